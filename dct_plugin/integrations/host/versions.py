"""Versions of a host, and checks that the functions that an integration replaces are those it was made for.

A host that moved one of them is refused with a message, instead of training on without the plugin or wrongly.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dct_plugin.errors import VersionError

#: Versions that the test suite was run with, by distribution; docs/support.md says what was run.
TESTED = {
    "torch": ("2.6.0", "2.13.0", "2.15.0"),
    "deepspeed": ("0.19.0", "0.19.6", "0.19.8"),
    "megatron-core": ("0.16.0", "0.16.1", "0.19.2"),
    "transformers": ("5.23.0", "5.24.0"),
    "accelerate": ("1.15.0",),
    "lightning": ("2.6.6",),
}


def how_tested(name: str, version: str) -> str:
    """Say whether a version was tested; builds of a release (``2.13.0+cpu``) count as that release."""
    known = TESTED.get(name, ())
    if not known or version.partition("+")[0] in known:
        return "tested" if known else ""
    return f"not tested (tested: {', '.join(known)})"


@functools.cache
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


class Target(NamedTuple):
    """A function or method, and what it is expected to look like.

    Attributes:
        module: Where it is defined.
        name: In the module, for example ``"Engine.step"``.
        parameters: The leading parameters that it must have, in this order, ``self`` included, with spaces
            between them; more may follow, since parameters that a later version adds at the end do not
            reach us.
        part: The part of the integration that needs it.
    """

    module: str
    name: str
    parameters: str
    part: str = ""


def _misfit(target: Target) -> tuple[str, str]:
    """Return the signature in a target's place and what is wrong with it; two empty texts if it fits."""
    try:
        function = pkgutil.resolve_name(f"{target.module}:{target.name}")
        parameters = list(inspect.signature(undecorated(function)).parameters)
    except ImportError as error:
        return "no such module", str(error)
    except AttributeError:
        return "missing", f"{target.module} has no {target.name}"
    except (TypeError, ValueError) as error:
        return "no signature", str(error)
    expected = target.parameters.split()
    if parameters[: len(expected)] == expected:
        return "", ""
    return f"({', '.join(parameters)})", f"does not start with ({', '.join(expected)})"


def undecorated(function: Any) -> Any:
    """Return the function inside a decorator that passes all arguments on (``*args, **kwargs``)."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return function
    inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    given = [each for each in inside if inspect.isfunction(each)]
    return given[0] if len(given) == 1 else function


def faults(targets: Iterable[Target]) -> str:
    """Return three lines for each target that is not what it is expected to be; modules are imported."""
    lines = []
    for target in targets:
        found, problem = _misfit(target)
        if problem:
            lines += [
                f"{target.module}.{target.name}" + (f" ({target.part})" if target.part else ""),
                f"  expected: ({', '.join(target.parameters.split())}, ...)",
                f"  found:    {found}: {problem}",
            ]
    return "\n".join(lines)


def require(targets: Iterable[Target], found: str, supported: VersionRange | str, remedy: str) -> None:
    """Stop unless every target is what it is expected to be; nothing has been patched then.

    Raises:
        VersionError: Names every target that is not; see :func:`.versions.unsupported` for the arguments.
    """
    if problems := faults(targets):
        why = "is not what dct-plugin was made for; nothing was patched"
        raise unsupported(found, supported, remedy, why=why, faults=problems)
