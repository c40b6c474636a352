"""``dct config``: look at a ``dct`` section, and check it before a job starts."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..integrations.deepspeed.file_check import FileReport

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
    table = Table(title=Text(f"{source} (fingerprint {section.fingerprint()})"), title_justify="left")
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
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job [default: as the batch sizes say].")
    ] = None,
) -> None:
    """Check DeepSpeed JSONs or bare sections; exit with 1 if a job would not start.

    The installed DeepSpeed checks its keys. All errors of a file are listed, then warnings: settings that are
    known to lose quality, keys that nothing reads.
    """
    from ..config.dct import read_hjson
    from ..console import print_error
    from ..errors import ConfigError
    from ..integrations.deepspeed import file_check, parser

    contents: dict[str, tuple[dict[str, Any], bool]] = {}
    failed = False
    for file in files:
        try:
            contents[file] = read_hjson(file)
        except ConfigError as error:
            print_error(error)
            failed = True
    asked = [file for file, (content, _) in contents.items() if file_check.for_deepspeed(content)]
    told = parser.ask([contents[file][0] for file in asked], ranks=ranks)
    answers = dict(zip(asked, told, strict=False))
    for file, (content, strict) in contents.items():
        report = file_check.check(content, answers.get(file))
        if not strict:
            report.notes.append("not strict JSON, which Hugging Face's Trainer and Accelerate want")
        failed |= not _print(report, file)
    if failed:
        raise typer.Exit(1)


def _print(report: FileReport, file: str) -> bool:
    """Print what is to be said about a file; return whether its job would start."""
    from ..config.validation_errors import faulty
    from ..console import print_error, print_warning

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


_UNMEASURED = (
    "With an empty section the plugin keeps local error feedback and sends a tenth of the entries; compare a "
    "short run with one without the plugin."
)


@app.command()
def suggest(
    optimizer: Annotated[str, typer.Option(help="Class of the optimizer: adamw, sgd, adagrad, ...")],
    link: Annotated[str, typer.Option(help="Rate of the link between the ranks: 100mbit, 1gbit, ...")],
    ranks: Annotated[int, typer.Option(min=2, help="Data-parallel ranks.")],
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage; 0 for torch DDP.")] = 0,
    momentum: Annotated[float, typer.Option(min=0, help="The optimizer's momentum.")] = 0.0,
    lr: Annotated[
        float | None, typer.Option(min=0, help="Learning rate: in fine-tuning few weights change.")
    ] = None,
) -> None:
    """Print recommended settings as JSON; their measured bytes and quality are on stderr."""
    from ..policy.evidence import Training, suggestion
    from ..rates import bits_per_second, check_rates

    rate = bits_per_second(check_rates([link], option="--link")[0])
    training = Training([optimizer], momentum, stage, ranks, math.inf if lr is None else lr)
    row, measured = suggestion(training, rate)
    typer.echo(json.dumps({"dct": {} if row is None else row.section}, indent=2))
    where = f"{optimizer}{' with momentum' if momentum else ''} on {ranks} ranks at {link}, " + (
        f"ZeRO-{stage}" if stage else "no ZeRO"
    )
    say = functools.partial(typer.echo, err=True)
    if row is None:
        say(f"Not measured: {where}, nor an optimizer like it. {_UNMEASURED}")
        return
    if not measured:
        say(f"Not measured: {where}. The nearest that was measured is {row.where}:")
    if row.data_parallel is None:
        say(f"Nothing that was measured keeps the quality of {where}.")
    for label, value in row.facts():
        say(f"{label}: {value}")
    if rate <= 1e8 and stage == 0:
        say('if a round trip takes longer than a step: "local_steps": 30 (docs/local-steps.md)')
