#!/bin/bash
eval ${CMD:-torchrun --standalone pretrain_gpt.py}
