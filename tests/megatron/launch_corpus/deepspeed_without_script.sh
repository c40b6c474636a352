#!/bin/bash
deepspeed $OPTIONS $WHAT
torchrun --standalone pretrain_gpt.py
