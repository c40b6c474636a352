"""Which process it was, and whether it still runs: of peers, and of locks. Standard library only."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["gone", "lives", "machine", "this"]


def this() -> str:
    """Name of this process, for others."""
    return f"{machine()} {os.getpid()} {_begin(os.getpid())}"


def lives(name: str) -> bool:
    """Whether a process (:func:`this`) is on this machine, and neither gone nor stopped."""
    where, process, begin = _parts(name)
    return where == machine() and begin != "" and _begin(process) == begin


def gone(name: str) -> bool:
    """Whether a process was on this machine, and has ended."""
    where, process, begin = _parts(name)
    return where == machine() and begin != "" and _begin(process, stopped=True) != begin


def _parts(name: str) -> tuple[str, str, str]:
    machine, _, rest = name.rpartition("]")
    process, _, begin = rest.strip().partition(" ")
    return machine + "]", process, begin


def machine() -> str:
    """Name of this machine, or of the container: what tells process numbers from those of others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} []"


def _begin(process: int | str, *, stopped: bool = False) -> str:
    """When a process was started, which tells it from a later one of the same number; empty if it is gone (or
    stopped, unless that is asked for), or the system does not tell.
    """
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" or (state in "tT" and not stopped) else fields[18]
