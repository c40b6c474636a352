"""Measure what step-ahead adds to a step, in milliseconds of one core and in bytes, without a host or ranks.

The passes are the same in every host: squared gradients are followed once per reduction (ZeRO-2: at every
micro-batch), weights are displaced once per optimizer step. Times are of the processor, medians.

    python benchmarks/step_ahead.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from dct_plugin.data_parallel.step_ahead.add_on import StepAhead, Unsent
from dct_plugin.data_parallel.step_units import units_of

WIDTH = 1600


def median_ms(action: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        action()
        taken.append(1e3 * (time.process_time() - began))
    return statistics.median(taken)


def row(dtype: torch.dtype, momentum: bool, layers: int, repeats: int) -> list[str]:
    """One line of the table: a stack of square matrices."""
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype)) for _ in range(layers)]
    optimizer: torch.optim.Optimizer = torch.optim.Adam(weights)
    if momentum:
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    named = {str(i): weight for i, weight in enumerate(weights)}
    gradients = {name: torch.randn(weight.numel()).to(dtype) for name, weight in named.items()}
    residuals = {name: torch.randn(weight.numel()) for name, weight in named.items()}
    ahead = StepAhead(named.items(), units_of(optimizer), Unsent(residuals.get), world_size=2)

    def follow() -> None:
        for name, gradient in gradients.items():
            ahead.observe([(name, gradient)])

    def displace() -> None:
        ahead.forget()
        ahead.displace()

    follow_ms = median_ms(follow, repeats)
    ahead.end_step(skipped=False)
    displace_ms = median_ms(displace, repeats)
    buffers = sum(weight.numel() * weight.element_size() for weight in weights)
    source = torch.randn(layers * WIDTH * WIDTH)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), repeats)
    cells = [f"{ms:.1f} ({ms / copy_ms:.1f}x)" for ms in (follow_ms, displace_ms)]
    name = str(dtype).removeprefix("torch.")
    return [name, type(optimizer).__name__, *cells, f"{copy_ms:.1f}", f"{buffers / 1e6:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4, help=f"matrices of {WIDTH} x {WIDTH}")
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("weights", "optimizer", "squares, ms", "displace, ms", "fp32 copy, ms", "buffers, MB")
    for dtype in (torch.float32, torch.bfloat16):
        for momentum in (False, True):
            table.add_row(*row(dtype, momentum, args.layers, args.repeats))
    Console().print(table)


if __name__ == "__main__":
    main()
