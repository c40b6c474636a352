"""The names of version 2 of Megatron-FSDP that a refusal looks for, where megatron-core has none."""

from __future__ import annotations

from typing import Any

import torch

from .module import FsdpModule


def fully_shard(module: torch.nn.Module, *_: Any) -> FsdpModule:
    return FsdpModule(module)
