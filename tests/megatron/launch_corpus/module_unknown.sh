#!/bin/bash
python -m $LAUNCHER $ARGS pretrain_gpt.py
