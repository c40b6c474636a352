"""Files of residuals as the hosts write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from dct_plugin import checkpoint


def save_state(
    folder: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    rank: int,
    world_size: int,
    unit: float = 1.0,
    identity: str = "",
) -> Path:
    """Write a reducer's state of one rank; return the file."""
    path = checkpoint.StateFiles(rank, 0).file(folder)
    content = checkpoint.StateFiles(rank, world_size, unit=unit).content(state, identity)
    checkpoint.write(path, content)
    return path


def plain(value: Any) -> Any:
    """A state in which tensors are types and bytes, to be compared."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return (value.dtype, value.numpy().tobytes()) if isinstance(value, torch.Tensor) else value
