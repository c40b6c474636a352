#!/bin/bash
torchrun --shutdown-timeout 30 --signals-to-handle SIGTERM --logs_specs default -t 3 pretrain_gpt.py
torchrun --virtual-local-rank --run-path pretrain_gpt.py
