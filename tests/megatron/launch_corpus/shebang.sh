#!/bin/bash
./pretrain_gpt.py --lr 1
