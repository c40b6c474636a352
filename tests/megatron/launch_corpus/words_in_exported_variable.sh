#!/bin/bash
export LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node $GPUS"
export CMD=" `pwd`/pretrain_gpt.py --num-layers 2 --name "a b" "
srun bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'
