"""Test-only: runs of :mod:`.megatron_gpt` in processes whose Transformer Engine is a stub."""

from __future__ import annotations

import sys
from pathlib import Path

from support.megatron_gpt import Job, Outcome, train_all


def forget_megatron() -> None:
    """Have megatron-core, and what the plugin holds of it, imported anew."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "megatron" or name.startswith("dct_plugin.integrations.megatron"):
            del sys.modules[name]


def use_stub() -> None:
    """Have megatron-core imported anew, with the stub of Transformer Engine."""
    forget_megatron()
    sys.path.insert(0, str(Path(__file__).with_name("engine_stub")))


def train_with_engine(rank: int, world_size: int, jobs: list[Job]) -> list[Outcome]:
    """Several runs one after the other in the same processes."""
    use_stub()
    return train_all(rank, world_size, jobs)
