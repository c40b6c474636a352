#!/bin/bash
# Launch with arrays and continuation lines: pretrain_gpt.py on one node.
set -e
GPUS_PER_NODE=2; NUM_NODES=1
MASTER_ADDR=localhost   # torchrun is told so
CHECKPOINT_PATH=$1      # <a path>

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES   # nodes
    --master_addr "$MASTER_ADDR"
    --rdzv-backend=c10d
)
MODEL_ARGS=(
    --num-layers 4
    --data-path "a b.txt"
)
echo "torchrun will start pretrain_gpt.py"

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    --save "$CHECKPOINT_PATH" \
    "${MODEL_ARGS[@]}"
