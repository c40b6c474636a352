#!/bin/bash
python - <<EOF
print("torchrun train.py")
EOF
torchrun --standalone pretrain_gpt.py
