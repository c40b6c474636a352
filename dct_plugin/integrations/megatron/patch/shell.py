"""Read the simple commands of a shell script, with the offsets of their words, by tree-sitter-bash."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from dct_plugin.errors import DCTError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

#: How deep strings, substitutions and here-documents may nest.
DEEPEST = 50
#: ``NAME=``, ``NAME+=`` or ``NAME[subscript]=`` at the start of a word.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]{0,80}\])?\+?=")


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_SKIPPED = re.compile(r"\\\r?\n|\d*[<>]&-")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(?:&>>?|>>|<>|>\||[<>]&?)[ \t]*$")
_UNQUOTE = re.compile(r"\\\r?\n|[\"'\r]|\\(.)", re.DOTALL)
# What the grammar does not take: NAME=<path of the data>, and a comment between continuation lines.
_PLACEHOLDER = re.compile(r"(?<==)<(?!\()[^<>'\"`$\\\n]*>|`#[^`\n]*`")
_DOCUMENT = re.compile(
    r"(?<!<)(<<-?[ \t]*['\"\\]?([A-Za-z_]\w*)['\"]?)(.*\n)((?:.*\n)*?)\t*\2(?=[)\r]*$)", re.MULTILINE
)
_OPENING = re.compile(r"\$\(|[<>]\(|\$?[\"']|[`(]")
_STRINGS = word_set("string raw_string ansi_c_string translated_string")
_NESTING = _STRINGS | word_set("command_substitution process_substitution array")
_WORDS = _STRINGS | word_set(
    "word number concatenation simple_expansion expansion command_substitution process_substitution "
    "arithmetic_expansion brace_expression command_name variable_name variable_assignment"
)
_STATEMENTS = word_set("command declaration_command variable_assignment redirected_statement")
_WITHOUT_WORDS = word_set("test_command comment regex heredoc_body")
# Words before a command, commands that may name a launch without starting it, and those that read commands.
_KEYWORDS = word_set("time exec sudo command nohup builtin !")
_HARMLESS = word_set(
    ". [ [[ apt apt-get awk aws basename black cat cd chmod chown code cp curl diff dirname du echo "
    "export file find git grep head hdfs kill less ln ls md5sum mkdir module more mv nano pgrep pip pip3 "
    "pkill popd printf ps pushd pylint pytest read readlink realpath rm rsync scp sed sha256sum sleep "
    "source spack stat tail tar tee test touch type unset unzip vi vim wc wget which zip"
)
_SHELLS = word_set("bash sh zsh ssh sbatch srun at")


@functools.cache
def _parser() -> Parser:
    # Imported here: the help of the command needs no extra.
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


class LaunchError(DCTError):
    """A launch is not understood, or a file is not fit for the command; the message names the line."""


class Part(NamedTuple):
    """A part of the source, from ``start``."""

    start: int
    source: str


class Word(NamedTuple):
    """A word, from ``start`` to ``end``.

    ``text`` has no quotes, and ``inner`` are the parts in quotes, brackets and substitutions.
    """

    start: int
    end: int
    text: str
    inner: tuple[Part, ...] = ()


class Command(NamedTuple):
    """The words of a simple command.

    ``is_piped`` is set where the output goes to the next command, ``is_broken`` where a syntax error touches
    the command, and ``in_document`` in a here-document. ``nesting`` is "value" in a variable's value and
    "string" in another string or substitution.
    """

    words: tuple[Word, ...]
    is_piped: bool = False
    is_broken: bool = False
    nesting: str = ""
    in_document: bool = False

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


_TOP = Command(())


class Script:
    """A shell script, to be read for its commands."""

    def __init__(self, text: str) -> None:
        self.text = text
        # One byte for each character, so that offsets in the tree are offsets in the text.
        source = _PLACEHOLDER.sub(lambda match: "_" * len(match[0]), text)
        self.source = re.sub(r"[^\x01-\x7f]", "_", source.replace("<<<", "  <"))

    def line(self, offset: int) -> int:
        """Return the line, from 1, of an offset."""
        return self.text.count("\n", 0, offset) + 1

    def commands(self, part: Part, outer: Command = _TOP, depth: int = 0) -> Iterator[Command]:
        """Yield the commands of a part of the text, of its strings and of its here-documents.

        Raises:
            LaunchError: It nests too deep.
        """
        if depth > DEEPEST:
            raise LaunchError(f"line {self.line(part.start)}: nested more than {DEEPEST} deep")
        found, documents = self.parsed(part)
        for index, command in enumerate(found):
            own = command._replace(nesting=outer.nesting, in_document=outer.in_document)
            yield own
            receivers = found[index + 1 : index + 2] if command.is_piped else []
            is_read = any(word.text in _SHELLS for receiver in receivers for word in receiver.words)
            if is_read or not command.is_harmless:
                for word in command.words:
                    is_value = outer.nesting == "value" or ASSIGNMENT.match(word.text)
                    inside = own._replace(nesting="value" if is_value else "string")
                    for inner in word.inner:
                        yield from self.commands(inner, inside, depth + 1)
        for document in documents:
            yield from self.commands(document, outer._replace(in_document=True), depth + 1)

    def parsed(self, part: Part) -> tuple[list[Command], list[Part]]:
        """Return the commands of a part of the text, and its here-documents.

        A command ends where more than blanks stand between two words.
        """
        source, documents = _without_documents(part)
        commands: list[Command] = []
        words: list[Word] = []
        is_broken, last = False, 0
        for node, broken in _tokens(source):
            low, high = node.start_byte, min(node.end_byte, len(source))
            start, end = part.start + low, part.start + high
            text = _UNQUOTE.sub(r"\1", self.text[start:end]).strip("\"'")
            word = Word(start, end, text, tuple(_inner(node, source, part.start)))
            if node.is_error:
                commands.append(Command((word,), is_broken=True))
                continue
            gap = _SKIPPED.sub("", source[last:low])
            rest = _REDIRECT.sub("", gap)
            if words and rest.strip(" \t\r\f\v"):
                commands.append(Command(tuple(words), rest.strip() == "|", is_broken))
                words, is_broken = [], False
            if words and not gap and part.start + last == words[-1].end:  # one word, which the grammar splits
                first = words.pop()
                word = Word(first.start, end, first.text + text, first.inner + word.inner)
            if rest == gap:  # no target of a redirection
                words.append(word)
            is_broken, last = is_broken or broken, high
        if words:
            commands.append(Command(tuple(words), is_broken=is_broken))
        return commands, documents


def _tokens(source: str) -> Iterator[tuple[Node, bool]]:
    """Yield words and errors, and whether an error is near."""
    pending = [(_parser().parse(source.encode() + b"\n").root_node, False)]
    while pending:
        node, broken = pending.pop()
        broken = broken or node.is_error or (node.type in _STATEMENTS and node.has_error)
        if node.is_error or (node.type in _WORDS and not node.is_missing):
            yield node, broken
        if node.type not in _WORDS and node.type not in _WITHOUT_WORDS:
            is_loop = node.type == "for_statement"  # its values are read as those of a variable
            children = node.children_by_field_name("body") if is_loop else node.children
            pending += [(child, broken) for child in reversed(children)]


def _inner(node: Node, source: str, start: int) -> Iterator[Part]:
    """Yield the parts of a word that may hold commands or values."""
    pending = [node]
    while pending:
        node = pending.pop()
        opening = _OPENING.match(source, node.start_byte) if node.type in _NESTING else None
        if opening is not None:
            yield Part(start + opening.end(), source[opening.end() : node.end_byte - 1])
        else:
            pending += reversed(node.children)


def _without_documents(part: Part) -> tuple[str, list[Part]]:
    """Return a source with blanks for its here-documents, and those that may hold commands."""
    source, documents, at = part.source, [], 0
    while match := _DOCUMENT.search(source, at):
        at = match.start() + 1
        before = source[source.rfind("\n", 0, at) + 1 : match.start()]
        owner = re.split("[;&|]", before)[-1]
        is_printed = re.search(r"\bcat\s*$", owner) and not re.search(r"[>|`]|\$\(", before + match[3])
        if not is_printed and not re.search(r"(?:^|[\s/])python[\d.]*\s", owner):
            documents.append(Part(part.start + match.start(4), match[4]))
        blanks = re.sub(r"[^\n]", " ", source[match.start(4) : match.end()])
        source = source[: match.start()] + " " * len(match[1]) + match[3] + blanks + source[match.end() :]
    return source, documents
