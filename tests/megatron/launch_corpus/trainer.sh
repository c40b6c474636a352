#!/bin/bash
torchrun --nproc-per-node 8 train.py --model_name_or_path gpt2 --fsdp full_shard
