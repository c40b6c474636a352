#!/bin/bash
python -m deepspeed.launcher.runner --num_gpus 2 train.py --deepspeed_config ds.json
