"""``dct bench``: the benchmarks of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

from ..command_options import Forward
from ..errors import ConfigError

app = typer.Typer(help="Benchmarks that are run from a checkout.", no_args_is_help=True)
_CHECKOUT = Path(__file__).resolve().parents[2]


@app.callback()
def _group() -> None:
    """Keep the name of the only command on the command line."""


@app.command("links", cls=Forward)
def links(context: typer.Context) -> None:
    """Measure step times on links of limited rate, all methods of a workload in turns within one run.

    Raises:
        ConfigError: The plugin was not installed from a checkout.
        typer.Exit: With the exit status of the benchmark.
    """
    if not (_CHECKOUT / "benchmarks" / "links").is_dir():
        raise ConfigError(
            f"dct bench links: {_CHECKOUT} has no benchmarks, which are not part of the installed package; "
            "clone the repository, install it there (pip install -e .[demo]) and give the command again"
        )
    path = os.pathsep.join([str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.links", *context.args]
    raise typer.Exit(subprocess.call(command, env={**os.environ, "PYTHONPATH": path}))
