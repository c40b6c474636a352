#!/bin/bash
train() {
  local script=$1
  torchrun --standalone pretrain_gpt.py "$@"
}
train --lr 1
