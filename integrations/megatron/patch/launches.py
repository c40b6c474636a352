"""Find the launches in a shell script by one rule.

A launch is a launcher (Python, torchrun, ...) and, behind its options, a Python script or a module. The words
of a command are read one by one. A variable is read as the words of each of its values, so it does not matter
which words stand in variables. The result is a set of states, one for each way through the values.

Every value of a variable is read once for each state: time is linear in the script's size.
"""

from __future__ import annotations

import enum
import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .shell import ASSIGNMENT, Command, Script, Word, word_set

#: What a patched command runs.
MODULE = "dct_plugin.megatron"
#: File names that train; others (tools, text generation, checkpoint conversion) are left alone.
TRAINING = tuple(
    word_set("pretrain*.py *_pretrain.py train*.py *_train.py finetune*.py *_finetune.py sft*.py")
)

_NO_TRAINING = re.compile(
    r"(?:^|[_\-.])(data|dataset|datasets|prep|prepare|preprocess|tokenizer|tokenize|vocab|spm|bpe|sentencepiece|"
    r"test|utils?|config|args|split|download|convert|merge|monitor|plot|ppo|dpo|grpo|ray)(?=[_\-.]|$)"
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[^]]{0,80}\])?(?::?[-=]([^{}]*))?\}|(\w+))")
_EXPANSION = re.compile(r"\$[@*]|\$\{[^}]*\}|\$\(.*\)|`.*`", re.DOTALL)
_VALUE_WORD = re.compile(r"(?:\$\{[^}\n]*\}|\$\([^)\n]*\)|`[^`\n]*`|[^\s\\]|\\\S)+")
_LOOSE_WORD = re.compile(r"""[^\s;&|()<>"'`]+""")
_QUOTES = re.compile(r"[\"']|\\(?=.)")
_LAUNCHER_NAME = re.compile(r"LAUNCH|RUNNER|PYTHON", re.IGNORECASE)
_SCRIPT_NAME = re.compile(
    r"^(?!.*(?:DIR|PATH_TO|ARGS)).*(?:SCRIPT|ENTRY_?POINT|PROGRAM|TRAIN(?:ER|_FILE|_PY)|PRETRAIN)",
    re.IGNORECASE,
)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?$")
_WHICH = re.compile(r"\$\((?:which|command -v) (\S+)\)|`which (\S+)`")
_PYTHON_MODULE = re.compile(r"-[bBdEiIOPqsSuvx]*m")
_MOST_VALUES, _MOST_WORDS, _DEEPEST_VALUE = 64, 2000, 12


# Commands that may name a launcher or a training script without starting it, and words before a command.
_HARMLESS = word_set(
    ". [ [[ apt apt-get awk aws basename black cat cd chmod chown code cp curl diff dirname du echo "
    "export file find git grep head hdfs kill less ln ls md5sum mkdir module more mv nano pgrep pip pip3 "
    "pkill popd printf ps pushd pylint pytest read readlink realpath rm rsync scp sed sha256sum sleep "
    "source spack stat tail tar tee test touch type unset unzip vi vim wc wget which zip"
)
_INSTALLERS = word_set("pip pip3 install uninstall")
_KEYWORDS = word_set("time exec sudo command nohup builtin !")
_SHELLS = word_set("bash sh zsh ssh sbatch srun at")
_NO_RUN = word_set("-h --help -v -V --version")


class Launcher(enum.Enum):
    """A program that starts Python on a script; ``UNKNOWN`` is in a variable that is set elsewhere."""

    PYTHON, UNKNOWN, TORCHRUN, DEEPSPEED, ACCELERATE = range(5)


_IN_JSON = "a DeepSpeed job takes its dct section from the DeepSpeed JSON; the launch stays as it is"
_AT_LAUNCHER = {
    Launcher.DEEPSPEED: _IN_JSON,
    Launcher.ACCELERATE: "accelerate launch starts no Megatron job: call dct_plugin.accelerate.attach in the "
    "script, or with DeepSpeed put the dct section into the DeepSpeed JSON",
}
_AT_OPTION = {
    re.compile(r"--deepspeed(?:[_=-]|$)"): _IN_JSON,
    re.compile(r"--(?:per_device_\w+|model_name_or_path|num_train_epochs)(?:=|$)"): "a job of Hugging Face's "
    "Trainer takes dct_plugin.transformers.DCTCallback, or with DeepSpeed a section in the DeepSpeed JSON",
}


_PROGRAMS = {
    "torchrun": Launcher.TORCHRUN,
    "ft_launcher": Launcher.TORCHRUN,
    "deepspeed": Launcher.DEEPSPEED,
    "accelerate": Launcher.ACCELERATE,
}
_MODULES = {
    "torch.distributed.run": Launcher.TORCHRUN,
    "torch.distributed.launch": Launcher.TORCHRUN,
    "deepspeed": Launcher.DEEPSPEED,
    "deepspeed.launcher.runner": Launcher.DEEPSPEED,
    "accelerate.commands.launch": Launcher.ACCELERATE,
    "pdb": Launcher.PYTHON,
}
_PYTHONS = (Launcher.PYTHON, Launcher.UNKNOWN)
# Options of Python that take the next word, and those of torchrun that do (True) and do not, with - for _.
_PYTHON_VALUES = word_set("-W -X --check-hash-based-pycs")
_TORCHRUN_OPTIONS = {
    **dict.fromkeys(
        word_set(
            "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts "
            "--monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee "
            "--local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank "
            "--master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle"
        ),
        True,
    ),
    **dict.fromkeys(word_set("--standalone --use-env --virtual-local-rank --run-path --"), False),
}


def _takes_value(launcher: Launcher, text: str) -> bool | None:
    """Return whether an option takes the next word; ``None`` if torchrun has no such option."""
    if launcher is not Launcher.TORCHRUN or "=" in text:
        return launcher in _PYTHONS and text in _PYTHON_VALUES
    option = text.replace("_", "-") if text.startswith("--") else text
    if option in _TORCHRUN_OPTIONS:
        return _TORCHRUN_OPTIONS[option]
    # argparse takes abbreviations.
    found = {
        takes for name, takes in _TORCHRUN_OPTIONS.items() if name.startswith(option) and len(option) > 2
    }
    return found.pop() if len(found) == 1 else None


class _Kind(enum.Enum):
    """What is expected next: a launcher (FIND), options or a script, a value, a module, or nothing more."""

    FIND, OPTIONS, VALUE, MODULE, END, FOUND, FAILED = range(7)


#: The place of an insertion that stands before the variable that is read, and one that cannot be edited.
_AT_VARIABLE, _IN_DEFAULT = -1, -2


class _State(NamedTuple):
    """What the words so far read as.

    ``token`` is the launcher's word, ``place`` where an insertion stands, ``flag`` the option before a
    module, ``text`` the script (FOUND) or the reason (FAILED). The others are as in :class:`Launch`.
    """

    kind: _Kind
    launcher: Launcher | None = None
    token: str = ""
    place: int = 0
    flag: str = ""
    text: str = ""
    removal: tuple[int, int] | None = None
    config: str | None = None


_START = _State(_Kind.FIND)


class Launch(NamedTuple):
    """A command that starts Python on a training script.

    ``place`` is the offset of the insertion, before the script or its ``-m``, and ``line`` its line, from 1;
    with ``joined`` options (``python -um``) it is before the module. ``removal`` is the span to take out when
    the command starts the plugin already, else ``None``, and ``config`` the path of its ``--dct-config``.
    """

    script: str
    place: int
    line: int
    joined: bool = False
    removal: tuple[int, int] | None = None
    config: str | None = None


class Launches(NamedTuple):
    """The training launches of a script; ``notes`` name what is left alone, ``errors`` forbid an edit."""

    training: list[Launch]
    notes: list[str]
    errors: list[str]


class _Reader:
    """Reads words as launches; knows the values of the variables."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self.values: dict[str, list[list[Word]]] = {}
        self._reading: set[str] = set()
        self._after = functools.cache(self._after_variable)
        self.names, self.other_host = functools.cache(self._names), functools.cache(self._other_host)
        self.is_script, self.trains = functools.cache(self._is_script), functools.cache(self._trains)

    # -- values ---

    def assign(self, name: str, words: list[Word], append: bool = False) -> None:
        """Add a value of a variable; one that contains the variable itself contains its last value."""
        values = self.values.setdefault(name, [])
        last = values[-1] if values else []
        new = list(last) if append else []
        for word in words:
            match = _VARIABLE.fullmatch(word.text)
            if match is None or (match[1] or match[3]) != name:
                new.append(word)
            else:
                new += last or [Word(word.start, word.end, part) for _, part in _split(match[2] or "")]
        texts = [word.text for word in new]
        if (
            len(values) < _MOST_VALUES
            and len(new) < _MOST_WORDS
            and all(texts != [w.text for w in x] for x in values)
        ):
            values.append(new)

    def values_of(self, text: str) -> list[list[Word]] | None:
        """Return the values of a word that is one variable; ``None`` if they are not known."""
        match = _VARIABLE.fullmatch(text)
        if match is None:
            return None
        values = list(self.values.get(match[1] or match[3], []))
        if match[2] is not None:
            values.append([Word(_IN_DEFAULT, _IN_DEFAULT, part) for _, part in _split(match[2])])
        return [value for value in values if value] or values or None

    def _names(self, text: str, depth: int = 0) -> frozenset[str]:
        """Return the file names that a word may stand for; what is not known stays a variable."""
        base = text.rsplit("/", 1)[-1]
        match = _VARIABLE.search(base)
        values = self.values_of(match[0]) if match and depth < _DEEPEST_VALUE else None
        if match is None or values is None:
            return frozenset([base])
        found: set[str] = set()
        for value in values:
            if len(value) == 1 and len(found) < _MOST_VALUES:
                found |= self._names(base[: match.start()] + value[0].text + base[match.end() :], depth + 1)
        return frozenset(found)

    def _is_script(self, text: str) -> bool:
        """Return whether a word may stand for a Python script."""
        return not text.startswith("-") and any(
            name.endswith(".py") or self._sounds_like_script(name) for name in self.names(text)
        )

    def _trains(self, text: str) -> bool:
        """Return whether a script, or a module as a script, is one of the wanted ones."""
        return self._matches(text, text) or any(
            self._matches(name, text) or self._sounds_like_script(name.removesuffix(".py"))
            for name in self.names(text)
        )

    def _matches(self, name: str, text: str) -> bool:
        matching = [pattern for pattern in self.patterns if fnmatch.fnmatch(name, pattern)]
        is_custom = any(pattern not in TRAINING for pattern in matching)
        return is_custom or (bool(matching) and not _NO_TRAINING.search(name))

    @staticmethod
    def _sounds_like_script(name: str) -> bool:
        match = _VARIABLE.fullmatch(name)
        return match is not None and _SCRIPT_NAME.search(match[1] or match[3]) is not None

    def _other_host(self, text: str, depth: int = 0) -> str:
        """Return what to do instead if a word among the arguments shows another host's job."""
        for option, reason in _AT_OPTION.items():
            if option.match(text):
                return reason
        if depth > _DEEPEST_VALUE:
            return ""
        found = (
            self.other_host(word.text, depth + 1) for value in self.values_of(text) or [] for word in value
        )
        return next(filter(None, found), "")

    # -- states ---

    def read(
        self, words: Sequence[Word], states: frozenset[_State], in_value: bool = False
    ) -> frozenset[_State]:
        """Return the states behind some words."""
        for index, word in enumerate(words):
            place = _AT_VARIABLE if in_value and index == 0 else word.start
            states = frozenset(new for state in states for new in self._step(state, words, index, place))
        return states

    def _after_variable(self, text: str, state: _State) -> frozenset[_State]:
        """Return the states behind a variable, for all of its values."""
        if text in self._reading or len(self._reading) > _DEEPEST_VALUE:
            return frozenset([state])
        self._reading.add(text)
        values = self.values_of(text) or []
        after = frozenset(
            new for value in values for new in self.read(value, frozenset([state]), in_value=True)
        )
        self._reading.discard(text)
        return after

    def _step(self, state: _State, words: Sequence[Word], index: int, place: int) -> Iterable[_State]:
        """Return the states behind one more word."""
        if state.kind in (_Kind.END, _Kind.FOUND, _Kind.FAILED):
            return (state,)
        text = words[index].text
        if self.values_of(text) is not None:
            found = self._after(text, state)
            return (each._replace(place=place) if each.place == _AT_VARIABLE else each for each in found)
        match = _VARIABLE.fullmatch(text)
        unknown = (match[1] or match[3]) if match else ""
        if state.kind is _Kind.VALUE:
            return (state._replace(kind=_Kind.OPTIONS),)
        if state.kind is _Kind.MODULE:
            return (self._module(state, words, index, place, unknown),)
        if state.kind is _Kind.FIND:
            return (self._find(state, words, index, place, unknown),)
        return (self._option(state, words, index, place, unknown),)

    def _find(self, state: _State, words: Sequence[Word], index: int, place: int, unknown: str) -> _State:
        text = words[index].text
        following = words[index + 1].text if index + 1 < len(words) else ""
        name = _WHICH.sub(r"\1\2", text).rsplit("/", 1)[-1]
        launcher = Launcher.PYTHON if _PYTHON.match(name) else _PROGRAMS.get(name)
        if _LAUNCHER_NAME.search(unknown):
            launcher = Launcher.UNKNOWN
        if launcher is not None and (launcher is not Launcher.ACCELERATE or following == "launch"):
            return _State(_Kind.OPTIONS, launcher, text)
        if text == "-m" and following in _MODULES:  # behind a tool that runs modules, e.g. a debugger
            return _State(_Kind.MODULE, Launcher.UNKNOWN, text, place, text)
        if not unknown and not ASSIGNMENT.match(text) and self.is_script(text) and self.trains(text):
            return _State(_Kind.FAILED, state.launcher, state.token, text=f"{text} is given to ")
        return state

    def _option(self, state: _State, words: Sequence[Word], index: int, place: int, unknown: str) -> _State:
        text, launcher = words[index].text, state.launcher
        assert launcher is not None
        is_python = launcher in _PYTHONS
        if text in ("-m", "--module") or (is_python and _PYTHON_MODULE.fullmatch(text)):
            return state._replace(kind=_Kind.MODULE, place=place, flag=text)
        if (is_python and (text == "-" or text.startswith("-c"))) or text in _NO_RUN:
            return state._replace(kind=_Kind.END)
        if launcher is Launcher.TORCHRUN and text in ("--no-python", "--no_python"):
            return _State(_Kind.FIND, launcher, f"{state.token} {text}")
        if text.startswith("-"):
            takes_value = _takes_value(launcher, text)
            if takes_value is None:
                return state._replace(kind=_Kind.FAILED, text=f"{state.token}: no script found before {text}")
            return state._replace(kind=_Kind.VALUE) if takes_value else state
        if self.is_script(text):
            return state._replace(kind=_Kind.FOUND, place=place, text=text)
        if unknown or not text or _EXPANSION.fullmatch(text):
            return state
        if launcher is Launcher.TORCHRUN:
            reason = f"{state.token}: {text} is neither an option nor a Python script"
            return state._replace(kind=_Kind.FAILED, text=reason)
        # Behind other launchers it may be the value of an option, which are not known here.
        other = self._find(_State(_Kind.FIND, None, state.token), words, index, place, unknown)
        return other if is_python or other.kind is not _Kind.FIND else state

    def _module(self, state: _State, words: Sequence[Word], index: int, place: int, unknown: str) -> _State:
        text = words[index].text
        if text == MODULE:
            return self._present(state, words, index)
        if text in _MODULES:
            return _State(_Kind.OPTIONS, _MODULES[text], f"{state.token} -m {text}")
        if state.launcher in _PYTHONS and unknown and not self._sounds_like_script(text):
            return state._replace(
                kind=_Kind.FAILED, text=f"{state.token}: the module {text} is set elsewhere"
            )
        at = state.place if state.flag in ("-m", "--module") else place
        return state._replace(kind=_Kind.FOUND, place=at, text=text)

    def _present(self, state: _State, words: Sequence[Word], index: int) -> _State:
        """Return the state of a launch that starts the plugin already."""
        config, at = None, index + 1
        while at + 1 < len(words) and words[at].text.startswith("--dct-"):
            option, equals, value = words[at].text.partition("=")
            if option == "--dct-config":
                config = value if equals else words[at + 1].text
            at += 1 if equals else 2
        is_joined = state.flag not in ("-m", "--module")
        last = at + 1 if at < len(words) and words[at].text in ("-m", "--module") else at
        if last >= len(words):
            return state._replace(kind=_Kind.FAILED, text=f"{MODULE} without a script behind it")
        first, behind = (words[index], words[last]) if is_joined else (words[index - 1], words[at])
        removal = first.start, behind.start
        return state._replace(
            kind=_Kind.FOUND, place=removal[0], text=words[last].text, removal=removal, config=config
        )


class _Finder:
    def __init__(self, text: str, patterns: Sequence[str]) -> None:
        self.text = text
        self.script = Script(text)
        self.reader = _Reader(patterns)
        self.launches: dict[int, Launch] = {}
        # Notes by the place of the launch that they are about: jobs of other hosts, and no trainings.
        self.elsewhere: dict[int, str] = {}
        self.untrained: dict[int, str] = {}
        self.notes: list[str] = []
        self.errors: list[str] = []

    def run(self) -> Launches:
        outer = sorted(self.script.commands(), key=lambda command: command.words[0].start)
        commands = []
        for command, following in zip(outer, [*outer[1:], None], strict=False):
            commands.append(command)
            to_shell = (
                command.piped and following is not None and _SHELLS & {word.text for word in following.words}
            )
            if to_shell or not _is_harmless(command):
                commands += self._in_strings(command)
        for command in commands:
            self._assign(command)
        for command in commands:
            self._find(command)
        launches = [self.launches[place] for place in sorted(self.launches) if place not in self.elsewhere]
        untrained = [note for place, note in self.untrained.items() if place not in self.launches]
        notes = [*self.elsewhere.values(), *untrained, *self.notes]
        handed = dict.fromkeys(word.text for x in outer if not _is_harmless(x) for word in x.words)
        if not launches and (scripts := [text for text in handed if text.endswith(".sh")][:20]):
            notes.append(f"it hands on to {', '.join(scripts)}: patch the script that launches")
        return Launches(launches, *(list(dict.fromkeys(lines)) for lines in (notes, self.errors)))

    def _in_strings(self, command: Command) -> Iterator[Command]:
        for word in command.words:
            match = ASSIGNMENT.match(self.text, word.start, word.end)
            for span in word.quoted:
                if re.search(r"\s", self.text[slice(*span)]):
                    for inner in self.script.inside(span):
                        yield inner._replace(name=inner.name or (match[1] if match else command.name))

    def _assign(self, command: Command) -> None:
        if command.name and not command.nested:
            start = command.words[0].start
            append = self.text[:start].rstrip().endswith("+=(") if self.text[start - 1].isspace() else False
            append = append or self.text.endswith("+=(", 0, start)
            self.reader.assign(command.name, list(command.words), append)
            return
        for word in command.words:
            match = ASSIGNMENT.match(self.text, word.start, word.end)
            if match is None:
                return
            first = match.end() + (self.text[match.end() : match.end() + 1] in ("'", '"'))
            end = word.end
            default = re.compile(rf"\$\{{{match[1]}:?[-=]([^{{}}]*)\}}['\"]?$").match(self.text, first, end)
            if default is not None:
                first, end = default.span(1)
            words = [Word(at, at + len(part), part) for at, part in _split(self.text[first:end], first)]
            self.reader.assign(match[1], words, match[0].endswith("+="))

    def _find(self, command: Command) -> None:
        words = command.words[_first(command) :]
        texts = [word.text for word in words]
        if not words or _is_harmless(command) or _INSTALLERS & set(texts[:4]):
            return
        if command.broken:
            text = self.text[command.words[0].start : command.words[-1].end]
            if self._wanted(_LOOSE_WORD.findall(text)):
                report = self._note if command.in_document else self._refuse
                report(words[0].start, "here a launch stands in what is no valid shell syntax")
            return
        states = self.reader.read(words, frozenset([_START]))
        found = [state for state in states if state.kind is _Kind.FOUND]
        failed = [state for state in states if state.kind is _Kind.FAILED]
        reasons = sorted(
            state.text + (_receiver(state, words) if state.text.endswith(" ") else "") for state in failed
        )
        places = {state.place for state in found}
        here = any(words[0].start <= place < words[-1].end for place in places)
        variables = [text for text in texts if text.startswith("$")]
        if command.name or (command.nested and not found and not self._is_launch(failed, texts)):
            reasons = []
        if found and not reasons and (_IN_DEFAULT in places or (here and len(places) > 1)):
            reasons = ["what its variables hold leads to different launches"]
        if not found and not reasons and not command.name and (variables or not command.nested):
            reasons = self._without_script(states, words, variables)
        host = next(filter(None, (self.reader.other_host(text) for text in texts)), "")
        if reasons and host and any(map(self.reader.is_script, texts)):
            self._note(words[0].start, host)
        elif reasons:
            self._refuse(words[0].start, reasons[0])
        for state in found if not reasons else []:
            self._add(state, command, host)

    def _is_launch(self, failed: list[_State], texts: list[str]) -> bool:
        """Return whether a string is a launch that is not understood, not prose."""
        return any(map(self.reader.trains, texts)) and any(not state.text.endswith(" ") for state in failed)

    def _without_script(
        self, states: Iterable[_State], words: Sequence[Word], variables: list[str]
    ) -> list[str]:
        """Return why a command with a launcher, but without a script, is refused."""
        reasons = []
        for state in states:
            is_last = state.token == words[-1].text
            if state.launcher is Launcher.DEEPSPEED and state.token == words[0].text and not is_last:
                self._note(words[0].start, _IN_JSON)
            elif state.launcher is Launcher.TORCHRUN and not is_last and state.kind is not _Kind.END:
                where = f" (is it in {' or '.join(dict.fromkeys(variables))}?)" if variables else ""
                no_python = (
                    ", but no python behind it" if state.kind is _Kind.FIND else f": no script found{where}"
                )
                reasons.append(state.token + no_python)
        return sorted(reasons)

    def _add(self, state: _State, command: Command, host: str) -> None:
        script, at = state.text, self.script.line(state.place)
        is_torchrun = state.launcher is Launcher.TORCHRUN
        is_name = bool(state.flag) and state.removal is None and not script.startswith("$")
        trains = state.removal is not None or self.reader.trains(
            script.rsplit(".", 1)[-1] + ".py" if is_name else script
        )
        reason = _AT_LAUNCHER.get(state.launcher, "") if state.launcher is not None else ""
        if state.removal is None and (reason or (host and (trains or is_torchrun))):
            self.elsewhere[state.place] = f"line {at}: {script}: {reason or host}"
        elif trains:
            joined = bool(state.flag) and state.flag not in ("-m", "--module")
            self.launches[state.place] = Launch(script, state.place, at, joined, state.removal, state.config)
            if state.launcher is Launcher.UNKNOWN and state.removal is None:
                what = "is set elsewhere: -m is right if it is python or torchrun, not for deepspeed"
                self._note(state.place, f"{state.token} {what}")
        elif (
            is_torchrun
            or re.search(r"train|tune|sft|\$", script)
            or self._wanted(word.text for word in command.words)
        ):
            what = "is not a training script: left alone (--script adds names)"
            self.untrained[state.place] = f"line {at}: {script} {what}"

    def _wanted(self, texts: Iterable[str]) -> bool:
        """Return whether a training script is among some words."""
        return any(self.reader.is_script(text) and self.reader.trains(text) for text in texts)

    def _note(self, offset: int, what: str) -> None:
        self.notes.append(f"line {self.script.line(offset)}: {what}")

    def _refuse(self, offset: int, what: str) -> None:
        self.errors.append(f"line {self.script.line(offset)}: {what}")


def find_launches(text: str, scripts: Sequence[str] = TRAINING) -> Launches:
    """Find every training launch in a script; changes nothing.

    Args:
        text: A shell script.
        scripts: File name patterns of training scripts.

    Raises:
        LaunchError: The text nests too deep.
    """
    return _Finder(text, scripts).run()


def _split(text: str, start: int = 0) -> list[tuple[int, str]]:
    """Return the words of a variable's value, with their offsets."""
    parts = ((start + match.start(), _QUOTES.sub("", match[0])) for match in _VALUE_WORD.finditer(text))
    return [(at, part) for at, part in parts if part]


def _first(command: Command) -> int:
    """Return the position of the program in a command."""
    words = enumerate(command.words)
    return next(
        (at for at, word in words if word.text not in _KEYWORDS and not ASSIGNMENT.match(word.text)),
        len(command.words),
    )


def _is_harmless(command: Command) -> bool:
    return next((word.text in _HARMLESS for word in command.words[_first(command) :]), False)


def _receiver(state: _State, words: Sequence[Word]) -> str:
    if state.launcher is Launcher.TORCHRUN:
        return f"{state.token}, but no python behind it"
    return f"{state.token or words[0].text}, which is no launcher known here"
