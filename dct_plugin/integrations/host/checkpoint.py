"""State that belongs to a rank, in files of a checkpoint's folder: all ranks have theirs, or none has.

A rank that went on with its residuals beside one without would count warm-up steps and adapt thresholds on
its own. So every collective here ends in the same way on all ranks: with a state, without one, or in an error
that names the rank and the file.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin import checkpoint
from dct_plugin.checkpoint import Folder, Loaded, NoState, State, Writer
from dct_plugin.console import listed, logger
from dct_plugin.errors import DCTError
from dct_plugin.host_traffic import own_traffic
from dct_plugin.transport import lost_ranks


def save_together(
    path: Path, content: Callable[[str], State], *, group: dist.ProcessGroup | None = None
) -> str:
    """Write this rank's file, complete or not at all; a collective.

    Args:
        path: Differs from rank to rank.
        content: Gives what :func:`dct_plugin.checkpoint.write` takes, from the identity of the save, which it
            holds as ``save``.
        group: Group of the ranks that write; None for all.

    Returns:
        The identity of the save, the same on all ranks.

    Raises:
        DCTError: On every rank, if one cannot write; names the ranks and the files.
    """
    identity = [uuid.uuid4().hex]
    with lost_ranks.reported("exchange of a checkpoint's identity", group):
        dist.broadcast_object_list(identity, _ranks_of(group)[0], group)
    problem = None
    try:
        checkpoint.write(path, content(identity[0]))
    except Exception as error:
        problem = f"{path}: {type(error).__name__}: {error}"
    _raise_together("cannot save residuals", _gathered(problem, group))
    return identity[0]


def load_together(
    read: Callable[[], Loaded],
    source: Folder,
    *,
    group: dist.ProcessGroup | None = None,
    expected: str | None = None,
) -> Loaded | None:
    """Read this rank's state; a collective.

    Args:
        read: Gives the state, or raises :class:`NoState`, or any other error for a file that is damaged or
            belongs elsewhere.
        source: The checkpoint, for messages.
        group: Group of the ranks that read; None for all.
        expected: Identity of the save that the host's own state is of; None if that does not tell.

    Returns:
        None on every rank if one has none; the log of rank 0 says why.

    Raises:
        DCTError: On every rank, if one cannot read its file, or the files are not of one save, which is that
            of the host's state; names the ranks and the files.
    """
    found: Loaded | None = None
    problem = absent = None
    try:
        found = read()
    except NoState as error:
        absent = str(error)
    except Exception as error:
        problem = str(error) if isinstance(error, DCTError) else f"{source}: {type(error).__name__}: {error}"
    if found is not None and expected is not None and found.save != expected:
        problem = (
            f"{source}: the files are of another save ({found.origin}) than the checkpoint they lie in; was "
            "it written over an older one, and interrupted?"
        )
    answers = _gathered((problem, absent, None if found is None else found[1:3]), group)
    problems = {rank: fault for rank, (fault, *_) in answers.items()}
    origins = {rank: origin for rank, (*_, origin) in answers.items() if origin is not None}
    if not any(problems.values()) and len({save for save, _ in origins.values()}) > 1:
        problems = {rank: f"{source}: its file is of {origin}" for rank, (_, origin) in origins.items()}
    remedy = (
        "load another checkpoint; or remove its dct_*.pt files, and training goes on with residuals of zero"
    )
    _raise_together("cannot load residuals", problems, remedy)
    without_state = {rank: reason for rank, (_, reason, _) in answers.items() if reason}
    if not without_state and found is not None:
        return found
    if dist.get_rank(group) == 0:
        _warn_of_missing(source, without_state, len(answers))
    return None


def _warn_of_missing(source: Folder, without_state: dict[int, str], ranks: int) -> None:
    first: dict[str, int] = {}  # the first rank of each reason
    for rank, reason in without_state.items():
        first.setdefault(reason, rank)
    reasons = "; ".join(f"rank {rank}: {reason}" for reason, rank in list(first.items())[:3])
    logger.warning(
        f"dct: {source}: no residuals for {len(without_state)} of {ranks} ranks ({reasons}); training goes "
        "on with residuals of zero and new thresholds, and the start (dense steps, rising sparsity) begins "
        "anew"
    )


def _gathered(value: Any, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """Return the values of all ranks of a group, by global rank."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    with lost_ranks.reported("exchange about a checkpoint", group):
        dist.all_gather_object(answers, value, group=group)
    return dict(zip(_ranks_of(group), answers, strict=True))


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _raise_together(what: str, problems: dict[int, str | None], remedy: str = "") -> None:
    """Raise an error on all ranks if one of them has a problem, so that none waits for it."""
    faults = [f"  rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    if faults:
        more = [f"  and {len(faults) - 5} more"] if len(faults) > 5 else []
        raise DCTError("\n".join([what, *faults[:5], *more, *([remedy] if remedy else [])]))


#: The state of a reducer that has not reduced anything.
FRESH: State = {"step": 0, "loss_scale": 1.0, "streams": {}}


@dataclass(frozen=True)
class ReducerFiles:
    """The files of the ranks over which a reducer reduces.

    Attributes:
        group: The ranks; None for all.
        parts: The job has several such groups, for parts of the model, with files or folders of their own;
            all ranks of the job save and load together.
        unit: Factor that the host had multiplied into the gradients, see
            :meth:`dct_plugin.checkpoint.Writer.content`.
        configuration: Fingerprint of the ``dct`` section.
        sizes: Entries of the model's parameters by the names of their streams; None if they are not known.
        layout: See :func:`dct_plugin.checkpoint.load`.
        writer: This rank as it writes; None: by its rank in the group.
    """

    group: dist.ProcessGroup | None = None
    parts: bool = False
    unit: float = 1.0
    configuration: str = ""
    sizes: Mapping[str, int] | None = None
    layout: Sequence[Sequence[int]] = ()
    writer: Writer | None = None

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
        file = self._own.file(folder)
        return save_together(file, lambda identity: self._content(state(), identity), group=self._writers)

    def save_alone(self, folder: Folder, state: State, topic: str) -> None:
        """Write this rank's state without waiting for another rank.

        Ranks that save the same step of the same job give their files one identity, which :meth:`load`
        compares.

        Args:
            folder: Of the checkpoint.
            state: ``GradientReducer.state_dict()``.
            topic: Name of the job, the same on all ranks and used once in the life of the store.
        """
        # The first rank that asks leaves the identity in the key-value store.
        key = f"dct_plugin/saves/{topic}/{state['step']}"
        identity: bytes = lost_ranks.default_store().compare_set(key, "", uuid.uuid4().hex)
        checkpoint.write(self._own.file(folder), self._content(state, identity.decode()))

    def load(self, folder: Folder, *, expected: str | None = None) -> State | None:
        """Read what :meth:`save` wrote; a collective, with results and errors of :func:`load_together`.

        Args:
            folder: Of the checkpoint.
            expected: What :meth:`save` returned, from the host's own state.
        """
        model: dict[str, Any] = {"unit": self.unit, "sizes": self.sizes, "layout": self.layout}
        read = partial(checkpoint.load, folder, self._own, **model)
        found = load_together(read, folder, group=self._writers, expected=expected)
        if found is None:
            return None
        state, strange = checkpoint.known_to(self.sizes, found.state)
        said = []
        if found.ranks not in (0, ranks := self._own.world_size):
            before = f"the residuals of {found.ranks} ranks at step {found.state['step']}"
            said.append(f"{before} are spread over {ranks} ranks")
        if strange:
            what = f"residuals of {len(strange)} parameters that the model does not have are left"
            said.append(f"{what}: {listed(strange)}")
        for line in said if dist.get_rank(self.group) == 0 else ():
            logger.warning(f"dct: {folder}: {line}")
        return state

    @property
    def _writers(self) -> dist.ProcessGroup | None:
        return None if self.parts else self.group

    @property
    def _own(self) -> Writer:
        return self.writer or Writer(dist.get_rank(self.group), dist.get_world_size(self.group))

    def _content(self, state: State, identity: str) -> State:
        return self._own.content(state, unit=self.unit, identity=identity, configuration=self.configuration)


def device_of(backends: str) -> str:
    """Return the type of device whose tensors a group takes, of backends such as ``cpu:gloo,cuda:nccl2``."""
    return "cpu" if "cpu:" in backends else backends.partition(":")[0]


@own_traffic(recorded=False)
def mean_residuals(
    state: dict[str, Any], sizes: Mapping[str, int], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return the mean of the ranks' residuals by parameter, fp32 [numel], on CPU; a collective.

    Args:
        state: This rank's state of the reducer.
        sizes: The entries of the parameters by name, in the same order on all ranks.
        group: The ranks.
    """
    streams = checkpoint.reshard([{"state": state, "unit": 1.0}])["streams"]
    device = device_of(str(dist.get_backend_config(group)))
    means = {}
    for name, numel in sizes.items():
        total = (streams[name]["residual"] if name in streams else torch.zeros(numel)).to(device)
        with lost_ranks.reported("average of residuals", group):
            dist.all_reduce(total, group=group)
        means[name] = total.div_(dist.get_world_size(group)).cpu()
    return means
