#!/bin/bash
torchrun --nproc-per-node 2 --frobnicate 3 pretrain_gpt.py
