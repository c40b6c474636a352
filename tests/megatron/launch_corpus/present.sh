#!/bin/bash
torchrun --standalone -m dct_plugin.megatron pretrain_gpt.py
torchrun --standalone pretrain_t5.py
