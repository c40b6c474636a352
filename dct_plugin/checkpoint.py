"""Residuals, thresholds and counters across a restart: one file per rank, also for another number of ranks.

A residual is a rank's own: losing it loses gradients that were computed and not yet sent. With the same
number of ranks each one gets its file back and goes on bitwise. With another number the residuals are spread
anew so that what the model still lacks stays the same: every new rank gets the mean of the old
residuals.

A file that is damaged, or that is another's, would change the training without a sign of it. So every file
ends with a checksum, holds its name and the identity of its save, and is compared with these, and with the
model, before anything of it is used.

All ranks have their state, or none has: a rank that went on with its residuals beside one without would count
warm-up steps and adapt thresholds on its own. So every collective here ends in the same way on all ranks:
with a state, without one, or in an error that names the rank and the file.
"""

from __future__ import annotations

import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ._version import __version__
from .compression.feedback import entries_of, unpacked
from .console import listed, logger
from .errors import DCTError
from .host_traffic import own_traffic
from .transport import lost_ranks

FORMAT = 2
#: Marks a folder in which a checkpoint is being written over an older one: until that is done, its parts may
#: be of two steps.
UNFINISHED = "dct_unfinished"

#: Name of the file that :func:`gather` writes.
GATHERED = "dct_residuals.pt"

#: Name of an owner's stream in the two-phase exchange: the parameter and the entries ``[start:stop)`` of it.
_SERVER_STREAM = re.compile(r"(?P<name>.*)\[(?P<start>\d+):(?P<stop>\d+)\]\Z", re.DOTALL)

State = dict[str, Any]
Folder = str | os.PathLike[str]

#: The state of a reducer that has not reduced anything.
FRESH: State = {"step": 0, "loss_scale": 1.0, "streams": {}}


class NoState(Exception):
    """A checkpoint holds nothing for this rank; the text says why."""


class Loaded(NamedTuple):
    """The state that a checkpoint holds for a rank.

    Attributes:
        state: For ``load_state_dict``.
        save: Identity of the save that the files are of, the same in those of all ranks.
        origin: Step, version and configuration of the files, in words.
        ranks: Number of ranks that it was spread from; 0 if it is the rank's own.
    """

    state: State
    save: str
    origin: str
    ranks: int = 0


# -- one file ---


def write(path: Path, content: State) -> None:
    """Write tensors, numbers and texts to a file, complete or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")  # one rank writes it; the next time over what a kill left
    try:
        temporary.unlink(missing_ok=True)  # it may be a FIFO
        with open(temporary, "x+b") as file:
            torch.save({"format": FORMAT, "version": __version__, "file": path.name, **content}, file)
            file.write(_checksum(file, file.tell()))
            file.flush()
            os.fsync(file.fileno())  # or a crash may leave the new name with no content
        os.replace(temporary, path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's writer hides that the disk is full
            raise error.__context__ from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, other: State | None = None) -> State:
    """Content of a file as it was written, bit by bit.

    Args:
        path: The file.
        other: Content of another file of the same checkpoint.

    Raises:
        DCTError: The file cannot be read, is damaged, was written under another name, in another format, or
            in another save or by another number of ranks than ``other``.
    """
    try:
        if not path.is_file():  # to open a FIFO would wait for whoever writes to it
            raise OSError("no regular file")
        with open(path, "rb") as file:
            is_whole = _checksum(file, path.stat().st_size - 4) == file.read()
            file.seek(0)
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
        found = content["format"]
        if found == FORMAT and not is_whole:
            raise ValueError("damaged: it does not have the checksum it was written with")
    except Exception as error:
        raise DCTError(f"{path}: not a readable state of dct-plugin: {_line(error)}") from error
    if found != FORMAT:
        raise DCTError(f"{path}: written in format {found!r}, this version of dct-plugin reads {FORMAT}")
    missing = [key for key in ("version", "file", "world_size", "save", "state") if key not in content]
    if missing or type(content["state"].get("step")) is not int:
        raise DCTError(f"{path}: not a complete state of dct-plugin: no {', '.join(missing) or 'step'} in it")
    if content["file"] != path.name:
        raise DCTError(f"{path}: written as {content['file']}, the file of another rank")
    if other is not None and content["save"] != other["save"]:
        raise DCTError(
            f"{path}: of another save ({origin_of(content)}) than the others of this checkpoint "
            f"({origin_of(other)})"
        )
    if other is not None and content["world_size"] != other["world_size"]:
        raise DCTError(
            f"{path}: written by a run of {content['world_size']} ranks, the other files of this checkpoint "
            f"by one of {other['world_size']}"
        )
    return cast(State, content)


def _checksum(file: BinaryIO, length: int) -> bytes:
    """Return the CRC-32 of the first ``length`` bytes of a file, which stands behind them."""
    checksum = file.seek(0)
    while length > 0 and (part := file.read(min(length, 1 << 20))):
        checksum, length = zlib.crc32(part, checksum), length - len(part)
    return checksum.to_bytes(4, "little")


def _line(error: Exception) -> str:
    """An error in one line: torch's explain at length how to load files without looking."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def origin_of(content: State) -> str:
    """Describe step, version and configuration of a file in words."""
    configuration = content.get("configuration") or "unknown"
    return (
        f"step {content['state']['step']}, dct-plugin {content['version']}, configuration {configuration}, "
        f"save {str(content['save'])[:8] or 'unknown'}"
    )


# -- the files of all ranks ---


@dataclass(frozen=True)
class StateFiles:
    """The files of the ranks that hold the same parameters, as one of these ranks writes and reads them.

    Attributes:
        rank, world_size: The rank's number among these, and how many they are.
        name: Name of the files, with a field for ``rank``.
        cut: Sizes of what cuts the parameters. Residuals cannot follow other sizes.
        expert: Number of the rank's experts; ranks with the same number have the same experts.
        unit: Factor that the framework had multiplied into the gradients before they reached the reducer, for
            example one over the number of ranks; 1 when it averages afterwards. Reducers by name have units
            of their own.
        configuration: Fingerprint of the ``dct`` section.
        sizes: Entries of the model's parameters by the names of their streams; None if they are not known.
        layout: Ranks of each node, where their gradients are summed first; only to read needs them.
        group: The ranks that save and load together, maybe those of several parts of the model; None: all.
    """

    rank: int
    world_size: int
    name: str = "dct_rank_{rank:05d}.pt"
    cut: Mapping[str, int] = field(default_factory=dict)
    expert: int = 0
    unit: float = 1.0
    configuration: str = ""
    sizes: Mapping[str, int] | None = None
    layout: Sequence[Sequence[int]] = ()
    group: dist.ProcessGroup | None = None

    def file(self, folder: Folder, rank: int | None = None) -> Path:
        """Return the file of this rank, or of another of these ranks."""
        return Path(folder) / self.name.format(rank=self.rank if rank is None else rank)

    @property
    def pattern(self) -> str:
        """The pattern of the names of all files."""
        return re.sub(r"\{.*?\}|\d+", "*", self.name)

    def content(self, state: State, identity: str = "") -> State:
        """Return what the file holds.

        Args:
            state: ``GradientReducer.state_dict()`` of this rank; or a dictionary in which ``"reducers"`` has
                the ``"state"`` and the ``"unit"`` of several reducers by name.
            identity: Identity of this save: the same on all ranks, another for each save.
        """
        own: State = {"world_size": self.world_size, "expert": self.expert, "layout": dict(self.cut)}
        return {
            **own, "unit": self.unit, "save": identity, "configuration": self.configuration, "state": state
        }  # fmt: skip

    def save(self, folder: Folder, state: Callable[[], State]) -> str:
        """Write every rank's state; a collective.

        Args:
            folder: Of the checkpoint.
            state: Gives the state, see :meth:`content`.

        Returns:
            The identity of the save, to be kept in the host's own state.

        Raises:
            DCTError: On every rank, if one cannot write; names the ranks and the files.
        """
        identity = [uuid.uuid4().hex]
        with lost_ranks.reported("exchange of a checkpoint's identity", self.group):
            dist.broadcast_object_list(identity, _ranks_of(self.group)[0], self.group)
        problem = None
        try:
            write(self.file(folder), self.content(state(), identity[0]))
        except Exception as error:
            problem = f"{self.file(folder)}: {type(error).__name__}: {error}"
        _raise_together("cannot save residuals", _gathered(problem, self.group))
        return identity[0]

    def save_alone(self, folder: Folder, state: State, topic: str) -> None:
        """Write this rank's state without waiting for another rank.

        Ranks that save the same step of the same job give their files one identity, which :meth:`load`
        compares.

        Args:
            folder: Of the checkpoint.
            state: See :meth:`content`.
            topic: Name of the job, the same on all ranks and used once in the life of the store.
        """
        # The first rank that asks leaves the identity in the key-value store.
        key = f"dct_plugin/saves/{topic}/{state['step']}"
        identity: bytes = lost_ranks.default_store().compare_set(key, "", uuid.uuid4().hex)
        write(self.file(folder), self.content(state, identity.decode()))

    def load(self, folder: Folder, *, expected: str | None = None) -> State | None:
        """Read what :meth:`save` wrote; a collective.

        Args:
            folder: Of the checkpoint.
            expected: What :meth:`save` returned, from the host's own state; None if that does not tell.

        Returns:
            None on every rank if one has none; the log of rank 0 says why.

        Raises:
            DCTError: On every rank, if one cannot read its file, or the files are not of one save, which is
                that of the host's state; names the ranks and the files.
        """
        found: Loaded | None = None
        problem = absent = None
        try:
            found = self.read(folder)
        except NoState as error:
            absent = str(error)
        except Exception as error:
            known = isinstance(error, DCTError)
            problem = str(error) if known else f"{folder}: {type(error).__name__}: {error}"
        if found is not None and expected is not None and found.save != expected:
            problem = (
                f"{folder}: the files are of another save ({found.origin}) than the checkpoint they lie in; "
                "was it written over an older one, and interrupted?"
            )
        answers = _gathered((problem, absent, None if found is None else found[1:3]), self.group)
        problems = {rank: fault for rank, (fault, *_) in answers.items()}
        origins = {rank: origin for rank, (*_, origin) in answers.items() if origin is not None}
        if not any(problems.values()) and len({save for save, _ in origins.values()}) > 1:
            problems = {rank: f"{folder}: its file is of {origin}" for rank, (_, origin) in origins.items()}
        remedy = "or remove its dct_*.pt files, and training goes on with residuals of zero"
        _raise_together("cannot load residuals", problems, f"load another checkpoint; {remedy}")
        without_state = {rank: reason for rank, (_, reason, _) in answers.items() if reason}
        if without_state or found is None:
            if dist.get_rank(self.group) == 0:
                _warn_of_missing(folder, without_state, len(answers))
            return None
        return self._of_model(folder, found)

    def read(self, folder: Folder) -> Loaded:
        """Return this rank's state from a checkpoint of the same or another number of ranks or nodes.

        Another rank may miss files that this one sees (node-local storage), or see those of another save:
        :meth:`load` compares over all ranks, since the step must agree.

        Raises:
            NoState: Files are missing, or the parameters were cut in another way.
            DCTError: A file cannot be read, is damaged, was written by another rank or version or in another
                save than the others, or does not fit the model; names the file and what is wrong in it.
        """
        folder = Path(folder)
        if (folder / UNFINISHED).exists():
            raise DCTError(
                f"{folder}: a save over an older checkpoint did not end, so that its parts may be of two "
                f"steps (that is what {UNFINISHED} in it says)"
            )
        if self.name != GATHERED and (folder / GATHERED).exists():
            return replace(self, rank=0, world_size=1, name=GATHERED, cut={}, layout=()).read(folder)
        # On node-local storage only this rank's file is here.
        candidates = (self.file(folder), self.file(folder, 0), *folder.glob(self.pattern))
        if (known := next((file for file in candidates if file.exists()), None)) is None:
            raise NoState(f"the checkpoint holds no {self.pattern} files")
        first = read(known)
        cut = first.get("layout") or {}
        if changed := [f"{k} {cut.get(k)} -> {size}" for k, size in self.cut.items() if cut.get(k) != size]:
            sizes = ", ".join(changed)
            raise NoState(f"the parameters are cut in another way ({sizes}), which residuals cannot follow")
        layouts = [part["state"].get("layout", []) for name, part in _reducers(first) if not _of_expert(name)]
        saved = int(first["world_size"])
        is_own = saved == self.world_size and all(each == [*map(list, self.layout)] for each in layouts)
        ranks = [self.rank] if is_own else range(saved)
        if absent := next((file for rank in ranks if not (file := self.file(folder, rank)).exists()), None):
            raise NoState(f"{absent.name} is missing")

        def contents() -> Iterator[State]:
            for file in (self.file(folder, rank) for rank in ranks):
                content = first if file == known else read(file, first)
                for _, part in _reducers(content):
                    if not {"step", "loss_scale", "streams"} <= part["state"].keys() or part["unit"] is None:
                        raise DCTError(f"{file}: not the state of a reducer")
                    _check_residuals(file, part["state"], self.sizes or {})
                yield content

        if is_own:
            (content,) = contents()
            state = in_unit(content["state"], self.unit / float(content.get("unit", self.unit)))
        else:
            state = self._spread(contents, first["state"])
        return Loaded(state, str(first["save"]), origin_of(first), 0 if is_own else saved)

    def _spread(self, contents: Callable[[], Iterator[State]], first: State) -> State:
        """Return the state for another number of ranks. ``contents`` reads the files one by one, once for
        each reducer. Streams of activations are those of one rank.
        """
        if "reducers" not in first:
            return reshard(contents(), unit=self.unit)
        reducers = {}
        for name, part in first["reducers"].items():
            alike = (each for each in contents() if not _of_expert(name) or each["expert"] == self.expert)
            parts = (each["state"]["reducers"][name] for each in alike)
            reducers[name] = {"unit": part["unit"], "state": reshard(parts, unit=part["unit"])}
        return {**first, "reducers": reducers, "parameters": {}}

    def _of_model(self, folder: Folder, found: Loaded) -> State:
        """Return a state with the streams of the model only; rank 0 logs what has become of the files."""
        state, strange = known_to(self.sizes, found.state)
        said = []
        if found.ranks not in (0, self.world_size):
            before = f"the residuals of {found.ranks} ranks at step {found.state['step']}"
            alone = self.world_size == 1
            after = "not used: one rank sends nothing" if alone else f"spread over {self.world_size} ranks"
            said.append(f"{before} are {after}")
        if strange:
            what = f"residuals of {len(strange)} parameters that the model does not have are left"
            said.append(f"{what}: {listed(strange)}")
        for line in said if self.rank == 0 else ():
            logger.warning(f"dct: {folder}: {line}")
        return state


def gather(source: Folder, target: Folder) -> Path:
    """Put the states of all ranks of a checkpoint into one file, for any number of ranks (:func:`reshard`).

    Args:
        source: Folder with the ranks' files.
        target: Folder of a checkpoint of the same step for any number of ranks.

    Returns:
        The file; :meth:`StateFiles.read` takes it from ``target`` instead of ranks' files.

    Raises:
        DCTError: A file is missing or damaged, or they are not of one save.
    """
    files = StateFiles(0, 0)  # no run has 0 ranks: the residuals are spread
    try:
        found = files.read(source)
    except NoState as error:
        raise DCTError(f"{source}: {error}; it is to be a folder with {files.pattern}") from error
    write(Path(target, GATHERED), replace(files, world_size=1).content(found.state, found.save))
    return Path(target, GATHERED)


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


# -- states of reducers ---


def _reducers(content: State) -> Iterable[tuple[str, State]]:
    """Return the states of the reducers in a file by name, with their units."""
    state = content["state"]
    return state.get("reducers", {"": {"unit": content.get("unit"), "state": state}}).items()


def _of_expert(reducer: str) -> bool:
    """Return whether a reducer is of expert layers, whose replicas are the ranks with the same experts."""
    return reducer.startswith("expert")


def _check_residuals(file: Path, state: State, sizes: Mapping[str, int]) -> None:
    """Check that the residuals of a reducer are finite, and of the sizes of the model's parameters.

    Args:
        file: That it was read from.
        state: State of a reducer; parameters that the model does not have are passed over.
        sizes: Entries of the model's parameters by name.

    Raises:
        DCTError: Names the file, the parameter and what is wrong.
    """
    parts = state.get("parts", {})
    for name, stream in state["streams"].items():
        if (saved := stream["residual"]) is None:
            continue
        expected = _entries(name, sizes)
        if expected is not None and name in parts:
            start, stop, numel = parts[name]
            expected = stop - start if numel == expected else expected
        try:
            shape = entries_of(saved)
            if expected is not None and shape != (expected,):
                raise ValueError(f"has shape {shape}, the model has {expected} entries there")
            if isinstance(saved, Tensor) and not saved.isfinite().all():
                raise ValueError("holds values that are not finite")
        except ValueError as error:
            raise DCTError(f"{file}: the residual of {name} {error}") from error


def _entries(stream: str, sizes: Mapping[str, int]) -> int | None:
    """Entries of the part of the model that a stream is of; None if the model does not have it."""
    if stream in sizes:
        return sizes[stream]
    match = _SERVER_STREAM.match(stream)
    if match is None or match["name"] not in sizes or int(match["stop"]) > sizes[match["name"]]:
        return None
    return int(match["stop"]) - int(match["start"])


def known_to(sizes: Mapping[str, int] | None, state: State) -> tuple[State, list[str]]:
    """A reducer's state with the streams of a model only, and the names of the others; of all, if its sizes
    are not known.
    """
    if sizes is None or "reducers" in state:
        return state, []
    streams = (name for name in state["streams"] if not name.startswith("updates "))  # of all weights
    strange = [name for name in streams if _entries(name, sizes) is None]
    kept = {name: stream for name, stream in state["streams"].items() if name not in strange}
    return {**state, "streams": kept}, strange


def reshard(contents: Iterable[State], *, unit: float = 1.0) -> State:
    """The state of every new rank (they are all the same), from the files of all old ranks.

    A model update averages the ranks, so the mean of the residuals is still to be sent. The residuals of
    owners (two-phase exchange) are parts of the *sum* over the ranks; they are shared out to the ranks, since
    the new owners own other parts. Thresholds are measured anew. Where the ranks of a node were summed first,
    each file has a part of the node's residual, and nodes are averaged.

    Args:
        contents: Contents of the files of all old ranks, in any order; one is in memory at a time.
        unit: See :class:`StateFiles`, for the new ranks.
    """
    step, loss_scale, count, inside, old_unit = 0, 1.0, 0, 1, 1.0
    total: dict[str, State] = {}
    for content in contents:
        state = content["state"]
        if count == 0:
            loss_scale, old_unit = float(state["loss_scale"]), float(content["unit"])
        factor = loss_scale / float(state["loss_scale"])
        step, count = max(step, int(state["step"])), count + 1
        parts, inside = state.get("parts", {}), max(1, *map(len, state.get("layout", [[]])))
        streams = {name: s for name, s in state["streams"].items() if s["residual"] is not None}
        answers = {name: match for name in streams if (match := _SERVER_STREAM.match(name))}
        for name in streams.keys() - answers.keys():
            residual = unpacked(streams[name]["residual"]) * factor
            start, stop, numel = parts.get(name, (0, residual.numel(), residual.numel()))
            if name not in total:
                total[name] = {
                    **_without_threshold(streams[name]),
                    "residual": torch.zeros(numel, dtype=torch.float32, device="cpu"),
                }
            total[name]["residual"][start:stop] += residual
        for name, match in answers.items():
            if (owner := total.get(match["name"])) is not None:
                first = parts.get(match["name"], [0])[0]
                part = owner["residual"][first + int(match["start"]) : first + int(match["stop"])]
                part += unpacked(streams[name]["residual"]) * factor
    for stream in total.values():
        stream["residual"] *= unit / old_unit / (count / inside)
    return {"step": step, "loss_scale": loss_scale, "streams": total}


def is_answer(stream: str) -> bool:
    """Return whether a stream is that of an owner, of sums in the two-phase exchange."""
    return _SERVER_STREAM.match(stream) is not None


def in_unit(state: State, ratio: float) -> State:
    """A reducer's state for gradients that are ``ratio`` times as large; 1 changes nothing.

    Thresholds are measured anew. The state has the ``"ratio"``, by which add-ons change their own parts when
    they are loaded.
    """
    if ratio == 1.0:
        return state
    streams = {}
    for name, stream in state["streams"].items():
        saved = stream["residual"]
        residual = None if saved is None else unpacked(saved) * ratio
        streams[name] = {**_without_threshold(stream), "residual": residual}
    return {**state, "streams": streams, "ratio": ratio * state.get("ratio", 1.0)}


def _without_threshold(stream: State) -> State:
    """The stream with a threshold that will be measured at its next use."""
    return {**stream, "threshold": {**stream["threshold"], "tau": 0.0}}


def device_of(backends: str) -> str:
    """Return the type of device whose tensors a group takes, of backends such as ``cpu:gloo,cuda:nccl2``."""
    return "cpu" if "cpu:" in backends else backends.partition(":")[0]


@own_traffic(recorded=False)
def mean_residuals(
    state: State, sizes: Mapping[str, int], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return the mean of the ranks' residuals by parameter, fp32 [numel], on CPU; a collective.

    Args:
        state: This rank's state of the reducer.
        sizes: The entries of the parameters by name, in the same order on all ranks.
        group: The ranks.
    """
    streams = reshard([{"state": state, "unit": 1.0}])["streams"]
    device = device_of(str(dist.get_backend_config(group)))
    means = {}
    for name, numel in sizes.items():
        total = (
            streams[name]["residual"]
            if name in streams
            else torch.zeros(numel, dtype=torch.float32, device="cpu")
        ).to(device)
        with lost_ranks.reported("average of residuals", group):
            dist.all_reduce(total, group=group)
            means[name] = lost_ranks.received(total, group).div_(dist.get_world_size(group))
    return means
