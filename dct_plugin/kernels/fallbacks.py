"""The log of what kernels of a device leave to the host or to plain torch."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("dct_plugin.kernels")


@functools.cache
def say_once(text: str) -> None:
    """Log something once in a process."""
    logger.warning(text)
