#!/bin/bash
export LAUNCHER="python -u -m torch.distributed.launch \
    --nproc_per_node $GPUS \
    "
export CMD=" \
    examples/run_clm.py \
    --config_overrides "n_embd=$NHIDDEN,n_layer=$NLAYERS" \
    --deepspeed $config_json \
    "
srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee log.txt
