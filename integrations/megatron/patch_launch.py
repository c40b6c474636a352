"""``dct patch-launch``: have a shell script start its training through ``python -m dct_plugin.megatron``.

The only edit is one insertion before the training script of each launch command,

    torchrun ${ARGS[@]} pretrain_gpt.py ...  ->  torchrun ${ARGS[@]} -m dct_plugin.megatron pretrain_gpt.py
    ...

so that taking it out again gives back the original byte for byte. Launch commands are found by their words,
not by lines: in continuation lines, arrays, ``sh -c`` strings, variables and here-documents.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from dct_plugin.errors import ConfigError, DCTError

from . import shell
from .shell import Command, ShellError, Word

__all__ = ["MODULE", "TRAINING", "Launch", "LaunchError", "Plan", "patch", "patch_launch", "plan", "revert"]

MODULE = "dct_plugin.megatron"
BACKUP = ".dct-orig"

#: File names that train; others (tools, text generation, checkpoint conversion) are left alone.
TRAINING = (
    "pretrain*.py",
    "*_pretrain.py",
    "train*.py",
    "*_train.py",
    "finetune*.py",
    "*_finetune.py",
    "sft*.py",
)

Kind = Literal["python", "torchrun", "deepspeed", "variable"]

_TORCHRUN = ("torchrun", "ft_launcher")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?$")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options by launcher, with - for _: those that take a value, and those that take none.
_OPTIONS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "torchrun": (
        _set(
            "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts "
            "--monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee "
            "--local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank "
            "--master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle"
        ),
        _set("--standalone --use-env --virtual-local-rank --run-path --"),
    ),
    "deepspeed": (
        _set(
            "-H --hostfile -i --include -e --exclude --num-nodes --num-gpus --num-accelerators --master-port "
            "--master-addr --node-rank --launcher --launcher-args --enable-each-rank-log --autotuning "
            "--elastic-training --min-elastic-nodes --max-elastic-nodes --bind-core-list --ssh-port "
            "--venv-script --log-level"
        ),
        _set(
            "--no-local-rank --no-ssh --no-ssh-check --force-multi --save-pid --bind-cores-to-rank -q --quiet"
        ),
    ),
    "python": (_set("-W -X --check-hash-based-pycs"), frozenset()),
}

# Commands that may name a launcher or a training script without starting it.
_HARMLESS = _set(
    ". [ [[ alias awk basename cat cd chmod command conda cp diff dirname echo export file find git grep "
    "head kill ln ls mkdir module mv pgrep pip pip3 pkill popd printf ps pushd readlink realpath rm rsync "
    "sed sha256sum source spack stat tail test touch type unset vi vim wc which"
)
_KEYWORDS = _set("if then else elif do while until ! { time exec sudo")
_DECLARE = _set("export local declare readonly typeset")

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[^]]*\])?\}|(\w+))$")
_DEFAULTED = re.compile(r"\$\{\w+:?[-=](.*)\}$", re.DOTALL)
_SCRIPT_NAME = re.compile(r"SCRIPT|ENTRY_?POINT|PROGRAM|TRAIN(ER|_FILE|_PY)|PRETRAIN", re.IGNORECASE)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=")
_OPTION_LEFT = re.compile(r"(?<!\S)--dct-[\w-]+")


class LaunchError(DCTError):
    """A script holds a launch that is not understood; the message names the line."""


class Launch(NamedTuple):
    """A command that starts Python on a script.

    ``place`` is where the insertion goes, before the script (or the module) and ``line`` its line, from 1.
    ``removal`` is the span to take out when the command starts the plugin already, else ``None``, and
    ``present`` the text there. ``trains`` is False for scripts that are none of the wanted ones.
    """

    kind: Kind
    script: str
    is_module: bool
    place: int
    line: int
    in_string: bool
    trains: bool
    removal: tuple[int, int] | None = None
    present: str = ""


class Plan(NamedTuple):
    """What was found in a script: launches, remarks for the user, and faults that forbid an edit."""

    launches: list[Launch]
    notes: list[str]
    faults: list[str]

    @property
    def training(self) -> list[Launch]:
        """Launches of training scripts."""
        return [launch for launch in self.launches if launch.trains]


def patch(
    text: str, *, config: str | None = None, scripts: Sequence[str] = TRAINING, partial: bool = False
) -> tuple[str, Plan]:
    """The text with the plugin in every training launch; unchanged where it is there already.

    Args:
        text: a shell script.
        config: path for ``--dct-config``, written as given; ``None`` leaves what is there.
        scripts: file name patterns of training scripts.
        partial: edit what is understood even if something else is not.

    Raises:
        LaunchError: a launch is not understood, or there is none.
    """
    found = plan(text, scripts)
    if found.faults and not partial:
        rest = "\n--partial patches the rest" if found.training else ""
        raise LaunchError("\n".join(found.faults) + rest)
    if not found.training:
        left = [f"{launch.script} (line {launch.line})" for launch in found.launches]
        raise LaunchError(
            "no launch of a training script found"
            + (f"; launched are {', '.join(left)}: name what is to be patched with --script" if left else "")
            + ("".join(f"\n{fault}" for fault in found.faults))
            + _handed_on(text)
        )
    result = text
    for launch in sorted(found.training, key=lambda launch: launch.place, reverse=True):
        start, end = launch.removal or (launch.place, launch.place)
        if launch.removal and (
            config is None or f"{MODULE} --dct-config {_word(config, launch)} " in launch.present
        ):
            continue
        result = result[:start] + _insertion(launch, config) + result[end:]
    return result, found


def _handed_on(text: str) -> str:
    """A hint at the scripts that a script without a launch starts or reads."""
    names = {
        word.text: None
        for command in shell.commands(text)
        for word in command.words
        if word.text.endswith(".sh") and not command.words[0].text.startswith(("rm", "echo", "chmod"))
    }
    return f"; it hands on to {', '.join(names)}: patch the script that launches" if names else ""


def revert(text: str) -> tuple[str, Plan]:
    """The text without the plugin, and what was found in it.

    Raises:
        LaunchError: the text does not follow the shell's grammar.
    """
    found = plan(text)
    result = text
    for launch in sorted(found.launches, key=lambda launch: launch.place, reverse=True):
        if launch.removal:
            result = result[: launch.removal[0]] + result[launch.removal[1] :]
    return result, found


def plan(text: str, scripts: Sequence[str] = TRAINING) -> Plan:
    """Find every launch in a script; changes nothing.

    Raises:
        LaunchError: the text does not follow the shell's grammar.
    """
    return _Finder(text, scripts).run()


def _insertion(launch: Launch, config: str | None) -> str:
    option = f"--dct-config {_word(config, launch)} " if config is not None else ""
    if launch.is_module:
        return f"{MODULE} {option}-m "
    flag = "--module" if launch.kind == "deepspeed" else "-m"
    return f"{flag} {MODULE} {option}"


def _word(config: str, launch: Launch) -> str:
    """A path as a shell word; one with variables is left for the script's shell to expand."""
    if re.fullmatch(r"[\w./${}:@%+,=~-]+", config):
        return config
    if launch.in_string:
        raise LaunchError(
            f"line {launch.line}: the launch stands inside a quoted string, where the path {config!r} cannot "
            "be written; use one without blanks and special characters"
        )
    return shlex.quote(config)


class _Found(NamedTuple):
    """A launcher's target: the word, and the flag before it where it is a module."""

    position: int
    is_module: bool
    flag: int | None


class _Finder:
    def __init__(self, text: str, scripts: Sequence[str]) -> None:
        self.text = text
        self.scripts = scripts
        self.values: dict[str, list[str]] = {}
        self.launches: dict[int, Launch] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []

    def run(self) -> Plan:
        found = self._all_commands()
        for command in found:
            self._remember(command)
        for command in found:
            self._look_at(command)
        launches = [self.launches[place] for place in sorted(self.launches)]
        for launch in launches:
            if not launch.trains:
                self._note(
                    launch.line, f"{launch.script} is not a training script: left alone (--script adds names)"
                )
        return Plan(launches, list(dict.fromkeys(self.notes)), list(dict.fromkeys(self.faults)))

    def _all_commands(self) -> list[Command]:
        try:
            outer = list(shell.commands(self.text))
        except ShellError as error:
            raise LaunchError(f"line {self._line(error.offset)}: {error}") from error
        result: list[Command] = []
        for command in outer:
            result.append(command)
            if not self._is_harmless(command):
                result += self._in_strings(command)
        return result

    def _in_strings(self, command: Command) -> Iterator[Command]:
        for word in command.words:
            if not any(" " in self.text[start:end] for start, end in word.quoted):
                continue
            try:
                yield from shell.inside(self.text, command, word)
            except ShellError as error:
                if self._names_launch(word.text):
                    self._fault(error.offset, f"a quoted command that is not understood ({error})")

    def _names_launch(self, text: str) -> bool:
        words = text.split()
        return any(_launcher(word) for word in words) and any(self._trains(word) for word in words)

    def _remember(self, command: Command) -> None:
        """Keep what is assigned to variables, to look through them later."""
        if command.name is not None and not command.in_string:  # an array
            self.values.setdefault(command.name, []).append(" ".join(word.text for word in command.words))
            return
        for word in command.words:
            match = _ASSIGNED.match(word.text)
            if match is None:
                if word.text not in _DECLARE:
                    return
                continue
            value = word.text[match.end() :]
            if default := _DEFAULTED.match(value):
                value = default[1]
            self.values.setdefault(match[1], []).append(value.strip("\"' \n"))

    def _look_at(self, command: Command) -> None:
        if self._is_harmless(command):
            return
        words = [word for word in command.words if not word.is_target]
        complaint: tuple[int, str] | None = None
        for position, word in enumerate(words):
            kind = self._kind(words, position)
            if kind is None:
                continue
            outcome = self._target(kind, words, position)
            if isinstance(outcome, _Found):
                self._add(kind, words, outcome, command)
                return
            held = match[1] or match[2] if (match := _VARIABLE.match(word.text)) else ""
            complete = any(
                self._is_script(part) for value in self.values.get(held, []) for part in value.split()
            )
            if outcome and complaint is None and not complete:
                complaint = (word.start, outcome)
            if kind == "python" and self._torchrun_at(words, position) is not None:
                break
        assigned = command.name is not None or _ASSIGNED.match(words[0].text) if words else False
        if complaint and not assigned:  # an assignment may be completed where the variable is used
            self._fault(*complaint)
        elif not complaint and not assigned and not command.in_string:
            for word in words[1:]:
                if (
                    self._trains(word.text)
                    and not word.text.startswith("-")
                    and not _ASSIGNED.match(word.text)
                ):
                    self._fault(
                        word.start,
                        f"{word.text} is given to {words[0].text}, which is no launcher known here",
                    )
                    return

    def _is_harmless(self, command: Command) -> bool:
        for word in command.words:
            if word.text not in _KEYWORDS:
                return word.text in _HARMLESS and word.text not in _DECLARE
        return False

    def _kind(self, words: Sequence[Word], position: int) -> Kind | None:
        """What kind of launcher stands here, also behind a variable in the place of a command."""
        text = words[position].text
        if kind := _launcher(text):
            return "torchrun" if kind == "python" and self._torchrun_at(words, position) is not None else kind
        if text == "-m" and position + 1 < len(words) and words[position + 1].text in _TORCHRUN_MODULES:
            return "torchrun"  # behind a tool that runs modules, e.g. a debugger
        match = _VARIABLE.match(text)
        first = all(_ASSIGNED.match(word.text) or word.text in _KEYWORDS for word in words[:position])
        if match is None or not first:
            return None
        name = match[1] or match[2]
        if kind := self._held_launcher(name):
            return kind
        if name not in self.values and re.search(r"LAUNCH|RUNNER|PYTHON", name, re.IGNORECASE):
            return "variable"
        return None

    def _held_launcher(self, name: str, depth: int = 0) -> Kind | None:
        """The launcher in a variable without a script; others are dealt with where they are assigned."""
        for value in self.values.get(name, []) if depth < 5 else []:
            parts = value.split()
            if any(self._is_script(part) for part in parts):
                continue
            for part in parts:
                kind = _launcher(part)
                if kind == "python" and any(module in parts for module in _TORCHRUN_MODULES):
                    return "torchrun"
                if kind:
                    return kind
            if parts and (match := _VARIABLE.match(parts[0])):
                return self._held_launcher(match[1] or match[2], depth + 1)
        return None

    def _torchrun_at(self, words: Sequence[Word], position: int) -> int | None:
        """Position of the module if this ``python`` runs torch's launcher."""
        for place in range(position + 1, len(words)):
            text = words[place].text
            if text in _TORCHRUN_MODULES and re.fullmatch(r"-[a-zA-Z]*m", words[place - 1].text):
                return place
            if not text.startswith("-"):
                return None
        return None

    def _target(self, kind: Kind, words: Sequence[Word], position: int) -> _Found | str:
        """The script or module that a launcher starts, else what is wrong; "" if it is none of ours."""
        place = position + 1
        if kind == "torchrun":
            module = self._torchrun_at(words, position)
            if module is None and words[position].text == "-m":
                module = position + 1
            place = place if module is None else module + 1
        spelled = words[position].text if place == position + 1 else words[place - 1].text
        with_value, without = _OPTIONS.get(
            "python" if kind == "variable" else kind, (frozenset(), frozenset())
        )
        skipped: list[str] = []
        while place < len(words):
            text = words[place].text
            option = text.partition("=")[0].replace("_", "-") if text.startswith("--") else text
            if option == "--no-python" and kind in ("torchrun", "deepspeed"):
                rest = next(
                    (at for at in range(place, len(words)) if _launcher(words[at].text) == "python"), None
                )
                return (
                    self._target("python", words, rest)
                    if rest
                    else f"{spelled} with {text}, but no python behind it"
                )
            if option in ("-m", "--module") or (
                kind == "python" and re.fullmatch(r"-[bBdEiIOPqsSuvx]+m", text)
            ):
                if place + 1 < len(words):
                    return _Found(place + 1, True, place)
                return f"{spelled} with {text}, but no module"
            if kind == "python" and text.startswith("-c"):
                return ""
            if text.startswith("-"):
                if "=" in text or option in without or (kind == "python" and option not in with_value):
                    place += 1
                elif option in with_value:
                    place += 2
                elif kind == "variable":
                    return ""
                else:
                    seen = f" (behind {', '.join(skipped)})" if skipped else ""
                    return f"{spelled}: no script found before {text}{seen}"
                continue
            if self._is_script(text):
                return _Found(place, False, None)
            if _VARIABLE.match(text) or re.fullmatch(r"\$[@*]|\$\{[^}]*\}|\$\(.*\)|`.*`", text, re.DOTALL):
                skipped.append(text)  # the launcher's own arguments
                place += 1
                continue
            if kind in ("python", "variable"):
                return ""
            return f"{spelled}: {text} is neither an option nor a Python script"
        if kind in ("python", "variable"):
            return ""
        return f"{spelled}: no script found" + (f" (is it in {' or '.join(skipped)}?)" if skipped else "")

    def _is_script(self, text: str) -> bool:
        return bool(self._script_names(text))

    def _script_names(self, text: str, depth: int = 0) -> list[str]:
        """File names that a word may stand for; a variable that is set elsewhere may say so by its name."""
        text = text.strip("\"'")
        if text.startswith("-") or depth > 5:
            return []
        if text.endswith(".py"):
            return [os.path.basename(text)]
        match = _VARIABLE.search(text)
        if match is None or (match.start() and text[match.start() - 1] != "/"):
            return []
        name = match[1] or match[2]
        if name not in self.values:
            return (
                [f"${name}"] if _SCRIPT_NAME.search(name) and not re.search(r"DIR|PATH_TO|ARGS", name) else []
            )
        firsts = (value.split()[0] for value in self.values[name] if value.split())
        return [found for first in firsts for found in self._script_names(first, depth + 1)]

    def _trains(self, text: str, *, is_module: bool = False) -> bool:
        if is_module:
            names = [part + ".py" for part in text.split(".")[-2:]]
        else:
            names = self._script_names(text)
        full = text.strip("\"'")
        return any(
            name.startswith("$") or fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(full, pattern)
            for name in names
            for pattern in self.scripts
        )

    def _add(self, kind: Kind, words: Sequence[Word], found: _Found, command: Command) -> None:
        target = words[found.position]
        removal, present = None, ""
        is_module = found.is_module
        script = target
        if is_module and target.text == MODULE:
            place = found.position + 1
            while place + 1 < len(words) and words[place].text.startswith("--dct-"):
                place += 1 if "=" in words[place].text else 2
            if place >= len(words):
                self._fault(target.start, f"{MODULE} without a script behind it")
                return
            script = words[place]
            is_module = script.text in ("-m", "--module")
            if is_module and place + 1 < len(words):
                script = words[place + 1]
            assert found.flag is not None
            removal = (target.start if is_module else words[found.flag].start, script.start)
            present = self.text[slice(*removal)]
        name = script.text.strip("\"'")
        line = self._line(script.start)
        trains = removal is not None or self._trains(script.text, is_module=is_module)
        if kind == "python" and not trains:
            return  # preprocessing and the like
        if trains and kind == "variable" and removal is None:
            launcher = words[0].text
            self._note(
                line,
                f"{launcher} is set elsewhere: -m is right if it is python or torchrun, not for deepspeed",
            )
        place = removal[0] if removal else script.start
        in_string = command.in_string
        self.launches[place] = Launch(kind, name, is_module, place, line, in_string, trains, removal, present)

    def _line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def _note(self, line: int, what: str) -> None:
        self.notes.append(f"line {line}: {what}")

    def _fault(self, offset: int, what: str) -> None:
        self.faults.append(f"line {self._line(offset)}: {what}")


def _launcher(text: str) -> Kind | None:
    name = text.strip("\"'").rsplit("/", 1)[-1]
    if name in _TORCHRUN:
        return "torchrun"
    if name == "deepspeed":
        return "deepspeed"
    return "python" if _PYTHON.match(name) else None


def patch_launch(
    script: Annotated[
        Path, typer.Argument(help="Shell script that launches a training.", show_default=False)
    ],
    config: Annotated[
        str | None,
        typer.Option(
            help="File for --dct-config. Without it the job has to bring DCT_CONFIG or --dct- options."
        ),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help=f"Change the file; a copy stays as SCRIPT{BACKUP}.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the changed script here.")] = None,
    undo: Annotated[bool, typer.Option("--revert", help="Take the plugin out again.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if there is something to change.")
    ] = False,
    scripts: Annotated[
        list[str] | None,
        typer.Option("--script", help="Further training scripts, by file name or pattern; repeatable."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Patch what is understood, and leave the rest.")
    ] = False,
) -> None:
    """Have a launch script start its training with the plugin. Prints a unified diff and changes nothing by
    default.

    Exits with 2, changing nothing, if a launch is not understood; the line is named.
    """
    from dct_plugin.cli import print_error

    try:
        if sum((in_place, output is not None, check)) > 1:
            raise LaunchError("only one of --in-place, --output and --check can be given")
        if undo and config is not None:
            raise LaunchError("--revert takes no --config")
        _check_config(config)
        before = _read(script)
        if undo:
            after, found = _reverted(script, before)
            for line in _left_options(after):
                found.notes.append(line)
        else:
            after, found = patch(
                before, config=config, scripts=(*TRAINING, *(scripts or ())), partial=partial
            )
            found.notes.extend(f"left as it is: {fault}" for fault in found.faults)
            if not check:
                found.notes.extend(_about_config(config, after))
        _write_or_show(script, before, after, in_place=in_place, output=output, check=check, undo=undo)
    except (LaunchError, ConfigError) as error:
        print_error(f"{script}: {error}" if isinstance(error, LaunchError) else error)
        raise typer.Exit(2) from error
    for note in found.notes:
        typer.echo(f"{script}: {note}", err=True)
    if check and before != after:
        raise typer.Exit(1)


def _about_config(config: str | None, after: str) -> Iterator[str]:
    """What the job still needs."""
    if config is not None:
        if not config.startswith(("/", "~", "$")):
            yield f"{config} is looked up from the folder in which the job runs"
    elif any("--dct-" not in launch.present for launch in plan(after).training):
        yield "no --config: the job needs DCT_CONFIG, or --dct- options among the script's arguments"


def _check_config(config: str | None) -> None:
    """Have a wrong configuration show up here, not in the job; paths with variables are not read."""
    if config is None or "$" in config or config.startswith("~"):
        return
    from dct_plugin.config import DCTConfig

    DCTConfig.from_file(config)


def _write_or_show(
    script: Path, before: str, after: str, *, in_place: bool, output: Path | None, check: bool, undo: bool
) -> None:
    if before == after:
        state = "does not start the plugin" if undo else "starts the plugin already"
        typer.echo(f"{script}: {state}; nothing to change", err=True)
    if output is not None:
        _write(output, after, like=script)
        typer.echo(f"wrote {output}", err=True)
    elif before == after:
        return
    elif in_place:
        backup = script.with_name(script.name + BACKUP)
        if undo:
            _write(script, after, like=script)
            if backup.is_file() and _read(backup) == after:
                backup.unlink()
                typer.echo(f"{script}: as it was; removed {backup}", err=True)
            else:
                typer.echo(f"{script}: reverted", err=True)
        else:
            kept = _keep(backup, before, like=script)
            _write(script, after, like=script)
            typer.echo(f"{script}: patched; original in {kept}", err=True)
    elif check:
        typer.echo(
            f"{script}: {'starts' if undo else 'does not start'} the plugin in every training launch",
            err=True,
        )
    else:
        sys.stdout.write("".join(_diff(script, before, after)))
        sys.stdout.flush()


def _reverted(script: Path, before: str) -> tuple[str, Plan]:
    """The original: the backup where patching it gives this file, else the file without the insertions."""
    after, found = revert(before)
    backup = script.with_name(script.name + BACKUP)
    if backup.is_file() and after != (original := _read(backup)):
        presents = {launch.present for launch in found.launches if launch.removal}
        configs = {shlex.split(text)[-1] if "--dct-config" in text else None for text in presents}
        for config in configs:
            try:
                if patch(original, config=config, partial=True)[0] == before:
                    return original, found
            except LaunchError:
                continue
        found.notes.append(f"{backup} is the original of another state of this file; it was not used")
    return after, found


def _left_options(text: str) -> Iterable[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.lstrip().startswith("#") and (match := _OPTION_LEFT.search(line)):
            yield f"line {number}: {match[0]} was not put there by this command; Megatron does not know it"


def _keep(backup: Path, content: str, *, like: Path) -> Path:
    """Write a backup; an older one of another content is kept, too."""
    number = 0
    place = backup
    while place.exists() and _read(place) != content:
        number += 1
        place = backup.with_name(f"{backup.name}.{number}")
    _write(place, content, like=like)
    return place


def _diff(script: Path, before: str, after: str) -> Iterator[str]:
    old, new = (re.split(r"(?<=\n)", text) for text in (before, after))
    lines = difflib.unified_diff([x for x in old if x], [x for x in new if x], f"a/{script}", f"b/{script}")
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _read(path: Path) -> str:
    # Bytes that are no UTF-8, and line ends of any kind, come back as they were.
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise LaunchError(f"cannot be read: {error.strerror or error}") from error


def _write(path: Path, text: str, *, like: Path) -> None:
    """Replace a file in one step, with the permissions of another."""
    try:
        mode = stat.S_IMODE(like.stat().st_mode)
        target = path.resolve()
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode("utf-8", "surrogateescape"))
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror or error}") from error
