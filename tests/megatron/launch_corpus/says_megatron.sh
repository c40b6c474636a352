#!/bin/bash
torchrun --standalone train.py --lr 1 --epochs 3
MODEL_ARGS=(
  --num-attention-heads 16
)
torchrun --standalone train.py ${MODEL_ARGS[@]}
torchrun --standalone finetune_vlm.py --micro-batch-size 1 --seq-length 8 --train-iters 3
torchrun --standalone finetune_vlm.py --micro-batch-size 1 --lr 1
torchrun --standalone $MEGATRON_PATH/train_x.py
python tasks/main_pretrain.py --batch_size 2
