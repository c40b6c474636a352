#!/bin/bash
usage() {
cat <<EOF
Usage: $0
  torchrun pretrain_gpt.py --lr 1
EOF
}
torchrun --standalone pretrain_gpt.py
