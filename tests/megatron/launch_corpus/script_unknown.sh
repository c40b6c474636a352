#!/bin/bash
torchrun --standalone $WHAT --lr 1
