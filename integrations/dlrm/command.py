"""``dct dlrm``: train recommenders with sharded tables on local ranks; quality paired by seed, bytes by
layer.
"""

from __future__ import annotations

import copy
import json
import platform
import shlex
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from dct_plugin import __version__
from dct_plugin.errors import ConfigError

from .quality import BASELINE
from .settings import EXCHANGES, MODEL_SECTION, MODELS, model_settings

__all__ = ["complete", "dlrm", "job"]

#: Epochs that suit a data set: more overfit.
EPOCHS = {"diabetes": 2, "criteo": 1, "movielens": 2}
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
_DEFAULTS: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 1_000_000,
}
_BATCH_SIZE = 256


def dlrm(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="With --compare: the configurations to compare.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON with a dct section, and optionally a dlrm section for the model."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the configurations that follow, and draw a plot.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="File to train on; a directory for movielens. Diabetes ships with this."),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="criteo, diabetes or movielens (criteo if only --data is given).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="dlrm, deepfm, widedeep or dcn; replaces that of the configurations.")
    ] = None,
    exchange: Annotated[
        str | None, typer.Option(help="all_to_all, des or auto; replaces that of the configurations.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Local processes.")] = 2,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training part.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train with seeds 0 to K-1.")] = 1,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Read the first rows only.")] = None,
    baseline: Annotated[bool, typer.Option(help="Also train without compression, to compare with.")] = True,
    report: Annotated[
        Path | None, typer.Option(help="Write the figures: JSON, or Markdown to a .md file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where --compare draws; by default beside the report.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep the ranks' output and events in this folder.")
    ] = None,
) -> None:
    """Train a recommender with sharded embedding tables and data-parallel MLPs on local ranks."""
    files = list(configs or [])
    if files and not compare:
        raise typer.BadParameter("give one configuration with --config, or several with --compare")
    if compare and not files:
        raise typer.BadParameter("needs configurations: --compare a.json b.json", param_hint="--compare")
    if config is not None:
        files.insert(0, config)
    format = format or ("diabetes" if data is None else "criteo")
    if format not in EPOCHS:
        raise typer.BadParameter(f"{format!r}: must be one of {', '.join(EPOCHS)}", param_hint="--format")
    for name, value, allowed in (
        ("--model", model, MODELS),
        ("--exchange", exchange, EXCHANGES),
    ):
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r}: must be one of {', '.join(allowed)}", param_hint=name)
    _check_data(format, data)
    content = job(
        files,
        format=format,
        data=data,
        model=model,
        exchange=exchange,
        ranks=ranks,
        epochs=epochs or EPOCHS[format],
        seeds=seeds,
        max_rows=max_rows,
        baseline=baseline,
    )
    if compare and plot is None:
        plot = Path("dlrm.png") if report is None else report.with_suffix(".png")
    folder = out or Path(tempfile.mkdtemp(prefix="dct-dlrm-"))
    # After a failure it stays: the message says where the ranks' output is.
    _train(content, ranks, report, plot, folder)
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)


def _check_data(format: str, path: Path | None) -> None:
    """Read the beginning here: a wrong file is better said before the ranks start."""
    from .data import load
    from .demo import _check_data as check_file

    if format != "movielens":
        check_file(format, path)
        return
    if path is None or not path.is_dir():
        what = "needs --data DIRECTORY" if path is None else f"{path}: no such directory"
        raise typer.BadParameter(f"movielens: {what} (with u.data, u.item and u.user)", param_hint="--data")
    try:
        load(format, path, max_rows=1000)
    except FileNotFoundError as error:
        raise typer.BadParameter(f"{error.filename}: no such file", param_hint="--data") from error


def job(
    files: list[Path],
    *,
    format: str,
    data: Path | None,
    model: str | None,
    exchange: str | None,
    ranks: int,
    epochs: int,
    seeds: int,
    max_rows: int | None,
    baseline: bool,
) -> dict[str, Any]:
    """What the ranks are to do: the JSON that ``integrations.dlrm.hybrid`` reads.

    Raises:
        ConfigError: A file is no JSON object, a ``dct`` or ``dlrm`` section is wrong, two files have the same
            name, or a batch cannot be split over the ranks.
    """
    from dct_plugin.config import DCTConfig

    from .demo import _read_json

    configs: dict[str, Any] = {}
    for file in files:
        content = _read_json(file)
        if "dct" in content:
            DCTConfig.from_file(file)
        if file.stem in configs or file.stem == BASELINE:
            taken = "is used twice" if file.stem in configs else "is that of the uncompressed run"
            raise ConfigError(f"{file}: the name {file.stem!r} {taken}; runs are named after their files")
        configs[file.stem] = complete(content, model=model, exchange=exchange, ranks=ranks, source=str(file))
    first = next(iter(configs.values()), None)
    if baseline or first is None:
        dense = copy.deepcopy(first) if first else complete({}, model=model, exchange=exchange, ranks=ranks)
        dense.pop("dct", None)
        # Its all-to-all is what savings are measured by, those of DES too.
        dense[MODEL_SECTION]["exchange"] = "all_to_all"
        configs = {BASELINE: dense, **configs}
    return {
        "format": format,
        "data": None if data is None else str(data.resolve()),
        "max_rows": max_rows,
        "epochs": epochs,
        "seeds": list(range(seeds)),
        "configs": configs,
    }


def complete(
    content: dict[str, Any],
    *,
    model: str | None = None,
    exchange: str | None = None,
    ranks: int,
    source: str = "the configuration",
) -> dict[str, Any]:
    """A configuration with the defaults of this command and the options that were given."""
    made = {**copy.deepcopy(_DEFAULTS), **copy.deepcopy(content)}
    for key in (*_BATCH_KEYS, "gradient_accumulation_steps"):
        value = made.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{source}: {key} = {json.dumps(value)}: must be an integer >= 1")
    for key in ("optimizer", "zero_optimization"):
        if not isinstance(made[key], dict):
            raise ConfigError(f"{source}: {key} = {json.dumps(made[key])}: must be a JSON object")
    if not any(key in made for key in _BATCH_KEYS):
        made["train_batch_size"] = _BATCH_SIZE * made.get("gradient_accumulation_steps", 1)
    size = made.get("train_batch_size")
    if size is not None and size % (ranks * made.get("gradient_accumulation_steps", 1)):
        raise ConfigError(f"{source}: train_batch_size = {size}: must be a multiple of {ranks} ranks")
    section = made.setdefault(MODEL_SECTION, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{source}: {MODEL_SECTION} must be a JSON object")
    if model is not None:
        if section.get("model", "dlrm") != model:  # widths of another model
            section = made[MODEL_SECTION] = {
                k: v for k, v in section.items() if k not in ("bottom", "top", "hidden", "depth")
            }
        section["model"] = model
    if exchange is not None:
        section["exchange"] = exchange
    section.setdefault("model", "dlrm")
    model_settings(made, source)
    return made


def _train(content: dict[str, Any], ranks: int, report: Path | None, plot: Path | None, folder: Path) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from .demo import _environment
    from .quality import as_dict, draw, markdown, outcomes, tables
    from .runner import Runner, loopback

    class HybridRunner(Runner):
        module = "dct_plugin.integrations.dlrm.hybrid"

    console = Console()
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    arguments = ["--job", str(job_file)]
    interface = loopback()
    if interface is not None:
        arguments += ["--interface", interface]
    runner = HybridRunner("dlrm", ranks, arguments, folder, _environment(ranks, interface))
    with _Progress(console, runs=len(content["configs"]) * len(content["seeds"])) as progress:
        events = runner.run(progress.follow)

    found = outcomes(events)
    start = events[0]
    title = (
        f"{start['data']}: {start['training_rows']:,} training rows, {start['fields']} fields, "
        f"{start['table_rows']:,} table rows, {ranks} ranks, {content['epochs']} epoch(s)"
    )
    console.print()
    console.print(Text(title))
    for table in tables(found):
        console.print(Padding(table, (1, 0, 0, 0)))
    for outcome in found:
        asked = content["configs"][outcome.name][MODEL_SECTION].get("exchange", "all_to_all")
        if asked != "all_to_all":
            console.print(Text(f"\n{outcome.name} exchanges"))
            for line in outcome.exchange:
                console.print(Text(f"  {line}"))
    command = shlex.join(["dct", *sys.argv[1:]])
    written = []
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        if report.suffix == ".md":
            text = markdown(found, command=command, data=title)
        else:
            figures = {
                "command": command,
                "seconds": round(time.monotonic() - started, 1),
                "data": {
                    k: start[k] for k in ("data", "rows", "training_rows", "fields", "table_rows", "ranks")
                },
                "job": content,
                "outcomes": {outcome.name: as_dict(outcome) for outcome in found},
                "versions": _versions(),
            }
            text = json.dumps(figures, indent=2) + "\n"
        report.write_text(text, encoding="utf-8")
        written.append(str(report))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(found, plot, title=title)
        written.append(str(plot))
    if written:
        console.print(Text(f"\nWrote {' and '.join(written)} in {time.monotonic() - started:.0f} s."))


def _versions() -> dict[str, str]:
    packages = ("torch", "deepspeed", "numpy", "scikit-learn")
    return {
        "dct-plugin": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


class _Progress:
    """One bar for the whole job, and a line for each finished epoch."""

    def __init__(self, console: Any, *, runs: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = console
        self._runs, self._run = runs, 0
        self._bars = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._bars.add_task("starting the ranks", total=None)

    def __enter__(self) -> _Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def follow(self, event: dict[str, Any]) -> None:
        """Take an event of the job."""
        kind = event["event"]
        if kind == "start":
            self._bars.update(self._task, total=event["steps"])
        elif kind == "run":
            self._run += 1
            name = f"run {self._run} of {self._runs}: {event['config']}, seed {event['seed']}"
            self._bars.update(self._task, description=name)
        elif kind == "step":
            self._bars.advance(self._task)
        elif kind == "epoch":
            self._console.print(
                f"{event['config']}, seed {event['seed']}, epoch {event['epoch'] + 1}: "
                f"AUC {event['auc']:.4f}, log loss {event['log_loss']:.4f}",
                highlight=False,
                markup=False,
            )
