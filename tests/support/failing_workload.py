"""Test-only: a workload to be measured that one rank cannot make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


class FailsOnOne:
    def __init__(self, options: Mapping[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("nothing to be done")

    def open(self, variant: str) -> list[Any]:
        return []

    def close(self) -> None:
        pass
