"""``dct patch-launch``: put the plugin into a launch script, and take it out again.

The only edit is one insertion before the training script of each launch command,

    torchrun ${ARGS[@]} train.py ...  ->  torchrun ${ARGS[@]} -m dct_plugin.megatron train.py ...

so that taking it out again gives back the original byte for byte.
"""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dct_plugin.console import print_error
from dct_plugin.errors import ConfigError

from .launches import INSERTION, MODULE, Launches, find_launches
from .shell import LaunchError

#: What the name of the copy ends with that stays of a script changed in place.
BACKUP = ".dct-orig"
#: Bytes of the largest file that is taken for a shell script.
LARGEST = 10**6

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


def patch(
    text: str,
    *,
    config: str | None = None,
    scripts: Sequence[str] | None = None,
    partial: bool = False,
    force: bool = False,
    folder: Path | None = None,
) -> tuple[str, Launches]:
    """Return the text with the plugin in every training launch of Megatron's; one that has it stays as it is.

    Args:
        text: A shell script.
        config: Path for ``--dct-config``, written as given; ``None`` leaves what is there.
        scripts: File name patterns of further training scripts.
        partial: Edit what is understood even if something else is not.
        force: Edit training launches that do not say that they are Megatron's.
        folder: Folder from which the script starts Python scripts, which are looked at if they are there.

    Raises:
        LaunchError: A launch is not understood, there is none, or the patched text would be read in another
            way, which happens where a quote or a bracket is open.
    """
    if config is not None and not re.fullmatch(r"[\w./${}:@%+,=~-]+", config):
        raise LaunchError(f"--config {config!r}: write a path without blanks and special characters")

    def imports(name: str) -> bool:
        return folder is not None and _imports_megatron(folder / name)

    found = find_launches(text, scripts or (), force=force, imports=imports)
    if found.errors and not partial:
        rest = "\n--partial patches the rest" if found.training else ""
        raise LaunchError("\n".join([*found.errors, *found.notes]) + rest)
    if not found.training:
        raise LaunchError("\n".join(["no launch of a training script found", *found.notes, *found.errors]))
    new = f"-m {MODULE} " if config is None else f"-m {MODULE} --dct-config {config} "
    patched, end = "", len(text)
    for launch in reversed(found.training):
        start, stop = launch.removal or (launch.place, launch.place)
        kept = launch.removal and (config is None or f"--dct-config {config} " in text[start:stop])
        patched = (text[start:stop] if kept else new) + text[stop:end] + patched
        end = start
    patched = text[:end] + patched
    reread = find_launches(patched, scripts or ()).training
    if len(reread) != len(found.training) or not all(launch.removal for launch in reread):
        # Revert would be right, but a second run would edit the script again.
        first = next((x.line for x in reread if not x.removal), found.training[0].line)
        raise LaunchError(f"line {first}: is a quote or a bracket open? With the plugin it reads otherwise")
    return patched, found


def revert(text: str) -> str:
    """Return the text without the plugin."""
    return INSERTION.sub("", text)


def _imports_megatron(path: Path) -> bool:
    try:
        return re.search(r"^\s*(?:from|import)\s+megatron\b", _read(path), re.MULTILINE) is not None
    except (LaunchError, OSError, ValueError):
        return False


def _read(path: Path) -> str:
    """Return the text of a regular file; bytes that are no UTF-8 survive being written again."""
    if path.exists() and not path.is_file():  # a FIFO would wait for a writer
        raise LaunchError(f"{path}: not a regular file")
    if path.stat().st_size > LARGEST:
        raise LaunchError(f"{path}: more than {LARGEST:,} bytes, too large for a launch script")
    return path.read_bytes().decode("utf-8", "surrogateescape")


@app.command(epilog="Exit status: 0; 1 where --check finds something to change; 2 for an error.")
def patch_launch(
    script: Annotated[
        Path, typer.Argument(help="Shell script that launches a training.", show_default=False)
    ],
    config: Annotated[
        str | None,
        typer.Option(help="File for --dct-config, written as given; else the job has to bring DCT_CONFIG."),
    ] = None,
    scripts: Annotated[
        list[str] | None,
        typer.Option("--script", help="Further training scripts, by file name or pattern; repeatable."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Edit the other launches if one cannot be parsed.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Edit training launches that do not say that they are Megatron's.")
    ] = False,
    undo: Annotated[bool, typer.Option("--revert", help="Undo the edit.")] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help=f"Change the file; the original stays as SCRIPT{BACKUP}.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if there is something to change.")
    ] = False,
) -> None:
    """Make a Megatron launch script start its training with the plugin, or undo this.

    The only edit is one insertion, -m dct_plugin.megatron, before the training script of each launch.
    A launch that is not understood is an error that names its line, and nothing is changed.
    A launch is Megatron's by its script, options, path or imports. Jobs of DeepSpeed, Accelerate, ray and
    Hugging Face's Trainer are left alone; a note says what to do instead.
    """
    said: list[str] = []
    try:
        before, original = _read(script), _original(script)
        if undo:
            after = revert(before)
            if original is not None and revert(original) == after:
                after = original  # which may have had the plugin in some launches
        else:
            _check_section(config)
            after, found = patch(
                before, config=config, scripts=scripts, partial=partial, force=force, folder=script.parent
            )
            said += found.in_words()
            if config is None and before != after:
                said.append("no --config: the job needs DCT_CONFIG, or --dct among the script's arguments")
        if in_place and not check and before != after:
            _write(script, after, original, undo=undo)
    except (LaunchError, ConfigError, OSError) as error:
        print_error("\n".join(x if str(script) in x else f"{script}: {x}" for x in str(error).split("\n")))
        raise typer.Exit(2) from error
    if before == after:
        said.insert(0, "nothing to change")
    elif not (in_place or check):
        typer.echo(_diff(script, before, after), nl=False)
        said.insert(0, "nothing is written; --in-place writes it")
    typer.echo("".join(f"{script}: {line}\n" for line in said), nl=False, err=True)
    raise typer.Exit(int(check and before != after))


def _check_section(config: str | None) -> None:
    """Refuse a wrong configuration before the job does; one whose path depends on the job comes later."""
    if config is not None and "$" not in config and not config.startswith("~"):
        from dct_plugin.config import DCTConfig

        if Path(config).exists():
            _read(Path(config))
        DCTConfig.from_file(config)


def _backup(script: Path) -> Path:
    return script.with_name(script.name + BACKUP)


def _original(script: Path) -> str | None:
    """Return what a script was before it was changed in place; None if it was not."""
    return _read(_backup(script)) if _backup(script).exists() else None


def _write(script: Path, text: str, original: str | None, *, undo: bool) -> None:
    """Change a script in place. A copy of the original stays beside it until the script is the same again."""
    if not undo and original is None:
        shutil.copy2(script, _backup(script))
    script.write_bytes(text.encode("utf-8", "surrogateescape"))
    if undo and original == text:
        _backup(script).unlink()


def _diff(script: Path, before: str, after: str) -> str:
    old, new = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{script}", f"b/{script}")
    return "".join(x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines)
