"""Find the launches in a shell script: in its commands, arrays, quoted strings, variables and here-documents.

Every word and every variable is looked at a bounded number of times: time is linear in the script's size.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dct_plugin.errors import DCTError

from . import launchers
from .launchers import (
    HARMLESS,
    KEYWORDS,
    PYTHON,
    SET_ELSEWHERE,
    TORCHRUN,
    TORCHRUN_MODULES,
    TRAINING,
    Launcher,
)
from .syntax import ASSIGNMENT, Command, Script, ShellError, Word
from .variables import Variables, variable_name

#: What a patched command runs.
MODULE = "dct_plugin.megatron"

_EXPANSION = re.compile(r"\$[@*]|\$\{[^}]*\}|\$\(.*\)|`.*`", re.DOTALL)
_LOOSE_WORD = re.compile(r"""[^\s;&|()<>"'`]+""")
_TORCHRUN_FLAG = re.compile(r"-[a-zA-Z]*m")


class LaunchError(DCTError):
    """A script holds a launch that is not understood, or a file is not fit for it; the message names the
    line.
    """


class Launch(NamedTuple):
    """A command that starts Python on a script.

    ``place`` is the offset of the insertion, before the script (or the module), and ``line`` its line, from
    1. ``removal`` is the span to take out when the command starts the plugin already, else ``None``,
    ``present`` the text there and ``config`` the path of its ``--dct-config``. ``trains`` is False for
    scripts that are none of the wanted ones.
    """

    launcher: Launcher
    script: str
    is_module: bool
    place: int
    line: int
    in_string: bool
    trains: bool
    removal: tuple[int, int] | None = None
    present: str = ""
    config: str | None = None


class Launches(NamedTuple):
    """The launches of a script and remarks about it.

    ``notes`` are remarks for the user, ``errors`` forbid an edit, and ``other_scripts`` are the shell scripts
    that it mentions.
    """

    launches: list[Launch]
    notes: list[str]
    errors: list[str]
    other_scripts: list[str]

    @property
    def training(self) -> list[Launch]:
        """The launches of training scripts."""
        return [launch for launch in self.launches if launch.trains]


def find_launches(text: str, scripts: Sequence[str] = TRAINING) -> Launches:
    """Find every launch in a script; changes nothing.

    Args:
        text: a shell script.
        scripts: file name patterns of training scripts.

    Raises:
        LaunchError: the text does not follow the shell's grammar, or nests too deep.
    """
    return _Finder(text, scripts).run()


class _Target(NamedTuple):
    """A launcher's target: the word, and the flag before it where it is a module."""

    position: int
    is_module: bool
    flag: int | None


class _Search:
    """The search for the scripts of the launchers in one command."""

    def __init__(self, words: Sequence[Word], variables: Variables) -> None:
        self.words = words
        self.variables = variables
        self._outcomes: dict[tuple[Launcher, int], _Target | str] = {}
        self._first = next((at for at, word in enumerate(words) if not _before_command(word)), len(words))
        self._pythons = [at for at, word in enumerate(words) if launchers.launcher(word.text) is PYTHON]

    def launcher(self, position: int) -> Launcher | None:
        """Return the launcher at a position, also one behind a variable in the place of a command."""
        text = self.words[position].text
        found = launchers.launcher(text)
        if text == "-m" and position + 1 < len(self.words):
            if self.words[position + 1].text in TORCHRUN_MODULES:
                return TORCHRUN  # behind a tool that runs modules, e.g. a debugger
        elif found is None and position <= self._first and (name := variable_name(text)):
            found = self.variables.launcher(name)
            if found is None and name not in self.variables.values and launchers.sounds_like_launcher(name):
                found = SET_ELSEWHERE
        if found is not None and found.runs_anything and self._torchrun_at(position) is not None:
            return TORCHRUN
        return found

    def target(self, launcher: Launcher, position: int) -> _Target | str:
        """Return the script or module that a launcher starts, else an error; "" if it is none of ours."""
        place = position + 1
        if launcher is TORCHRUN:
            module = position + 1 if self.words[position].text == "-m" else self._torchrun_at(position)
            place = place if module is None else module + 1
        return self._from(launcher, place, self.words[place - 1].text)

    def _from(self, launcher: Launcher, place: int, spelled: str) -> _Target | str:
        seen: list[int] = []
        outcome = self._scan_options(launcher, place, spelled, seen)
        self._outcomes.update(dict.fromkeys(((launcher, at) for at in seen), outcome))
        return outcome

    def _scan_options(self, launcher: Launcher, place: int, spelled: str, seen: list[int]) -> _Target | str:
        """Go through a launcher's options from ``place`` on; ``seen`` becomes the positions on the way."""
        skipped: dict[str, None] = {}  # the launcher's own arguments, in variables
        while place < len(self.words):
            if (launcher, place) in self._outcomes:
                return self._outcomes[launcher, place]
            seen.append(place)
            text = self.words[place].text
            if launcher.starts_executable(text):
                return self._behind_executable(place, f"{spelled} with {text}")
            if launcher.takes_module(text):
                if place + 1 < len(self.words):
                    return _Target(place + 1, True, place)
                return f"{spelled} with {text}, but no module"
            if launcher is PYTHON and text.startswith("-c"):
                return ""
            if text.startswith("-"):
                width = launcher.option_width(text)
                if width is None:
                    behind = f" (behind {', '.join(skipped)})" if skipped else ""
                    error = f"{spelled}: no script found before {text}{behind}"
                    return "" if launcher.runs_anything else error
                place += width
                continue
            if self.variables.is_script(text):
                return _Target(place, False, None)
            if not variable_name(text) and not _EXPANSION.fullmatch(text):
                error = f"{spelled}: {text} is neither an option nor a Python script"
                return "" if launcher.runs_anything else error
            skipped[text] = None
            place += 1
        where = f" (is it in {' or '.join(skipped)}?)" if skipped else ""
        return "" if launcher.runs_anything else f"{spelled}: no script found{where}"

    def _behind_executable(self, place: int, spelled: str) -> _Target | str:
        """Return the target of the next Python, which an executable is expected to be."""
        after = bisect_left(self._pythons, place)
        if after == len(self._pythons):
            return f"{spelled}, but no python behind it"
        python = self._pythons[after]
        return self._from(PYTHON, python + 1, self.words[python].text)

    def _torchrun_at(self, position: int) -> int | None:
        """Return the position of the module if the Python at a position runs torch's launcher."""
        for place in range(position + 1, len(self.words)):
            text = self.words[place].text
            if text in TORCHRUN_MODULES and _TORCHRUN_FLAG.fullmatch(self.words[place - 1].text):
                return place
            if not text.startswith("-"):
                return None
        return None


class _Finder:
    def __init__(self, text: str, scripts: Sequence[str]) -> None:
        self.text = text
        self.script = Script(text)
        self.variables = Variables(scripts)
        self.launches: dict[int, Launch] = {}
        self.notes: list[str] = []
        self.errors: list[str] = []
        self._line_ends = [match.start() for match in re.finditer("\n", text)]

    def run(self) -> Launches:
        try:
            outer = self.script.commands()
        except ShellError as error:
            raise LaunchError(f"line {self._line(error.offset)}: {error}") from error
        found: list[Command] = []
        for command in outer:
            found.append(command)
            if not _is_harmless(command):
                found += self._in_strings(command)
        for command in found:
            self.variables.remember(command)
        for command in found:
            self._find_launch(command)
        launches = [self.launches[place] for place in sorted(self.launches)]
        for launch in launches:
            if not launch.trains:
                self._note(
                    launch.line, f"{launch.script} is not a training script: left alone (--script adds names)"
                )
        notes, errors = (list(dict.fromkeys(lines)) for lines in (self.notes, self.errors))
        return Launches(launches, notes, errors, list(dict.fromkeys(_shell_scripts(outer))))

    def _in_strings(self, command: Command) -> Iterator[Command]:
        for word in command.words:
            try:
                yield from self.script.inside(command, word)
            except ShellError as error:
                parts = word.text.split()
                if any(map(launchers.launcher, parts)) and any(map(self.variables.trains, parts)):
                    self._refuse(error.offset, f"a quoted command that is not understood ({error})")

    def _find_launch(self, command: Command) -> None:
        words = [word for word in command.words if not word.is_target]
        if not words or _is_harmless(command):
            return
        search = _Search(words, self.variables)
        complaint: tuple[int, str] | None = None
        for position, word in enumerate(words):
            launcher = search.launcher(position)
            if launcher is None:
                continue
            outcome = search.target(launcher, position)
            if isinstance(outcome, _Target):
                self._add(launcher, words, outcome, command)
                return
            if outcome and complaint is None and not self.variables.is_complete(variable_name(word.text)):
                complaint = (word.start, outcome)
        if command.is_broken:
            text = self.text[command.words[0].start : command.words[-1].end]
            if any(map(self.variables.trains, _LOOSE_WORD.findall(text))):
                self._refuse(command.words[0].start, "here a launch stands in what is no valid shell syntax")
        elif command.name is not None or ASSIGNMENT.match(words[0].text):
            return  # may be completed where the variable is used
        elif complaint:
            self._refuse(*complaint)
        elif not command.in_string:
            for word in words[1:]:
                if self.variables.trains(word.text) and not ASSIGNMENT.match(word.text):
                    self._refuse(
                        word.start,
                        f"{word.text} is given to {words[0].text}, which is no launcher known here",
                    )
                    return

    def _add(self, launcher: Launcher, words: Sequence[Word], found: _Target, command: Command) -> None:
        target = script = words[found.position]
        is_module = found.is_module
        removal: tuple[int, int] | None = None
        config: str | None = None
        if is_module and target.text == MODULE:
            place = found.position + 1
            while place + 1 < len(words) and words[place].text.startswith("--dct-"):
                option, equals, value = words[place].text.partition("=")
                if option == "--dct-config":
                    config = value if equals else words[place + 1].text
                place += 1 if equals else 2
            if place >= len(words):
                self._refuse(target.start, f"{MODULE} without a script behind it")
                return
            script = words[place]
            is_module = script.text in ("-m", "--module")
            if is_module and place + 1 < len(words):
                script = words[place + 1]
            assert found.flag is not None
            removal = (target.start if is_module else words[found.flag].start, script.start)
        name = script.text.strip("\"'")
        line = self._line(script.start)
        if is_module and not removal:
            parts = name.split(".")[-2:]
            trains = self.variables.wanted(name) or any(
                part.startswith("$") or self.variables.wanted(f"{part}.py") for part in parts
            )
        else:
            trains = removal is not None or self.variables.trains(name)
        if launcher is PYTHON and not trains:
            return  # preprocessing and the like
        if launcher is SET_ELSEWHERE and trains and removal is None:
            self._note(
                line,
                f"{words[0].text} is set elsewhere: -m is right if it is python or torchrun, not for "
                "deepspeed",
            )
        if trains and command.is_broken:
            self._refuse(script.start, f"the launch of {name} stands in what is no valid shell syntax")
            return
        place, present = (removal[0], self.text[slice(*removal)]) if removal else (script.start, "")
        self.launches[place] = Launch(
            launcher, name, is_module, place, line, command.in_string, trains, removal, present, config
        )

    def _line(self, offset: int) -> int:
        return bisect_left(self._line_ends, offset) + 1

    def _note(self, line: int, what: str) -> None:
        self.notes.append(f"line {line}: {what}")

    def _refuse(self, offset: int, what: str) -> None:
        self.errors.append(f"line {self._line(offset)}: {what}")


def _before_command(word: Word) -> bool:
    return word.text in KEYWORDS or ASSIGNMENT.match(word.text) is not None


def _is_harmless(command: Command) -> bool:
    return next((word.text in HARMLESS for word in command.words if word.text not in KEYWORDS), False)


def _shell_scripts(commands: Sequence[Command]) -> Iterator[str]:
    for command in commands:
        if not command.words[0].text.startswith(("rm", "echo", "chmod")):
            yield from (word.text for word in command.words if word.text.endswith(".sh"))
