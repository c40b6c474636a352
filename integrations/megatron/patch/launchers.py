"""Launchers of training scripts, their options, and names that only look like launchers."""

from __future__ import annotations

import re
from typing import Literal

__all__ = [
    "DECLARATIONS",
    "HARMLESS",
    "KEYWORDS",
    "TORCHRUN_MODULES",
    "TRAINING",
    "Kind",
    "launcher",
    "option_width",
    "sounds_like_launcher",
    "sounds_like_script",
    "takes_module",
    "without_python",
    "word_set",
]

#: ``variable``: set outside the script, which may be any of the others.
Kind = Literal["python", "torchrun", "deepspeed", "variable"]

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

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?$")
_PYTHON_MODULE = re.compile(r"-[bBdEiIOPqsSuvx]*m")
_KINDS: dict[str, Kind] = {"torchrun": "torchrun", "ft_launcher": "torchrun", "deepspeed": "deepspeed"}
_LAUNCHER_NAME = re.compile(r"LAUNCH|RUNNER|PYTHON", re.IGNORECASE)
_SCRIPT_NAME = re.compile(r"SCRIPT|ENTRY_?POINT|PROGRAM|TRAIN(ER|_FILE|_PY)|PRETRAIN", re.IGNORECASE)
_NO_SCRIPT_NAME = re.compile(r"DIR|PATH_TO|ARGS")

# Options by launcher, with - for _.
_WITH_VALUE: dict[Kind, frozenset[str]] = {
    "torchrun": word_set(
        "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts "
        "--monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee "
        "--local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank "
        "--master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle"
    ),
    "deepspeed": word_set(
        "-H --hostfile -i --include -e --exclude --num-nodes --num-gpus --num-accelerators --master-port "
        "--master-addr --node-rank --launcher --launcher-args --enable-each-rank-log --autotuning "
        "--elastic-training --min-elastic-nodes --max-elastic-nodes --bind-core-list --ssh-port "
        "--venv-script --log-level"
    ),
    "python": word_set("-W -X --check-hash-based-pycs"),
}
_FLAGS: dict[Kind, frozenset[str]] = {
    "torchrun": word_set("--standalone --use-env --virtual-local-rank --run-path --"),
    "deepspeed": word_set(
        "--no-local-rank --no-ssh --no-ssh-check --force-multi --save-pid --bind-cores-to-rank -q --quiet"
    ),
}


def launcher(text: str) -> Kind | None:
    """Return the launcher that a word names, by path or name."""
    name = text.strip("\"'").rsplit("/", 1)[-1]
    return "python" if _PYTHON.match(name) else _KINDS.get(name)


def sounds_like_launcher(variable: str) -> bool:
    """Return whether a variable that is set elsewhere holds a launcher, by its name."""
    return bool(_LAUNCHER_NAME.search(variable))


def sounds_like_script(variable: str) -> bool:
    """Return whether a variable that is set elsewhere holds a training script, by its name."""
    return bool(_SCRIPT_NAME.search(variable)) and not _NO_SCRIPT_NAME.search(variable)


def takes_module(kind: Kind, text: str) -> bool:
    """Return whether the word after this option is a module to run."""
    return text in ("-m", "--module") or (kind == "python" and bool(_PYTHON_MODULE.fullmatch(text)))


def without_python(kind: Kind, text: str) -> bool:
    """Return whether this option has the launcher start an executable instead of Python."""
    return kind in ("torchrun", "deepspeed") and text in ("--no-python", "--no_python")


def option_width(kind: Kind, text: str) -> int | None:
    """Return how many words an option takes, itself included; ``None`` if the launcher has no such option."""
    option = text.replace("_", "-") if text.startswith("--") else text
    if "=" in text or option in _FLAGS.get(kind, ()):
        return 1
    if option in _WITH_VALUE["python" if kind == "variable" else kind]:
        return 2
    return 1 if kind == "python" else None
