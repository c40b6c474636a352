#!/bin/bash
#SBATCH -N 4
srun --mpi=pmix --container-image=a/deepspeed:1 bash -c "cd /w; exec python -u pretrain_gpt.py $ARGS"
sbatch --wrap="torchrun --standalone pretrain_gpt.py"
