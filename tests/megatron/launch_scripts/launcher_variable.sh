#!/bin/bash
# The launcher itself is in a variable, once set here and once elsewhere.
LAUNCHER="torchrun --nproc_per_node 2"
CMD=(torchrun "--standalone" finetune_llama.py --lr 0.1)
$LAUNCHER pretrain_gpt.py --one
"${CMD[@]}" --two
FULL="$LAUNCHER --max_restarts 0"
FULL="$FULL pretrain_t5.py --three"
$FULL
LAUNCH_SCRIPT_UNSET=1
${LAUNCH_SCRIPT} ${HOME}/finetune.py --four
