"""Read the simple commands of a shell script, with the offsets of their words, by tree-sitter-bash."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from dct_plugin.errors import DCTError

#: How deep ``$(...)``, ``${...}``, backticks and here-documents may nest.
DEEPEST = 50
#: ``NAME=``, ``NAME+=`` or ``NAME[subscript]=`` at the start of a word; the bound keeps the time linear.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]{0,80}\])?\+?=")


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_PARSER = Parser(Language(tree_sitter_bash.language()))
_SKIPPED = re.compile(r"\\\r?\n|\d*[<>]&-")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(?:&>>?|>>|<>|>\||[<>]&?)\s*$")
_UNQUOTE = re.compile(r"\\\r?\n|[\"'\r]|\\(.)", re.DOTALL)
_COMMENT = re.compile(r"(?:^|\s)#")
_HEREDOC = re.compile(r"(?<!<)<<-?[ \t]*(['\"\\]?)([A-Za-z_]\w*)['\"]?")
# NAME=<path of the data>, as in templates: no shell takes it before somebody has filled it in.
_PLACEHOLDER = re.compile(r"(?<==)<(?!\()[^<>'\"`$\\\n]*>")
# A comment between continuation lines; the grammar takes its end for a part of it.
_BACKTICK_COMMENT = re.compile(r"`#[^`\n]*`")
_WORDS = word_set(
    "word number concatenation string raw_string ansi_c_string translated_string simple_expansion "
    "expansion command_substitution process_substitution arithmetic_expansion brace_expression "
    "command_name variable_name variable_assignment"
)
_STATEMENTS = word_set("command declaration_command variable_assignment redirected_statement")
_SUBSTITUTIONS = word_set("command_substitution process_substitution")
_STRINGS = {"string": 1, "raw_string": 1, "ansi_c_string": 2, "translated_string": 2}
_WITHOUT_WORDS = word_set("test_command comment regex heredoc_body")
_OPENERS = frozenset(['"', "'", "`", "(", "$(", "${", "<<", "<<-"])


class LaunchError(DCTError):
    """A launch is not understood, or a file is not fit for the command; the message names the line."""


class Word(NamedTuple):
    """A word from ``start`` to ``end``. ``text`` has no quotes; ``quoted`` are the spans inside quotes."""

    start: int
    end: int
    text: str
    quoted: tuple[tuple[int, int], ...] = ()


class Command(NamedTuple):
    """The words of a simple command, of an array or of a loop's values; the latter have a ``name``.

    ``nested`` is set inside strings, substitutions and here-documents (``in_document``), ``broken`` where a
    syntax error touches the command, and ``piped`` where its output goes to the next command.
    """

    words: tuple[Word, ...]
    name: str = ""
    nested: bool = False
    in_document: bool = False
    broken: bool = False
    piped: bool = False


_Token = tuple[int, int, list[tuple[int, int]], bool]  # start, end, spans inside quotes, whether it is broken


class Script:
    """A shell script, to be read for its commands."""

    def __init__(self, text: str) -> None:
        self.text = text
        # One byte for each character, so that offsets in the tree are offsets in the text.
        source = _PLACEHOLDER.sub(lambda match: "_" * len(match[0]), text).replace("<<<", "  <")
        source = _BACKTICK_COMMENT.sub(lambda match: " " * len(match[0]), source)
        self._source = re.sub(r"[^\x01-\x7f]", "_", source)
        self._line_ends = [match.start() for match in re.finditer("\n", text)]

    def commands(self) -> Iterator[Command]:
        """Yield every command and array, also of substitutions and here-documents.

        Raises:
            LaunchError: The text nests too deep.
        """
        pending = [(0, len(self.text), 0)]
        while pending:
            start, end, depth = pending.pop()
            source, bodies = self._without_heredocs(start, end)
            for first, last in bodies:
                self._check_depth(depth + 1, "<<", first - 1)
                pending.append((first, last, depth + 1))
            for command in self._parsed(source, start, depth):
                yield command._replace(in_document=depth > 0)

    def inside(self, span: tuple[int, int]) -> Iterator[Command]:
        """Yield the commands in a quoted part of a word, such as ``sh -c "..."``."""
        for command in self._parsed(self._source[slice(*span)], span[0], 0):
            yield command._replace(nested=True)

    def line(self, offset: int) -> int:
        """Return the line, from 1, of an offset."""
        return bisect_left(self._line_ends, offset) + 1

    def _check_depth(self, depth: int, what: str, offset: int) -> None:
        if depth > DEEPEST:
            raise LaunchError(f"line {self.line(offset)}: {what} nested more than {DEEPEST} deep")

    def _without_heredocs(self, start: int, end: int) -> tuple[str, list[tuple[int, int]]]:
        """Return a part of the source with here-documents blanked, and the spans of those with commands."""
        source = self._source[start:end]
        blanked, bodies, absent = list(source), list[tuple[int, int]](), set[str]()
        first = done = 0  # the here-documents of the last line that has some
        for match in _HEREDOC.finditer(source):
            # Long lines are read from near the operator only, so that the time stays linear.
            low = max(0, match.start() - 500)
            before = source[source.rfind("\n", low, match.start()) + 1 or low : match.start()]
            line_end = source.find("\n", match.end())
            if first <= match.start() < done or match[2] in absent or _COMMENT.search(before) or line_end < 0:
                continue
            body = done if match.start() < first < done else line_end + 1
            mark = re.compile(rf"^\t*{match[2]}(?=[)\r]*$)", re.MULTILINE).search(source, body)
            if mark is None:
                absent.add(match[2])
                continue
            owner = re.split("[;&|]", before)[-1]
            line = before + source[match.end() : min(line_end, match.end() + 500)]
            is_prose = re.search(r"\bcat\s*$", owner) and not re.search(r"[>|]|\$\(|`", line)
            if not is_prose and not re.search(r"(?:^|[\s/])python[\d.]*\s", owner):
                bodies.append((start + body, start + mark.start()))
            for low, high in (match.span(), (body, mark.end())):
                blanked[low:high] = re.sub(r"[^\n]", " ", source[low:high])
            first, done = line_end + 1, mark.end()
        return "".join(blanked), bodies

    def _parsed(self, source: str, start: int, depth: int) -> Iterator[Command]:
        """Yield the commands of a part of the source; a stream holds the words of one level of nesting."""
        root = _PARSER.parse(source.encode() + b"\n").root_node
        streams: list[tuple[str, bool, list[_Token]]] = [("", depth > 0, [])]
        doubtful = len(source) + 1  # what stands behind an open quote or bracket may be anything
        pending: list[tuple[Node, int, int, list[tuple[int, int]] | None, bool]] = [
            (root, 0, depth, None, False)
        ]
        while pending:
            node, stream, level, quoted, broken = pending.pop()
            kind, low, high = node.type, node.start_byte, min(node.end_byte, len(source))
            broken = broken or node.is_error or (kind in _STATEMENTS and node.has_error)
            if node.is_error and any(child.type in _OPENERS for child in node.children):
                doubtful = min(doubtful, low)
            if node.is_error:
                yield Command((Word(start + low, start + high, source[low:high]),), broken=True)
            children = node.children
            if kind in _SUBSTITUTIONS or kind == "expansion":
                level += 1
                self._check_depth(level, source[low : low + 2], start + low)
            if kind in _SUBSTITUTIONS:
                streams.append(("", True, []))
                children_stream, quoted_inside = len(streams) - 1, None
            elif kind == "array":
                match = ASSIGNMENT.match(source, node.parent.start_byte) if node.parent is not None else None
                streams.append((match[1] if match else "?", level > 0, []))
                children_stream, quoted_inside = len(streams) - 1, None
            else:
                children_stream, quoted_inside = (-1 if kind in _WITHOUT_WORDS else stream), quoted
            if kind in _WORDS and stream >= 0 and not node.is_missing:
                is_array = kind == "variable_assignment" and node.children[-1].type == "array"
                quoted_inside = []
                if not is_array:
                    streams[stream][2].append((low, high, quoted_inside, broken))
                if kind not in _SUBSTITUTIONS:
                    children_stream = -1
            if kind in _STRINGS and quoted_inside is not None:
                quoted_inside.append((start + low + _STRINGS[kind], start + high - 1))
                quoted_inside = None
            if kind == "for_statement":
                variable = node.child_by_field_name("variable")
                for value in node.children_by_field_name("value"):  # each is a value of the variable
                    streams.append((_source_of(source, variable), level > 0, []))
                    pending.append((value, len(streams) - 1, level, None, broken))
                body = node.child_by_field_name("body")
                children = [body] if body is not None else []
            pending += [(each, children_stream, level, quoted_inside, broken) for each in reversed(children)]
        for name, nested, tokens in streams:
            yield from self._grouped(
                source, start, name, nested, sorted(tokens, key=lambda token: token[0]), doubtful
            )

    def _grouped(
        self, source: str, start: int, name: str, nested: bool, tokens: list[_Token], doubtful: int
    ) -> Iterator[Command]:
        """Yield the commands of one stream, which end where more than blanks stand between two words."""
        words: list[Word] = []
        is_broken = False
        last = tokens[0][0] if tokens else 0
        for low, high, quoted, broken in tokens:
            between = source[last:low] if words or last < low else source[max(0, low - 4) : low]
            gap = _SKIPPED.sub("", between)
            rest = _REDIRECT.sub("", gap)
            is_end = rest.strip(" \t\r\f\v") != "" or (rest != rest.replace("\n", ""))
            if words and not name and is_end:
                yield Command(tuple(words), name, nested, False, is_broken, rest.strip() == "|")
                words, is_broken = [], False
            is_broken = is_broken or broken or low >= doubtful
            text = _UNQUOTE.sub(r"\1", self.text[start + low : start + high]).strip("\"'")
            if words and not gap and last == words[-1].end - start:  # one word, which the grammar splits
                word = words.pop()
                words.append(Word(word.start, start + high, word.text + text, (*word.quoted, *quoted)))
            elif rest == gap:  # no target of a redirection
                words.append(Word(start + low, start + high, text, tuple(quoted)))
            last = high
        if words:
            yield Command(tuple(words), name, nested, broken=is_broken)


def _source_of(source: str, node: Node | None) -> str:
    return source[node.start_byte : node.end_byte] if node is not None else ""
