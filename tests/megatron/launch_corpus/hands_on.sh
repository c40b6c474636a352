#!/bin/bash
chmod +x tools/prepare.sh
bash scripts/run_all.sh --lr 1
./launch.sh
