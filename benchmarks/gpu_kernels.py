"""Time what a bucket of one large tensor costs on a GPU, and kernels by their number of warps.

python benchmarks/gpu_kernels.py --json kernels.json
DCT_DRY_RUN=1 TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --json kernels.json   # anywhere, and small
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from host_work import LoopedPeers
from no_gpu import DEVICE, DRY, stand_in

from dct_plugin.config import DataParallelConfig, KernelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer, pending_exchanges
from dct_plugin.kernels.triton import backend, batch, messages
from dct_plugin.kernels.triton.launch import launch
from dct_plugin.metrics import Metrics

ENTRIES, STEPS = (20_000, 2) if DRY else (45_000_000, 30)
#: Kernels, and the numbers of warps that they are timed with.
WARPS = {"write": (4, 8), "compact": (4, 8), "open_messages": (4, 1)}


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def one_tensor(ranks: int, warps: dict[str, int]) -> dict[str, Any]:
    """Return milliseconds of a step of one tensor, waits, held-back entries, and milliseconds by kernel."""
    metrics = Metrics(MetricsConfig(), rank=0, world_size=ranks)
    kernels = KernelConfig(backend="interpreted" if DRY else "triton")
    config = DataParallelConfig(sparsity=0.99, feedback="local", exchange="direct")
    peers = LoopedPeers(0, range(ranks))
    reducer = GradientReducer(config, peers, device=DEVICE, kernels=kernels, metrics=metrics)
    times, waits, marks = [], 0, []
    read = pending_exchanges.read_figures

    def counted(*arguments: Any) -> Any:
        nonlocal waits
        waits += 1
        return read(*arguments)

    def timed(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        name = kernel.fn.__name__
        begin, end = _events()
        begin.record()
        if name in warps:
            constants["num_warps"] = warps[name]
        launch(kernel, programs, *arguments, **constants)
        end.record()
        marks.append((name, begin, end))

    modules = (backend, batch, messages)
    pending_exchanges.read_figures = counted
    for module in modules:
        module.launch = timed
    try:
        for _ in range(STEPS):
            gradient = torch.randn(ENTRIES, device=DEVICE) ** 3
            marks.clear()
            begin, end = _events()
            begin.record()
            reducer.begin([("tensor", gradient)]).finish()
            reducer.finish()
            end.record()
            end.synchronize()
            reducer.end_step()
            times.append(begin.elapsed_time(end))
    finally:
        pending_exchanges.read_figures = read
        for module in modules:
            module.launch = launch
    by_kernel: Counter[str] = Counter()
    for name, begin, end in marks:
        by_kernel[name] += begin.elapsed_time(end)
    held_back = sum(each.held_back for each in metrics.summary().classes.values())
    return {
        "ranks": ranks,
        "entries": ENTRIES,
        "num_warps": warps,
        "ms": statistics.median(times),
        "waits": waits / STEPS,
        "held_back": held_back,
        "kernels_ms": {name: round(ms, 4) for name, ms in by_kernel.items()},
    }


def main(
    json_file: Annotated[Path, typer.Option("--json", help="JSON lines, written row by row.")],
) -> None:
    """Time steps of one tensor, between 2 ranks and 8, and with other numbers of warps."""
    stand_in()
    variants = [{}, *({name: count} for name, counts in WARPS.items() for count in counts)]
    for ranks, warps in [(8, {}), *((2, each) for each in variants)]:
        row = one_tensor(ranks, warps)
        with json_file.open("a") as file:
            print(json.dumps(row), file=file)
        print(row, flush=True)


if __name__ == "__main__":
    typer.run(main)
