#!/bin/bash
L="torchrun --standalone"
[ -n "$DS" ] && L="deepspeed"
$L pretrain_gpt.py
