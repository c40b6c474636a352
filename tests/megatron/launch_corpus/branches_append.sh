#!/bin/bash
CMD="torchrun --standalone"
if true; then CMD="$CMD pretrain_gpt.py"; else CMD="$CMD pretrain_t5.py"; fi
$CMD
