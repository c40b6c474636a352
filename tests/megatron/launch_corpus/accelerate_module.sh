#!/bin/bash
accelerate config
python -m accelerate.commands.launch --num_processes 8 train.py
accelerate launch --multi_gpu --num_processes 8 $SCRIPT --lr 1
