"""A reducer's state as ``dct_rank_XXXXX.pt``, one file per rank, for hosts with data parallelism alone.

Also for another number of ranks; format and re-sharding are those of :mod:`dct_plugin.checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from dct_plugin import checkpoint
from dct_plugin.checkpoint import Loaded

from . import rank_files
from .rank_files import Folder, NoState, State

logger = logging.getLogger("dct_plugin")

#: The state of a reducer that has not reduced anything.
FRESH: State = {"step": 0, "loss_scale": 1.0, "streams": {}}


def save(
    folder: Folder,
    state: Callable[[], State],
    *,
    group: dist.ProcessGroup | None = None,
    parts: bool = False,
    unit: float = 1.0,
    configuration: str = "",
) -> str:
    """Write every rank's state; a collective.

    Args:
        folder: Of the checkpoint.
        state: Gives ``GradientReducer.state_dict()``.
        group: Over which gradients are reduced; None for all ranks.
        parts: The job has several such groups, for parts of the model, each with a folder of its own; all
            ranks of the job save and load together.
        unit: Factor that the host had multiplied into the gradients, see
            :func:`dct_plugin.checkpoint.content_of`.
        configuration: Fingerprint of the ``dct`` section.

    Returns:
        The identity of the save, to be kept in the host's own state.

    Raises:
        DCTError: On every rank, if one cannot write; names the ranks and the files.
    """
    rank = dist.get_rank(group)
    content = _content(state, group, unit, configuration)
    return rank_files.save(checkpoint.file_of(folder, rank), content, group=None if parts else group)


def save_alone(
    folder: Folder,
    state: State,
    topic: str,
    *,
    group: dist.ProcessGroup | None = None,
    configuration: str = "",
) -> None:
    """Write this rank's state without waiting for another rank.

    Ranks that save the same step of the same job give their files one identity, which :func:`load` compares.

    Args:
        folder, group, configuration: As for :func:`save`.
        state: ``GradientReducer.state_dict()``.
        topic: Name of the job, the same on all ranks and used once in the life of the store.
    """
    rank = dist.get_rank(group)
    identity = rank_files.identity_of(f"{topic}/{state['step']}")
    content = _content(lambda: state, group, 1.0, configuration)
    checkpoint.write(checkpoint.file_of(folder, rank), content(identity))


def _content(
    state: Callable[[], State], group: dist.ProcessGroup | None, unit: float, configuration: str
) -> Callable[[str], State]:
    """Return a function that makes the content of this rank's file from the identity of the save."""
    return lambda identity: checkpoint.content_of(
        state(),
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        unit=unit,
        identity=identity,
        configuration=configuration,
    )


def load(
    folder: Folder,
    *,
    group: dist.ProcessGroup | None = None,
    parts: bool = False,
    unit: float = 1.0,
    sizes: Mapping[str, int] | None = None,
    expected: str | None = None,
    layout: Sequence[Sequence[int]] = (),
) -> State | None:
    """Read what :func:`save` wrote; a collective, whose results and errors are :func:`.rank_files.load`'s.

    Args:
        folder, group, parts, unit: As for :func:`save`.
        sizes: Entries of the model's parameters by the names of their streams; None if they are not known.
        expected: What :func:`save` returned, from the host's own state.
        layout: See :func:`dct_plugin.checkpoint.load`.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def read() -> Loaded:
        found = checkpoint.load(
            folder, rank=rank, world_size=world_size, unit=unit, sizes=sizes, layout=layout
        )
        if found is None:
            some = any(Path(folder).glob("dct_rank_*.pt"))
            raise NoState(
                "dct_rank_*.pt files are missing" if some else "the checkpoint holds no dct_rank_*.pt files"
            )
        return found

    found = rank_files.load(read, folder, group=None if parts else group, expected=expected)
    if found is None:
        return None
    if rank == 0:
        rank_files.report_spread(folder, found, world_size)
    if sizes is None:
        return found.state
    state, strange = checkpoint.known_to(sizes, found.state)
    if strange and rank == 0:
        logger.warning(
            "dct: %s: residuals of %d parameters that the model does not have are left: %s",
            folder,
            len(strange),
            ", ".join(strange[:5]),
        )
    return state
