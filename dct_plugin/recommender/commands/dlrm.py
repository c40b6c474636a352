"""``dct dlrm``: train recommenders with sharded tables on local ranks; quality paired by seed, bytes by
layer.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dct_plugin.errors import ConfigError
from dct_plugin.output import check_target, write

from ..figures import BASELINE
from ..provenance import command, provenance
from ..runner import saved_run
from ..settings import EXCHANGES, MODEL_SECTION, MODELS, model_settings
from .options import takes_options
from .shared import Job, chosen_format, complete, launch

#: The ready configuration that is compared with dense training if none is given.
DEFAULT_CONFIG = "hybrid_dct"
#: Epochs that suit a data set: more overfit.
EPOCHS = {"diabetes": 2, "criteo": 1, "table": 1}
_TABLES = (".csv", ".tsv", ".tab", ".psv", ".dat", ".data", ".parquet", ".pq")
_OPTIMIZER = {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}
_BATCH_SIZE = 256


@dataclass(frozen=True)
class _Options:
    """The options of ``dct dlrm``."""

    configs: Annotated[
        list[Path] | None, typer.Argument(help="With --compare: the configurations to compare.")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            help="DeepSpeed JSON with a dct section, and optionally a dlrm section for the model "
            f"({DEFAULT_CONFIG} if not given)."
        ),
    ] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the configurations that follow, and draw a plot.")
    ] = False
    data: Annotated[
        Path | None, typer.Option(help="File to train on; without it Diabetes 130-US, which ships with this.")
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            help="criteo, diabetes, or table for any CSV, TSV or Parquet file (if only --data is "
            "given: table where --label is given, or for these by their names, else criteo)."
        ),
    ] = None
    label: Annotated[
        str | None, typer.Option(help="Column of a table to predict, 0 or 1, or compared: 'rating>=4'.")
    ] = None
    dense: Annotated[str | None, typer.Option(help="Numeric columns of a table, separated by commas.")] = None
    categorical: Annotated[
        str | None,
        typer.Option(
            help="Categorical columns of a table. Without both lists, columns of floating-point numbers "
            "are dense and all others categorical."
        ),
    ] = None
    separator: Annotated[
        str | None,
        typer.Option(help="Separator of columns, such as ';', '::', tab; by default guessed."),
    ] = None
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="The first line of a table has names; by default guessed. Else columns are 1, 2, ...",
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="dlrm, deepfm, widedeep or dcn; replaces that of the configurations.")
    ] = None
    exchange: Annotated[
        str | None, typer.Option(help="all_to_all, des or auto; replaces that of the configurations.")
    ] = None
    ranks: Annotated[int, typer.Option(min=2, help="Local processes.")] = 2
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the training part; if not given 2 for diabetes, else 1."),
    ] = None
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Train with seeds 0 to K-1.")] = 1
    max_rows: Annotated[int | None, typer.Option(min=1, help="Read the first rows only.")] = None
    min_count: Annotated[
        int | None,
        typer.Option(min=1, help="Values that occur less often in the training part become id 0 (4)."),
    ] = None
    baseline: Annotated[bool, typer.Option(help="Also train without compression, to compare with.")] = True
    report: Annotated[
        Path | None, typer.Option(help="Write the figures: JSON, or Markdown to a .md file.")
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="File for the plot of --compare; by default beside the report.")
    ] = None
    save: Annotated[
        Path | None, typer.Option(help="Save each run as a DeepSpeed checkpoint in a folder of this one.")
    ] = None
    resume: Annotated[
        Path | None, typer.Option(help="Continue the runs that --save wrote, for --epochs more.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Keep the ranks' output and events in this folder.")] = None


@takes_options(_Options)
def dlrm(options: _Options) -> None:
    """Train a recommender with sharded embedding tables and data-parallel MLPs on local ranks."""
    model, exchange = options.model, options.exchange
    for name, value, allowed in (("--model", model, MODELS), ("--exchange", exchange, EXCHANGES)):
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r}: must be one of {', '.join(allowed)}", param_hint=name)
    format, columns = _format_and_columns(options)
    made = configurations(
        _files(options), model=model, exchange=exchange, ranks=options.ranks, baseline=options.baseline
    )
    job = Job(
        format,
        None if options.data is None else str(options.data.resolve()),
        max_rows=options.max_rows,
        epochs=options.epochs or EPOCHS[format],
        seeds=list(range(options.seeds)),
        configs=made,
        columns=columns,
        save=None if options.save is None else str(options.save.resolve()),
        resume=None if options.resume is None else str(options.resume.resolve()),
        min_count=options.min_count,
    )
    report, plot, out = options.report, options.plot, options.out
    if options.compare and plot is None:
        plot = Path("dlrm.png") if report is None else report.with_suffix(".png")
    check_target(report, "--report")
    check_target(plot, "--plot")
    check_target(None if options.save is None else options.save / "saved", "--save")
    if options.resume is not None:
        for folder in (saved_run(options.resume, run, seed) for run in made for seed in job.seeds):
            if not folder.is_dir():
                raise typer.BadParameter(f"{folder}: there is no such run", param_hint="--resume")
    check_target(None if out is None else out / "dlrm.events.jsonl", "--out")
    folder = out or Path(tempfile.mkdtemp(prefix="dct-dlrm-"))
    # After a failure the folder stays: the message says where the ranks' output is.
    _train(job, options.ranks, report, plot, folder)
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)


def _files(options: _Options) -> list[Path]:
    """Return the configuration files that were given.

    Raises:
        typer.BadParameter: There are several without ``--compare``, or none with it.
    """
    files, config = list(options.configs or []), options.config
    if files and not options.compare:
        raise typer.BadParameter("give one configuration with --config, or several with --compare")
    if options.compare and not files:
        raise typer.BadParameter("needs configurations: --compare a.json b.json", param_hint="--compare")
    return files if config is None and files else [config or Path(DEFAULT_CONFIG), *files]


def _format_and_columns(options: _Options) -> tuple[str, dict[str, Any] | None]:
    """Return the format of the data, and for a table the roles of its columns.

    Raises:
        typer.BadParameter: The options contradict each other or the data.
    """
    from ..data import FORMATS

    columns, format, data = _columns(options), options.format, options.data
    if format is None and (columns or (data is not None and set(data.suffixes) & set(_TABLES))):
        format = "table"
    if columns is not None and format != "table":
        raise typer.BadParameter(f"{format} has columns of its own", param_hint="--label")
    if format == "table" and columns is None:
        raise typer.BadParameter("name the column to predict", param_hint="--label")
    return chosen_format(format, data, FORMATS, columns), columns


def _columns(options: _Options) -> dict[str, Any] | None:
    """Return the columns of a table as the options give them; None if they give none."""
    if options.label is None:
        given = options.dense, options.categorical, options.separator, options.header
        if any(each is not None for each in given):
            raise typer.BadParameter("name the column to predict", param_hint="--label")
        return None

    def names(text: str | None) -> list[str]:
        return [] if text is None else [name.strip() for name in text.split(",") if name.strip()]

    lists = {"dense": names(options.dense), "categorical": names(options.categorical)}
    separator = {"tab": "\t", "\\t": "\t"}.get(options.separator or "", options.separator)
    return {"label": options.label, **lists, "separator": separator or None, "header": options.header}


def configurations(
    files: list[Path],
    *,
    model: str | None = None,
    exchange: str | None = None,
    ranks: int,
    baseline: bool = True,
) -> dict[str, dict[str, Any]]:
    """Return the completed configurations by the names of their runs, the uncompressed one first.

    Args:
        files: DeepSpeed JSON files; runs are named after them.
        model, exchange: In place of those of the files.
        ranks: Of the launch.
        baseline: Add the first configuration without compression; without files it is the only one.

    Raises:
        ConfigError: A file is no JSON object, a ``dct`` or ``dlrm`` section is wrong, two files have the same
            name, or a batch cannot be split over the ranks.
    """
    from dct_plugin.config import DCTConfig
    from dct_plugin.config.dct import read_json

    make = partial(configuration, model=model, exchange=exchange, ranks=ranks)
    configs: dict[str, dict[str, Any]] = {}
    for file in files:
        content = read_json(file)
        if "dct" in content:
            DCTConfig.from_file(file)
        if file.stem in configs or file.stem == BASELINE:
            taken = "is used twice" if file.stem in configs else "is that of the uncompressed run"
            raise ConfigError(f"{file}: the name {file.stem!r} {taken}; runs are named after their files")
        configs[file.stem] = make(content, source=str(file))
    first = next(iter(configs.values()), None)
    if baseline or first is None:
        dense = copy.deepcopy(first) if first else make({})
        dense.pop("dct", None)
        # Its all-to-all is what savings are measured by, those of DES too.
        dense[MODEL_SECTION]["exchange"] = "all_to_all"
        configs = {BASELINE: dense, **configs}
    return configs


def configuration(
    content: dict[str, Any],
    *,
    model: str | None = None,
    exchange: str | None = None,
    ranks: int,
    source: str = "the configuration",
) -> dict[str, Any]:
    """A configuration with the defaults of this command and the options that were given."""
    made = complete(content, optimizer=_OPTIMIZER, batch_size=_BATCH_SIZE, ranks=ranks, source=source)
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


def _train(job: Job, ranks: int, report: Path | None, plot: Path | None, folder: Path) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from ..figures import read_runs
    from ..report import diverged, draw_quality, judged, markdown, run_tables

    console = Console()
    started = time.monotonic()
    done = launch("dlrm", job, ranks=ranks, folder=folder, console=console)
    runs = read_runs(done.events)
    tables = run_tables(runs)
    start = done.events[0]
    title = (
        f"{start['data']}: {start['training_rows']:,} training rows, {start['fields']} fields, "
        f"{start['table_rows']:,} table rows, {ranks} ranks, {job.epochs} epoch(s)"
    )
    console.print()
    console.print(Text(title))
    for table in tables:
        console.print(Padding(table.rich(), (1, 0, 0, 0)))
    for run in runs:
        if job.configs[run.name][MODEL_SECTION].get("exchange", "all_to_all") != "all_to_all":
            console.print(Text(f"\n{run.name} exchanges"))
            for line in run.exchange:
                console.print(Text(f"  {line}"))
    broken, verdicts = diverged(runs), judged(runs, rarer=start["rarer"])
    for line in [*verdicts, *broken]:
        console.print(Text(f"\n{line}"))
    written = []
    if report is not None:
        if report.suffix == ".md":
            write(report, markdown(tables, command=command(), data=title, verdicts=verdicts))
        else:
            of_data = ("data", "rows", "training_rows", "fields", "table_rows", "ranks")
            figures = {
                **provenance(started),
                "data": {key: start[key] for key in of_data},
                "facts": start["roles"],
                "job": job._asdict(),
                "outcomes": {run.name: run.as_dict() for run in runs},
                "verdicts": verdicts,
            }
            write(report, figures)
        written.append(str(report))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw_quality(runs, plot, title=title)
        written.append(str(plot))
    if written:
        console.print(Text(f"\nWrote {' and '.join(written)} in {time.monotonic() - started:.0f} s."))
    if broken:
        raise typer.Exit(1)
