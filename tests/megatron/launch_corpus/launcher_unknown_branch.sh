#!/bin/bash
L="torchrun --standalone"
if [ -n "$X" ]; then L="bytelauncher -n 2"; fi
$L pretrain_gpt.py
