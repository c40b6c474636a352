#!/bin/bash
dir=$(dirname "$0")
host="${HOSTNAME}"
options=" \
    --deepspeed \
    --deepspeed_config ds.json \
    --zero-stage 1"
WORKER_STR="--hostfile hosts"
deepspeed ${dir}/../pretrain_gpt.py ${options} &> /dev/null
deepspeed --num_nodes 1 --num_gpus=2 --force_multi --master_port 29700 $WORKER_STR pretrain_gpt.py $@ ${options} >> /dev/null
run_cmd="deepspeed $WORKER_STR ${dir}/pretrain_gpt.py $@ ${options}"
echo ${run_cmd}
eval ${run_cmd}
