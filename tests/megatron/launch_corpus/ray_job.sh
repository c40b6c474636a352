#!/bin/bash
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{}' -- python3 train.py --tensor-model-parallel-size 2
ray job submit -- bash -c "cd x; torchrun --standalone pretrain_gpt.py --num-layers 2"
torchrun --standalone pretrain_gpt.py --backend ray
