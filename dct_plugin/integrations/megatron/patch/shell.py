"""Read the simple commands of a shell script, with the offsets of their words.

Strings, substitutions, arrays and here-documents are read for the commands inside them. What a shell would
refuse (an open quote, a bracket too many) is read as if it were not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from dct_plugin.errors import DCTError

#: ``NAME=``, ``NAME+=`` or ``NAME[subscript]=`` at the start of a word.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]{0,80}\])?\+?=")


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_QUOTED = r'"(?:[^"\\]|\\.)*"' + r"|'[^']*'|`[^`]*`"
_SUBSTITUTED = r"\$\((?:[^()]|\([^()]*\))*\)|\$\{[^{}]*\}"
_ARRAY = rf"(?<==)\((?:[^()\"'`#]|(?<!\s)#|(?<=\s)#[^\n]*(?![^\n])|{_QUOTED}|\([^()]*\))*\)"
_NESTED = re.compile(rf"{_QUOTED}|{_SUBSTITUTED}|{_ARRAY}", re.DOTALL)
_TOKEN = re.compile(
    r"(?P<blank>(?:\\\r?\n|[ \t\r\f\v])+|#[^\n]*|function[ \t]+[\w-]+(?=\s*[({]))"
    r"|(?P<redirection>(?:\d+|&)?(?:<<<|<<-?|>>|<>|>\||[<>])&?)"
    rf"|(?P<word>(?:{_QUOTED}|{_SUBSTITUTED}|{_ARRAY}|\\\r?\n|\\.|[^\s;&|()<>])+)"
    r"|(?P<end>\|\||\|&?|.)",
    re.DOTALL,
)
_UNQUOTE = re.compile(r"\\\r?\n|[\"'\r]|\\(.)", re.DOTALL)
_OPENING = re.compile(r"[\"'`(]|\$\(+|\$\{\w*(?::?[-=+])?")
_DOCUMENT = re.compile(
    r"(?<!<)<<-?[ \t]*['\"\\]?([A-Za-z_]\w*)['\"]?(.*\n)((?:.*\n)*?)\t*\1(?=[)\r]*$)", re.MULTILINE
)
# Words before a command, commands that may name a launch without starting it, and those that read commands.
_RESERVED = word_set("if then elif else while until do { export local declare readonly typeset")
_KEYWORDS = word_set("time exec sudo command nohup builtin !")
_HARMLESS = word_set(
    ". [ [[ apt apt-get awk aws basename black case cat cd chmod chown code cp curl diff dirname du echo "
    "file find for git grep head hdfs kill less ln ls md5sum mkdir module more mv nano pgrep pip pip3 "
    "pkill popd printf ps pushd pylint pytest read readlink realpath rm rsync scp sed sha256sum sleep "
    "source spack stat tail tar tee test touch type unset unzip vi vim wc wget which zip"
)
_SHELLS = word_set("bash sh zsh ssh sbatch srun at")


class LaunchError(DCTError):
    """A launch is not understood, or a file is not fit for the command; the message names the line."""


class Word(NamedTuple):
    """A word, from ``start`` to ``end``; ``text`` has no quotes."""

    start: int
    end: int
    text: str


class Command(NamedTuple):
    """The words of a simple command.

    ``is_piped`` is set where the output goes to the next command. ``nesting`` is "value" in a variable's
    value and "string" in another string or substitution.
    """

    words: tuple[Word, ...]
    is_piped: bool = False
    nesting: str = ""

    @property
    def program(self) -> tuple[Word, ...]:
        """The words from the program's name on."""
        words = enumerate(self.words)
        first = (at for at, x in words if x.text not in _KEYWORDS and not ASSIGNMENT.match(x.text))
        return self.words[next(first, len(self.words)) :]

    @property
    def is_harmless(self) -> bool:
        """True if it starts nothing, whatever its arguments are."""
        return any(word.text in _HARMLESS for word in self.program[:1])


class Script:
    """A shell script, to be read for its commands."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._source = _DOCUMENT.sub(_without_prose, text)

    def line(self, offset: int) -> int:
        """Return the line, from 1, of an offset."""
        return self.text.count("\n", 0, offset) + 1

    def commands(self, start: int, end: int, nesting: str = "") -> Iterator[Command]:
        """Yield the commands between two offsets, and those in their strings and substitutions."""
        found = list(self.simple_commands(start, end))
        for command, receiver in zip(found, [*found[1:], Command(())], strict=True):
            yield command._replace(nesting=nesting)
            is_read = command.is_piped and any(word.text in _SHELLS for word in receiver.words)
            if is_read or not command.is_harmless:
                for word in command.words:
                    is_value = nesting == "value" or ASSIGNMENT.match(word.text)
                    for inner in self.nested(word.start, word.end):
                        yield from self.commands(*inner, "value" if is_value else "string")

    def nested(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a word that may hold commands or values."""
        for match in _NESTED.finditer(self._source, start, end):
            opening = _OPENING.match(match[0])
            yield match.start() + (opening.end() if opening else 0), match.end() - 1

    def simple_commands(self, start: int, end: int) -> Iterator[Command]:
        """Yield the commands between two offsets, without those inside their words."""
        words: list[Word] = []
        is_target = False  # of a redirection
        while start < end:
            match = _TOKEN.match(self._source, start, end)
            assert match is not None
            start, kind = match.end(), match.lastgroup
            if kind == "word" and not is_target:
                text = _UNQUOTE.sub(r"\1", self.text[match.start() : start]).strip("\"'")
                if words or text not in _RESERVED:
                    words.append(Word(match.start(), start, text))
            elif kind == "end":
                yield Command(tuple(words), match[0].startswith("|") and match[0] != "||")
                words = []
            is_target = kind == "redirection" or (is_target and kind == "blank")
        yield Command(tuple(words))


def _without_prose(document: re.Match[str]) -> str:
    """Return a here-document, with blanks in place of text that is printed or ignored, and of Python."""
    before = document.string[document.string.rfind("\n", 0, document.start()) + 1 : document.start()]
    owner = re.split("[;&|]", before)[-1]
    is_printed = re.search(r"\bcat\s*$", owner) and not re.search(r"[>|`]|\$\(", before + document[2])
    if not is_printed and not re.search(r"(?:^|[\s/])python[\d.]*\s|^\s*:\s", owner):
        return document[0]
    kept = document.start(3) - document.start()
    return document[0][:kept] + re.sub(r"[^\n]", " ", document[0][kept:])
