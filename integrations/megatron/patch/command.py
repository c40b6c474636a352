"""``dct patch-launch``: put the plugin into a launch script, and take it out again.

The only edit is one insertion before the training script of each launch command,

    torchrun ${ARGS[@]} train.py ...  ->  torchrun ${ARGS[@]} -m dct_plugin.megatron train.py ...

so that taking it out again gives back the original byte for byte.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dct_plugin.console import print_error
from dct_plugin.errors import ConfigError

from .launches import MODULE, TRAINING, Launch, Launches, find_launches
from .shell import LaunchError

#: What the name of the copy ends with that stays of a script changed in place.
BACKUP = ".dct-orig"
#: Bytes of the largest file that is taken for a shell script.
LARGEST = 10**6

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

_HELP = """\
Make a Megatron launch script start its training with the plugin, or undo this.

The only edit is one insertion, -m dct_plugin.megatron, before the training script of each launch. \
A launch that is not understood is an error that names its line, and nothing is changed. \
Jobs of DeepSpeed, Accelerate and Hugging Face's Trainer are left alone; a note says what to do instead."""


def patch(
    text: str, *, config: str | None = None, scripts: Sequence[str] = TRAINING, partial: bool = False
) -> tuple[str, Launches]:
    """Return the text with the plugin in every training launch; a launch that has it stays as it is.

    Args:
        text: A shell script.
        config: Path for ``--dct-config``, written as given; ``None`` leaves what is there.
        scripts: File name patterns of training scripts.
        partial: Edit what is understood even if something else is not.

    Raises:
        LaunchError: A launch is not understood, or there is none.
    """
    if config is not None and not re.fullmatch(r"[\w./${}:@%+,=~-]+", config):
        raise LaunchError(f"--config {config!r}: write a path without blanks and special characters")
    found = find_launches(text, scripts)
    if found.errors and not partial:
        rest = "\n--partial patches the rest" if found.training else ""
        raise LaunchError("\n".join([*found.errors, *found.notes]) + rest)
    if not found.training:
        raise LaunchError("\n".join(["no launch of a training script found", *found.notes, *found.errors]))
    edits = []
    for launch in found.training:
        if launch.removal is None:
            edits.append((launch.place, launch.place, _insertion(launch, config)))
        elif config is not None and launch.config != config:
            edits.append((*launch.removal, _insertion(launch, config)))
    patched = _edited(text, edits)
    # The grammar may see other launches behind an edit near a syntax error.
    if revert(patched) != _edited(text, [(*x.removal, "") for x in found.training if x.removal]):
        raise LaunchError(f"line {found.training[0].line}: near this launch the syntax is not understood")
    return patched, found


def revert(text: str) -> str:
    """Return the text without the plugin.

    Raises:
        LaunchError: The text nests too deep.
    """
    return _edited(text, [(*launch.removal, "") for launch in find_launches(text).training if launch.removal])


def _edited(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    parts, done = [], 0
    for start, end, new in sorted(edits):
        parts += [text[done:start], new]
        done = end
    return "".join([*parts, text[done:]])


def _insertion(launch: Launch, config: str | None) -> str:
    option = f"--dct-config {config} " if config is not None else ""
    return f"{MODULE} {option}-m " if launch.joined else f"-m {MODULE} {option}"


def _read(path: Path) -> str:
    """Return the text of a regular file; bytes that are no UTF-8 survive :func:`_write`."""
    try:
        if path.exists() and not path.is_file():  # a FIFO would wait for a writer
            raise LaunchError(f"{path}: not a regular file")
        if path.stat().st_size > LARGEST:
            raise LaunchError(f"{path}: more than {LARGEST:,} bytes, too large for a launch script")
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror or error}") from error


def _write(path: Path, text: str, like: Path) -> None:
    """Replace a regular file, or the one a link leads to, in one step, with the permissions of another."""
    try:
        if path.exists() and not path.is_file():
            raise LaunchError(f"{path}: not a regular file")
        target = path.resolve()
        with tempfile.TemporaryDirectory(prefix=".dct-", dir=target.parent) as folder:
            temporary = Path(folder, target.name)
            temporary.write_bytes(text.encode("utf-8", "surrogateescape"))
            temporary.chmod(like.stat().st_mode & 0o7777)
            os.replace(temporary, target)
    except OSError as error:
        raise LaunchError(f"{path}: cannot be written: {error.strerror or error}") from error


@app.command(help=_HELP, epilog="Exit status: 0; 1 where --check finds something to change; 2 for an error.")
def patch_launch(
    script: Annotated[
        Path, typer.Argument(help="Shell script that launches a training.", show_default=False)
    ],
    config: Annotated[
        str | None,
        typer.Option(
            help="File for --dct-config, written as given. Without it the job has to bring DCT_CONFIG or "
            "--dct- options."
        ),
    ] = None,
    scripts: Annotated[
        list[str] | None,
        typer.Option("--script", help="Further training scripts, by file name or pattern; repeatable."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Edit the other launches if one cannot be parsed.")
    ] = False,
    undo: Annotated[bool, typer.Option("--revert", help="Undo the edit.")] = False,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help=f"Change the file; the original stays as SCRIPT{BACKUP}. By default a diff is printed.",
        ),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the changed script to another file.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if there is something to change.")
    ] = False,
) -> None:
    """Run the command; its help is ``_HELP``."""
    try:
        if sum((in_place, output is not None, check)) > 1:
            raise LaunchError("only one of --in-place, --output and --check can be given")
        if undo and config is not None:
            raise LaunchError("--revert takes no --config")
        if config is not None and "$" not in config and not config.startswith("~"):
            from dct_plugin.config import DCTConfig

            _read(Path(config))
            DCTConfig.from_file(config)  # a wrong one is refused here, before the job
        backup = script.with_name(script.name + BACKUP)
        before = _read(script)
        original = _read(backup) if backup.exists() else None
        if output is not None and output.exists() and output.samefile(script):
            raise LaunchError(f"{output}: --output names the script itself; --in-place changes it")
        if output is not None and original is not None and output.exists() and output.samefile(backup):
            raise LaunchError(f"{output}: --output names the backup of {script}, which would be lost")
        try:
            if undo:
                after, found = revert(before), find_launches(before)
                if original is not None and revert(original) == after:
                    after = original  # which may have had the plugin in some launches
            else:
                after, found = patch(
                    before, config=config, scripts=(*TRAINING, *(scripts or ())), partial=partial
                )
        except LaunchError as error:
            raise LaunchError(f"{script}: " + str(error).replace("\nline ", f"\n{script}: line ")) from error
        if in_place and not undo and before != after and original is None:
            _write(backup, before, like=script)
        if in_place or output is not None:
            _write(output or script, after, like=script)
        if in_place and undo and original == after:
            backup.unlink()
    except (LaunchError, ConfigError) as error:
        print_error(error)
        raise typer.Exit(2) from error
    changed = before != after
    if changed and not (check or in_place or output):
        typer.echo(_diff(script, before, after), nl=False)
    notes = [*found.notes, *(f"left as it is: {error}" for error in found.errors)]
    if not undo and config is None and changed:
        notes.append("no --config: the job needs DCT_CONFIG, or --dct- options among the script's arguments")
    for line in (_summary(found.training, changed, undo, done=in_place or output is not None), *notes):
        typer.echo(f"{script}: {line}", err=True)
    if check and changed:
        raise typer.Exit(1)


def _summary(launches: Sequence[Launch], changed: bool, undo: bool, *, done: bool) -> str:
    """Say what was or would be changed, by number and lines."""
    present = [launch for launch in launches if launch.removal]
    new = [launch for launch in launches if not launch.removal]
    if not changed:
        return "nothing to change, " + (
            "no launch starts the plugin" if undo else "every training launch starts the plugin already"
        )
    chosen = present if undo or not new else new
    lines = ", ".join(str(launch.line) for launch in chosen[:10]) + (", ..." if len(chosen) > 10 else "")
    number = f"1 launch (line {lines})" if len(chosen) == 1 else f"{len(chosen)} launches (lines {lines})"
    what = "without the plugin" if undo else "with the plugin" if new else "with another --dct-config"
    return f"{number} {what}" + (
        "" if done else "; nothing is written, --in-place or --output FILE writes it"
    )


def _diff(script: Path, before: str, after: str) -> str:
    old, new = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{script}", f"b/{script}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
