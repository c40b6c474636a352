#!/bin/bash
cat <<'TEXT'
An apostrophe isn't a quote here; "nor this one
TEXT
bash <<JOB
torchrun --standalone \
    pretrain_gpt.py --job $1
JOB
for i in 1 2; do torchrun --standalone pretrain_gpt.py --run $i; done
(cd / && out=$(torchrun --standalone train_it.py "x)y") ; echo "$out")
