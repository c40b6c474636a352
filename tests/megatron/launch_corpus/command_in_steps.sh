#!/bin/bash
: <<'NOTES'
torchrun pretrain_gpt.py
NOTES
CMD="python -m torch.distributed.run --nproc-per-node 2"
if [ "$N" -gt 1 ]; then CMD="$CMD --nnodes $N"; fi
CMD="${CMD} pretrain_gpt.py"
CMD="${CMD} --num-layers 2"
srun bash -c "$CMD"
