#!/bin/bash
function launch {
  torchrun --nproc-per-node 2 "$@"
}
function start()
{
  torchrun --nproc-per-node 4 "$@"
}
function here { torchrun pretrain_gpt.py --num-layers 2; }
launch pretrain_gpt.py --num-layers 2
start pretrain_gpt.py --num-layers 2
