#!/bin/bash
out=$(conda run -n env python -m torch.distributed.run --standalone pretrain_gpt.py)
echo "$out"
