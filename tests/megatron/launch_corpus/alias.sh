#!/bin/bash
alias go="torchrun --standalone pretrain_gpt.py"
go
