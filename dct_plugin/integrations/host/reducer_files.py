"""A reducer's state as ``dct_rank_XXXXX.pt``, one file per rank, for hosts with data parallelism alone.

Also for another number of ranks; format and re-sharding are those of :mod:`dct_plugin.checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dct_plugin import checkpoint
from dct_plugin.checkpoint import Loaded

from . import rank_files
from .rank_files import Folder, NoState, State

logger = logging.getLogger("dct_plugin")

#: The state of a reducer that has not reduced anything.
FRESH: State = {"step": 0, "loss_scale": 1.0, "streams": {}}


@dataclass(frozen=True)
class ReducerFiles:
    """The files of the ranks over which a reducer reduces.

    Attributes:
        group: The ranks; None for all.
        parts: The job has several such groups, for parts of the model, each with a folder of its own; all
            ranks of the job save and load together.
        unit: Factor that the host had multiplied into the gradients, see
            :func:`dct_plugin.checkpoint.content_of`.
        configuration: Fingerprint of the ``dct`` section.
        sizes: Entries of the model's parameters by the names of their streams; None if they are not known.
        layout: See :func:`dct_plugin.checkpoint.load`.
    """

    group: dist.ProcessGroup | None = None
    parts: bool = False
    unit: float = 1.0
    configuration: str = ""
    sizes: Mapping[str, int] | None = None
    layout: Sequence[Sequence[int]] = ()

    def save(self, folder: Folder, state: Callable[[], State]) -> str:
        """Write every rank's state; a collective.

        Args:
            folder: Of the checkpoint.
            state: Gives ``GradientReducer.state_dict()``.

        Returns:
            The identity of the save, to be kept in the host's own state.

        Raises:
            DCTError: On every rank, if one cannot write; names the ranks and the files.
        """
        file = checkpoint.file_of(folder, dist.get_rank(self.group))
        return rank_files.save(file, lambda identity: self._content(state(), identity), group=self._writers)

    def save_alone(self, folder: Folder, state: State, topic: str) -> None:
        """Write this rank's state without waiting for another rank.

        Ranks that save the same step of the same job give their files one identity, which :meth:`load`
        compares.

        Args:
            folder: Of the checkpoint.
            state: ``GradientReducer.state_dict()``.
            topic: Name of the job, the same on all ranks and used once in the life of the store.
        """
        identity = rank_files.identity_of(f"{topic}/{state['step']}")
        file = checkpoint.file_of(folder, dist.get_rank(self.group))
        checkpoint.write(file, self._content(state, identity))

    def load(self, folder: Folder, *, expected: str | None = None) -> State | None:
        """Read what :meth:`save` wrote; a collective, with results and errors of :func:`.rank_files.load`.

        Args:
            folder: Of the checkpoint.
            expected: What :meth:`save` returned, from the host's own state.
        """
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)

        def read() -> Loaded:
            found = checkpoint.load(
                folder,
                rank=rank,
                world_size=world_size,
                unit=self.unit,
                sizes=self.sizes,
                layout=self.layout,
            )
            if found is None:
                some = any(Path(folder).glob("dct_rank_*.pt"))
                raise NoState(
                    "dct_rank_*.pt files are missing"
                    if some
                    else "the checkpoint holds no dct_rank_*.pt files"
                )
            return found

        found = rank_files.load(read, folder, group=self._writers, expected=expected)
        if found is None:
            return None
        if rank == 0:
            rank_files.report_spread(folder, found, world_size)
        state, strange = checkpoint.known_to(self.sizes, found.state)
        if strange and rank == 0:
            logger.warning(
                "dct: %s: residuals of %d parameters that the model does not have are left: %s",
                folder,
                len(strange),
                ", ".join(strange[:5]),
            )
        return state

    @property
    def _writers(self) -> dist.ProcessGroup | None:
        return None if self.parts else self.group

    def _content(self, state: State, identity: str) -> State:
        return checkpoint.content_of(
            state,
            rank=dist.get_rank(self.group),
            world_size=dist.get_world_size(self.group),
            unit=self.unit,
            identity=identity,
            configuration=self.configuration,
        )
