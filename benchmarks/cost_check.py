"""Steps, links and coding that the cost model was not fitted on, measured beside its estimates.

dct cost calibrate --out machine.json
python benchmarks/cost_check.py --machine machine.json
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dct_plugin.cost import MEASURED, Machine, Transformer
from dct_plugin.links.rates import check_rates
from dct_plugin.tools.bench.calibration import Measured, activations, check, coded, measure, name_of, words

UNLIMITED = "unlimited"
#: Shapes that the fit has not seen, and activations: rows and hidden size, share of the entries that is sent.
HELD_OUT = (Transformer(3, 384, 6, 96),)
HELD_OUT_CODED = ((768, 448, 0.15), (1536, 192, 0.08), (384, 256, 0.2))


def main(
    machine: Annotated[Path | None, typer.Option(help="What `dct cost calibrate` wrote.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="May be repeated (2 and 4).")] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Of the links; may be repeated (unlimited, 1gbit, 100mbit).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for figures.")] = Path("out/cost"),
) -> None:
    """Measure, and compare with the model."""
    here, console = MEASURED if machine is None else Machine.load(machine), Console()
    rates = [
        None if one == UNLIMITED else one
        for one in check_rates(rate or (UNLIMITED, "1gbit", "100mbit"), also=UNLIMITED, option="--rate")
    ]
    found: list[Measured] = []
    for count in ranks or (2, 4):
        shapes = [(shape, True) for shape in HELD_OUT]
        found += measure(count, shapes, rates, out / "logs", lambda line: console.print(line, style="dim"))
    table = Table("shape", "ranks", "link", "class", "measured, ms", "model, ms", "error")
    checked = check(here, found)
    for each in checked:
        figures = f"{1e3 * each.measured:.0f}", f"{1e3 * each.estimated:.0f}", f"{each.error:+.0%}"
        table.add_row(words(each.shape), str(each.ranks), name_of(each.rate), each.method, *figures)
    console.print(table)
    coding = Table("activations", "rows x hidden", "measured, ms", "model, ms", "error")
    for way, rows, hidden in activations(HELD_OUT_CODED):
        seconds = coded(way, rows, hidden).seconds
        estimated = here.seconds(way.coding(rows, hidden))
        figures = f"{1e3 * seconds:.2f}", f"{1e3 * estimated:.2f}", f"{estimated / seconds - 1.0:+.0%}"
        coding.add_row(way.method, f"{rows} x {hidden}", *figures)
    console.print(coding)
    errors = [abs(each.error) for each in checked]
    console.print(f"Off by {statistics.median(errors):.0%} (median), {max(errors):.0%} (worst).")
    out.mkdir(parents=True, exist_ok=True)
    (out / "check.json").write_text(json.dumps([asdict(each) for each in checked], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
