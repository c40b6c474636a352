#!/bin/bash
cat > a.txt <<A; bash <<B
<text> (
A
torchrun --standalone pretrain_gpt.py
B
