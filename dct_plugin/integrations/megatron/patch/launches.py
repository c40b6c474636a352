"""Find the launches in a shell script by one rule.

A launch is a launcher (Python, torchrun, ...) and, behind its options, a Python script or a module. The words
of a command are read one by one. A variable is read as the words of each of its values, so it does not matter
which words stand in variables. The result is a set of states, one for each way through the values.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

from .shell import ASSIGNMENT, Command, LaunchError, Script, Word, word_set

#: What a patched command runs.
MODULE = "dct_plugin.megatron"
_SPACE = r"(?:\s|\\\r?\n)+"
_VALUE = r"""(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s'"\\])+"""
#: An insertion, also one that was written by hand.
INSERTION = re.compile(
    rf"(?:-m|--module){_SPACE}{re.escape(MODULE)}{_SPACE}(?:--dct(?:-[\w-]+)?(?:=|{_SPACE}){_VALUE}{_SPACE})*"
)

# File names that train; others (tools, text generation, checkpoint conversion) are left alone.
_TRAINING = re.compile(r"(?:pretrain|train|finetune|sft).*\.py|.*_(?:pretrain|train|finetune)\.py")
_NO_TRAINING = re.compile(
    r"(?:^|[_\-.])(data|dataset|datasets|prep|prepare|preprocess|tokenizer|tokenize|vocab|spm|bpe|sentencepiece|"
    r"test|utils?|config|args|split|download|convert|merge|monitor|plot|ppo|dpo|grpo|ray)(?=[_\-.]|$)"
)
_LAUNCHER_NAME = re.compile(r"LAUNCH|RUNNER|PYTHON", re.IGNORECASE)
_SCRIPT_NAME = re.compile(
    r"^(?!.*(?:DIR|PATH_TO|ARGS)).*(?:SCRIPT|ENTRY_?POINT|PROGRAM|TRAIN(?:ER|_FILE|_PY)|PRETRAIN)",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[^]]{0,80}\])?(?::?[-=]([^{}]*))?\}|(\w+))")
_EXPANSION = re.compile(r"\$[@*]|\$\{[^}]*\}|\$\(.*\)|`.*`", re.DOTALL)
_LOOP = re.compile(r"\bfor\s+(\w+)\s+in\s+([^;\n]+)")
_WHICH = re.compile(r"\$\((?:which|command -v) (\S+)\)|`which (\S+)`")
_MOST_VALUES, _DEEPEST_VALUE, _LONGEST_VALUE = 32, 6, 1_000

_TORCHRUN = word_set("torchrun ft_launcher torch.distributed.run torch.distributed.launch")
_OTHER_HOSTS = word_set("deepspeed deepspeed.launcher.runner accelerate accelerate.commands.launch")
_OPTION_OF_OTHER_HOST = re.compile(
    r"--(?:deepspeed(?:[_=-]|$)|(?:per_device_\w+|model_name_or_path|num_train_epochs)(?:=|$))"
)
_OTHER_HOST = (
    "left alone, it is not Megatron's: the dct section goes into the DeepSpeed JSON, to "
    "dct_plugin.accelerate.attach, or to the Trainer's dct_plugin.transformers.DCTCallback"
)
_NO_REASON = (
    "left alone, nothing in the launch says that it is Megatron's. If it is, --force edits it; else the dct "
    "section goes to dct_plugin.attach in the script, into the DeepSpeed JSON, or to the Trainer's callback"
)
_RAY = "left alone, ray starts it: its workers would train without the plugin (--force edits it)"
# What says that a launch is Megatron's: its scripts, a path, options that others do not have, or several of
# those that others may have.
_MEGATRON_SCRIPT = re.compile(
    r"pretrain_(?:gpt|bert|t5|ict|vlm|mamba|hybrid|retro|vision|biencoder|multimodal|\$)[^/]*\.py"
)
_MEGATRON = re.compile(r"megatron", re.IGNORECASE)
_MEGATRON_OPTION = re.compile(
    r"--(?:(?:tensor|pipeline|expert)-model-parallel-size|num-layers-per-virtual-pipeline-stage|num-attention-heads|"
    r"use-distributed-optimizer|use-mcore-models|transformer-impl|max-position-embeddings|num-query-groups|"
    r"recompute-granularity|untie-embeddings-and-output-weights|position-embedding-type|lr-decay-iters|"
    r"attention-softmax-in-fp32|no-masked-softmax-fusion|overlap-grad-reduce|data-cache-path)(?:=|$)"
)
_SHARED_OPTION = re.compile(
    r"--(?:num-layers|hidden-size|ffn-hidden-size|micro-batch-size|global-batch-size|seq-length|train-iters|"
    r"train-samples|eval-iters|eval-interval|save-interval|log-interval|tokenizer-type|vocab-file|merge-file|"
    r"swiglu|group-query-attention|context-parallel-size|sequence-parallel|distributed-backend|split|"
    r"lr-warmup-fraction|lr-warmup-iters|ckpt-format|normalization|clip-grad|data-path)(?:=|$)"
)
_SHARED_ENOUGH = 3
_FUNCTION = re.compile(
    r"^[ \t]*(function[ \t]+)?([\w-]+)[ \t]*(?(1)(?:\(\))?|\(\))\s*\{(.*?)^[ \t]*\}", re.MULTILINE | re.DOTALL
)
# Options without a value, and those of Python with one; other options of other launchers may take a value.
_FLAG = re.compile(r"--$|--?[\w-]+=")
_PYTHON_VALUE = re.compile(r"-[WX]$|--check-hash-based-pycs$|--dct\b")


class Launch(NamedTuple):
    """A command that starts Python on a training script.

    ``place`` is the offset of the insertion, and ``line`` its line, from 1. ``removal`` is the span to take
    out where the command starts the plugin already, else ``None``.
    """

    script: str
    place: int
    line: int
    removal: tuple[int, int] | None = None


class Launches(NamedTuple):
    """The training launches of a script; ``notes`` name what is left alone, ``errors`` forbid an edit."""

    training: list[Launch]
    notes: list[str]
    errors: list[str]

    def in_words(self) -> list[str]:
        """Return the lines that were found, and what is left as it is."""
        lines = ", ".join(str(launch.line) for launch in self.training)
        left = (f"left as it is: {error}" for error in self.errors)
        return [f"training launches: line {lines}", *self.notes, *left]


class _State(NamedTuple):
    """A reading of the words so far.

    ``token`` is the launcher's word, and ``expects`` is "value" or "module" behind an option. ``place`` is
    where an insertion stands, ``script`` what is launched there, and ``plugin`` whether it is in place.
    Otherwise ``problem`` says why the launch is not understood, or ``orphan`` is a script without a launcher.
    """

    launcher: str = ""
    token: str = ""
    expects: str = ""
    place: int = 0
    script: str = ""
    is_module: bool = False
    plugin: bool = False
    problem: str = ""
    orphan: str = ""
    is_over: bool = False


class _Variables:
    """The values of a script's variables, and the functions that hand their arguments to a launcher.

    Attributes:
        bodies: Those functions by the place of their command.
    """

    def __init__(self, script: Script, commands: Iterable[Command]) -> None:
        self._script = script
        self._values: dict[str, list[list[Word]]] = {}
        self.bodies: dict[int, str] = {}
        for loop in _LOOP.finditer(script.text):
            for value in re.finditer(r"\S+", loop[2]):
                start, end = (loop.start(2) + offset for offset in value.span())
                self._add_value(loop[1], [Word(start, end, value[0].strip("\"'"))], [])
        for command in commands:
            self._assign(command)
        self._read_functions()

    def _assign(self, command: Command) -> None:
        """Add the values of variables; one that contains the variable itself contains its last value."""
        for word in command.words:
            raw = self._script.text[word.start : word.end]
            match = ASSIGNMENT.match(raw)
            if match is None and word is command.words[0] and re.fullmatch(r"-\w+", word.text):
                continue  # declare -a NAME=(...)
            if match is None:
                return
            value = Word(word.start + match.end(), word.end, word.text[match.end() :])
            words = [value] if value.text else []
            if raw[match.end() : match.end() + 1] in ("'", '"', "("):
                parts = self._script.nested(word.start, word.end)
                words = [
                    x for part in parts for inner in self._script.simple_commands(*part) for x in inner.words
                ]
            last = self._values.get(match[1], [[]])[-1]
            self._add_value(match[1], words, last, append=match[0].endswith("+="))

    def _add_value(self, name: str, words: Iterable[Word], last: list[Word], append: bool = False) -> None:
        new = list(last) if append else []
        for word in words:
            match = _VARIABLE.fullmatch(word.text)
            new += [word] if match is None or (match[1] or match[3]) != name else last or _default(match)
            if len(new) > _LONGEST_VALUE:  # A="$A $A", again and again
                line = self._script.line(max(word.start, 0))
                raise LaunchError(f"line {line}: {name} has more than {_LONGEST_VALUE:,} words")
        values = self._values.setdefault(name, [])
        texts = [[word.text for word in value] for value in values]
        if len(values) < _MOST_VALUES and [word.text for word in new] not in texts:
            values.append(new)

    def _read_functions(self) -> None:
        """Take the words before ``"$@"`` in a function's command as a value of the function's name."""
        for function in _FUNCTION.finditer(self._script.text):
            for command in self._script.simple_commands(*function.span(3)):
                texts = [word.text for word in command.words]
                at = next((at for at, text in enumerate(texts) if text in ("$@", "$*", "${@}")), 0)
                if any(_launcher_of(text.rsplit("/", 1)[-1]) for text in texts[:at]):
                    self._values.setdefault(f"{function[2]}()", []).append([*command.words[:at]])
                    self.bodies[command.program[0].start] = function[2]

    def is_function(self, text: str) -> bool:
        """Return whether a word is the name of such a function."""
        return f"{text}()" in self._values

    def values_of(self, text: str) -> list[list[Word]]:
        """Return the known values of a word that is one variable, or a function."""
        if self.is_function(text):
            return self._values[f"{text}()"]
        match = _VARIABLE.fullmatch(text)
        values = [*self._values.get(match[1] or match[3], []), _default(match)] if match else []
        return [value for value in values if value] or values[:-1]

    def names(self, text: str) -> set[str]:
        """Return the file names that a word may stand for."""
        base = text.rsplit("/", 1)[-1]
        match = _VARIABLE.search(base)
        values = [value[0].text for value in self.values_of(match[0]) if len(value) == 1] if match else []
        names = {base.replace(match[0], value).rsplit("/", 1)[-1] for value in values} if match else set()
        return names or {base}

    def all_texts(self, words: Iterable[Word], seen: frozenset[str] = frozenset()) -> set[str]:
        """Return the words, and those that their variables may hold."""
        found = {word.text for word in words}
        for text in found - seen:
            for value in self.values_of(text):
                found |= self.all_texts(value, seen | found)
        return found


class _Finder:
    def __init__(
        self, text: str, patterns: Sequence[str], force: bool, imports: Callable[[str], bool]
    ) -> None:
        self.script, self.patterns = Script(text), patterns
        self._force, self._imports = force, imports
        self._commands = list(self.script.commands(0, len(text)))
        self._in_megatron = any(map(_is_in_megatron, self._commands))
        """True if the script changes to a folder of Megatron's, or imports from there."""
        self._ray = [command.words for command in self._commands if _starts_ray(command)]
        """The words of ray's commands."""
        self._variables = _Variables(self.script, self._commands)
        self.inserted = {match.end(): match.span() for match in INSERTION.finditer(text)}
        self.launches: dict[int, Launch] = {}
        # Notes and errors by offset; notes about a place with a launch give way to it, or it to them.
        self.other_hosts: dict[int, str] = {}
        self.untrained: dict[int, str] = {}
        self.notes: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self._behind = functools.cache(self._read_word)

    def run(self) -> Launches:
        for command in self._commands:
            if command.program and not command.is_harmless:
                self._find(command, command.program)
        for place in self.inserted.keys() - self.launches.keys():
            self.errors[place] = f"{MODULE} stands here, and before no launch that is understood"
        launches = [self.launches[place] for place in sorted(self.launches.keys() - self.other_hosts.keys())]
        untrained = {place: self.untrained[place] for place in self.untrained.keys() - self.launches.keys()}
        notes = {**untrained, **self.notes, **self.other_hosts}
        return Launches(launches, self._lines(notes), self._lines(self.errors))

    def _lines(self, found: dict[int, str]) -> list[str]:
        lines = [f"line {self.script.line(offset)}: {found[offset]}" for offset in sorted(found)]
        return list(dict.fromkeys(lines))

    # -- scripts ---

    def _is_script(self, text: str) -> bool:
        """Return whether a word may stand for a Python script."""
        names = set() if text.startswith("-") or ASSIGNMENT.match(text) else self._variables.names(text)
        return any(name.endswith(".py") or _sounds_like_script(name) for name in names)

    def _trains(self, text: str) -> bool:
        """Return whether a script is one of the wanted ones."""
        names = self._variables.names(text)
        wanted = any(fnmatch(name, pattern) for pattern in self.patterns for name in (text, *names))
        trains = (_TRAINING.fullmatch(name) and not _NO_TRAINING.search(name) for name in names)
        return wanted or any(trains) or any(_sounds_like_script(name.removesuffix(".py")) for name in names)

    def _is_training(self, text: str) -> bool:
        return self._is_script(text) and self._trains(text)

    # -- the rule ---

    def _read(self, words: Iterable[Word], states: frozenset[_State], depth: int = 0) -> frozenset[_State]:
        """Return the states behind some words."""
        for word in words:
            states = frozenset().union(*(self._behind(word, state, depth) for state in states))
        return states

    def _read_word(self, word: Word, state: _State, depth: int) -> frozenset[_State]:
        """Return the states behind a word, which may be a variable."""
        values = self._variables.values_of(word.text) if depth < _DEEPEST_VALUE else []
        if not values:
            return frozenset([self._step(state, word)])
        placed = [[each._replace(start=word.start) for each in value[:1]] + value[1:] for value in values]
        return frozenset().union(*(self._read(value, frozenset([state]), depth + 1) for value in placed))

    def _step(self, state: _State, word: Word) -> _State:
        """Return the state behind one more word."""
        text, variable = word.text, _VARIABLE.fullmatch(word.text)
        if state.script or state.problem or state.orphan or state.is_over:
            return state
        if state.expects == "module":
            return self._module(state._replace(expects=""), text)
        launcher = _launcher_of(_WHICH.sub(r"\1\2", text).rsplit("/", 1)[-1])
        if variable and not state.launcher and _LAUNCHER_NAME.search(variable[1] or variable[3]):
            launcher = "unknown"
        if launcher and not state.expects:
            return state._replace(launcher=launcher, token=text)
        if text in ("-m", "--module"):
            return state._replace(expects="module", place=word.start)
        if state.launcher:
            return self._argument(state, word)
        is_orphan = not variable and self._is_training(text)
        return state._replace(orphan=text) if is_orphan else state

    def _argument(self, state: _State, word: Word) -> _State:
        text, is_python = word.text, state.launcher in ("python", "unknown")
        if text in ("--no-python", "--no_python"):
            return state._replace(launcher="", token=f"{state.token} {text}")
        if text in ("-h", "--help", "-V", "--version") or (is_python and re.match(r"-$|-c", text)):
            return state._replace(is_over=True)
        if is_python and re.fullmatch(r"-\w+m", text):
            return state._replace(problem=f"{state.token} {text}: write {text[:-1]} -m")
        if text.startswith("-"):
            takes_value = bool(_PYTHON_VALUE.match(text) if is_python else not _FLAG.match(text))
            if takes_value and state.launcher == "torchrun":
                known = _takes_value(text)
                if known is None:
                    return state._replace(problem=f"{state.token}: no script found before {text}")
                takes_value = known
            return state._replace(expects="value" if takes_value else "")
        if self._is_script(text):
            return state._replace(script=text, place=word.start)
        if state.expects or not text or _VARIABLE.fullmatch(text) or _EXPANSION.fullmatch(text):
            return state._replace(expects="")
        if state.launcher == "torchrun":
            return state._replace(problem=f"{state.token}: {text} is neither an option nor a Python script")
        return state._replace(launcher="", token="") if is_python else state

    def _module(self, state: _State, text: str) -> _State:
        if text == MODULE:
            return state._replace(plugin=True)
        if launcher := _launcher_of(text):
            return state._replace(launcher=launcher, token=f"{state.token} -m {text}")
        if state.launcher in ("python", "unknown") and text.startswith("$") and not _sounds_like_script(text):
            return state._replace(problem=f"{state.token}: the module {text} is set elsewhere")
        return state._replace(script=text, is_module=True) if state.launcher else state

    # -- what is found ---

    def _find(self, command: Command, words: Sequence[Word]) -> None:
        start, end, texts = words[0].start, words[-1].end, [word.text for word in words]
        states = self._read(words, frozenset([_State()]))
        found = [state for state in states if state.script]
        places = {state.place for state in found}
        problems = [state.problem for state in states if state.problem]
        if command.nesting and not found and not any(map(self._trains, texts)):
            problems = []  # it may be prose
        elif found and command.nesting == "value" and texts[0].startswith("$"):
            problems = []  # of A="$A ...", where A had another value
        if found or not command.nesting:
            receiver = f"is given to {texts[0]}, which is no launcher known here"
            problems += [f"{state.orphan} {receiver}" for state in states if state.orphan]
        if -1 in places or (len(places) > 1 and any(start <= place < end for place in places)):
            problems.append("what its variables hold leads to different launches")
        has_variable = any(text.startswith("$") for text in texts)
        is_whole = not command.nesting or (command.nesting == "string" and has_variable)
        if not found and not problems and is_whole:
            problems += [f"{state.token}: no script found" for state in states if _lacks_script(state, texts)]
        said = self._variables.all_texts(words)
        other_host = any(map(_OPTION_OF_OTHER_HOST.match, said))
        if len(words) == 1 and self._variables.is_function(texts[0]):
            return  # its definition
        if (function := self._variables.bodies.get(start)) and not found and self._is_called(function):
            problems = []
        if problems and other_host and any(map(self._is_script, texts)):
            self.notes[start] = _OTHER_HOST
        elif problems:
            self.errors[start] = min(problems)
        elif not found and has_variable and _launcher_of(texts[0]) == "other":
            self.notes[start] = _OTHER_HOST
        for state in found if not problems else ():
            self._add(state, other_host, texts, said)

    def _is_called(self, function: str) -> bool:
        """Return whether a function is called with arguments."""
        call = rf"^[^#\n]*(?<![\w-]){re.escape(function)}[ \t]+[^\s(]"
        return re.search(call, self.script.text, re.MULTILINE) is not None

    def _why_not(self, place: int, script: str, texts: set[str]) -> str:
        """Return why a training launch of these words is left alone; empty: it says that it is Megatron's."""
        if any(words[0].start <= place < words[-1].end for words in self._ray):
            return _RAY
        names = self._variables.names(script)
        paths = {script, *self._variables.all_texts([Word(0, 0, script)])}
        is_megatrons = (
            any(fnmatch(name, pattern) for pattern in self.patterns for name in (script, *names))
            or any(map(_MEGATRON_SCRIPT.fullmatch, names))
            or any(map(_MEGATRON.search, paths))
            or any(map(_MEGATRON_OPTION.match, texts))
            or len({text.split("=")[0] for text in texts if _SHARED_OPTION.match(text)}) >= _SHARED_ENOUGH
            or self._in_megatron
            or any(map(self._imports, paths))
        )
        return "" if is_megatrons else _NO_REASON

    def _add(self, state: _State, other_host: bool, texts: Sequence[str], said: set[str]) -> None:
        script, place, is_torchrun = state.script, state.place, state.launcher == "torchrun"
        name = script.rsplit(".", 1)[-1] + ".py" if state.is_module and not script.startswith("$") else script
        trains = state.plugin or self._trains(name)
        other_host = state.launcher == "other" or (other_host and (trains or is_torchrun))
        if other_host and not state.plugin:
            self.other_hosts[place] = f"{script}: {_OTHER_HOST}"
        elif state.plugin != (place in self.inserted):
            self.errors[place] = f"{MODULE} stands here in a way that is not understood"
        elif trains and not (state.plugin or self._force) and (why := self._why_not(place, name, said)):
            self.other_hosts[place] = f"{script}: {why}"
        elif trains:
            self.launches[place] = Launch(script, place, self.script.line(place), self.inserted.get(place))
            if state.launcher == "unknown" and not state.plugin:
                what = "is set elsewhere: -m is right if it is python or torchrun, not for deepspeed"
                self.notes[place] = f"{state.token} {what}"
        elif is_torchrun or re.search(r"train|tune|sft|\$", script) or any(map(self._is_training, texts)):
            self.untrained[place] = f"{script} is not a training script: left alone (--script adds names)"


def find_launches(
    text: str,
    scripts: Sequence[str] = (),
    *,
    force: bool = False,
    imports: Callable[[str], bool] = lambda script: False,
) -> Launches:
    """Find every training launch of Megatron's in a script; changes nothing.

    Args:
        text: A shell script.
        scripts: File name patterns of further training scripts.
        force: Take a training launch for Megatron's that does not say so.
        imports: Returns whether a Python script imports Megatron, by its path as the launch has it.

    Raises:
        LaunchError: A variable's value has more than 1,000 words.
    """
    return _Finder(text, scripts, force, imports).run()


def _starts_ray(command: Command) -> bool:
    """Return whether a command is one of ray, before any launcher."""
    names = [word.text.rsplit("/", 1)[-1] for word in command.program]
    before = itertools.takewhile(lambda name: not _launcher_of(name), names)
    return not command.is_harmless and "ray" in before


def _is_in_megatron(command: Command) -> bool:
    """Return whether a command changes to a folder of Megatron's, or has Python import from there."""
    program = [word.text for word in command.program]
    paths = program[1:] if program[:1] in (["cd"], ["pushd"]) else []
    paths += [word.text for word in command.words if word.text.startswith("PYTHONPATH=")]
    return any(map(_MEGATRON.search, paths))


@functools.cache
def _torchrun_options() -> dict[str, bool]:
    """Return the options of torchrun, and whether each takes a value."""
    from torch.distributed.run import get_args_parser

    options = {"--use-env": False, "--use_env": False}  # of torch.distributed.launch
    for action in get_args_parser()._actions:
        options |= dict.fromkeys(action.option_strings, action.nargs != 0)
    return options


def _takes_value(option: str) -> bool | None:
    """Return whether an option of torchrun, or the beginning of one, takes a value; None for no option."""
    options = _torchrun_options()
    names = [option] if option in options else [name for name in options if name.startswith(option)]
    found = {options[name] for name in names}
    return found.pop() if len(found) == 1 else True if option.startswith("--dct") else None


def _launcher_of(name: str) -> str:
    if name in _TORCHRUN or name in _OTHER_HOSTS:
        return "torchrun" if name in _TORCHRUN else "other"
    return "python" if re.fullmatch(r"python[\d.]*|pdb", name) else ""


def _lacks_script(state: _State, texts: Sequence[str]) -> bool:
    is_torchrun = state.launcher == "torchrun" or "--no" in state.token
    return is_torchrun and not state.is_over and state.token != texts[-1]


def _default(variable: re.Match[str]) -> list[Word]:
    """Return the words of a default value, in which there is no place for an insertion."""
    text = variable[2] or ""
    return [Word(-1, -1, part) for part in ([text] if re.search(r"\$\(|`", text) else text.split())]


def _sounds_like_script(name: str) -> bool:
    match = _VARIABLE.fullmatch(name)
    return match is not None and _SCRIPT_NAME.search(match[1] or match[3]) is not None
