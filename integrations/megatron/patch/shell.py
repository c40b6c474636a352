"""Just enough of the shell's grammar to find commands, their words and their offsets in a launch script.

Known: quotes, comments, continuation lines, arrays, command substitution, here-documents, redirections.
Expansions are left as they stand. Words keep their offsets, so that an edit touches nothing else.

Every character is read once, and once more where it stands in a quoted string that may hold commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["ASSIGNMENT", "DEEPEST", "Command", "DepthError", "ShellError", "Text", "Word"]

#: How deep ``$(...)``, ``${...}``, backticks and here-documents may nest.
DEEPEST = 50

#: ``NAME=``, ``NAME+=`` or ``NAME[subscript]=`` at the start of a word. The bound on the subscript keeps the
#: time linear.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]{0,80}\])?\+?=")

_HEREDOC = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([\w.+-]+))")
_CONTINUATION = re.compile(r"\\\r?\n")
_GAP = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_PLAIN = re.compile(r"[^ \t\n\r;&|()<>\\'\"$`]+")
_PLAIN_IN_DOUBLE = re.compile(r"[^\\\"$`]+")
_PLAIN_IN_BRACES = re.compile(r"[^}\\\"$`]+")
_TO_SINGLE = re.compile(r"[^']*'")
_TO_SINGLE_ESCAPED = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL)
_PARENTHESIS = re.compile(r"[()]")
_WORD_END = frozenset(" \t\n\r;&|()<>")


class ShellError(ValueError):
    """The text does not follow the grammar: an unterminated quote or bracket at ``offset``."""

    def __init__(self, what: str, offset: int) -> None:
        super().__init__(what)
        self.offset = offset


class DepthError(ShellError):
    """The text nests deeper than :data:`DEEPEST`."""


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


class _HereDocument(NamedTuple):
    """One whose body is yet to come."""

    mark: str
    strips_tabs: bool
    opened: int


class Text:
    """A shell script, to be read for its commands."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._ends: dict[int, int] = {}  # of the expansions read so far, by where they begin

    def commands(self) -> list[Command]:
        """Every command and array, also in substitutions and here-documents, in the order of the text.

        Raises:
            ShellError: the text does not follow the grammar.
            DepthError: it nests too deep.
        """
        reader = _Reader(self.text, 0, len(self.text), self._ends)
        reader.commands()
        return reader.in_order()

    def inside(self, command: Command, word: Word) -> Iterator[Command]:
        """Commands in a word's quoted parts, e.g. of ``sh -c "..."`` or ``run_cmd="..."``.

        Substitutions that :meth:`commands` has been through are left out.

        Raises:
            ShellError: a quoted part does not follow the grammar, or nests too deep; after the commands
                before that.
        """
        match = ASSIGNMENT.match(self.text, word.start, word.end)
        name = match[1] if match else None
        for start, end in word.quoted:
            reader = _Reader(self.text, start, end, self._ends)
            failure: ShellError | None = None
            try:
                reader.commands()
            except ShellError as error:
                failure = error
            for found in reader.in_order():
                yield found._replace(name=found.name or name, in_string=True)
            if failure:
                raise failure


class _Reader:
    """Recursive descent over ``text[at:end]``; every method begins at ``at`` and moves it."""

    def __init__(self, text: str, at: int, end: int, ends: dict[int, int], depth: int = 0) -> None:
        self.text, self.at, self.end, self.ends, self.depth = text, at, end, ends, depth
        self.found: list[Command] = []

    def in_order(self) -> list[Command]:
        """What was found, by where it begins: it was found from the inside out."""
        return sorted(self.found, key=lambda command: command.words[0].start)

    def commands(self, *, opened: int | None = None) -> None:
        """Read commands up to the end or, where ``$(`` was ``opened``, up to its parenthesis."""
        words: list[Word] = []
        heredocs: list[_HereDocument] = []
        is_target = False
        parentheses = 0
        while self.at < self.end:
            char = self.text[self.at]
            if self._skip(_GAP):
                pass
            elif char == "#":
                self._comment()
            elif char in "<>" or self.text.startswith("&>", self.at, self.end):
                is_target = self._redirection(heredocs)
            elif not words and self.text.startswith("((", self.at, self.end):
                self._arithmetic("((")
            elif char in "\n;&|()":
                self._add(words)
                is_target = False
                self.at += 1
                if char == "\n":
                    self._here_documents(heredocs, in_substitution=opened is not None)
                elif char == "(":
                    parentheses += 1
                elif char == ")":
                    parentheses -= 1
                    if opened is not None and parentheses < 0:
                        return
            else:
                word = self._word(is_target)
                words.append(word)
                is_target = False
                if self.text.startswith("(", self.at, self.end) and self.text[self.at - 1] == "=":
                    self._array(word)
        self._add(words)
        if opened is not None:
            raise ShellError("$( without an end", opened)

    def _add(self, words: list[Word], name: str | None = None) -> None:
        if words:
            self.found.append(Command(tuple(words), name, in_string=self.depth > 0))
            words.clear()

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        match = pattern.match(self.text, self.at, self.end)
        if match is None:
            return False
        self.at = match.end()
        return True

    def _comment(self) -> None:
        stop = self.text.find("\n", self.at, self.end)
        self.at = self.end if stop < 0 else stop

    def _redirection(self, heredocs: list[_HereDocument]) -> bool:
        """Skip an operator; whether a target follows."""
        match = _HEREDOC.match(self.text, self.at, self.end)
        if match and not self.text.startswith("<<<", self.at):
            heredocs.append(_HereDocument(match[2] or match[3] or match[4], bool(match[1]), self.at))
            self.at = match.end()
            return False
        while self.at < self.end and self.text[self.at] in "<>&|":
            self.at += 1
        return not self.text.startswith("(", self.at, self.end)  # process substitution is read as commands

    def _here_documents(self, heredocs: list[_HereDocument], *, in_substitution: bool) -> None:
        """Read the bodies of the documents announced on the line before."""
        for mark, tabs, opened in heredocs:
            body = self.at
            while self.at < self.end:
                stop = self.text.find("\n", self.at, self.end)
                line_end = self.end if stop < 0 else stop
                line = self.text[self.at : line_end].rstrip("\r")
                if tabs:
                    line = line.lstrip("\t")
                if line == mark:
                    break
                if in_substitution and line.startswith(f"{mark})"):  # bash takes it, with a warning
                    line_end = self.text.index(mark, self.at) + len(mark)
                    break
                self.at = min(line_end + 1, self.end)
            else:
                line_end = self.end
            document = _Reader(self.text, body, self.at, self.ends, self._deeper("<<", opened))
            try:
                document.commands()
            except DepthError:
                raise
            except ShellError:  # prose or another language
                pass
            else:
                self.found += document.found
            self.at = line_end
        heredocs.clear()

    def _deeper(self, what: str, opened: int) -> int:
        if self.depth == DEEPEST:
            raise DepthError(f"{what} nested more than {DEEPEST} deep", opened)
        return self.depth + 1

    def _array(self, word: Word) -> None:
        match = ASSIGNMENT.match(word.text)
        opened = self.at
        self.at += 1
        words: list[Word] = []
        while self.at < self.end:
            char = self.text[self.at]
            if self._skip(_GAP):
                pass
            elif char == "#":
                self._comment()
            elif char == ")":
                self.at += 1
                self._add(words, match[1] if match else None)
                return
            elif char in "\n;&|(<>":
                self.at += 1
            else:
                words.append(self._word(False))
        raise ShellError("array without an end", opened)

    def _word(self, is_target: bool) -> Word:
        start = self.at
        parts: list[str] = []
        quoted: list[tuple[int, int]] = []
        while self.at < self.end and (char := self.text[self.at]) not in _WORD_END:
            opened = self.at
            if self._skip(_CONTINUATION):
                pass
            elif char == "\\":
                self.at = min(self.at + 2, self.end)
                parts.append(self.text[opened + 1 : self.at])
            elif char == "'" or self.text.startswith("$'", self.at, self.end):
                opened += 1 if char == "'" else 2
                self.at = opened
                if not self._skip(_TO_SINGLE if char == "'" else _TO_SINGLE_ESCAPED):
                    raise ShellError("quote without an end", opened - 1)
                quoted.append((opened, self.at - 1))
                parts.append(self.text[opened : self.at - 1])
            elif char == '"':
                self._double()
                quoted.append((opened + 1, self.at - 1))
                parts.append(_CONTINUATION.sub("", self.text[opened + 1 : self.at - 1]))
            else:
                if not self._skip(_PLAIN):
                    self._expansion()
                parts.append(self.text[opened : self.at])
        return Word(start, self.at, "".join(parts), is_target, tuple(quoted))

    def _double(self) -> None:
        opened = self.at
        self.at += 1
        self._until('"', _PLAIN_IN_DOUBLE, "quote", opened)

    def _until(self, closing: str, plain: re.Pattern[str], what: str, opened: int) -> None:
        """Skip escapes, expansions and, in ``${...}``, double quotes up to a closing character."""
        while self.at < self.end:
            if self._skip(plain):
                continue
            char = self.text[self.at]
            if char == closing:
                self.at += 1
                return
            if char == "\\":
                self.at += 2
            elif char == '"':
                self._double()
            else:
                self._expansion()
        raise ShellError(f"{what} without an end", opened)

    def _expansion(self) -> None:
        """Skip ``${...}``, ``$(...)``, ``$((...))`` or backticks, if one begins here, else one character."""
        opened = self.at
        if self.ends.get(opened, self.end + 1) <= self.end:
            self.at = self.ends[opened]
            return
        if self.text.startswith("$((", opened, self.end):
            self._arithmetic("$((")
        elif self.text.startswith("${", opened, self.end):
            self.depth = self._deeper("${", opened)
            self.at += 2
            self._until("}", _PLAIN_IN_BRACES, "${", opened)
            self.depth -= 1
        elif self.text.startswith("$(", opened, self.end):
            self.depth = self._deeper("$(", opened)
            self.at += 2
            self.commands(opened=opened)
            self.depth -= 1
        elif self.text[opened] == "`":
            self._backticks()
        else:
            self.at += 1
            return
        self.ends[opened] = self.at

    def _backticks(self) -> None:
        opened = self.at
        closing = self.text.find("`", opened + 1, self.end)
        if closing < 0:
            raise ShellError("backtick without an end", opened)
        reader = _Reader(self.text, opened + 1, closing, self.ends, self._deeper("`", opened))
        reader.commands()
        self.found += reader.found
        self.at = closing + 1

    def _arithmetic(self, opening: str) -> None:
        """Skip balanced parentheses; nothing in them matters here."""
        opened = self.at
        depth = 0
        for match in _PARENTHESIS.finditer(self.text, opened, self.end):
            depth += 1 if match[0] == "(" else -1
            if not depth:
                self.at = match.end()
                return
        raise ShellError(f"{opening} without ))", opened)
