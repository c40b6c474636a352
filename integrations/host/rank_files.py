"""State that belongs to a rank, in files of a checkpoint's folder: all ranks have theirs, or none has.

A rank that went on with its residuals beside one without would count warm-up steps and adapt thresholds on
its own. So every collective here ends in the same way on all ranks: with a state, without one, or in an error
that names the rank and the file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dct_plugin import checkpoint
from dct_plugin.errors import DCTError

__all__ = ["NoState", "load", "save"]

logger = logging.getLogger("dct_plugin")

State = dict[str, Any]
Folder = str | os.PathLike[str]


class NoState(Exception):
    """A checkpoint holds nothing for this rank; the text says why."""


def save(path: Path, content: Callable[[], State], *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's file, complete or not at all; a collective.

    Args:
        path: Differs from rank to rank.
        content: Gives what :func:`dct_plugin.checkpoint.write` takes.
        group: Whose ranks write; None for all.

    Raises:
        DCTError: On every rank, if one cannot write; names the ranks and the files.
    """
    problem = None
    try:
        checkpoint.write(path, content())
    except Exception as error:
        problem = f"{path}: {type(error).__name__}: {error}"
    _raise_together("cannot save residuals", _gathered(problem, group))


def load(
    read: Callable[[], State], source: Folder, *, group: dist.ProcessGroup | None = None
) -> State | None:
    """This rank's state; a collective.

    Args:
        read: Gives the state, or raises :class:`NoState`, or any other error for a file that is damaged or
            belongs elsewhere.
        source: The checkpoint, for messages.
        group: Whose ranks read; None for all.

    Returns:
        None on every rank if one has none; the log of rank 0 says why.

    Raises:
        DCTError: On every rank, if one cannot read its file; names the ranks and the files.
    """
    state: State | None = None
    problem = lack = None
    try:
        state = read()
    except NoState as error:
        lack = str(error)
    except Exception as error:
        problem = str(error) if isinstance(error, DCTError) else f"{source}: {type(error).__name__}: {error}"
    answers = _gathered((problem, lack), group)
    _raise_together("cannot load residuals", {rank: fault for rank, (fault, _) in answers.items()})
    lacking = {rank: reason for rank, (_, reason) in answers.items() if reason}
    if not lacking:
        return state
    if dist.get_rank(group) == 0:
        reasons: dict[str, int] = {}  # with the first rank that has it
        for rank, reason in lacking.items():
            reasons.setdefault(reason, rank)
        logger.warning(
            "dct: %s: no residuals for %d of %d ranks (%s); training goes on with residuals of zero and new "
            "thresholds",
            source,
            len(lacking),
            len(answers),
            "; ".join(f"rank {rank}: {reason}" for reason, rank in list(reasons.items())[:3]),
        )
    return None


def _gathered(value: Any, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """What every rank says, by its number in the whole job."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, value, group=group)
    return dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), answers, strict=True))


def _raise_together(what: str, problems: dict[int, str | None]) -> None:
    """All ranks stop where one must, so that none waits for it."""
    faults = [f"  rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    if faults:
        more = [f"  and {len(faults) - 5} more"] if len(faults) > 5 else []
        raise DCTError("\n".join([what, *faults[:5], *more]))
