#!/bin/bash
CMD="torchrun --standalone"
CMD="$CMD pretrain_gpt.py"
CMD+=" --lr 1"
eval "$CMD"
