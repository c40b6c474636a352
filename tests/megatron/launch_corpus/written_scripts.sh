#!/bin/bash
cat <<-'EOF' > job.sh
	torchrun --standalone pretrain_gpt.py
	EOF
tee run.sh <<EOF
python pretrain_gpt.py
EOF
