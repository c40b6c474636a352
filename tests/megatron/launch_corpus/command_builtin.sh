#!/bin/bash
command torchrun --nproc-per-node 4 pretrain_gpt.py --lr 1
if command -v torchrun; then echo torchrun; fi
