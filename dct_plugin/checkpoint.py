"""Residuals, thresholds and counters across a restart: one file per rank, also for another number of ranks.

A residual is a rank's own: losing it loses gradients that were computed and not yet sent. With the same
number of ranks each one gets its file back and goes on bitwise. With another number the residuals are spread
anew so that what is still owed to the model stays the same: every new rank gets the mean of the old
residuals.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .errors import DCTError

FORMAT = 1

#: Name of an owner's stream in the two-phase exchange: the parameter and the entries ``[start:stop)`` of it.
_SERVER_STREAM = re.compile(r"(?P<name>.*)\[(?P<start>\d+):(?P<stop>\d+)\]\Z", re.DOTALL)

State = dict[str, Any]


def file_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where rank ``rank`` keeps its state."""
    return Path(folder) / f"dct_rank_{rank:05d}.pt"


def save(
    folder: str | os.PathLike[str], state: State, *, rank: int, world_size: int, unit: float = 1.0
) -> Path:
    """Write a reducer's state (``GradientReducer.state_dict()``); complete or not at all.

    Args:
        folder: Of the checkpoint; made if it is not there.
        state: Of this rank.
        rank, world_size: In the data-parallel group.
        unit: Factor that the host had multiplied into the gradients before they reached the reducer, for
            example one over the number of ranks; 1 when it averages afterwards.
    """
    path = file_of(folder, rank)
    write(path, content_of(state, rank=rank, world_size=world_size, unit=unit))
    return path


def content_of(state: State, *, rank: int, world_size: int, unit: float) -> State:
    """What :func:`save` writes."""
    return {"rank": rank, "world_size": world_size, "unit": unit, "state": state}


def write(path: Path, content: State) -> None:
    """Write tensors, numbers and texts to a file, complete or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save({"format": FORMAT, **content}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(folder: str | os.PathLike[str], *, rank: int, world_size: int, unit: float = 1.0) -> State | None:
    """This rank's state from a checkpoint of the same or another number of ranks.

    Returns:
        A state for ``GradientReducer.load_state_dict``; None when files are missing. Another rank may miss
        files that this one sees (node-local storage): compare over all ranks before using it, since the step
        must agree.

    Raises:
        DCTError: A file cannot be read, or was written by a later version of the plugin.
    """
    own, first = file_of(folder, rank), file_of(folder, 0)
    if not first.exists():  # node-local storage: only the own file is here
        first = own
    if not first.exists():
        return None
    saved = int(read(first)["world_size"])
    if saved == world_size:
        content = read(own, saved) if own.exists() else None
        return None if content is None else in_unit(content["state"], unit / float(content["unit"]))
    files = [file_of(folder, r) for r in range(saved)]
    if not all(file.exists() for file in files):
        return None
    return reshard((read(file, saved) for file in files), unit=unit)


def reshard(contents: Iterable[State], *, unit: float = 1.0) -> State:
    """The state of every new rank (they are all the same), from the files of all old ranks.

    A model update averages the ranks, so it is the mean of the residuals that is owed. The residuals of
    owners (two-phase exchange, ``server_error_feedback``) are parts of the *sum* over the ranks; they are
    shared out to the ranks, since the new owners own other parts. Thresholds are measured anew, and momentum
    that is kept at the workers starts over.

    Args:
        contents: Of the file of every old rank, in any order; only one is held in memory at a time.
        unit: See :func:`save`, for the new ranks.
    """
    step, loss_scale, count, old_unit = 0, 1.0, 0, 1.0
    total: dict[str, State] = {}
    for content in contents:
        state = content["state"]
        if count == 0:
            loss_scale, old_unit = float(state["loss_scale"]), float(content["unit"])
        factor = loss_scale / float(state["loss_scale"])
        step, count = max(step, int(state["step"])), count + 1
        streams = {name: s for name, s in state["streams"].items() if s["residual"] is not None}
        answers = {name: match for name in streams if (match := _SERVER_STREAM.match(name))}
        for name in streams.keys() - answers.keys():
            residual = streams[name]["residual"] * factor
            if name in total:
                total[name]["residual"] += residual
            else:
                total[name] = {**_unmeasured(streams[name]), "residual": residual, "velocity": None}
        for name, match in answers.items():
            if (owner := total.get(match["name"])) is not None:
                part = owner["residual"][int(match["start"]) : int(match["stop"])]
                part += streams[name]["residual"] * factor
    for stream in total.values():
        stream["residual"] *= unit / old_unit / count
    return {"step": step, "loss_scale": loss_scale, "streams": total}


def in_unit(state: State, ratio: float) -> State:
    """A reducer's state for gradients that are ``ratio`` times as large; 1 changes nothing."""
    if ratio == 1.0:
        return state
    streams = {
        name: {
            **_unmeasured(stream),
            "residual": None if stream["residual"] is None else stream["residual"] * ratio,
            "velocity": None if stream.get("velocity") is None else stream["velocity"] * ratio,
        }
        for name, stream in state["streams"].items()
    }
    return {**state, "streams": streams, "ahead": _ahead_in_unit(state.get("ahead"), ratio * ratio)}


def _ahead_in_unit(ahead: State | None, ratio: float) -> State | None:
    """What step-ahead knows: second moments of gradients, and products of residuals."""
    if ahead is None:
        return None
    moments = {
        name: {**saved, "rows": saved["rows"] * ratio, "columns": saved["columns"] * ratio}
        for name, saved in ahead["moments"].items()
    }
    products = {name: (own * ratio, mixed * ratio) for name, (own, mixed) in ahead["products"].items()}
    return {"moments": moments, "products": products}


def _unmeasured(stream: State) -> State:
    """The stream with a threshold that will be measured at its next use."""
    return {**stream, "threshold": {**stream["threshold"], "tau": 0.0}}


def read(path: Path, world_size: int | None = None) -> State:
    """Content of a file; with ``world_size``, of the checkpoint that was written by so many ranks.

    Raises:
        DCTError: The file cannot be read, or was written by a later version or by another number of ranks.
    """
    try:
        content: State = torch.load(path, map_location="cpu", weights_only=True)
        found, saved = content["format"], content["world_size"]
    except Exception as error:
        raise DCTError(f"{path}: not a readable state of dct-plugin: {error}") from error
    if found != FORMAT:
        raise DCTError(f"{path}: written in format {found}, this version of dct-plugin reads {FORMAT}")
    if world_size is not None and saved != world_size:
        raise DCTError(
            f"{path}: written by a run of {saved} ranks, the other files of this checkpoint by one of "
            f"{world_size}"
        )
    return content
