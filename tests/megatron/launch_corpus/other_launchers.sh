#!/bin/bash
colossalai run --nproc_per_node 2 train.py
horovodrun -np 2 python pretrain_gpt.py
