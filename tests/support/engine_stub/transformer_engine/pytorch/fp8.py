from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FP8GlobalStateManager:
    """Says whether linears run in fp8."""

    enabled = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled


@contextmanager
def fp8_autocast(enabled: bool = True) -> Iterator[None]:
    """Say that linears run in fp8; they do not."""
    FP8GlobalStateManager.enabled, previous = enabled, FP8GlobalStateManager.enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.enabled = previous
