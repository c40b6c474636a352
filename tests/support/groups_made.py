"""Counts the process groups that a training makes before its first forward pass, and from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook


@contextlib.contextmanager
def groups_made() -> Iterator[dict[str, int]]:
    """Count the calls of ``torch.distributed.new_group`` in the block."""
    counts, new_group = {"before": 0, "in passes": 0}, dist.new_group
    phases = ["before"]

    def counted(*arguments: Any, **keywords: Any) -> Any:
        counts[phases[-1]] += 1
        return new_group(*arguments, **keywords)

    handle = register_module_forward_pre_hook(lambda *_: phases.append("in passes"))
    try:
        with patch.object(dist, "new_group", counted):
            yield counts
    finally:
        handle.remove()
