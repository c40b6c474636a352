#!/bin/bash
nsys profile -t cuda -o out torchrun --nproc-per-node 2 pretrain_gpt.py
ncu --target-processes all python pretrain_gpt.py
