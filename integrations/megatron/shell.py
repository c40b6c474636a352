"""Just enough of the shell's grammar to find commands, their words and their places in a launch script.

Known: quotes, comments, continuation lines, arrays, command substitution, here-documents, redirections.
Expansions are left as they stand. Words keep their offsets, so that an edit touches nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Command", "ShellError", "Word", "commands", "inside"]


class ShellError(ValueError):
    """The text does not follow the grammar: an unterminated quote or bracket at ``offset``."""

    def __init__(self, what: str, offset: int) -> None:
        super().__init__(what)
        self.offset = offset


class Word(NamedTuple):
    """A word from ``start`` to ``end``; ``text`` is without quotes and continuation marks."""

    start: int
    end: int
    text: str
    is_target: bool  # of a redirection
    quoted: tuple[tuple[int, int], ...]  # insides of its quoted parts


class Command(NamedTuple):
    """The words of one simple command, or of one array; ``in_string`` when it stands inside a quoted string.

    ``name`` is the variable that holds it, if it is the value of an assignment.
    """

    words: tuple[Word, ...]
    name: str | None = None
    in_string: bool = False


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=")
_HEREDOC = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([\w.+-]+))")
_BREAK = " \t\n\r;&|()<>"


def commands(text: str, start: int = 0, end: int | None = None) -> Iterator[Command]:
    """Every command, array, and the insides of substitutions and here-documents between two offsets.

    Raises:
        ShellError: see there.
    """
    yield from _Scanner(text, start, len(text) if end is None else end).run()


def inside(text: str, command: Command, word: Word) -> Iterator[Command]:
    """Commands in a word's quoted parts, e.g. of ``sh -c "..."`` or ``run_cmd="..."``.

    Raises:
        ShellError: a quoted part does not follow the grammar.
    """
    match = _ASSIGNMENT.match(text, word.start)
    name = match[1] if match and match.end() <= word.end else None
    for start, end in word.quoted:
        for found in commands(text, start, end):
            yield found._replace(name=found.name or name, in_string=True)


class _Scanner:
    def __init__(self, text: str, start: int, end: int) -> None:
        self.text, self.at, self.end = text, start, end
        self.nested: list[Command] = []
        self.heredocs: list[tuple[str, bool]] = []

    def run(self) -> Iterator[Command]:
        words: list[Word] = []
        is_target = False
        while self.at < self.end:
            char = self.text[self.at]
            if skip := self._continuation():
                self.at += skip
            elif char in " \t\r":
                self.at += 1
            elif char == "#":
                self._skip_comment()
            elif char == "\n":
                yield from self._flush(words)
                is_target = False
                self.at += 1
                yield from self._heredoc_bodies()
            elif char in "<>" or (char == "&" and self._peek(1) == ">"):
                is_target = self._redirection()
            elif self.text.startswith("((", self.at) and not words:
                self._skip_balanced("((", "))")
            elif char in ";&|()":
                yield from self._flush(words)
                is_target = False
                self.at += 1
            else:
                word = self._word(is_target)
                is_target = False
                words.append(word)
                if (
                    self.text.startswith("(", self.at)
                    and self.text[self.at - 1] == "="
                    and self.at < self.end
                ):
                    yield from self._array(word)
        yield from self._flush(words)

    def _flush(self, words: list[Word]) -> Iterator[Command]:
        if words:
            yield Command(tuple(words))
            words.clear()
        yield from self.nested
        self.nested.clear()

    def _peek(self, distance: int) -> str:
        place = self.at + distance
        return self.text[place] if place < self.end else ""

    def _continuation(self) -> int:
        """Length of a continuation mark (backslash and end of line) here, else 0."""
        if self.text.startswith("\\\n", self.at):
            return 2
        return 3 if self.text.startswith("\\\r\n", self.at) else 0

    def _skip_comment(self) -> None:
        stop = self.text.find("\n", self.at, self.end)
        self.at = self.end if stop < 0 else stop

    def _redirection(self) -> bool:
        """Skip an operator; whether a target follows."""
        match = _HEREDOC.match(self.text, self.at, self.end)
        if match and not self.text.startswith("<<<", self.at):
            self.heredocs.append((match[2] or match[3] or match[4], bool(match[1])))
            self.at = match.end()
            return False
        while self.at < self.end and self.text[self.at] in "<>&|":
            self.at += 1
        return self.at >= self.end or self.text[self.at] != "("  # process substitution is scanned as commands

    def _heredoc_bodies(self) -> Iterator[Command]:
        for mark, tabs in self.heredocs:
            body = self.at
            while self.at < self.end:
                stop = self.text.find("\n", self.at, self.end)
                line_end = self.end if stop < 0 else stop
                line = self.text[self.at : line_end].rstrip("\r")
                if (line.lstrip("\t") if tabs else line) == mark:
                    break
                self.at = min(line_end + 1, self.end)
            else:
                line_end = self.end
            try:
                found = list(commands(self.text, body, self.at))
            except ShellError:  # prose or another language
                found = []
            yield from (command._replace(in_string=True) for command in found)
            self.at = line_end
        self.heredocs.clear()

    def _array(self, word: Word) -> Iterator[Command]:
        match = _ASSIGNMENT.match(word.text)
        opened = self.at
        self.at += 1
        words: list[Word] = []
        while self.at < self.end:
            char = self.text[self.at]
            if skip := self._continuation():
                self.at += skip
            elif char in " \t\r\n":
                self.at += 1
            elif char == "#":
                self._skip_comment()
            elif char == ")":
                self.at += 1
                if words:
                    yield Command(tuple(words), match[1] if match else None)
                return
            elif char in ";&|(<>":
                self.at += 1
            else:
                words.append(self._word(False))
        raise ShellError("array without an end", opened)

    def _word(self, is_target: bool) -> Word:
        start = self.at
        plain: list[str] = []
        quoted: list[tuple[int, int]] = []
        while self.at < self.end and self.text[self.at] not in _BREAK:
            char = self.text[self.at]
            if skip := self._continuation():
                self.at += skip
            elif char == "\\":
                plain.append(self._peek(1))
                self.at = min(self.at + 2, self.end)
            elif char == "'" or self.text.startswith("$'", self.at):
                opened = self.at + (1 if char == "'" else 2)
                self._skip_single(opened, escapes=char == "$")
                quoted.append((opened, self.at - 1))
                plain.append(self.text[opened : self.at - 1])
            elif char == '"':
                opened = self.at + 1
                self._skip_double()
                quoted.append((opened, self.at - 1))
                plain.append(re.sub(r"\\\r?\n", "", self.text[opened : self.at - 1]))
            else:
                opened = self.at
                if not self._skip_expansion():
                    self.at += 1
                plain.append(self.text[opened : self.at])
        return Word(start, self.at, "".join(plain), is_target, tuple(quoted))

    def _skip_single(self, opened: int, *, escapes: bool) -> None:
        place = opened
        while place < self.end:
            if escapes and self.text[place] == "\\":
                place += 1
            elif self.text[place] == "'":
                self.at = place + 1
                return
            place += 1
        raise ShellError("quote without an end", opened - 1)

    def _skip_double(self) -> None:
        opened = self.at
        self.at += 1
        while self.at < self.end:
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
            elif char == '"':
                self.at += 1
                return
            elif not self._skip_expansion():
                self.at += 1
        raise ShellError("quote without an end", opened)

    def _skip_expansion(self) -> bool:
        """Skip ``${...}``, ``$(...)``, ``$((...))`` or backticks, if one begins here."""
        if self.text.startswith("$((", self.at):
            self._skip_balanced("$((", "))")
        elif self.text.startswith("${", self.at):
            self._skip_braces()
        elif self.text.startswith("$(", self.at):
            self._skip_substitution()
        elif self.text[self.at] == "`":
            closing = self.text.find("`", self.at + 1, self.end)
            if closing < 0:
                raise ShellError("backtick without an end", self.at)
            self._scan_nested(self.at + 1, closing)
            self.at = closing + 1
        else:
            return False
        return True

    def _skip_braces(self) -> None:
        opened = self.at
        self.at += 2
        while self.at < self.end:
            char = self.text[self.at]
            if char == "}":
                self.at += 1
                return
            if char == "\\":
                self.at += 2
            elif char == '"':
                self._skip_double()
            elif not self._skip_expansion():
                self.at += 1
        raise ShellError("${ without an end", opened)

    def _skip_substitution(self) -> None:
        opened = self.at
        self.at += 2
        depth = 1
        while self.at < self.end:
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
            elif char == "'":
                self._skip_single(self.at + 1, escapes=False)
            elif char == '"':
                self._skip_double()
            elif char == "#" and self.text[self.at - 1] in " \t\n;(":
                self._skip_comment()
            elif char in "()":
                depth += 1 if char == "(" else -1
                self.at += 1
                if not depth:
                    self._scan_nested(opened + 2, self.at - 1)
                    return
            elif not self._skip_expansion():
                self.at += 1
        raise ShellError("$( without an end", opened)

    def _skip_balanced(self, opening: str, closing: str) -> None:
        """Skip arithmetic; nothing in it matters here."""
        opened = self.at
        depth = 0
        while self.at < self.end:
            char = self.text[self.at]
            self.at += 1
            if char == "(":
                depth += 1
            elif char == ")":
                depth -= 1
                if not depth:
                    return
        raise ShellError(f"{opening} without {closing}", opened)

    def _scan_nested(self, start: int, end: int) -> None:
        self.nested += [command._replace(in_string=True) for command in commands(self.text, start, end)]
