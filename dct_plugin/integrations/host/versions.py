"""Supported and tested versions of a host, and the error for others."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from dct_plugin.errors import VersionError

#: Versions that the test suite was run with, by distribution; docs/support.md says what was run.
TESTED = {
    "torch": ("2.6.0", "2.13.0", "2.15.0"),
    "deepspeed": ("0.19.0", "0.19.6", "0.19.8"),
    "megatron-core": ("0.16.0", "0.16.1", "0.19.2"),
    "transformers": ("5.23.0",),
    "accelerate": ("1.15.0",),
    "lightning": ("2.6.6",),
}


def how_tested(name: str, version: str) -> str:
    """Say whether a version was tested; builds of a release (``2.13.0+cpu``) count as that release."""
    known = TESTED.get(name, ())
    if not known or version.partition("+")[0] in known:
        return "tested" if known else ""
    return f"not tested (tested: {', '.join(known)})"


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse(version: str) -> tuple[int, ...]:
    """Return ``(0, 19, 4)`` for ``"0.19.4rc1+cu12"``: three numbers or more; ``()`` without any."""
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return tuple(numbers + [0] * (3 - len(numbers))) if numbers else ()


@dataclass(frozen=True)
class VersionRange:
    """Releases from ``first`` up to, not including, ``end``; suffixes (``rc0``, ``+abc``) are ignored."""

    first: str
    end: str

    def __contains__(self, version: str) -> bool:
        return parse(self.first) <= parse(version) < parse(self.end)

    def __str__(self) -> str:
        return f"{self.first} up to, not including, {self.end}"


def unsupported(
    found: str, supported: object, remedy: str, *, why: str = "is not supported", faults: str = ""
) -> VersionError:
    """Return the error for a host that the plugin does not support.

    Args:
        found: Name and version, for example ``"DeepSpeed 0.18.0"``, and where it lies if that helps.
        supported: A :class:`VersionRange`, or words.
        remedy: What the user can do.
        why: What is wrong with it.
        faults: Details, one line each.
    """
    lines = [f"{found} {why}", *(f"  {line}" for line in faults.splitlines())]
    return VersionError("\n".join([*lines, f"  supported: {supported}", f"  what to do: {remedy}"]))
