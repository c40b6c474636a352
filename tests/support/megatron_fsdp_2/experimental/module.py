"""The module in which megatron-core has the wrapper."""

from __future__ import annotations

import torch


class FsdpModule:
    """A module whose parameters are sharded."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
