"""What kernels of a device leave to the host."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("dct_plugin.kernels")


@functools.cache
def say_once(text: str) -> None:
    """Log why something is done on the host."""
    logger.warning("%s; vectors and gradients are copied there, 'packed' needs no copy", text)
