"""Residuals, thresholds and counters across a restart: one file per rank, also for another number of ranks.

A residual is a rank's own: losing it loses gradients that were computed and not yet sent. With the same
number of ranks each one gets its file back and goes on bitwise. With another number the residuals are spread
anew so that what the model still lacks stays the same: every new rank gets the mean of the old
residuals.

A file that is damaged, or that is another's, would change the training without a sign of it. So every file
holds a checksum of each of its tensors and a digest of all else, says which rank wrote it in which save, and
is compared with that, and with the model, before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ._version import __version__
from .compression.feedback import entries_of, unpacked
from .errors import DCTError

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


class NoState(Exception):
    """A checkpoint holds nothing for this rank; the text says why."""


class Writer(NamedTuple):
    """A rank that writes a file: one of the ranks that hold the same parameters.

    Attributes:
        rank, world_size: Its rank among these, and their number.
        name: Name of the files, with fields for ``rank`` and for the coordinates in ``place``.
        place: The coordinates of all of these ranks.
        cut: Sizes of what cuts the parameters. Residuals cannot follow other sizes.
        expert: Ranks of one number have the same experts.
    """

    rank: int
    world_size: int
    name: str = "dct_rank_{rank:05d}.pt"
    place: Mapping[str, int] = MappingProxyType({})
    cut: Mapping[str, int] = MappingProxyType({})
    expert: int = 0

    def file(self, folder: Folder, rank: int | None = None) -> Path:
        """Return the file of this rank, or of another of these ranks."""
        return Path(folder) / self.name.format(rank=self.rank if rank is None else rank, **self.place)

    @property
    def pattern(self) -> str:
        """The pattern of the names of all files."""
        return re.sub(r"\{.*?\}", "*", self.name)

    def content(
        self, state: State, *, unit: float = 1.0, identity: str = "", configuration: str = ""
    ) -> State:
        """Return what the file holds.

        Args:
            state: ``GradientReducer.state_dict()`` of this rank; or a dictionary in which ``"reducers"`` has
                the ``"state"`` and the ``"unit"`` of several reducers by name.
            unit: Factor that the host had multiplied into the gradients before they reached the reducer, for
                example one over the number of ranks; 1 when it averages afterwards.
            identity: Identity of this save: the same on all ranks, another for each save.
            configuration: Fingerprint of the ``dct`` section.
        """
        own: State = {"rank": self.rank, "world_size": self.world_size, "expert": self.expert}
        own |= {"place": self.coordinates(self.rank), "layout": dict(self.cut)}
        return {**own, "unit": unit, "save": identity, "configuration": configuration, "state": state}

    def coordinates(self, rank: int | None) -> dict[str, int | None]:
        """Return where a rank stands: among the ranks that hold the same parameters, and in their place."""
        return {"data": rank, **self.place}


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


def origin_of(content: State) -> str:
    """Describe step, version and configuration of a file in words."""
    configuration = content.get("configuration") or "unknown"
    return (
        f"step {content['state']['step']}, dct-plugin {content['version']}, configuration {configuration}, "
        f"save {str(content['save'])[:8] or 'unknown'}"
    )


def write(path: Path, content: State) -> None:
    """Write tensors, numbers and texts to a file, complete or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")  # one rank writes it; the next time over what a kill left
    content = {"format": FORMAT, "version": __version__, **content}
    tensors, digest = _sums(content)
    try:
        temporary.unlink(missing_ok=True)  # it may be a FIFO
        with open(temporary, "xb") as file:
            torch.save({**content, "tensors": tensors, "digest": digest}, file)
            file.flush()
            os.fsync(file.fileno())  # or a crash may leave the new name with no content
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(
    folder: Folder,
    writer: Writer,
    *,
    unit: float = 1.0,
    sizes: Mapping[str, int] | None = None,
    layout: Sequence[Sequence[int]] = (),
) -> Loaded:
    """Return a rank's state from a checkpoint of the same or another number of ranks or nodes.

    Args:
        folder: Folder of the checkpoint.
        writer: The rank.
        unit: See :meth:`Writer.content`; reducers by name keep their units.
        sizes: Entries of the model's parameters by name, where the host knows them.
        layout: Ranks of each node, where their gradients are summed first.

    Returns:
        A state for ``load_state_dict`` and what it was made of. Another rank may miss files that this one
        sees (node-local storage), or see those of another save: compare over all ranks before using it, since
        the step must agree.

    Raises:
        NoState: Files are missing, or the parameters were cut in another way.
        DCTError: A file cannot be read, is damaged, was written by another rank or version or in another save
            than the others, or does not fit the model; names the file and what is wrong in it.
    """
    folder = Path(folder)
    if (gathered := Writer(0, 1, GATHERED)).file(folder).exists():
        writer, layout = gathered, ()
    elif (folder / UNFINISHED).exists():
        raise DCTError(
            f"{folder}: a save over an older checkpoint did not end, so that its parts may be of two steps "
            f"(that is what {UNFINISHED} in it says)"
        )
    known = writer.file(folder)
    if not known.exists():
        known = writer.file(folder, 0)  # on node-local storage only the own file is here
    if not known.exists():
        if (other := next(folder.glob(writer.pattern), None)) is None:
            raise NoState(f"the checkpoint holds no {writer.pattern} files")
        if writer.cut:
            _check_cut(read(other), writer)
        raise NoState(f"{known.name} is missing")
    content = read(known)
    _check_cut(content, writer)
    layouts = [part["state"].get("layout", []) for name, part in _reducers(content) if not _of_expert(name)]
    saved = int(content["world_size"])
    is_own = saved == writer.world_size and all(each == [*map(list, layout)] for each in layouts)
    ranks = [writer.rank] if is_own else range(saved)
    if (absent := next((r for r in ranks if not writer.file(folder, r).exists()), None)) is not None:
        raise NoState(f"{writer.file(folder, absent).name} is missing")
    origin = str(content["save"]), origin_of(content)
    contents = partial(_contents, writer, ranks, known, content, sizes)
    if is_own:
        (content,) = contents()
        return Loaded(in_unit(content["state"], unit / float(content.get("unit", unit))), *origin)
    return Loaded(_spread(contents, content["state"], writer, unit), *origin, saved)


def gather(source: Folder, target: Folder) -> Path:
    """Put the states of all ranks of a checkpoint into one file, for any number of ranks (:func:`reshard`).

    Args:
        source: Folder with the ranks' files.
        target: Folder of a checkpoint of the same step for any number of ranks.

    Returns:
        The file; :func:`load` takes it from ``target`` instead of ranks' files.

    Raises:
        DCTError: A file is missing or damaged, or they are not of one save.
    """
    writer = Writer(0, 1)
    if not (known := writer.file(source)).exists():
        raise DCTError(f"{known}: no such file; {source} is to be a folder with {writer.pattern}")
    first = read(known)
    state = reshard(_contents(writer, range(int(first["world_size"])), known, first))
    path, configuration = Path(target, GATHERED), first.get("configuration", "")
    write(path, writer.content(state, identity=first["save"], configuration=configuration))
    return path


def _contents(
    writer: Writer, ranks: Sequence[int], known: Path, first: State, sizes: Mapping[str, int] | None = None
) -> Iterator[State]:
    """Yield the content of the files of ranks, one by one and checked; ``first`` is that of ``known``, and of
    the same save.
    """
    for rank in ranks:
        file = writer.file(known.parent, rank)
        content = first if file == known else read(file, first)
        found = content.get("place", writer.coordinates(content.get("rank")))  # files of older versions
        if found != (named := writer.coordinates(rank)):
            raise DCTError(f"{file}: written by {_in_words(found)}; its name says {_in_words(named)}")
        for _, part in _reducers(content):
            if not {"step", "loss_scale", "streams"} <= part["state"].keys() or part["unit"] is None:
                raise DCTError(f"{file}: not the state of a reducer")
            check_sizes(file, part["state"], sizes or {})
        yield content


def _in_words(coordinates: Mapping[str, object]) -> str:
    return ", ".join(f"{'rank' if name == 'data' else name} {at}" for name, at in coordinates.items())


def _check_cut(content: State, writer: Writer) -> None:
    """Refuse the files of ranks whose parameters are cut in another way."""
    saved = content.get("layout") or {}
    if changed := [f"{k} {saved.get(k)} -> {size}" for k, size in writer.cut.items() if saved.get(k) != size]:
        sizes = ", ".join(changed)
        raise NoState(f"the parameters are cut in another way ({sizes}), which residuals cannot follow")


def _reducers(content: State) -> Iterable[tuple[str, State]]:
    """Return the states of the reducers in a file by name, with their units."""
    state = content["state"]
    return state.get("reducers", {"": {"unit": content.get("unit"), "state": state}}).items()


def _of_expert(reducer: str) -> bool:
    """Return whether a reducer is of expert layers, whose replicas are the ranks with the same experts."""
    return reducer.startswith("expert")


def _spread(contents: Callable[[], Iterator[State]], first: State, writer: Writer, unit: float) -> State:
    """Return the state for another number of ranks. ``contents`` reads the files one by one, once for each
    reducer. Streams of activations are those of one rank.
    """
    if "reducers" not in first:
        return reshard(contents(), unit=unit)
    reducers = {}
    for name, part in first["reducers"].items():
        alike = (each for each in contents() if not _of_expert(name) or each["expert"] == writer.expert)
        parts = (each["state"]["reducers"][name] for each in alike)
        reducers[name] = {"unit": part["unit"], "state": reshard(parts, unit=part["unit"])}
    return {**first, "reducers": reducers, "parameters": {}}


def check_sizes(file: Path, state: State, sizes: Mapping[str, int]) -> None:
    """Check that what a reducer's state holds has the sizes of a model's parameters.

    Args:
        file: That it was read from.
        state: State of a reducer; parameters that the model does not have are passed over.
        sizes: Entries of the model's parameters by name.

    Raises:
        DCTError: Names the file, the parameter and both sizes.
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
        except ValueError as error:
            raise DCTError(f"{file}: the residual of {name} {error}") from error
        if expected is not None and shape != (expected,):
            raise DCTError(
                f"{file}: the residual of {name} has shape {shape}, the model has {expected} entries there"
            )


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
        unit: See :meth:`Writer.content`, for the new ranks.
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
                total[name] = {**_unmeasured(streams[name]), "residual": torch.zeros(numel)}
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

    Add-ons know themselves what in their states depends on it; when they are loaded they get the ``"ratio"``.
    """
    if ratio == 1.0:
        return state
    streams = {}
    for name, stream in state["streams"].items():
        saved = stream["residual"]
        residual = None if saved is None else unpacked(saved) * ratio
        streams[name] = {**_unmeasured(stream), "residual": residual}
    return {**state, "streams": streams, "ratio": ratio * state.get("ratio", 1.0)}


def _unmeasured(stream: State) -> State:
    """The stream with a threshold that will be measured at its next use."""
    return {**stream, "threshold": {**stream["threshold"], "tau": 0.0}}


def read(path: Path, other: State | None = None) -> State:
    """Content of a file as it was written, bit by bit.

    Args:
        path: The file.
        other: Content of another file of the same checkpoint.

    Raises:
        DCTError: The file cannot be read, is damaged, holds values that are not finite, was written in
            another format, or in another save or by another number of ranks than ``other``.
    """
    try:
        if not path.is_file():  # to open a FIFO would wait for whoever writes to it
            raise OSError("no regular file")
        with open(path, "rb") as file:
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
        found = content["format"]
    except Exception as error:
        raise DCTError(f"{path}: not a readable state of dct-plugin: {_line(error)}") from error
    if found != FORMAT:
        raise DCTError(f"{path}: written in format {found!r}, this version of dct-plugin reads {FORMAT}")
    try:
        tensors, digest = content.pop("tensors"), content.pop("digest")
        sums, found = _sums(content)
        wrong = [name for name in sums.keys() | tensors.keys() if sums.get(name) != tensors.get(name)]
        missing = [key for key in ("version", "world_size", "save", "state") if key not in content]
        step = content["state"]["step"]
    except Exception as error:
        raise DCTError(f"{path}: not a complete state of dct-plugin: {_line(error)}") from error
    if wrong:
        raise DCTError(f"{path}: damaged: {min(wrong)} does not have the checksum it was written with")
    if digest != found or missing or isinstance(step, bool) or not isinstance(step, int):
        raise DCTError(f"{path}: damaged: names or numbers in it are not those that were written")
    for name, tensor in _leaves(content):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
            raise DCTError(f"{path}: {name} holds values that are not finite")
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


def _line(error: Exception) -> str:
    """An error in one line: torch's explain at length how to load files without looking."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _sums(content: State) -> tuple[dict[str, Any], str]:
    """``[type, shape, CRC-32]`` of every tensor by name, and a digest of these and all else."""
    tensors: dict[str, Any] = {}
    digest = hashlib.sha256()
    for name, leaf in _leaves(content):
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            tensors[name] = [str(leaf.dtype), list(leaf.shape), zlib.crc32(data.data)]
            text = json.dumps(tensors[name])
        else:
            text = f"{type(leaf).__name__} {leaf!r}"
        digest.update(f"{name!r} {text}\n".encode())
    return tensors, digest.hexdigest()


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dictionaries, lists and tuples that is none of these, or is empty, by name."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}[{index}]")
    else:
        yield name, value
