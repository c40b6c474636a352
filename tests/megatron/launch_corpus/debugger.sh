#!/bin/bash
python -m pdb pretrain_gpt.py
python -m debugpy --listen 1 pretrain_gpt.py
