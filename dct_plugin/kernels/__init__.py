"""The hot loops, behind one dispatch point: :func:`get_backend`.

``reference`` (plain torch, any device) defines the results; compiled backends give the same bits faster:
``cpu`` (C) and, on CUDA tensors, ``triton``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch

from ..codecs.stats import Stats, read_stats
from .backend import Backend
from .job import GRAD_DTYPES, SMALLEST_TAU, Job, Tau

__all__ = [
    "GRAD_DTYPES",
    "SMALLEST_TAU",
    "Backend",
    "Job",
    "Stats",
    "Tau",
    "backend_names",
    "get_backend",
    "read_stats",
    "register_backend",
    "serves",
]

logger = logging.getLogger("dct_plugin.kernels")

# name -> (factory, device types that "auto" uses it for); later registrations are preferred.
_factories: dict[str, tuple[Callable[[], Backend], tuple[str, ...]]] = {}
_instances: dict[str, Backend] = {}
_failed: set[str] = set()
_lock = threading.Lock()
_NEEDED = {
    "cpu": "A C compiler (gcc or clang) in PATH is all that is needed.",
    "triton": "The package triton, which torch for CUDA brings along, is all that is needed; until then the "
    "host waits for the device several times per tensor.",
}


def register_backend(name: str, factory: Callable[[], Backend], device_types: tuple[str, ...] = ()) -> None:
    """Make a backend known; ``auto`` tries it first on ``device_types``.

    A factory that cannot serve on this machine raises OSError.
    """
    with _lock:
        _factories[name] = (factory, device_types)
        _instances.pop(name, None)
        _failed.discard(name)


def backend_names() -> tuple[str, ...]:
    """What :func:`get_backend` takes for a name: ``auto`` and all registered ones."""
    return ("auto", *_factories)


def serves(name: str, device: torch.device) -> bool:
    """Whether a backend of :func:`backend_names` takes tensors of a device."""
    if name == "auto":
        return True
    _, device_types = _factories[name]
    return not device_types or device.type in device_types


def get_backend(device: torch.device | str, name: str = "auto", *, threads: int | None = None) -> Backend:
    """The kernels for tensors on ``device``.

    Args:
        name: one of :func:`backend_names`. ``auto`` takes the environment variable ``DCT_KERNELS`` if it is
            set, else the fastest backend that works here; the choice is logged once.
        threads: threads per call of a compiled CPU backend; None: as many as torch uses.
    Raises:
        ValueError: unknown name, or a backend that does not serve this device.
        OSError: the named backend is not available (``auto`` falls back to ``reference`` instead).
    """
    backend = _choose(torch.device(device), name)
    return backend if threads is None else backend.with_threads(threads)


def _choose(device: torch.device, name: str) -> Backend:
    from_environment = name == "auto"
    if from_environment:
        name = os.environ.get("DCT_KERNELS", "").strip().lower() or "auto"
    if name != "auto":
        if name not in _factories:
            source = "DCT_KERNELS" if from_environment else "kernels.backend"
            allowed = ", ".join(backend_names())
            raise ValueError(f"{source}: kernel backend {name!r} is unknown; allowed: {allowed}")
        if serves(name, device):
            return _instance(name)
        if not from_environment:
            served = ", ".join(_factories[name][1])
            raise ValueError(f"kernel backend {name!r} serves {served} tensors, not {device.type}")
    for candidate, (_, device_types) in reversed(list(_factories.items())):
        if device.type in device_types and candidate not in _failed:
            try:
                return _instance(candidate)
            except OSError as error:
                with _lock:
                    first = candidate not in _failed
                    _failed.add(candidate)
                if first:
                    logger.warning(
                        "kernel backend %r is not available (%s); using plain torch on %s tensors, which is "
                        "several times slower. %s",
                        candidate,
                        error,
                        device.type,
                        _NEEDED.get(candidate, ""),
                    )
    return _instance("reference")


def _instance(name: str) -> Backend:
    with _lock:
        backend = _instances.get(name)
        if backend is None:
            backend = _factories[name][0]()
            _instances[name] = backend
            logger.info("using %r kernels: %r", name, backend)
        return backend


def _reference() -> Backend:
    from .reference import ReferenceBackend

    return ReferenceBackend()


def _cpu() -> Backend:
    from .cpu import CpuBackend

    return CpuBackend()


def _triton() -> Backend:
    from .triton.backend import TritonBackend

    return TritonBackend()


register_backend("reference", _reference)
register_backend("cpu", _cpu, device_types=("cpu",))
register_backend("triton", _triton, device_types=("cuda",))
