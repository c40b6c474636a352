"""How, where and with what figures were made."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from datetime import date
from importlib import metadata
from typing import Any

from dct_plugin._version import __version__


def command() -> str:
    """Return the command line of this program."""
    return shlex.join(["dct", *sys.argv[1:]])


def provenance(started: float) -> dict[str, Any]:
    """Return how, where and with what figures were made, from the monotonic time at which that began on."""
    return {
        "command": command(),
        "date": str(date.today()),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "versions": _versions(),
        "seconds": round(time.monotonic() - started, 1),
    }


def _versions() -> dict[str, str]:
    packages = ("torch", "deepspeed", "numpy", "scikit-learn")
    return {
        "dct-plugin": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }
