#!/bin/bash
for s in pretrain_gpt.py pretrain_t5.py; do
  torchrun --standalone $s --lr 1
done
