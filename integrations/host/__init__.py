"""What every host framework needs, once; imports nothing, since ``import torch`` loads a part of it."""
