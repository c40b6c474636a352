#!/bin/bash
ARGS="--nproc-per-node 2 pretrain_gpt.py --lr 1"
torchrun $ARGS
