"""``dct cost``: estimates of steps with each class of compression, by the cost model."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dct_plugin.command_options import takes_options
from dct_plugin.cost import (
    ACTIVATIONS,
    COEFFICIENTS,
    GRADIENTS,
    MEASURED,
    Estimate,
    Link,
    Machine,
    Transformer,
    data_parallel,
    pays_below,
    pipeline,
)
from dct_plugin.links.rates import bits_per_second, check_rates, rate_name

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True)

UNLIMITED = "unlimited"
RATES = (UNLIMITED, "10gbit", "1gbit", "100mbit")
#: Rates of a plot, bits per second.
PLOTTED = [10.0 ** (exponent / 10) for exponent in range(70, 111)]
#: What the others are compared with: who compares with fp32 has not tried the cheapest thing.
BASELINE = "bf16"

_Rate = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Of a rank's link, as tc writes it, or {UNLIMITED}; may be repeated ({', '.join(RATES)})."
    ),
]
_Machine = Annotated[
    Path | None,
    typer.Option("--machine", help="What `dct cost calibrate` wrote (one measured with 2 cores)."),
]


@dataclass(frozen=True)
class _Model:
    """The options of both estimates: the model, the links and the form of the answer."""

    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 4
    hidden: Annotated[int, typer.Option(min=1, help="Their width; the MLP is four times as wide.")] = 512
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences per rank and step, in a pipeline of a micro-batch.")
    ] = 8
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 128
    ranks_here: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share one machine (all of them).")
    ] = None
    rate: _Rate = None
    latency: Annotated[float, typer.Option(min=0, help="Of a message, microseconds.")] = 50.0
    machine: _Machine = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: seconds, bytes, bits per second.")] = (
        False
    )
    plot: Annotated[Path | None, typer.Option(help="Draw steps over link rates into this PNG.")] = None


@dataclass(frozen=True)
class _DataParallel(_Model):
    """The options of ``dct cost data-parallel``."""

    ranks: Annotated[int, typer.Option(min=2, help="Data-parallel ranks.")] = 2


@dataclass(frozen=True)
class _Pipeline(_Model):
    """The options of ``dct cost pipeline``."""

    stages: Annotated[int, typer.Option(min=2, help="Pipeline stages.")] = 2
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a step.")] = 4


@app.callback()
def cost() -> None:
    """Estimate what a training step costs with each class of compression, by a fitted model."""


@dataclass(frozen=True)
class Row:
    """A class: estimates by rate, and below which rate it is faster than the baseline."""

    name: str
    estimates: Mapping[str, Estimate]
    below: float


@app.command("data-parallel")
@takes_options(_DataParallel)
def gradients(options: _DataParallel) -> None:
    """Steps of data-parallel training: dense, thresholded and low-rank gradients."""
    model = Transformer(options.layers, options.hidden, options.batch, options.sequence)
    here, ranks = _machine(options.machine), options.ranks

    def estimate(name: str, link: Link) -> Estimate:
        return data_parallel(
            here, model, GRADIENTS[name], ranks=ranks, link=link, ranks_here=options.ranks_here
        )

    job = {"machine": here.name, "model": asdict(model), "parameters": model.parameters, "ranks": ranks}
    title = f"{model.parameters / 1e6:.3g}M parameters, {ranks} ranks, {here.name}"
    _answer(list(GRADIENTS), estimate, title, job, options)


@app.command("pipeline")
@takes_options(_Pipeline)
def activations(options: _Pipeline) -> None:
    """Steps of pipeline-parallel training: dense and compressed activations and their gradients."""
    model = Transformer(options.layers, options.hidden, options.batch, options.sequence)
    here = _machine(options.machine)
    counts = {"stages": options.stages, "micro_batches": options.micro_batches}

    def estimate(name: str, link: Link) -> Estimate:
        return pipeline(here, model, ACTIVATIONS[name], link=link, ranks_here=options.ranks_here, **counts)

    title = (
        f"{model.layers} x {model.hidden}, {options.stages} stages, {options.micro_batches} micro-batches, "
        f"{here.name}"
    )
    job = {"machine": here.name, "model": asdict(model), **counts}
    _answer(list(ACTIVATIONS), estimate, title, job, options)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="File for what was measured.")] = Path("out/machine.json"),
) -> None:
    """Measure this machine, about a minute. Keep it idle; needs what `dct bench links` needs."""
    from rich.console import Console

    from .calibration import calibrate, check

    console = Console()
    machine, found = calibrate(out.parent / "logs", lambda line: console.print(line, style="dim"))
    machine.save(out)
    for name, what in COEFFICIENTS.items():
        console.print(f"{1e9 * machine.coefficients[name]:12.4g} ns  per {what}", highlight=False)
    errors = [abs(each.error) for each in check(machine, found)]
    console.print(
        f"Fit: off by {statistics.median(errors):.0%} (median), {max(errors):.0%} (worst). Wrote {out}."
    )


def _machine(path: Path | None) -> Machine:
    return MEASURED if path is None else Machine.load(path)


def _answer(
    names: Sequence[str],
    estimate: Callable[[str, Link], Estimate],
    title: str,
    job: Mapping[str, Any],
    options: _Model,
) -> None:
    """Print what was asked for: a table, or JSON; and draw it."""
    latency = options.latency / 1e6
    links = {
        name: Link(math.inf if name == UNLIMITED else bits_per_second(name), latency)
        for name in check_rates(options.rate or RATES, also=UNLIMITED, option="--rate")
    }
    free = {name: estimate(name, Link(latency=latency)) for name in names}
    rows = [
        Row(
            name,
            {where: estimate(name, link) for where, link in links.items()},
            pays_below(free[name], free[BASELINE]),
        )
        for name in names
    ]
    if options.plot is not None:
        steps = {name: [estimate(name, Link(bits, latency)).total for bits in PLOTTED] for name in names}
        _draw(steps, title, options.plot)
    if options.as_json:
        typer.echo(json.dumps({**job, "classes": [_as_dict(row) for row in rows]}, indent=1))
        return
    _print(rows, title)


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "sent_bytes": next(iter(row.estimates.values())).sent,
        "pays_below": None if row.below == math.inf else row.below,
        "seconds": {
            where: {name: getattr(each, name) for name in ("compute", "codec", "exchange", "total")}
            for where, each in row.estimates.items()
        },
    }


def _print(rows: Sequence[Row], title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{title}: ms per step"), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("class", min_width=11)
    table.add_column("sent\nper rank", justify="right", no_wrap=True, min_width=8)
    for where in rows[0].estimates:
        table.add_column(rate_name(where).replace(" ", "\n"), justify="right", no_wrap=True, min_width=6)
    table.add_column(f"beats {BASELINE}\nbelow", justify="right")
    shortest = min(each.total for row in rows for each in row.estimates.values())
    form = ".0f" if shortest > 0.1 else "#.3g"
    best = {where: min(row.estimates[where].total for row in rows) for where in rows[0].estimates}
    for row in rows:
        cells = [
            Text(f"{1e3 * each.total:{form}}", style="bold" if each.total <= best[where] else "")
            for where, each in row.estimates.items()
        ]
        sent = next(iter(row.estimates.values())).sent
        below = "" if row.name == BASELINE else _speed(row.below)
        table.add_row(row.name, decimal(round(sent)), *cells, below)
    Console().print(table)


def _speed(bits: float) -> str:
    if bits == math.inf:
        return "any rate"
    if bits < 1e5:
        return "never"
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _draw(steps: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    from dct_plugin.plots import png

    with png(path, [4.0]) as (_, (axes,)):
        for number, (name, seconds) in enumerate(steps.items()):
            style = ":" if name in ("fp32", "bf16") else "-" if "DCT" in name or "threshold" in name else "--"
            axes.plot(
                [bits / 1e6 for bits in PLOTTED],
                [1e3 * one for one in seconds],
                style,
                label=name,
                color=f"C{number}",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("Mbit/s of a rank's link")
        axes.set_ylabel("ms per step")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8, ncols=2)
