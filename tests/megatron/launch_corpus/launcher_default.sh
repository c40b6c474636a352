#!/bin/bash
${LAUNCH:-torchrun --nproc-per-node 2} pretrain_gpt.py --lr 1
