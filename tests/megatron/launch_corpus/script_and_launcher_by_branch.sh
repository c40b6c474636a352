#!/bin/bash
if [ -n "$ONE" ]; then
  S=pretrain_gpt.py
  L="python -u"
else
  S=pretrain_t5.py
  L="torchrun --nproc-per-node 8"
fi
$L ${S} --lr 1
