"""``dct config``: look at a ``dct`` section, and check it before a job starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

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
) -> None:
    """Judge DeepSpeed JSONs or bare sections as the start of a job would; exit with 1 if one would not start.

    All faults of a file are listed, then warnings: settings that are known to lose, keys that nothing reads.
    """
    from ..config.dct import read_json
    from ..config.validation_errors import faulty
    from ..console import print_error, print_warning
    from ..errors import ConfigError
    from ..integrations.deepspeed import file_check

    failed = 0
    for file in files:
        try:
            report = file_check.check(read_json(file))
        except ConfigError as error:
            print_error(error)
            failed += 1
            continue
        if report.faults or report.config is None:
            print_error(faulty(report.faults, f"dct configuration in {file}"))
            failed += 1
        else:
            state = "" if report.config.enabled else ", disabled"
            typer.echo(f"{file}: ok (fingerprint {report.config.fingerprint()}{state})")
            for note in report.notes:
                typer.echo(f"  {note}")
        for warning in report.warnings:
            print_warning(f"{file}: {warning}")
    if failed:
        raise typer.Exit(1)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print the section alone.")] = False,
) -> None:
    """Print the settings to take, what they sent and lost where they were measured, and where that stands."""
    from ..config.optimizers import family_of
    from ..config.recommended import Wanted, suggestion
    from ..links.rates import bits_per_second, check_rates

    rate = bits_per_second(check_rates([link], option="--link")[0])
    wanted = Wanted(family_of([optimizer], momentum=momentum), rate, ranks, stage)
    row, measured = suggestion(wanted)
    section = {"dct": {} if row is None else row.section}
    if as_json:
        typer.echo(json.dumps(section, indent=2))
        return
    where = f"{optimizer}{' with momentum' if momentum else ''} on {ranks} ranks at {link}, " + (
        f"ZeRO-{stage}" if stage else "no ZeRO"
    )
    if row is None:
        typer.echo(f"Not measured: {where}, nor an optimizer like it. {_UNMEASURED}")
        return
    if not measured:
        typer.echo(f"Not measured: {where}. The nearest that was measured is {row.where}:")
    if row.data_parallel is None:
        typer.echo(f"Nothing that was measured keeps the quality of {where}.")
    else:
        typer.echo(json.dumps(section)[1:-1])
    for label, value in row.facts():
        typer.echo(f"{label + ':':<9} {value}")
