"""Measure what a launch of a kernel takes on the host, as the project launches it and as Triton does.

    python benchmarks/launches.py

It runs anywhere: kernels are those of a step that benchmarks/host_work.py counts, the driver is a stub, and
Triton compiles as far as its own code goes. So microseconds are those of Python alone, in a loop that does
nothing else. Every launch is made in both ways: both have to start the same compiled kernel with the same
arguments.
"""

from __future__ import annotations

import itertools
import timeit
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.compiler
import typer
from rich.console import Console
from rich.table import Table
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver

from benchmarks import host_work
from dct_plugin.kernels.triton import backend, batch, messages, selection_kernels, step_ahead
from dct_plugin.kernels.triton.launch import OPTIONS, launch

#: Steps whose launches are made.
ROWS = ("8 ranks, two_phase", "2 ranks, direct, sampled thresholds", "step-ahead with AdamW, 200 tensors")
_REPEATS, _LAUNCHES = 7, 200
_started: list[tuple[Any, ...]] = []


class Driver:
    """Stands for that of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Kernel(CompiledKernel):
    """A kernel in Triton's intermediate representation; a launch notes its arguments."""

    def __init__(self, source: Any, target: Any = None, options: Any = None) -> None:
        compiler, context = make_backend(target), ir.context()
        parsed = compiler.parse_options(options)
        ir.load_dialects(context)
        compiler.load_dialects(context)
        functions = compiler.get_codegen_implementation(parsed), compiler.get_module_map()
        source.make_ir(target, parsed, *functions, context)
        source.hash()  # which notes the constants that a launch compares
        self.src, self.name, self.function, self.packed_metadata = source, source.fn.fn.__name__, None, None
        self.noted = True

    def _init_handles(self) -> None:
        """There is nothing to load."""

    @property
    def run(self) -> Callable[..., None]:
        return self._note

    def _note(self, *arguments: Any) -> None:
        if self.noted:
            described = arguments[6]  # for hooks
            _started.append((self, described and described.data["stream"], *arguments[:6], *arguments[7:]))


def by_triton(kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel as Triton does."""
    kernel[programs if isinstance(programs, tuple) else (programs,)](*arguments, **constants, **OPTIONS)


def launched(*arguments: Any, **constants: Any) -> Kernel:
    """Launch a kernel in both ways, and once more as it is kept; return it."""
    _started.clear()
    for way in (launch, by_triton, launch):
        way(*arguments, **constants)
    first, *others = _started
    same = [mine is its or mine == its for other in others for mine, its in zip(first, other, strict=True)]
    assert len(others) == 2
    assert all(same), first[0].name
    return first[0]


def variations() -> None:
    """Launch one kernel with addresses and numbers that Triton compiles it anew for."""
    table, positions = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    found = {
        launched(selection_kernels.compact, 3, table[first:], positions, table, 0, count)
        for first, count in itertools.product((0, 1), (1, 16, 1 << 31, 1 << 40))
    }
    assert len(found) == 2 * 2, len(found)


def _microseconds(kernel: Kernel, way: Callable[..., None], call: tuple[Any, Any]) -> float:
    arguments, constants = call
    kernel.noted = False
    taken = timeit.repeat(lambda: way(*arguments, **constants), number=_LAUNCHES, repeat=_REPEATS)
    kernel.noted = True
    return 1e6 * min(taken) / _LAUNCHES


def main(check: bool = typer.Option(False, help="Launch only, and print what was launched.")) -> None:
    """Print the table."""
    driver.set_active(Driver())  # type: ignore[arg-type]
    triton.compiler.compile = Kernel
    calls: dict[Kernel, Any] = {}

    def both(step: Callable[[], None], steps: int) -> Any:
        with host_work.counted():
            stand_in = batch.launch

            def in_both_ways(*arguments: Any, **constants: Any) -> None:
                calls[launched(*arguments, **constants)] = arguments, constants
                stand_in(*arguments, **constants)

            for module in (backend, batch, messages, step_ahead):
                module.launch = in_both_ways  # type: ignore[attr-defined]
            for _ in range(4):  # the last ones repeat
                step()

    host_work._measured = both
    for name in host_work.ROWS if check else ROWS:
        host_work.ROWS[name]()
    variations()
    if check:
        print(len(calls), *sorted({kernel.name for kernel in calls}))
        return
    table = Table("kernel", "Triton, us", "kept, us")
    for kernel, call in calls.items():
        table.add_row(
            kernel.name, *(f"{_microseconds(kernel, way, call):.1f}" for way in (by_triton, launch))
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
