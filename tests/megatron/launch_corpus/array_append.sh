#!/bin/bash
CMD=(torchrun --standalone)
CMD+=(pretrain_gpt.py)
CMD+=(--lr 1)
"${CMD[@]}"
