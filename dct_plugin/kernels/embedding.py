"""The choice of the kernels that write and read error-bounded codes of tensors on a device."""

from __future__ import annotations

import functools
import logging

from .backend import Backend
from .embedding_format import DeviceCodeKernels

logger = logging.getLogger("dct_plugin.kernels")


def device_code_kernels(backend: Backend, entropy: str) -> DeviceCodeKernels | None:
    """Return the kernels that code tensors on the device of a backend; None: the host does.

    Args:
        backend: The backend of the device.
        entropy: The kind of code; ``auto`` is packed on a device. Rice codes and deflate are serial.
    """
    kernels = backend.code_kernels()
    if kernels is not None and entropy in ("rice", "deflate"):
        say_once(f"error-bounded codes of kind '{entropy}': a serial code, which the host writes and reads")
        return None
    return kernels


@functools.cache
def say_once(text: str) -> None:
    """Log why something is done on the host."""
    logger.warning("%s; vectors and gradients are copied there, 'packed' needs no copy", text)
