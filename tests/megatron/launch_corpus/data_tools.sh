#!/bin/bash
python tools/preprocess_data.py --input a.json
python train_bpe.py
python tools/finetune_data_convert.py
python -m project.train_dataset
torchrun --standalone tools/checkpoint/convert.py
