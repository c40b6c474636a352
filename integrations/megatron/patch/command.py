"""``dct patch-launch``: the command line around :func:`patch` and :func:`revert`."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dct_plugin.console import print_error
from dct_plugin.errors import ConfigError

from . import files
from .edit import patch, revert
from .finder import Launch, LaunchError, Launches, find_launches
from .launchers import TRAINING

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

_OPTION_LEFT = re.compile(r"(?<!\S)--dct-[\w-]+")
_WHAT, _WHERE = "What to change", "Where to (by default a unified diff is printed and nothing is changed)"

_Script = Annotated[Path, typer.Argument(help="Shell script that launches a training.", show_default=False)]
_Config = Annotated[
    str | None,
    typer.Option(
        help="File for --dct-config, written as given. Without it the job has to bring DCT_CONFIG or "
        "--dct- options.",
        rich_help_panel=_WHAT,
    ),
]
_Scripts = Annotated[
    list[str] | None,
    typer.Option(
        "--script",
        help="Further training scripts, by file name or pattern; repeatable.",
        rich_help_panel=_WHAT,
    ),
]
_Partial = Annotated[
    bool,
    typer.Option("--partial", help="Patch what is understood, and leave the rest.", rich_help_panel=_WHAT),
]
_Undo = Annotated[bool, typer.Option("--revert", help="Take the plugin out again.", rich_help_panel=_WHAT)]
_InPlace = Annotated[
    bool,
    typer.Option(
        "--in-place",
        help=f"Change the file; the original stays as SCRIPT{files.BACKUP}.",
        rich_help_panel=_WHERE,
    ),
]
_Output = Annotated[
    Path | None, typer.Option(help="Write the changed script to another file.", rich_help_panel=_WHERE)
]
_Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Write nothing; exit with 1 if there is something to change.", rich_help_panel=_WHERE
    ),
]

_HELP = """\
Have a launch script start its training with the plugin, or take that back.

The only edit is one insertion, -m dct_plugin.megatron, before the training script of each launch. \
A launch that is not understood is an error that names its line, and nothing is changed."""


class _Change(NamedTuple):
    """A script before and after, the launches in it, and remarks for the user."""

    before: str
    after: str
    found: Launches
    notes: list[str]


@app.command(help=_HELP, epilog="Exit status: 0; 1 where --check finds something to change; 2 for an error.")
def patch_launch(
    script: _Script,
    config: _Config = None,
    scripts: _Scripts = None,
    partial: _Partial = False,
    undo: _Undo = False,
    in_place: _InPlace = False,
    output: _Output = None,
    check: _Check = False,
) -> None:
    """Run the command; its help is ``_HELP``."""
    try:
        if sum((in_place, output is not None, check)) > 1:
            raise LaunchError("only one of --in-place, --output and --check can be given")
        if undo and config is not None:
            raise LaunchError("--revert takes no --config")
        _check_config(config)
        _check_output(script, output)
        before = files.read(script)
        try:
            if undo:
                change = _reverted(script, before)
            else:
                patterns = (*TRAINING, *(scripts or ()))
                change = _patched(before, config, patterns, partial=partial, for_job=not check)
        except LaunchError as error:
            raise LaunchError(f"{script}: " + str(error).replace("\nline ", f"\n{script}: line ")) from error
        changed = change.before != change.after
        said = _summary(change, undo, done=in_place or output is not None)
        if output is not None:
            files.write(output, change.after, like=script)
            said += f"; written to {output}"
        elif in_place and changed:
            said += _replace(script, change, undo=undo)
        elif changed and not check:
            sys.stdout.write("".join(_diff(script, change)))
            sys.stdout.flush()
            said += "; shown only, --in-place or --output FILE writes it"
    except (LaunchError, ConfigError) as error:
        print_error(error)
        raise typer.Exit(2) from error
    for line in (said, *change.notes):
        typer.echo(f"{script}: {line}", err=True)
    if check and changed:
        raise typer.Exit(1)


def _check_config(config: str | None) -> None:
    """Refuse a wrong configuration here, before the job; paths with variables are not read."""
    if config is None or "$" in config or config.startswith("~"):
        return
    from dct_plugin.config import DCTConfig

    files.require_regular(Path(config), "read")
    DCTConfig.from_file(config)


def _check_output(script: Path, output: Path | None) -> None:
    if output is None:
        return
    if files.same_file(output, script):
        raise LaunchError(
            f"{output}: --output names the script itself; --in-place changes it and keeps a copy"
        )
    if files.same_file(output, files.backup_of(script)):
        raise LaunchError(f"{output}: --output names the backup of {script}, which would be lost")


def _patched(
    before: str, config: str | None, patterns: Sequence[str], *, partial: bool, for_job: bool
) -> _Change:
    """Patch a script; ``for_job`` adds what the job still needs to the notes."""
    after, found = patch(before, config=config, scripts=patterns, partial=partial)
    notes = [*found.notes, *(f"left as it is: {error}" for error in found.errors)]
    return _Change(before, after, found, [*notes, *(_about_config(config, after) if for_job else ())])


def _reverted(script: Path, before: str) -> _Change:
    """Take the plugin out of a script.

    The original is the backup where patching it gives this file, else the file without the insertions.
    """
    after, found = revert(before)
    notes = list(_left_options(after))
    backup = files.backup_of(script)
    if backup.is_file() and after != (original := files.read(backup)):
        # Patching writes one path everywhere, or none.
        configs = {launch.config for launch in found.launches if launch.removal} - {None}
        for config in (None, *(configs if len(configs) == 1 else ())):
            with contextlib.suppress(LaunchError):
                if patch(original, config=config, partial=True)[0] == before:
                    return _Change(before, original, found, notes)
        notes.append(f"{backup} is the original of another state of this file; it was not used")
    return _Change(before, after, found, notes)


def _replace(script: Path, change: _Change, *, undo: bool) -> str:
    """Change the script itself; return what became of the backup."""
    backup = files.backup_of(script)
    if not undo:
        # Another configuration: the original is there already.
        kept = backup.is_file() and files.read(backup) == revert(change.before)[0]
        place = backup if kept else files.keep(script, change.before)
        files.write(script, change.after, like=script)
        return f"; the original is in {place}"
    files.write(script, change.after, like=script)
    if not backup.is_file() or files.read(backup) != change.after:
        return ""
    backup.unlink()
    return f"; the script is as it was, {backup} is removed"


def _summary(change: _Change, undo: bool, *, done: bool) -> str:
    """Say what was or would be changed, by number and lines."""
    if change.before == change.after:
        state = "no launch starts the plugin" if undo else "every training launch starts the plugin already"
        return f"nothing to change, {state}"
    patched = [launch for launch in change.found.training if launch.removal]
    new = [launch for launch in change.found.training if not launch.removal]
    if undo:
        return f"{_launches(patched)} {'reverted' if done else 'to revert'}"
    if new:
        return f"{_launches(new)} {'patched' if done else 'to patch'}"
    return f"{_launches(patched)} {'with' if done else 'to have'} another --dct-config"


def _launches(launches: Sequence[Launch], most: int = 10) -> str:
    lines = [str(launch.line) for launch in launches]
    shown = ", ".join(lines[:most]) + (", ..." if len(lines) > most else "")
    one = len(lines) == 1
    return f"{len(lines)} launch{'' if one else 'es'} (line{'' if one else 's'} {shown})"


def _about_config(config: str | None, after: str) -> Iterator[str]:
    """Say what the job still needs."""
    if config is not None:
        if not config.startswith(("/", "~", "$")):
            yield f"{config} is looked up from the folder in which the job runs"
    elif any("--dct-" not in launch.present for launch in find_launches(after).training):
        yield "no --config: the job needs DCT_CONFIG, or --dct- options among the script's arguments"


def _left_options(text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.lstrip().startswith("#") and (match := _OPTION_LEFT.search(line)):
            yield f"line {number}: {match[0]} was not put there by this command; Megatron does not know it"


def _diff(script: Path, change: _Change) -> Iterator[str]:
    old, new = (re.split(r"(?<=\n)", text) for text in (change.before, change.after))
    lines = difflib.unified_diff([x for x in old if x], [x for x in new if x], f"a/{script}", f"b/{script}")
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
