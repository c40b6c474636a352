"""Commands whose options are those of a command that they start."""

from __future__ import annotations

from typing import Any

import typer


class Forward(typer.core.TyperCommand):
    """Leaves every argument, also ``--`` and ``--help``, to another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return args
