#!/bin/bash
DIR=/opt/m
SCRIPT="pretrain_gpt.py"
torchrun --standalone "$DIR/$SCRIPT"
python ${DIR}/tools/${TOOL}.py
