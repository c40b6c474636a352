"""Supported versions of a host, and the error for others."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from dct_plugin.errors import VersionError


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
