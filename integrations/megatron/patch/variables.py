"""The values of a script's variables, and what a word made of them may stand for."""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from . import launchers
from .launchers import DECLARATIONS, PYTHON, TORCHRUN, TORCHRUN_MODULES, Launcher
from .syntax import ASSIGNMENT, Command

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[^]]{0,80}\])?\}|(\w+))$")
_DEFAULTED = re.compile(r"\$\{\w+:?[-=](.*)\}$", re.DOTALL)

# Variables that hold variables are looked through so many times.
_INDIRECTIONS = 5


def variable_name(text: str) -> str:
    """Return the variable that is all of a word, else ""."""
    match = _VARIABLE.match(text)
    return (match[1] or match[2]) if match else ""


class _Meaning(NamedTuple):
    """The properties of what a word may stand for."""

    is_script: bool
    trains: bool


_NO_SCRIPT = _Meaning(False, False)


class Variables:
    """The values that a script assigns to its variables, and what a word made of them may stand for.

    Nothing is asked before everything has been assigned: answers are kept by variable.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self.values: dict[str, list[str]] = {}
        self.launcher, self.is_complete = functools.cache(self._launcher), functools.cache(self._is_complete)
        self._held = functools.cache(self._meaning_held)

    def remember(self, command: Command) -> None:
        """Keep what a command assigns."""
        if command.name is not None and not command.in_string:  # an array
            self.values.setdefault(command.name, []).append(" ".join(word.text for word in command.words))
            return
        for word in command.words:
            match = ASSIGNMENT.match(word.text)
            if match is None:
                if word.text not in DECLARATIONS:
                    return
                continue
            value = word.text[match.end() :]
            if default := _DEFAULTED.match(value):
                value = default[1]
            self.values.setdefault(match[1], []).append(value.strip("\"' \n"))

    def is_script(self, text: str) -> bool:
        """Return whether a word may stand for a Python script."""
        return self._meaning(text).is_script

    def trains(self, text: str) -> bool:
        """Return whether a word may stand for one of the wanted scripts."""
        found = self._meaning(text)
        return found.trains or (found.is_script and self.wanted(text.strip("\"'")))

    def wanted(self, name: str) -> bool:
        """Return whether a file's name is one of the wanted ones."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns)

    def _is_complete(self, name: str) -> bool:
        """Return whether a variable holds a script."""
        return any(self.is_script(part) for value in self.values.get(name, []) for part in value.split())

    def _launcher(self, name: str, depth: int = 0) -> Launcher | None:
        """Return the launcher in a variable without a script; others are found where they are assigned."""
        for value in self.values.get(name, []) if depth < _INDIRECTIONS else []:
            parts = value.split()
            if any(self.is_script(part) for part in parts):
                continue
            for part in parts:
                launcher = launchers.launcher(part)
                if launcher is PYTHON and any(module in parts for module in TORCHRUN_MODULES):
                    return TORCHRUN
                if launcher is not None:
                    return launcher
            if parts and (held := variable_name(parts[0])):
                return self.launcher(held, depth + 1)
        return None

    def _meaning(self, text: str, depth: int = 0) -> _Meaning:
        text = text.strip("\"'")
        if text.startswith("-") or depth > _INDIRECTIONS:
            return _NO_SCRIPT
        if text.endswith(".py"):
            name = os.path.basename(text)
            return _Meaning(True, name.startswith("$") or self.wanted(name))
        match = _VARIABLE.search(text)
        if match is None or (match.start() and text[match.start() - 1] != "/"):
            return _NO_SCRIPT
        name = match[1] or match[2]
        if name not in self.values:
            named = launchers.sounds_like_script(name)
            return _Meaning(named, named)
        return self._held(name, depth)

    def _meaning_held(self, name: str, depth: int) -> _Meaning:
        """Return what the values of a variable may stand for."""
        firsts = (parts[0] for value in self.values[name] if (parts := value.split(None, 1)))
        found = {self._meaning(first, depth + 1) for first in firsts}
        return _Meaning(*map(any, zip(_NO_SCRIPT, *found, strict=True)))
