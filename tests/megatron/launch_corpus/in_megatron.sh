#!/bin/bash
cd /workspace/Megatron-LM
torchrun --standalone train.py --lr 1
