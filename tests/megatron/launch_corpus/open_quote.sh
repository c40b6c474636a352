#!/bin/bash
torchrun --standalone pretrain_gpt.py
export A="1
torchrun --standalone pretrain_gpt.py
