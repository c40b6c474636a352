#!/bin/bash
pip install torch deepspeed
pip3 install -U deepspeed==0.15
conda install -y deepspeed $EXTRA
git clone https://host/deepspeed
cd ../deepspeed
pkill -f "torchrun pretrain_gpt.py"
ls pretrain_gpt.py
echo "torchrun pretrain_gpt.py"
ps aux | grep torchrun | grep pretrain_gpt.py
export DEEPSPEED_HOME=/opt/deepspeed
which torchrun deepspeed
torchrun --help
python -c "import deepspeed"
torchrun --standalone pretrain_gpt.py
