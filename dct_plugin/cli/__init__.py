"""The ``dct`` command.

Starting it imports neither torch nor any integration: commands that need them are entries of
:data:`COMMANDS` and are imported when they run.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from .._version import __version__
from ..console import print_error
from ..errors import ConfigError, DCTError
from . import config


class Forward(typer.core.TyperCommand):
    """Leaves every argument, also ``--`` and ``--help``, to another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return args


__all__ = ["COMMANDS", "LazyCommand", "app", "main"]

app = typer.Typer(
    name="dct",
    help="Dynamic Communication Thresholding for distributed training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class LazyCommand(NamedTuple):
    """A command whose module is imported only when it runs.

    Attributes:
        name: Word of the command line.
        help: Line of ``dct --help``.
        load: Imports and returns a function with typer annotations, or a ``typer.Typer``.
        needs: Top-level modules that must be installed.
        extra: Extra of the plugin that brings them.
    """

    name: str
    help: str
    load: Callable[[], Any]
    needs: tuple[str, ...] = ()
    extra: str | None = None


COMMANDS: list[LazyCommand] = []

_DEMO = ("deepspeed", "sklearn", "matplotlib")
_Load = Callable[[], Any]


def _command(help: str, needs: tuple[str, ...] = (), extra: str | None = None) -> Callable[[_Load], _Load]:
    """Register a command that the decorated function imports, by the name of the function."""

    def register(load: _Load) -> _Load:
        entry = LazyCommand(load.__name__.strip("_").replace("_", "-"), help, load, needs, extra)
        COMMANDS.append(entry)

        @app.command(entry.name, cls=Forward, help=help)
        def forward(context: typer.Context) -> None:
            _run(entry, context.args)

        return load

    return register


@_command("List installed versions and kernels, and say whether the plugin is active.")
def _doctor() -> Any:
    from .doctor import doctor

    return doctor


@_command("Add the residuals of a DeepSpeed checkpoint to the universal checkpoint made from it.")
def _universal() -> Any:
    from .universal import universal

    return universal


@_command("Measure some dense steps of a job, and predict its step time with every setting.")
def _advise() -> Any:
    from .advise import advise

    return advise


@_command("Show what a run saved, from its metrics files, and write it as an HTML page.")
def _report() -> Any:
    from .report import report

    return report


@_command("Make a Megatron launch script start its training with the plugin, or undo this.")
def _patch_launch() -> Any:
    from ..integrations.megatron.patch.command import app

    return app


@_command(
    "Train a recommender on real data on two local ranks, dense and with DCT, and compare.", _DEMO, "demo"
)
def _demo() -> Any:
    from ..recommender.commands.demo import demo

    return demo


@_command(
    "Train recommenders with sharded embedding tables, and compare configurations.",
    _DEMO,
    "demo",
)
def _dlrm() -> Any:
    from ..recommender.commands.dlrm import dlrm

    return dlrm


def _missing(entry: LazyCommand, modules: list[str]) -> typer.Exit:
    what = f"'dct-plugin[{entry.extra}]'" if entry.extra else " ".join(modules)
    print_error(f"dct {entry.name} needs {', '.join(modules)}, not installed here: pip install {what}")
    return typer.Exit(1)


def command_of(entry: LazyCommand) -> Any:
    """Return the command behind an entry, as typer runs it."""
    command = entry.load()
    if not isinstance(command, typer.Typer):
        function, command = command, typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        command.command(entry.name, help=entry.help)(function)
    return typer.main.get_command(command)


def _run(entry: LazyCommand, arguments: list[str]) -> None:
    """Run the command behind an entry, or exit and say what has to be installed; its help needs nothing."""
    missing = [module for module in entry.needs if importlib.util.find_spec(module) is None]
    if missing and "--help" not in arguments:
        raise _missing(entry, missing)
    try:
        command_of(entry).main(args=arguments, prog_name=f"dct {entry.name}")
    except ModuleNotFoundError as error:
        name = error.name or str(error)
        if name.partition(".")[0] == "dct_plugin":  # an incomplete installation is to be seen in full
            raise
        raise _missing(entry, [name]) from error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dct-plugin {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.add_typer(config.app, name="config")


def main() -> None:
    """Entry point: errors that the plugin raises on purpose are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Latin-1 terminal has no lines of tables
            stream.reconfigure(errors="replace")
    try:
        app()
    except DCTError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
