#!/bin/bash
export RUN="torchrun --standalone pretrain_gpt.py"
source go.sh
