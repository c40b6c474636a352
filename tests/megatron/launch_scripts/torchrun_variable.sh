#!/usr/bin/env bash
# The script's path comes from a variable, on a line of its own.
PRETRAIN="${1:-pretrain_gpt.py}"
OUT="pretrain_gpt.py"
ARGS="--nproc-per-node 2 \
      --standalone"
[ -f "$PRETRAIN" ] || echo "Error: $PRETRAIN not found"
if [[ $((1 << 2)) -lt 3 ]]; then exit 1; fi

time CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun $ARGS \
	"$PRETRAIN" \
	--log "$OUT" 2>&1 | cat
