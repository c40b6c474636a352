"""Counts launches of Triton kernels under the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.runtime.interpreter import GridExecutor


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched while the context is open."""
    names: list[str] = []
    launch = GridExecutor.__call__

    def counted(self: GridExecutor, *arguments: Any, **constants: Any) -> Any:
        names.append(self.fn.__name__)
        return launch(self, *arguments, **constants)

    with patch.object(GridExecutor, "__call__", counted):
        yield names


@contextmanager
def warps_of_launches() -> Iterator[dict[str, set[int]]]:
    """The numbers of warps that launches ask for while the context is open, by kernel."""
    warps: dict[str, set[int]] = {}
    launch = GridExecutor.__call__

    def noted(self: GridExecutor, *arguments: Any, **constants: Any) -> Any:
        if "num_warps" in constants:
            warps.setdefault(self.fn.__name__, set()).add(constants["num_warps"])
        return launch(self, *arguments, **constants)

    with patch.object(GridExecutor, "__call__", noted):
        yield warps
