#!/bin/bash
ssh host "torchrun 'pretrain_gpt.py"
