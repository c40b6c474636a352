#!/bin/bash
L=""
if true; then L="torchrun --standalone"; fi
$L pretrain_gpt.py
