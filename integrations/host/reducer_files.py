"""A reducer's state as ``dct_rank_XXXXX.pt``, one file per rank, for hosts with data parallelism alone.

Also for another number of ranks; format and re-sharding are those of :mod:`dct_plugin.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from dct_plugin import checkpoint

from . import rank_files
from .rank_files import Folder, NoState, State

__all__ = ["FRESH", "load", "save"]

#: The state of a reducer that has not reduced anything.
FRESH: State = {"step": 0, "loss_scale": 1.0, "streams": {}}


def save(
    folder: Folder, state: Callable[[], State], *, group: dist.ProcessGroup | None = None, unit: float = 1.0
) -> None:
    """Write every rank's state; a collective.

    Args:
        folder: Of the checkpoint.
        state: Gives ``GradientReducer.state_dict()``.
        group: Over which gradients are reduced; None for all ranks.
        unit: Factor that the host had multiplied into the gradients, see :func:`dct_plugin.checkpoint.save`.

    Raises:
        DCTError: On every rank, if one cannot write; names the ranks and the files.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def content() -> State:
        return checkpoint.content_of(state(), rank=rank, world_size=world_size, unit=unit)

    rank_files.save(checkpoint.file_of(folder, rank), content, group=group)


def load(folder: Folder, *, group: dist.ProcessGroup | None = None, unit: float = 1.0) -> State | None:
    """Read what :func:`save` wrote; a collective, whose results and errors are :func:`.rank_files.load`'s."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def read() -> State:
        state = checkpoint.load(folder, rank=rank, world_size=world_size, unit=unit)
        if state is None:
            some = any(Path(folder).glob("dct_rank_*.pt"))
            raise NoState(
                "dct_rank_*.pt files are missing" if some else "the checkpoint holds no dct_rank_*.pt files"
            )
        return state

    return rank_files.load(read, folder, group=group)
