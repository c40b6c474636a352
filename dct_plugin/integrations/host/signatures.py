"""Check that the functions that a host integration replaces, wraps or calls are those it was made for.

A host that moved one of them is refused with a message, instead of training on without the plugin or wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from .versions import VersionRange, unsupported


class Target(NamedTuple):
    """A function or method, and what it is expected to look like.

    Attributes:
        module: Where it is defined.
        name: In the module, for example ``"Engine.step"``.
        parameters: The leading parameters that it must have, in this order, ``self`` included; more may
            follow, since parameters that a later version adds at the end do not reach us.
        part: The part of the integration that needs it.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    part: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({', '.join(self.parameters)}, ...)"


class Probe(NamedTuple):
    """The signature that was found for one target, or why there is none; no ``problem`` where it fits."""

    target: Target
    found: str
    problem: str = ""


def probe(target: Target) -> Probe:
    """Compare a target with its module, which is imported if need be."""
    try:
        module = import_module(target.module)
    except ImportError as error:
        return Probe(target, "no such module", str(error))
    function: Any = module
    for part in target.name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        return Probe(target, "missing", f"{target.module} has no {target.name}")
    try:
        parameters = list(inspect.signature(_decorated(function)).parameters)
    except (TypeError, ValueError) as error:
        return Probe(target, "no signature", str(error))
    fits = tuple(parameters[: len(target.parameters)]) == target.parameters
    problem = "" if fits else f"does not start with ({', '.join(target.parameters)})"
    return Probe(target, f"({', '.join(parameters)})", problem)


def _decorated(function: Any) -> Any:
    """Return the function inside a decorator that passes all arguments on (``*args, **kwargs``)."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return function
    inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    given = [each for each in inside if inspect.isfunction(each)]
    return given[0] if len(given) == 1 else function


def faults(probes: Iterable[Probe]) -> str:
    """Return three lines for each target that does not fit."""
    lines = []
    for target, found, problem in probes:
        if problem:
            lines += [
                f"{target.module}.{target.name}" + (f" ({target.part})" if target.part else ""),
                f"  expected: ({', '.join(target.parameters)}, ...)",
                f"  found:    {found}: {problem}",
            ]
    return "\n".join(lines)


def require(targets: Iterable[Target], found: str, supported: VersionRange | str, remedy: str) -> None:
    """Stop unless every target is what it is expected to be; nothing has been patched then.

    Raises:
        VersionError: Names every target that is not; see :func:`.versions.unsupported` for the arguments.
    """
    if problems := faults(map(probe, targets)):
        why = "is not what dct-plugin was made for; nothing was patched"
        raise unsupported(found, supported, remedy, why=why, faults=problems)
