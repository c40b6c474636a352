"""Files of residuals as the hosts write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
