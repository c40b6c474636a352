"""Commands whose options are one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def takes_options(kind: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Return a decorator for a command that takes a ``kind``, a dataclass with typer's annotations.

    typer sees one parameter for each field.
    """

    types = get_type_hints(kind, include_extras=True)
    fields = inspect.signature(kind).parameters.values()
    parameters = [field.replace(annotation=types[field.name]) for field in fields]

    def decorated(run: Callable[[Any], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            run(kind(**values))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = types
        return command

    return decorated
