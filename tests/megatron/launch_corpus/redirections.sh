#!/bin/bash
> log torchrun --standalone pretrain_gpt.py
torchrun --standalone pretrain_gpt.py > $OUT/train.py 2>&1 < /dev/null &
