#!/bin/bash
torchrun --nproc-per-node 8 examples/run_clm.py --model_name_or_path gpt2 --deepspeed ds.json
