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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
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

_MISSING = "dct_rank_*.pt files are missing"

State = dict[str, Any]


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

    @classmethod
    def of(cls, state: State, content: State) -> Loaded:
        """``state``, which was made of the files of which ``content`` is one."""
        return cls(state, str(content["save"]), origin_of(content))


def origin_of(content: State) -> str:
    """Describe step, version and configuration of a file in words."""
    configuration = content.get("configuration") or "unknown"
    return (
        f"step {content['state']['step']}, dct-plugin {content['version']}, configuration {configuration}, "
        f"save {str(content['save'])[:8] or 'unknown'}"
    )


def file_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of rank ``rank``."""
    return Path(folder) / f"dct_rank_{rank:05d}.pt"


def content_of(
    state: State, *, rank: int, world_size: int, unit: float, identity: str = "", configuration: str = ""
) -> State:
    """Return what a rank's file holds.

    Args:
        state: A reducer's state of this rank (``GradientReducer.state_dict()``).
        rank, world_size: Rank and number of ranks in the data-parallel group.
        unit: Factor that the host had multiplied into the gradients before they reached the reducer, for
            example one over the number of ranks; 1 when it averages afterwards.
        identity: Identity of this save: the same on all ranks, another for each save.
        configuration: Fingerprint of the ``dct`` section.
    """
    return {
        "rank": rank,
        "world_size": world_size,
        "unit": unit,
        "save": identity,
        "configuration": configuration,
        "state": state,
    }


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
    folder: str | os.PathLike[str],
    *,
    rank: int,
    world_size: int,
    unit: float = 1.0,
    sizes: Mapping[str, int] | None = None,
    layout: Sequence[Sequence[int]] = (),
) -> Loaded:
    """Return this rank's state from a checkpoint of the same or another number of ranks or nodes.

    Args:
        folder: Folder of the checkpoint.
        rank, world_size: Rank and number of ranks in the data-parallel group.
        unit: See :func:`content_of`.
        sizes: Entries of the model's parameters by name, where the host knows them.
        layout: Ranks of each node, where their gradients are summed first.

    Returns:
        A state for ``GradientReducer.load_state_dict`` and what it was made of. Another rank may miss files
        that this one sees (node-local storage), or see those of another save: compare over all ranks before
        using it, since the step must agree.

    Raises:
        NoState: Files are missing.
        DCTError: A file cannot be read, is damaged, was written by another rank or version or in another save
            than the others, or does not fit the model; names the file and what is wrong in it.
    """
    if Path(folder, GATHERED).exists():
        content = read(Path(folder, GATHERED))
        _check(Path(folder, GATHERED), content, 0, sizes)
        return Loaded.of(in_unit(content["state"], unit / float(content["unit"])), content)
    own, first = file_of(folder, rank), file_of(folder, 0)
    known = own if own.exists() else first  # on node-local storage only the own file is here
    if Path(folder, UNFINISHED).exists():
        raise DCTError(
            f"{folder}: a save over an older checkpoint did not end, so that its parts may be of two steps "
            f"(that is what {UNFINISHED} in it says)"
        )
    if not known.exists():
        some = any(Path(folder).glob("dct_rank_*.pt"))
        raise NoState(_MISSING if some else "the checkpoint holds no dct_rank_*.pt files")
    content = read(known)
    saved = int(content["world_size"])
    if saved == world_size and content["state"].get("layout", []) == [list(ranks) for ranks in layout]:
        if known != own:
            raise NoState(_MISSING)
        _check(own, content, rank, sizes)
        return Loaded.of(in_unit(content["state"], unit / float(content["unit"])), content)
    if not all(file_of(folder, r).exists() for r in range(saved)):
        raise NoState(_MISSING)
    loaded = Loaded.of(reshard(_parts(known, content, sizes), unit=unit), content)
    return loaded._replace(ranks=saved)


def gather(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Put the states of all ranks of a checkpoint into one file, for any number of ranks (:func:`reshard`).

    Args:
        source: Folder with the ranks' files.
        target: Folder of a checkpoint of the same step for any number of ranks.

    Returns:
        The file; :func:`load` takes it from ``target`` instead of ranks' files.

    Raises:
        DCTError: A file is missing or damaged, or they are not of one save.
    """
    known = file_of(source, 0)
    if not known.exists():
        raise DCTError(f"{known}: no such file; {source} is to be a folder with dct_rank_*.pt")
    first = read(known)
    state = reshard(_parts(known, first, None))
    origin = {"identity": first["save"], "configuration": first.get("configuration", "")}
    path = Path(target, GATHERED)
    write(path, content_of(state, rank=0, world_size=1, unit=1.0, **origin))
    return path


def _parts(known: Path, first: State, sizes: Mapping[str, int] | None) -> Iterator[State]:
    """The content of all ranks' files, one by one; ``first`` is that of ``known``, and of the same save."""
    for rank in range(int(first["world_size"])):
        file = file_of(known.parent, rank)
        content = first if file == known else read(file, first)
        _check(file, content, rank, sizes)
        yield content


def _check(file: Path, content: State, rank: int, sizes: Mapping[str, int] | None) -> None:
    """Check that a reducer's file is that of ``rank`` and fits a model."""
    if content.get("rank") != rank:
        raise DCTError(f"{file}: written by rank {content.get('rank')}, its name says {rank}")
    state = content["state"]
    if not {"step", "loss_scale", "streams"} <= state.keys() or "unit" not in content:
        raise DCTError(f"{file}: not the state of a reducer")
    if sizes is not None:
        check_sizes(file, state, sizes)


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
    if sizes is None:
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
        unit: See :func:`content_of`, for the new ranks.
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
