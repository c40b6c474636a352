"""Work that both commands share: check the files, complete configurations, start the ranks."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from dct_plugin.config.dct import SECTION
from dct_plugin.config.validation_errors import DEEPSPEED_KEYS
from dct_plugin.errors import ConfigError
from dct_plugin.integrations.deepspeed.section import near_misses
from dct_plugin.output import write

from ..settings import MODEL_SECTION

if TYPE_CHECKING:
    from rich.console import Console

#: Keys of a DeepSpeed JSON of which one gives the batch.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")


class Job(NamedTuple):
    """The work of the ranks: all configurations, by the names of their runs, under all seeds."""

    format: str
    data: str | None
    max_rows: int | None
    epochs: int
    seeds: list[int]
    configs: dict[str, dict[str, Any]]
    split_seed: int = 0
    """Seed of the test part of Diabetes."""
    columns: dict[str, Any] | None = None
    """Roles of a table's columns, and its layout."""
    save: str | None = None
    """Folder that runs are saved in."""
    resume: str | None = None
    """Folder of saved runs that go on."""
    min_count: int | None = None
    """Values that are rarer in the training part become id 0; None for the default."""

    def arguments(self) -> list[str]:
        """Return the arguments of the trainer, without the configurations."""
        given: dict[str, Any] = {
            "format": self.format,
            "data": self.data,
            "max-rows": self.max_rows,
            "epochs": self.epochs,
            "split-seed": self.split_seed or None,
            "save": self.save,
            "resume": self.resume,
            "min-count": self.min_count,
            "columns": None if self.columns is None else json.dumps(self.columns),
        }
        made = ["--seeds", *map(str, self.seeds)]
        for name, value in given.items():
            made += [] if value is None else [f"--{name}", str(value)]
        return made


class Launch(NamedTuple):
    """A finished launch of the trainer."""

    events: list[dict[str, Any]]
    command_lines: dict[str, str]
    """Commands that repeat each run by itself."""


def chosen_format(
    format: str | None, path: Path | None, allowed: tuple[str, ...], columns: dict[str, Any] | None = None
) -> str:
    """Return the format of the data: ``format``, or the one that suits ``path``.

    Reads the beginning of the data: a wrong file is better named before the ranks start.

    Raises:
        typer.BadParameter: The format is not allowed, or the data is not there.
        DataFormatError: The data is of another format.
    """
    from ..data import Columns, load

    format = format or ("diabetes" if path is None else "criteo")
    if format not in allowed:
        raise typer.BadParameter(f"{format!r}: must be one of {', '.join(allowed)}", param_hint="--format")
    if path is None and format != "diabetes":
        raise typer.BadParameter(f"{format} needs --data FILE", param_hint="--data")
    if path is not None and not path.is_file():
        fault = "a folder, not a file" if path.is_dir() else "no such file"
        raise typer.BadParameter(f"{path}: {fault}", param_hint="--data")
    load(format, path, max_rows=1000, columns=None if columns is None else Columns(**columns))
    return format


def complete(
    content: dict[str, Any], *, optimizer: dict[str, Any], batch_size: int, ranks: int, source: str
) -> dict[str, Any]:
    """Complete a DeepSpeed JSON with what DeepSpeed needs and the file leaves out.

    Args:
        content: As read; stays as it is.
        optimizer, batch_size: For a file without; the batch is that of one micro-step of all ranks.
        ranks: Of the launch.
        source: For errors.

    Raises:
        ConfigError: A section is no JSON object, a batch key no integer of at least 1, or the batch cannot be
            split over the ranks.
    """
    defaults = {
        "optimizer": optimizer,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    made = copy.deepcopy({**defaults, **content})
    for key in ("optimizer", "zero_optimization"):
        if not isinstance(made[key], dict):
            raise ConfigError(f"{source}: {key} = {json.dumps(made[key])}: must be a JSON object")
    for key in near_misses(content, SECTION) + near_misses(content, MODEL_SECTION):
        raise ConfigError(f"{source}: {key}: unknown section; did you mean {SECTION!r} or {MODEL_SECTION!r}?")
    for key in content.keys() - {*DEEPSPEED_KEYS, SECTION, MODEL_SECTION}:
        if close := difflib.get_close_matches(key.lower(), DEEPSPEED_KEYS, n=1, cutoff=0.75):
            raise ConfigError(f"{source}: unknown key {key!r} (did you mean {close[0]!r}?)")
    accumulation = "gradient_accumulation_steps"
    for key in (*BATCH_KEYS, accumulation):
        value = made.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{source}: {key} = {json.dumps(value)}: must be an integer >= 1")
    parts = made.get(accumulation, 1)
    if not any(key in made for key in BATCH_KEYS):
        made["train_batch_size"] = batch_size * parts
    size = made.get("train_batch_size")
    if size is not None and size % (ranks * parts):
        steps = "" if parts == 1 else f" times {parts} accumulation steps"
        raise ConfigError(f"{source}: train_batch_size = {size}: must be a multiple of {ranks} ranks{steps}")
    return made


def launch(name: str, job: Job, *, ranks: int, folder: Path, console: Console) -> Launch:
    """Do a job on local ranks and show its progress.

    Args:
        name: Of the log files.
        folder: For everything that is written, the configurations first.

    Raises:
        RunFailed: A rank failed.
    """
    from ..progress import LaunchProgress
    from ..runner import Runner, config_file

    for run, content in job.configs.items():
        write(config_file(folder, run), content)

    def runner(title: str, runs: Iterable[str]) -> Runner:
        files = [str(config_file(folder, run)) for run in runs]
        return Runner(title, ranks, [*files, *job.arguments()], folder)

    with LaunchProgress(console) as progress:
        events = runner(name, job.configs).run(progress.follow)
    return Launch(events, {run: runner(run, [run]).command_line for run in job.configs})
