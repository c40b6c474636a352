#!/bin/bash
$(which torchrun) --standalone pretrain_gpt.py
"$(command -v python3)" -u pretrain_${MODEL}.py
