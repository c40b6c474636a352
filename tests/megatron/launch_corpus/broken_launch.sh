#!/bin/bash
(torchrun --standalone pretrain_gpt.py
