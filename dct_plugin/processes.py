"""Names of processes, by which a peer sees whether they still run, and the end of jobs.

Imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path


def this() -> str:
    """Return the name of this process, for others."""
    return f"{machine()} {os.getpid()} {_begin(os.getpid())}"


def lives(name: str) -> bool:
    """Return whether a process, named by its :func:`this`, runs on this machine and is not stopped."""
    where, _, rest = name.rpartition("]")
    process, _, begin = rest.strip().partition(" ")
    return where + "]" == machine() and begin != "" and _begin(process) == begin


def machine() -> str:
    """Return the name of this machine, or of the container: process numbers are unique within it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} []"


def _begin(process: int | str) -> str:
    """Return the start time of a process, which a later process of the same number does not have.

    Empty if the process is gone or stopped, or the system does not tell.
    """
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZXtT" else fields[18]


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job that leads a process group, and the whole group; by force if it does not end in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(job.pid, number)
            job.wait(timeout=60)  # torchrun gives its ranks 30 seconds
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    job.wait()


def tail(text: str, lines: int = 25) -> str:
    """Return the last lines of what a process wrote."""
    return "\n".join(text.strip().splitlines()[-lines:])
