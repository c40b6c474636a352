#!/bin/bash
torchrun --standalone -m project.trainer.run
python -m project.pretrain_gpt
torchrun --standalone -m $TRAIN_SCRIPT
