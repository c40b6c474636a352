"""``dct config``: look at a ``dct`` section, and check it before a job starts."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import print_error, print_warning
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..integrations.deepspeed.file_check import FileReport

_RanksPerNode = Annotated[
    int, typer.Option(min=1, help='Ranks of a machine, which "nodes": "auto" sums before nodes exchange.')
]

app = typer.Typer(help="Show and check the dct section of a JSON file.", no_args_is_help=True)


@app.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="DeepSpeed JSON with a dct section, or the bare section; without it, the defaults."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the complete section as JSON.")] = False,
) -> None:
    """Show a validated section with every default, what is allowed, and what each option does."""
    from ..config import DCTConfig, options

    section = DCTConfig() if file is None else DCTConfig.from_file(file)
    if as_json:
        typer.echo(json.dumps(section.model_dump(mode="json"), indent=2))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    source = "defaults" if file is None else str(file)
    table = Table(title=Text(source), title_justify="left")
    table.add_column("option", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("default", overflow="fold")
    table.add_column("what it does, and what is allowed", ratio=1)
    for option in options(section):
        changed = option.value != option.default
        what = Text.assemble(option.description, (f"\n{option.allowed}", "dim"))
        value = Text(json.dumps(option.value), style="bold" if changed else "")
        table.add_row(Text(option.path), value, Text("" if not changed else json.dumps(option.default)), what)
    # Full option names matter more than the width of a terminal that is not there.
    console = Console()
    Console(width=None if console.is_terminal else max(console.width, 120)).print(table)


@app.command()
def check(
    files: Annotated[list[str], typer.Argument(help="Files to check; - is the standard input.")],
    ranks: Annotated[int, typer.Option(min=0, help="Ranks of the job; 0: not known.")] = 0,
    ranks_per_node: _RanksPerNode = 1,
) -> None:
    """Check the section of DeepSpeed JSONs, or bare sections; exit with 1 if it would stop a job.

    All errors of a file are listed, then warnings: settings that are known to lose quality. DeepSpeed checks
    its own keys when the job starts.
    """
    from ..config.dct import read_hjson
    from ..integrations.deepspeed import file_check

    failed = False
    for file in files:
        try:
            content, strict = read_hjson(file)
        except ConfigError as error:
            print_error(error)
            failed = True
            continue
        report = file_check.check(content, ranks, ranks_per_node)
        if not strict:
            report.notes.append("not strict JSON, which Hugging Face's Trainer and Accelerate want")
        failed |= not _print(report, file)
    if failed:
        raise typer.Exit(1)


def _print(report: FileReport, file: str) -> bool:
    """Print what is to be said about a file; return whether its job would start."""
    from ..config.validation_errors import faulty

    if report.faults:
        print_error(faulty(report.faults, f"dct configuration in {file}"))
    else:
        state = 'no "dct" section: the job trains without the plugin'
        if report.config is not None:
            disabled = "" if report.config.enabled else ", disabled"
            state = f"fingerprint {report.config.fingerprint()}{disabled}"
        typer.echo(f"{file}: ok ({state})")
        for note in report.notes:
            typer.echo(f"  {note}")
    for warning in report.warnings:
        print_warning(f"{file}: {warning}")
    return not report.faults


class Precision(str, Enum):
    """Types of weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command()
def suggest(
    optimizer: Annotated[str, typer.Option(help="Class of the optimizer: adamw, sgd, adagrad, ...")],
    ranks: Annotated[int, typer.Option(min=2, help="Data-parallel ranks.")],
    ranks_per_node: _RanksPerNode = 1,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage; 0 for torch DDP.")] = 0,
    precision: Annotated[Precision, typer.Option(help="Type of the weights.")] = Precision.BF16,
    momentum: Annotated[float, typer.Option(min=0, help="The optimizer's momentum.")] = 0.0,
    lr: Annotated[
        float | None, typer.Option(min=0, help="Learning rate: in fine-tuning few weights change.")
    ] = None,
    one_mesh: Annotated[
        bool, typer.Option("--one-mesh", help="FSDP2 shards one copy of the model over all ranks.")
    ] = False,
    parameters: Annotated[
        float | None, typer.Option(min=1, help="With --one-mesh, on a machine of the job: its parameters.")
    ] = None,
) -> None:
    """Print the section to take, and on stderr what it becomes, with measured bytes and quality."""
    import torch

    from ..config import DCTConfig
    from ..integrations.deepspeed.rules import training_facts
    from ..integrations.deepspeed.section import Job
    from ..policy import resolve
    from ..policy.evidence import MEASURED_DEFAULTS
    from ..policy.memory import TRAINED, node_memory, replicas_in_words
    from ..policy.rules import compressors_of

    if one_mesh and stage:
        raise ConfigError(f"dct config suggest: --one-mesh is FSDP2's, --stage {stage} DeepSpeed's: take one")
    rate = math.inf if lr is None else lr
    job = Job(stage, precision.value, optimizer, momentum, lr=rate, gathers_weights=stage in (1, 2))
    section = DCTConfig()
    training = replace(training_facts(job, section), ranks=ranks)
    count = compressors_of(section.data_parallel, ranks, ranks_per_node)
    if one_mesh:
        halves, apart = precision is not Precision.FP32, ranks_per_node == 1
        training = training.sharing_copy(in_halves=halves, has_nodes=count < ranks, is_apart=apart)
    made = resolve(section.data_parallel, training, count)
    typer.echo(json.dumps({"dct": {}}))
    say = functools.partial(typer.echo, err=True)
    say(f"it becomes: {made.settings.summary}")
    for line in made.lines:
        say(line)
    if one_mesh:
        say("measured with AdamW: docs/quality.md#one-mesh, docs/performance.md")
        advice = "where 16 to 18 bytes per parameter fit in a node, take HSDP: docs/settings.md#sharded-jobs"
        if parameters is not None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            available = node_memory(ranks_per_node, ranks_per_node, device)
            advice = replicas_in_words(TRAINED * parameters, available)
        say(advice)
        return
    row = next((row for row in MEASURED_DEFAULTS if row.suits(replace(training, ranks=count))), None)
    if row is None:
        say("this combination was not measured")
    for label, value in row.facts() if row else ():
        say(f"{label}: {value}")
    say("whether it pays: dct advise -- LAUNCH LINE")
