"""Selection with error feedback: this project's kernels, torch's own operations and a plain copy.

All methods run in one process, interleaved, on the same data; a round runs each of them once. Times are wall
clock (median and minimum over the rounds) and processor time (median), also as multiples of ``copy_`` of the
same tensor.

    python benchmarks/selection.py --numel 16777216 --density 0.01 --threads 1
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dct_plugin.codecs.index import index_form
from dct_plugin.codecs.payload import Payload, payload_bound
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.compression.feedback import PackedTensor, ScratchBuffers
from dct_plugin.kernels import Job
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend

TARGET_COPY = 2.0  # the fused pass takes at most this many times copy_
TARGET_TOPK = 20.0  # and is at least this much faster than topk
FUSED = "DCT fused compress"
COPY = "copy_"
TOPK = "torch.topk of |x|"


@dataclass
class Timing:
    """Times of one method, milliseconds, one entry per round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, run: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        self.wall.append(1e3 * (time.perf_counter() - wall))
        self.cpu.append(1e3 * (time.process_time() - cpu))


@dataclass
class Row:
    """One line of the result: times in milliseconds, ratios to ``copy_``."""

    method: str
    median_ms: float
    min_ms: float
    cpu_ms: float
    median_ratio: float
    min_ratio: float
    cpu_ratio: float


class Data:
    """Gradient, residual (restored before every timed call), output buffers, threshold for a density."""

    def __init__(self, numel: int, density: float, kernels: CpuBackend) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numel, self.kept = numel, max(1, int(density * numel))
        self.density = density
        self.grad = torch.randn(numel, generator=generator)
        self.grad_bf16 = self.grad.bfloat16()
        self.start_residual = 0.3 * torch.randn(numel, generator=generator)
        self.residual = self.start_residual.clone()
        self.apart, self.scratch = torch.zeros(numel), ScratchBuffers()
        self.tau = kernels.exact_threshold(self.grad, self.residual, self.kept)
        self.capacity = min(numel, 2 * self.kept)
        bound = payload_bound(numel, self.capacity, ValueDtype.BF16)
        self.message = torch.zeros(bound, dtype=torch.uint8)
        self.magnitude, self.mask = torch.empty(numel), torch.empty(numel, dtype=torch.bool)
        self.target = torch.zeros(numel)
        self.packed: dict[str, tuple[PackedTensor, PackedTensor]] = {}
        for kind, dtype in (("bf16", torch.bfloat16), ("int8", torch.int8)):
            before, after = (PackedTensor(numel, dtype, kernels, self.grad.device) for _ in range(2))
            before.write(self.start_residual, seed=0)
            self.packed[kind] = before, after

    def compress(self, kernels: CpuBackend | ReferenceBackend, grad: Tensor, **options: Any) -> Payload:
        stats = kernels.compress(
            Job(
                grad,
                options.pop("residual", self.residual),
                self.tau,
                self.message,
                capacity=self.capacity,
                value_dtype=ValueDtype.BF16,
                **options,
            )
        )
        return Payload.from_tensor(self.message[: stats.nbytes], verify=False)

    def compress_packed(self, kernels: CpuBackend, packed: tuple[PackedTensor, PackedTensor]) -> Payload:
        """With a residual that is kept in fewer bytes (``residual_dtype``)."""
        before, after = packed
        values = before.read(self.scratch, "pass")
        payload = self.compress(kernels, self.grad, residual=values)
        after.write(values, seed=1)
        return payload

    def torch_preallocated(self) -> tuple[Tensor, Tensor]:
        """The fewest passes plain torch allows: every large temporary is reused."""
        self.residual.add_(self.grad)
        torch.abs(self.residual, out=self.magnitude)
        torch.ge(self.magnitude, self.tau, out=self.mask)
        idx = self.mask.nonzero().view(-1)
        values = self.residual.index_select(0, idx)
        self.residual.index_fill_(0, idx, 0.0)
        return idx, values

    def torch_naive(self) -> tuple[Tensor, Tensor, Tensor]:
        """As the method is usually written down."""
        acc = self.grad + self.residual
        mask = acc.abs() >= self.tau
        return mask.nonzero().view(-1), acc[mask], acc * ~mask


def methods(data: Data, kernels: CpuBackend, seeds: list[int]) -> dict[str, Callable[[], Any]]:
    """Name -> one timed call."""
    reference = ReferenceBackend()
    payload = data.compress(kernels, data.grad).data.clone()
    samples = max(65536, int(1000 / data.density))
    return {
        COPY: lambda: data.target.copy_(data.grad),
        FUSED: lambda: data.compress(kernels, data.grad),
        "DCT fused compress, bf16 gradient": lambda: data.compress(kernels, data.grad_bf16),
        "DCT fused compress, residual apart": lambda: data.compress(
            kernels, data.grad, residual_out=data.apart
        ),
        **{
            f"DCT fused compress, residual in {kind}": partial(data.compress_packed, kernels, packed)
            for kind, packed in data.packed.items()
        },
        "DCT compress, no error feedback": lambda: data.compress(kernels, data.grad, residual=None),
        "DCT plain-torch fallback": lambda: data.compress(reference, data.grad),
        "torch, preallocated (select only)": data.torch_preallocated,
        "torch, as written (select only)": data.torch_naive,
        TOPK: lambda: torch.topk((data.grad + data.residual).abs_(), data.kept, sorted=False),
        f"DCT threshold from {samples} samples": lambda: kernels.sample_threshold(
            data.grad, data.residual, data.density, samples, seeds.pop()
        ),
        "DCT exact threshold": lambda: kernels.exact_threshold(data.grad, data.residual, data.kept),
        "DCT decode + scatter-add": lambda: kernels.decode_add(payload, data.apart),
    }


def measure(data: Data, kernels: CpuBackend, repeats: int) -> list[Row]:
    calls = methods(data, kernels, seeds=list(range(repeats + 1)))
    timings = {name: Timing() for name in calls}
    for round_number in range(repeats + 1):
        for name, call in calls.items():
            data.residual.copy_(data.start_residual)
            if round_number:
                timings[name].add(call)
            else:
                call()  # warm up: pages, thread pools
    base = timings[COPY]
    return [
        Row(
            name,
            *(values := (statistics.median(t.wall), min(t.wall), statistics.median(t.cpu))),
            values[0] / statistics.median(base.wall),
            values[1] / min(base.wall),
            values[2] / statistics.median(base.cpu),
        )
        for name, t in timings.items()
    ]


def measure_positions(numel: int, kernels: CpuBackend, repeats: int) -> list[dict[str, Any]]:
    """Size and speed of the index section at several densities; uniform positions, bf16 values."""
    rows = []
    for density in (0.5, 0.1, 0.01, 0.001):
        data = Data(numel, density, kernels)
        out = torch.zeros(payload_bound(numel, data.capacity, ValueDtype.BF16), dtype=torch.uint8)
        encode, decode = [], Timing()
        for _ in range(repeats):
            stats = kernels.compress(
                Job(
                    data.grad,
                    data.start_residual,
                    data.tau,
                    out,
                    residual_out=data.apart,
                    capacity=data.capacity,
                    value_dtype=ValueDtype.BF16,
                )
            )
            encode.append(stats.encode_ns / stats.nnz)
            decode.add(partial(kernels.decode_add, out[: stats.nbytes], data.target))
        rows.append(
            {
                "density": density,
                "index_bits_per_entry": 8 * index_form(stats.nnz, numel).nbytes / stats.nnz,
                "encode_ns_per_entry": min(encode),
                "decode_ns_per_entry": 1e6 * min(decode.wall) / stats.nnz,
            }
        )
    return rows


def show(rows: list[Row], title: str, console: Console) -> None:
    table = Table(
        "method", "median ms", "min ms", "cpu ms", "median/copy", "min/copy", "cpu/copy", title=title
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        ratios = (row.median_ratio, row.min_ratio, row.cpu_ratio)
        times = (row.median_ms, row.min_ms, row.cpu_ms)
        style = "bold" if row.method == FUSED else None
        table.add_row(row.method, *(f"{v:.2f}" for v in (*times, *ratios)), style=style)
    console.print(table)


def main(
    numel: Annotated[int, typer.Option(help="Entries of the tensor.")] = 1 << 24,
    density: Annotated[float, typer.Option(help="Share of entries kept.")] = 0.01,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 9,
    threads: Annotated[int, typer.Option(help="Threads, for torch and for these kernels.")] = 1,
    isa: Annotated[
        str | None, typer.Option(help="portable, avx2 or avx512; default: the best there is.")
    ] = None,
    positions: Annotated[bool, typer.Option(help="Also measure the index section.")] = False,
    check: Annotated[bool, typer.Option(help="Exit with status 1 when a target is missed.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda: benchmarks/gpu.py without whole steps.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here, too.")] = None,
) -> None:
    """Compare threshold selection with error feedback with copy_, plain torch and torch.topk."""
    if device == "cuda":
        import gpu

        gpu.main(numel, density, repeats, steps=False, json_file=json_file)
        return
    torch.set_num_threads(threads)
    kernels = CpuBackend(threads)
    if isa:
        kernels.set_isa(isa)
    console = Console(width=130)
    rows = measure(Data(numel, density, kernels), kernels, repeats)
    title = (
        f"{numel:,} fp32 entries, {density:.3%} kept, {threads} thread(s), {kernels.isa}, {repeats} rounds"
    )
    show(rows, title, console)
    by_name = {row.method: row for row in rows}
    fused, topk = by_name[FUSED], by_name[TOPK]
    faster = {"median": topk.median_ms / fused.median_ms, "min": topk.min_ms / fused.min_ms}
    console.print(
        f"fused compress: {fused.median_ratio:.2f} / {fused.min_ratio:.2f} x copy_ by medians / minima "
        f"(target: at most {TARGET_COPY:g}); {faster['median']:.0f} / {faster['min']:.0f} x faster than topk "
        f"(target: at least {TARGET_TOPK:g})"
    )
    sizes = measure_positions(numel, kernels, min(repeats, 3)) if positions else []
    if sizes:
        table = Table(*sizes[0], title="positions, one thread")
        for size in sizes:
            table.add_row(*(f"{v:.2f}" if isinstance(v, float) and v > 1 else str(v) for v in size.values()))
        console.print(table)
    if json_file:
        environment = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "isa": kernels.isa,
            "threads": threads,
            "numel": numel,
            "density": density,
            "repeats": repeats,
        }
        result = {
            "environment": environment,
            "methods": [asdict(row) for row in rows],
            "times_faster_than_topk": faster,
            "positions": sizes,
        }
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if check and (fused.min_ratio > TARGET_COPY or faster["min"] < TARGET_TOPK):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
