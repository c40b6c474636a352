#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8
SOURCE=`pwd`
NAME="it's a run"
OPTIONS=" --train-iters 10 \
  --name 'x' \
"
BATCH=${BATCH:-1}
if [[ $BATCH -eq 0 ]]; then
    torchrun --nproc_per_node 8 examples/train.py ${OPTIONS}
else
    run_cmd="cd ${SOURCE}; python -u examples/train.py ${OPTIONS}"
    DATETIME=`date +'date_%y-%m-%d'`
    srun -l --verbose --container-image "host#image:1" \
        --output=/dev/null sh -c "echo ${run_cmd} > /dev/null; ${run_cmd}"
    srun --ntasks=2 python -u "${SOURCE}/pretrain_gpt.py" ${OPTIONS}
    srun bash -c 'exec torchrun --nproc_per_node $N pretrain_gpt.py --a "b c"'
fi
