#!/bin/bash
M="-m torch.distributed.run"
python $M --standalone pretrain_gpt.py
