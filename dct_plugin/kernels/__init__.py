"""Kernels for selection, encoding and decoding, behind one dispatch point: :func:`get_backend`.

``reference`` (plain torch, any device) defines the results; compiled backends give the same bits faster:
``cpu`` (C) and, on CUDA tensors, ``triton``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import errors
from . import self_check
from .backend import Backend as Backend
from .backend import Residuals as Residuals
from .backend import Selection as Selection
from .backend import Sums as Sums
from .cpu import CpuBackend
from .job import Job as Job
from .reference import ReferenceBackend

logger = logging.getLogger("dct_plugin.kernels")


class _Registered(NamedTuple):
    """A backend that is known by its name."""

    factory: Callable[[], Backend]
    device_types: tuple[str, ...]
    """The device types that ``auto`` uses it for."""
    self_check: bool


# By name; ``auto`` prefers later ones.
_factories: dict[str, _Registered] = {}
_instances: dict[str, Backend] = {}
#: Names of backends, and types of devices, that ``auto`` does not use, and why not; None: it does.
_problems: dict[tuple[str, str], str | None] = {}
_lock = threading.RLock()
_NEEDED = {
    "cpu": "A C compiler (gcc or clang) in PATH is all that is needed.",
    "triton": "The package triton (torch for CUDA brings it along), a C compiler and Python's headers are "
    "needed; until then the host waits for the device several times per tensor.",
}


def register_backend(
    name: str, factory: Callable[[], Backend], device_types: tuple[str, ...] = (), *, self_check: bool = False
) -> None:
    """Register a backend; ``auto`` tries it first on ``device_types``.

    Args:
        name: The name in ``dct.kernels.backend`` and ``DCT_KERNELS``.
        factory: Makes the backend; raises OSError if it cannot serve on this machine.
        device_types: The device types that ``auto`` uses it for.
        self_check: ``auto`` compares it with the reference before its first use in a process
            (:mod:`.self_check`).
    """
    with _lock:
        _factories[name] = _Registered(factory, device_types, self_check)
        _instances.pop(name, None)
        for key in [key for key in _problems if key[0] == name]:
            del _problems[key]


def backend_names() -> tuple[str, ...]:
    """Return the names that :func:`get_backend` takes: ``auto`` and all registered ones."""
    return ("auto", *_factories)


def serves(name: str, device: torch.device) -> bool:
    """Return True if a backend of :func:`backend_names` supports tensors of a device."""
    if name == "auto":
        return True
    device_types = _factories[name].device_types
    return not device_types or device.type in device_types


def get_backend(device: torch.device | str, name: str = "auto") -> Backend:
    """Return the kernels for tensors on ``device``.

    Args:
        device: The device; ``auto`` looks at its type alone.
        name: One of :func:`backend_names`. ``auto`` uses the environment variable ``DCT_KERNELS`` if it is
            set, else the fastest backend that works on this machine; the choice is logged once.

    Raises:
        ConfigError: No backend of that name is registered.
        ValueError: It does not serve this device.
        OSError: The named backend is not available (``auto`` falls back to ``reference`` instead).
    """
    device, from_environment = torch.device(device), name == "auto"
    if from_environment:
        name = os.environ.get("DCT_KERNELS", "").strip().lower() or "auto"
    if name != "auto":
        if name not in _factories:
            source = "DCT_KERNELS" if from_environment else "dct.kernels.backend"
            names = ", ".join(f'"{each}"' for each in backend_names())
            raise errors.ConfigError(f'{source} = "{name}": must be one of {names}')
        if serves(name, device):
            return _instance(name)
        if not from_environment:
            served = ", ".join(_factories[name].device_types)
            raise ValueError(f"kernel backend {name!r} serves {served} tensors, not {device.type}")
    for candidate, registered in reversed(list(_factories.items())):
        if device.type in registered.device_types and _works(candidate, device):
            return _instance(candidate)
    return _instance("reference")


def problem_with(name: str, device_type: str) -> str | None:
    """Return why ``auto`` does not use a backend on a device type; None: it does, or has not been asked."""
    return _problems.get((name, device_type))


def _works(name: str, device: torch.device) -> bool:
    """Return whether ``auto`` may use a backend on a device; find out at the first call."""
    key = name, device.type
    with _lock:
        if key not in _problems:
            _problems[key] = _find_problem(name, device)
        return _problems[key] is None


def _find_problem(name: str, device: torch.device) -> str | None:
    """Return what is wrong with a backend, after a warning; None: nothing."""
    slower = f"using plain torch on {device.type} tensors, which is several times slower"
    try:
        backend = _instance(name)
    except OSError as error:
        logger.warning(
            "kernel backend %r is not available (%s); %s. %s", name, error, slower, _NEEDED.get(name, "")
        )
        return str(error)
    # Without such a device no tensor will come.
    if not _factories[name].self_check or (device.type == "cuda" and not torch.cuda.is_available()):
        return None
    began = time.perf_counter()
    if problem := self_check.first_difference(backend, device):
        logger.warning(
            f"kernel backend {name!r} fails its self-check ({problem}); {slower}. Please report this line "
            f"with the output of `dct doctor`. dct.kernels.backend: {name!r} uses these kernels nevertheless"
        )
        return f"self-check: {problem}"
    logger.info("%r kernels equal the reference on %s: %.1f s", name, device, time.perf_counter() - began)
    return None


def _instance(name: str) -> Backend:
    with _lock:
        backend = _instances.get(name)
        if backend is None:
            backend = _instances[name] = _factories[name].factory()
            logger.info("using %r kernels: %r", name, backend)
        return backend


def _triton() -> Backend:
    from .triton.backend import TritonBackend

    return TritonBackend()


register_backend("reference", ReferenceBackend)
register_backend("cpu", CpuBackend, device_types=("cpu",))
register_backend("triton", _triton, device_types=("cuda",), self_check=True)
