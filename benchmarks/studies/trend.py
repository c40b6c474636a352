"""Fit the loss of thresholded gradients by the size of the model and by the length of the run.

The figures are differences to dense training of the same seed, from the results of ``many_streams.py``. Each
line is a least-squares fit over the logarithm: the change for twice the parameters, or twice the steps, with
Student's 95 % interval.

    python benchmarks/studies/trend.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from many_streams import RESULTS, rows_of
from scipy.special import stdtrit
from scipy.stats import linregress

#: By number of compressors, the settings that are the default between so many.
DEFAULTS = {2: ("0.99", "0.99 direct"), 8: ("0.96/0.934 int4",)}
#: The width of the model of which lengths are compared.
OF_LENGTHS = 128


def width_of(row: Mapping[str, Any]) -> int | None:
    """Return the width of a GPT on one text; None for another task."""
    name, _, width = row["model"].partition(", width ")
    return None if name != "gpt" or not (width or "64").isdigit() else int(width or 64)


def parameters_of(row: Mapping[str, Any]) -> float:
    """Return the number of parameters: a ring sends 8 (P - 1) / P bytes for each of them."""
    return float(row["dense"] * row["ranks"] / (8 * (row["ranks"] - 1)))


def differences(
    rows: Sequence[Mapping[str, Any]], compressors: int, x: Callable[[Mapping[str, Any]], float]
) -> list[tuple[float, float]]:
    """Return pairs of log2(x) and the difference to the dense run of the same seed."""
    dense = {
        (row["model"], row["seed"], row["steps"]): row["loss"] for row in rows if row["setting"] == "dense"
    }
    return [
        (math.log2(x(row)), row["loss"] - dense[key])
        for row in rows
        if (row["ranks"], row["per_node"]) == (compressors, 1) and row["setting"] in DEFAULTS[compressors]
        if (key := (row["model"], row["seed"], row["steps"])) in dense
    ]


def fit(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the slope of a straight line with its interval, in words."""
    line = linregress(*zip(*pairs, strict=True))
    half = float(stdtrit(len(pairs) - 2, 0.975)) * line.stderr
    return f"{line.slope:+.4f} ± {half:.4f} nats ({len(pairs)} runs)"


def main() -> None:
    """Print the fits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines of many_streams.py")
    rows = [row for row in rows_of(parser.parse_args().results) if width_of(row) is not None]
    of_sizes = [row for row in rows if row["steps"] == 1200]
    for compressors in DEFAULTS:
        pairs = differences(of_sizes, compressors, parameters_of)
        print(f"{compressors} compressors, twice the parameters: {fit(pairs)}")
    of_lengths = [row for row in rows if width_of(row) == OF_LENGTHS]
    pairs = differences(of_lengths, 2, lambda row: row["steps"])
    print(f"2 compressors, twice the steps: {fit(pairs)}")


if __name__ == "__main__":
    main()
