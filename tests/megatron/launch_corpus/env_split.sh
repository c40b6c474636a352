#!/bin/bash
env -u A B=1 python3 -X dev -W ignore -u pretrain_gpt.py
sudo -E /opt/bin/python3.11 pretrain_gpt.py
