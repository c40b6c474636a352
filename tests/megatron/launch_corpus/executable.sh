#!/bin/bash
torchrun --no-python ./run pretrain_gpt.py
