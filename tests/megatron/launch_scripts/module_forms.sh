#!/bin/bash
# Old launchers, modules, and Python's own options.
N=2
python -m torch.distributed.launch --nproc_per_node $N --use_env ./pretrain_bert.py --lr 1e-4 &&
python3 -u -m torch.distributed.run --nproc-per-node="$N" -m project.train --x 1
torchrun --nproc_per_node $N --module project.finetune_gpt "$@"
uv run --no-sync python -m torch.distributed.run --standalone \
    train.py --z
# not for us
python tools/preprocess_data.py --input pretrain_gpt.py
python -c "print('train.py')"
