"""Read metrics files: also those that are cut off, appended to, of several ranks, or of another version."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import DCTError
from ..metrics import FORMAT

#: Figures of a line have limits, so that sums, ratios and charts of them are finite.
_Count = Annotated[int, Field(ge=0, le=10**15)]
_Amount = Annotated[float, Field(ge=0, le=1e18)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Target = Annotated[float, Field(ge=1e-9, le=1)]
_Duration = Annotated[float, Field(ge=1e-6, le=1e18)]
_Threshold = Annotated[float, Field(ge=0, le=1e39)]
_Loss = Annotated[float, Field(ge=-1e39, le=1e39)]
_Ranks = Annotated[int, Field(ge=1, le=10**7)]
_Text = Annotated[str, Field(max_length=500)]


class Line(BaseModel):
    """Lines of all kinds have these fields."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rank: _Count = 0
    world_size: _Ranks = 1


class Row(Line):
    """One line of a tensor class. Keys that not all versions write have defaults."""

    step: _Count
    steps: Annotated[int, Field(ge=1, le=10**15)]
    cls: _Text = Field(alias="class")
    dense_bytes: _Amount
    sent_bytes: _Amount
    is_start: bool = False
    step_ms: _Duration | None = None
    dense_step_ms: _Duration | None = None
    density: _Share | None = None
    density_target: _Target | None = None
    tau: _Threshold | None = None
    select_ms: _Amount = 0.0
    encode_ms: _Amount = 0.0
    exchange_ms: _Amount = 0.0
    decode_ms: _Amount = 0.0
    waited_ms: _Amount = 0.0


class EventLine(Line):
    """One line of an event; which keys it has depends on the event."""

    event: _Text
    step: _Count = 0
    format: _Count = FORMAT
    run: _Text | None = None
    loss: _Loss | None = None
    setting: _Text = ""
    reason: _Text = ""
    predicted_ms: _Amount | None = None
    measured_ms: _Amount | None = None
    data_parallel: dict[str, Any] = {}


@dataclass
class RankRun:
    """The lines that one rank wrote in one run."""

    source: str
    rank: int
    world_size: int
    identity: str | None = None
    """The first lines of all ranks of a run have the same; None: an older version wrote the file."""
    rows: list[Row] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)


def _read(path: Path) -> tuple[list[RankRun], list[str]]:
    """Return the runs in a file, and sentences on what could not be read.

    A run begins with a ``start`` line, or where steps start again.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DCTError(f"{path}: cannot be read: {error.strerror or error}") from error
    runs: list[RankRun] = []
    latest: dict[int, RankRun] = {}
    faults, first_fault, newest = 0, "", FORMAT
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            content = json.loads(text)
            is_event = isinstance(content, dict) and "event" in content
            line = (EventLine if is_event else Row).model_validate(content)
        except (ValueError, RecursionError) as error:
            faults += 1
            first_fault = first_fault or f"line {number}: {_reason(error)}"
            continue
        run = latest.get(line.rank)
        if isinstance(line, Row):
            begins = run is not None and bool(run.rows) and line.step < run.rows[-1].step
        else:
            begins, newest = line.event == "start", max(newest, line.format)
        if run is None or begins:
            if run is not None and not run.rows and not run.events:
                runs.remove(run)  # it ended before its first report
            identity = None if isinstance(line, Row) else line.run
            run = latest[line.rank] = RankRun(str(path), line.rank, line.world_size, identity)
            runs.append(run)
        if isinstance(line, Row):
            run.rows.append(line)
        elif line.event != "start":
            run.events.append(line)
    notes = []
    if rest.strip():
        notes.append(f"{path} ends in the middle of line {len(lines) + 1}, which is left out.")
    if faults:
        notes.append(f"{faults} of {len(lines)} lines of {path} are left out; {first_fault}.")
    if newest > FORMAT:
        notes.append(
            f"{path} was written by a newer version (format {newest}, this one knows {FORMAT}): keys that it "
            "added are not shown."
        )
    return runs, notes


def _reason(error: Exception) -> str:
    """Return the first fault of a line in words."""
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "missing":
            return f"it has no {key!r}, so another version or another program wrote it"
        return f"{key or 'it'} = {json.dumps(fault['input'], default=str)[:60]}: {fault['msg']}"
    return f"it is not JSON ({error})"


def read(paths: Iterable[Path]) -> tuple[list[RankRun], list[str]]:
    """Read metrics files of one run.

    Args:
        paths: The files. Of a file with several runs the last one counts.

    Returns:
        The ranks of the run, and notes about what was left out.

    Raises:
        DCTError: A file cannot be read, holds no report, or is of another run or the same rank as another.
    """
    ranks: dict[int, RankRun] = {}
    notes: list[str] = []
    for path in paths:
        found, said = _read(path)
        found = [each for each in found if each.rows]
        if not found:
            if _is_document(path):
                said = [
                    "It is one JSON document; metrics files have a line for each report"
                    " (dct.metrics.path). dct dlrm --report FILE.md makes a report."
                ]
            why = " ".join(said) or "It is empty, or its job has not made a report yet (dct.metrics.every)."
            raise DCTError(f"{path}: holds no report of metrics. {why}")
        last = {each.rank: each for each in found}
        if (count := max(sum(each.rank == rank for each in found) for rank in last)) > 1:
            said.append(f"{path} holds {count} runs; this is the last one.")
        for rank, each in last.items():
            other = next(iter(ranks.values()), each)
            if rank in ranks or (each.world_size, each.identity) != (other.world_size, other.identity):
                raise DCTError(f"{path}: is not of the same run as {other.source}: report each run by itself")
            ranks[rank] = each
        notes += said
    return list(ranks.values()), notes


def _is_document(path: Path) -> bool:
    """Return whether a file is one JSON object or list over several lines."""
    try:
        return isinstance(json.loads(path.read_bytes()), (dict, list)) and path.read_bytes().count(b"\n") > 1
    except (ValueError, RecursionError):
        return False
