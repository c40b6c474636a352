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
