#!/bin/bash
torchrun --no-python python -u pretrain_gpt.py
