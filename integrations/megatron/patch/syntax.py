"""The commands of a shell script with the offsets of their words, from the syntax tree of tree-sitter-bash.

The tree holds every character of the script. Where the script does not follow the grammar, the tree has error
nodes. A command that touches one is marked; an error that leaves a quote or a bracket open raises, because
nobody can tell what the rest of the script is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from .launchers import word_set

#: How deep ``$(...)``, ``${...}``, backticks and here-documents may nest.
DEEPEST = 50

#: ``NAME=``, ``NAME+=`` or ``NAME[subscript]=`` at the start of a word. The bound on the subscript keeps the
#: time linear.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]{0,80}\])?\+?=")

# How often a text is parsed whose here-documents the grammar ends too early.
_ATTEMPTS = 8

_PARSER = Parser(Language(tree_sitter_bash.language()))
_CONTINUATION = re.compile(r"\\\r?\n")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# NAME=<path of the data>, as in templates: no shell takes it before somebody has filled it in.
_PLACEHOLDER = re.compile(r"(?<==)<(?!\()[^<>'\"`$\\\n]*>")
_BRACKET = re.compile(r"""["'`]|<<|\$\{|\$?\(|\)""")
_OPENER = re.compile(r"""["'`]|\$?\(+|\$\{""")
_REST_OF_LINE = re.compile(r"\)|\r*(?:\n|$)")
_EXPANSION_END = re.compile(r"[^'\"`\n}]*\}")

_WORDS = word_set(
    "word number concatenation string raw_string ansi_c_string translated_string simple_expansion expansion "
    "command_substitution process_substitution arithmetic_expansion brace_expression command_name "
    "variable_name variable_assignment"
)
_REDIRECTIONS = word_set("file_redirect heredoc_redirect")
_COMPOSED = word_set("concatenation command_name variable_assignment")
_DECLARATIONS = word_set("declaration_command unset_command")
# How many characters open and close each form of quotes.
_QUOTES = {"string": (1, 1), "raw_string": (1, 1), "ansi_c_string": (2, 1), "translated_string": (2, 1)}
_NESTING = word_set("command_substitution expansion heredoc_body")
_STATEMENTS = word_set("command declaration_command variable_assignment redirected_statement")
_CLOSERS = frozenset(['"', ")", "))", "}", "`"])


class ShellError(ValueError):
    """The text leaves a quote or a bracket at ``offset`` open."""

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
    """The words of one simple command, of one array, or of the values of a loop.

    ``name`` is the variable that holds them, if any. ``in_string`` is set inside quoted strings,
    substitutions and here-documents, ``is_broken`` where a syntax error touches the command.
    """

    words: tuple[Word, ...]
    name: str | None = None
    in_string: bool = False
    is_broken: bool = False


class Script:
    """A shell script, to be read for its commands."""

    def __init__(self, text: str) -> None:
        self.text = text
        # One byte for each character, so that offsets in the tree are offsets in the text. To the grammar,
        # all characters beyond ASCII are alike.
        source = _PLACEHOLDER.sub(lambda match: "_" * len(match[0]), text)
        source = source.replace("<<<", "  <")  # behind another redirection the grammar does not know it
        self._source = re.sub(r"[^\x01-\x7f]", "_", source).encode()
        self._found: set[int] = set()  # where the commands found so far begin

    def commands(self) -> list[Command]:
        """Return every command and array, also of substitutions and here-documents, in the order of the text.

        Raises:
            ShellError: The text leaves a quote or a bracket open.
            DepthError: The text nests too deep.
        """
        commands, error = self._read(0, len(self.text), 0)
        if error is not None:
            raise error
        return commands

    def inside(self, command: Command, word: Word) -> Iterator[Command]:
        """Yield the commands in a word's quoted parts, e.g. of ``sh -c "..."`` or ``run_cmd="..."``.

        Substitutions that :meth:`commands` has returned are left out.

        Raises:
            ShellError: A quoted part leaves a quote or a bracket open, or nests too deep; raised after the
                commands of that part.
        """
        match = ASSIGNMENT.match(self.text, word.start, word.end)
        name = match[1] if match else None
        for start, end in word.quoted:
            if self.text.find(" ", start, end) < 0:
                continue
            commands, error = self._read(start, end, 0)
            for found in commands:
                yield found._replace(name=found.name or name, in_string=True)
            if error is not None:
                raise error

    def _read(self, start: int, end: int, depth: int) -> tuple[list[Command], ShellError | None]:
        """Return the new commands of a part of the text, and the error that leaves something open in it."""
        source = self._source[start:end]
        for _ in range(_ATTEMPTS):
            # The line end after the last line belongs to the grammar.
            tree = _PARSER.parse(source + b"\n")
            reader = _Reader(self.text, start, end, depth)
            found = reader.read(tree.root_node)
            if reader.cut_document is None:
                break
            whole = _with_whole_document(source, *reader.cut_document)
            if whole == source:
                break
            source = whole
        commands = self._new(found)
        for body_start, body_end, body_depth in reader.documents:
            found, error = self._read(body_start, body_end, body_depth)
            if isinstance(error, DepthError):
                raise error
            if error is None:  # else: prose or another language
                commands += found
        return sorted(commands, key=lambda command: command.words[0].start), reader.open_error()

    def _new(self, commands: Iterable[Command]) -> list[Command]:
        """Return the commands that were not found before: substitutions in quotes are read twice."""
        new = [each for each in commands if each.is_broken or each.words[0].start not in self._found]
        self._found.update(each.words[0].start for each in new if not each.is_broken)
        return new


def _with_whole_document(source: bytes, start: int, mark: bytes) -> bytes:
    """Return the source with an underscore for ``mark`` where lines of the here-document only begin with it.

    The grammar ends the document there. Its first line begins at ``start``.
    """
    line = rb"(?m)^(\t*)" + re.escape(mark)
    end = re.compile(line + rb"[)\r]*$").search(source, start)
    if end is None:
        return source
    body = re.sub(line, lambda match: match[1] + b"_" * len(mark), source[start : end.start()])
    return source[:start] + body + source[end.start() :]


class _Reader:
    """Collects the commands of one syntax tree.

    ``documents`` are its here-documents: start, end and depth. ``cut_document`` is the first one that the
    grammar ended too early: its start in this part of the text, and its mark.
    """

    def __init__(self, text: str, start: int, end: int, depth: int) -> None:
        self.text, self.start, self.end, self.depth = text, start, end, depth
        self.documents: list[tuple[int, int, int]] = []
        self.cut_document: tuple[int, bytes] | None = None
        self._commands: list[Command] = []
        self._open: list[ShellError] = []
        # Words that stand behind a redirection, by the node of their command.
        self._behind_redirection: dict[int, list[Word]] = {}

    def read(self, root: Node) -> list[Command]:
        """Return the commands; raise :class:`DepthError` where the tree nests too deep."""
        pending: list[tuple[Node, Node | None, int, bool]] = [(root, None, self.depth, False)]
        while pending:
            node, parent, depth, is_broken = pending.pop()
            if node.is_error or node.is_missing:
                self._check_error(node, parent)
            if node.is_error or (node.has_error and node.type in _STATEMENTS):
                is_broken = True
            if node.type in _NESTING:
                depth += 1
                if depth > DEEPEST:
                    opened = parent if node.type == "heredoc_body" and parent is not None else node
                    what = self._source_of(opened)[:2]
                    raise DepthError(f"{what} nested more than {DEEPEST} deep", self._start(opened))
            if node.type == "heredoc_body":
                self.documents.append((self._start(node), self._end(node), depth))
            for words, name in self._commands_at(node, parent):
                self._add(words, name, depth, is_broken)
            pending += [(child, node, depth, is_broken) for child in node.children]
        return self._commands

    def open_error(self) -> ShellError | None:
        """Return the first error that leaves a quote or a bracket open."""
        return min(self._open, key=lambda error: error.offset, default=None)

    def _commands_at(self, node: Node, parent: Node | None) -> Iterator[tuple[list[Word], str | None]]:
        """Yield the words of the command or array that a node is, and the variable that holds them."""
        kind = node.type
        if kind == "command" or kind in _DECLARATIONS:
            yield self._words_of(node) + self._behind_redirection.pop(node.id, []), None
        elif kind == "variable_assignment":
            if parent is None or (parent.type != "command" and parent.type not in _DECLARATIONS):
                yield self._words_of(node, (node,)), None
        elif kind == "array":
            match = ASSIGNMENT.match(self.text, self._start(parent)) if parent is not None else None
            yield self._words_of(node), match[1] if match else ""
        elif kind == "for_statement":
            variable = node.child_by_field_name("variable")
            values = self._words_of(node, node.children_by_field_name("value"))
            yield values, self._source_of(variable) if variable is not None else ""
        elif kind == "redirected_statement":
            yield self._without_command(node), None
        elif kind == "heredoc_redirect":
            self._check_document(node)
        elif node.is_error:
            yield [Word(self._start(node), self._end(node), self._source_of(node), False, ())], None

    def _without_command(self, node: Node) -> list[Word]:
        """Give the words behind the redirections of a statement to its last command; else return them."""
        redirections = [child for child in node.children if child.type in _REDIRECTIONS]
        words = [word for child in redirections for word in self._redirected(child)]
        last: Node | None = node.child_by_field_name("body")
        while last is not None and last.type in ("list", "pipeline", "negated_command"):
            last = last.named_children[-1]
        if last is None or last.type != "command":
            return [] if all(word.is_target for word in words) else words
        self._behind_redirection.setdefault(last.id, []).extend(words)
        return []

    def _add(self, words: list[Word], name: str | None, depth: int, is_broken: bool) -> None:
        """Add a command; an unescaped line end between two words, which the grammar may skip, ends it."""
        runs: list[list[Word]] = []
        for word in sorted(words):
            gap = self.text[runs[-1][-1].end : word.start] if runs else "\n"
            rest = _CONTINUATION.sub("", gap)
            if gap and not rest:  # one word, continued on the next line
                runs[-1][-1] = _joined(runs[-1][-1], word)
            elif not runs or ("\n" in rest and name is None):
                runs.append([word])
            else:
                runs[-1].append(word)
        self._commands += [Command(tuple(run), name, depth > 0, is_broken) for run in runs]

    # -- words ---

    def _words_of(self, node: Node, children: Sequence[Node] | None = None) -> list[Word]:
        words = []
        holds_tokens = node.type == "command" or node.type in _DECLARATIONS  # such as `export` and `==`
        for child in node.children if children is None else children:
            if child.type in _REDIRECTIONS:
                words += self._redirected(child)
            elif child.is_missing or not (child.type in _WORDS or (holds_tokens and not child.is_named)):
                continue
            # An array is a command of its own.
            elif child.type != "variable_assignment" or child.named_children[-1].type != "array":
                words.append(self._word(child))
        return words

    def _redirected(self, node: Node) -> list[Word]:
        """Return the words of a redirection: its target, and those behind it."""
        words: list[Word] = []
        has_target = node.type == "heredoc_redirect"
        operator_end = self._start(node)
        for child in node.children:
            if child.type in _REDIRECTIONS:
                words += self._redirected(child)
            elif child.type in _WORDS and not child.is_missing:
                gap = self.text[operator_end : self._start(child)]
                is_target = not has_target and "\n" not in _CONTINUATION.sub("", gap)
                words.append(self._word(child, is_target))
                has_target = True
            elif not has_target:
                operator_end = self._end(child)
        return words

    def _word(self, node: Node, is_target: bool = False) -> Word:
        parts: list[str] = []
        quoted: list[tuple[int, int]] = []
        pending = [node]
        while pending:
            part = pending.pop()
            start, end = self._start(part), self._end(part)
            if part.type in _COMPOSED:
                pending += reversed(part.children)
            elif part.type in _QUOTES:
                before, after = _QUOTES[part.type]
                quoted.append((start + before, end - after))
                inside = self.text[start + before : end - after]
                parts.append(inside if part.type == "raw_string" else _CONTINUATION.sub("", inside))
            elif part.type == "word":
                parts.append(_ESCAPE.sub(r"\1", _CONTINUATION.sub("", self.text[start:end])))
            else:
                parts.append(self.text[start:end])
        return Word(self._start(node), self._end(node), "".join(parts), is_target, tuple(quoted))

    # -- errors ---

    def _check_error(self, node: Node, parent: Node | None) -> None:
        """Note an error that leaves something open."""
        if node.is_missing:
            if node.type not in _CLOSERS or parent is None or parent.type == "compound_statement":
                return
            # In ${NAME:$OTHER+1} the bracket is not missing: the grammar does not know the form.
            if parent.type == "expansion" and _EXPANSION_END.match(self.text, self._start(node), self.end):
                return
            opener = _OPENER.match(self._source_of(parent))
            what = "array" if parent.type == "array" or opener is None else opener[0]
            self._open.append(_left_open(what, self._start(parent)))
        elif found := self._opener_in(node):
            self._open.append(_left_open(*found))

    def _check_document(self, node: Node) -> None:
        """Note a here-document that has no end, shares its line with another one, or was ended too early."""
        parts = {child.type: child for child in node.children}
        opening, ending, body = (parts.get(f"heredoc_{name}") for name in ("start", "end", "body"))
        mark = re.sub(r"['\"\\]", "", self._source_of(opening)) if opening else ""
        if ending is None or body is None or self._source_of(ending).strip() != mark or "ERROR" in parts:
            self._open.append(_left_open("<<", self._start(node)))
        elif _REST_OF_LINE.match(self.text, self._end(ending), self.end) is None:
            self._open.append(_left_open("<<", self._start(node)))
            if self.cut_document is None or body.start_byte < self.cut_document[0]:
                self.cut_document = body.start_byte, re.sub(r"[^\x01-\x7f]", "_", mark).encode()

    def _opener_in(self, node: Node) -> tuple[str, int] | None:
        """Return the quote or bracket that opens in an error node and is not closed there, and its offset."""
        start = self._start(node)
        loose = list(self.text[start : self._end(node)])
        for child in node.children:
            if child.is_named and not child.is_error:
                low, high = self._start(child) - start, self._end(child) - start
                loose[low:high] = "x" * (high - low)
        brackets: list[re.Match[str]] = []
        for match in _BRACKET.finditer("".join(loose)):
            if match[0] == ")":
                del brackets[-1:]
            else:
                brackets.append(match)
                if not match[0].endswith("("):
                    break
        return (brackets[0][0], start + brackets[0].start()) if brackets else None

    # -- offsets ---

    def _start(self, node: Node) -> int:
        return min(self.start + node.start_byte, self.end)

    def _end(self, node: Node) -> int:
        return min(self.start + node.end_byte, self.end)

    def _source_of(self, node: Node) -> str:
        return self.text[self._start(node) : self._end(node)]


def _joined(first: Word, second: Word) -> Word:
    text, quoted = first.text + second.text, first.quoted + second.quoted
    return Word(first.start, second.end, text, first.is_target, quoted)


def _left_open(opener: str, offset: int) -> ShellError:
    name = {'"': "quote", "'": "quote", "`": "backtick"}.get(opener, opener)
    return ShellError(f"{name} without an end", offset)
