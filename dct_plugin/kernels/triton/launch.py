"""The one place where kernels are launched, with the options that they are checked with."""

from __future__ import annotations

from typing import Any

#: Products and sums are rounded one by one, as in plain torch.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def launch(kernel: Any, programs: int | tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Queue so many programs of a kernel."""
    grid = programs if isinstance(programs, tuple) else (programs,)
    kernel[grid](*arguments, **constants, **OPTIONS)
