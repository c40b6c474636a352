#!/bin/bash
ray job submit -- python3 -m acme.cli.train_ppo_ray --lr 1
deepspeed --module $TRAINING_COMMANDS
torchrun --standalone ${NAME}.py
