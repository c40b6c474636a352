#!/bin/bash
ds_options="--deepspeed --deepspeed_config=ds.json"
options="--lr 1 ${ds_options}"
torchrun --standalone pretrain_gpt.py ${options}
run="deepspeed pretrain_gpt.py $options"
$run
