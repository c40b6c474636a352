"""Launchers of training scripts, their options, and names that only look like launchers."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: File names that train; others (tools, text generation, checkpoint conversion) are left alone.
TRAINING = (
    "pretrain*.py",
    "*_pretrain.py",
    "train*.py",
    "*_train.py",
    "finetune*.py",
    "*_finetune.py",
    "sft*.py",
)

TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


#: Commands that may name a launcher or a training script without starting it.
HARMLESS = word_set(
    ". [ [[ alias awk basename cat cd chmod command conda cp diff dirname echo file find git grep head kill "
    "ln ls mkdir module mv pgrep pip pip3 pkill popd printf ps pushd readlink realpath rm rsync sed "
    "sha256sum source spack stat tail test touch type unset vi vim wc which"
)
#: Words before a command.
KEYWORDS = word_set("time exec sudo")
#: Commands whose arguments are assignments.
DECLARATIONS = word_set("export local declare readonly typeset")

_PYTHON_NAME = re.compile(r"python(\d+(\.\d+)*)?$")
_PYTHON_MODULE = re.compile(r"-[bBdEiIOPqsSuvx]*m")
_LAUNCHER_NAME = re.compile(r"LAUNCH|RUNNER|PYTHON", re.IGNORECASE)
_SCRIPT_NAME = re.compile(r"SCRIPT|ENTRY_?POINT|PROGRAM|TRAIN(ER|_FILE|_PY)|PRETRAIN", re.IGNORECASE)
_NO_SCRIPT_NAME = re.compile(r"DIR|PATH_TO|ARGS")


@dataclass(frozen=True, eq=False)
class Launcher:
    """A program that starts Python on a training script.

    Attributes:
        with_value: Options that take the next word, with - for _.
        flags: Options that take no word.
        module_flag: The option before a module.
        runs_anything: Whether a command of this program may start something else than a training.
    """

    with_value: frozenset[str]
    flags: frozenset[str] = frozenset()
    module_flag: str = "-m"
    runs_anything: bool = False

    def takes_module(self, text: str) -> bool:
        """Return whether the word after this option is a module to run."""
        return text in ("-m", "--module")

    def starts_executable(self, text: str) -> bool:
        """Return whether this option has the launcher start an executable instead of Python."""
        return not self.runs_anything and text in ("--no-python", "--no_python")

    def option_width(self, text: str) -> int | None:
        """Return how many words an option takes, itself included; ``None`` if there is no such option."""
        option = text.replace("_", "-") if text.startswith("--") else text
        if "=" in text or option in self.flags:
            return 1
        return 2 if option in self.with_value else None


class _Python(Launcher):
    """Python itself, whose options may be joined."""

    def takes_module(self, text: str) -> bool:
        return super().takes_module(text) or _PYTHON_MODULE.fullmatch(text) is not None

    def option_width(self, text: str) -> int | None:
        return super().option_width(text) or 1


PYTHON = _Python(word_set("-W -X --check-hash-based-pycs"), runs_anything=True)
TORCHRUN = Launcher(
    word_set(
        "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts "
        "--monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee "
        "--local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank "
        "--master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle"
    ),
    word_set("--standalone --use-env --virtual-local-rank --run-path --"),
)
DEEPSPEED = Launcher(
    word_set(
        "-H --hostfile -i --include -e --exclude --num-nodes --num-gpus --num-accelerators --master-port "
        "--master-addr --node-rank --launcher --launcher-args --enable-each-rank-log --autotuning "
        "--elastic-training --min-elastic-nodes --max-elastic-nodes --bind-core-list --ssh-port "
        "--venv-script --log-level"
    ),
    word_set(
        "--no-local-rank --no-ssh --no-ssh-check --force-multi --save-pid --bind-cores-to-rank -q --quiet"
    ),
    module_flag="--module",
)
#: A variable that is set outside the script and may hold any of the others.
SET_ELSEWHERE = Launcher(PYTHON.with_value, runs_anything=True)

_BY_NAME = {"torchrun": TORCHRUN, "ft_launcher": TORCHRUN, "deepspeed": DEEPSPEED}


def launcher(text: str) -> Launcher | None:
    """Return the launcher that a word names, by path or name."""
    name = text.strip("\"'").rsplit("/", 1)[-1]
    return PYTHON if _PYTHON_NAME.match(name) else _BY_NAME.get(name)


def sounds_like_launcher(variable: str) -> bool:
    """Return whether a variable that is set elsewhere holds a launcher, by its name."""
    return bool(_LAUNCHER_NAME.search(variable))


def sounds_like_script(variable: str) -> bool:
    """Return whether a variable that is set elsewhere holds a training script, by its name."""
    return bool(_SCRIPT_NAME.search(variable)) and not _NO_SCRIPT_NAME.search(variable)
