"""The judgement of the installed DeepSpeed about a JSON: it is asked, since every version reads other keys.

:func:`ask` starts a process of its own: importing DeepSpeed takes seconds and prints. In a job DeepSpeed is
there, and :func:`keys_read` asks it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections import UserDict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from dct_plugin.config.options import show
from dct_plugin.config.validation_errors import DEEPSPEED_KEYS

from ..host.patching import Patches
from ..host.versions import installed
from .section import READ_BY_PLUGIN, unread

#: Seconds in which the process must answer.
_LIMIT = 120.0
#: What every version can read.
_LEAST = {"train_micro_batch_size_per_gpu": 1}
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
#: One of which a JSON must have.
_BATCH = {*_BATCH_SIZES[:2]}
#: Sections with the names of their models.
_SECTIONS = {
    "zero_optimization": "zero_config", "fp16": "float16_config", "bf16": "bfloat16_config",
    "bfloat16": "bfloat16_config", "compile": "compile_config", "hybrid_engine": "hybrid_engine",
    "tensor_parallel": "tensor_parallel_config",
}  # fmt: skip


class Answer(NamedTuple):
    """The answer of the installed DeepSpeed to a JSON.

    Attributes:
        keys: The keys that it reads at the top level of any JSON.
        faults: Why it does not take this one; empty if it does.
        sections: What it reads in some of the sections of this one, with its defaults.
    """

    keys: frozenset[str]
    faults: tuple[str, ...] = ()
    sections: Mapping[str, Any] = MappingProxyType({})


class _Recorder(UserDict[str, Any], dict[str, Any]):  # type: ignore[misc]
    """A JSON that notes which keys it is asked for: all methods of a UserDict go through these two. DeepSpeed
    takes a dict alone.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.asked: set[str] = set()
        super().__init__(content)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(str(key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def _parse(content: Mapping[str, Any], ranks: int) -> Any:
    """Have DeepSpeed parse a JSON for a job of so many ranks; imports DeepSpeed."""
    from deepspeed.runtime import config

    with Patches() as patches:
        patches.replace(logging.getLogger("DeepSpeed"), "disabled", True)
        patches.replace(config, "dist", _job_of(ranks))
        return config.DeepSpeedConfig(content)


def _job_of(ranks: int) -> SimpleNamespace:
    """Return the stand-in for ``torch.distributed`` in a job of so many ranks."""
    return SimpleNamespace(get_rank=lambda *_: 0, get_world_size=lambda *_, **__: ranks)


@functools.cache
def keys_read() -> frozenset[str]:
    """Return the keys that DeepSpeed reads at the top level of any JSON; imports DeepSpeed."""
    recorder = _Recorder(_LEAST)
    _parse(recorder, 1)
    return frozenset(recorder.asked)


def keys_for(content: Mapping[str, Any]) -> Collection[str]:
    """Return the keys that the installed DeepSpeed reads, asking it if ``content`` has unusual ones.

    Without DeepSpeed the keys of ``content`` are returned: nobody knows better.
    """
    usual = {*DEEPSPEED_KEYS, *READ_BY_PLUGIN}
    if not unread(content, usual):
        return usual
    answers = ask([_LEAST])
    return answers[0].keys if answers else content.keys()


def ask(contents: Sequence[Mapping[str, Any]], *, ranks: int | None = None) -> list[Answer]:
    """Return what DeepSpeed makes of each JSON, from one process of its own.

    Args:
        contents: The JSONs.
        ranks: Ranks of the jobs; None for as many as the batch sizes of each JSON say.

    Returns:
        One answer per JSON; none where DeepSpeed is not installed, or cannot be imported.
    """
    if not contents or installed("deepspeed") is None:
        return []
    # The process computes nothing. On the CPU it builds nothing either.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps([contents, ranks]),
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            env=environment,
        )
        keys, judgements = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError, RecursionError):
        return []
    return [Answer(frozenset(keys), tuple(faults), sections) for faults, sections in judgements]


def main() -> None:
    """Answer the question on the standard input; the last line of the output is the answer."""
    contents, ranks = json.load(sys.stdin)
    judgements = []
    for content in contents:
        try:
            judgements.append(_answer(content, ranks))
        except RecursionError:
            judgements.append((["nested too deeply"], {}))
    print(json.dumps([sorted(keys_read()), judgements], default=str))


def _answer(content: Mapping[str, Any], ranks: int | None) -> tuple[list[str], dict[str, Any]]:
    """Return the first reasons for which DeepSpeed does not parse a JSON, and what it reads in sections."""
    filled = _filled(content)
    try:
        config = _parse(filled, ranks or _ranks(filled))
    except Exception as error:
        return _in_words(error), {}
    return [], {
        key: getattr(config, name).model_dump(mode="python")
        for key, name in _SECTIONS.items()
        if key in filled and hasattr(config, name)
    }


def _filled(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON in which the values that are ``"auto"`` are as Hugging Face fills them in."""
    filled = {key: value for key, value in content.items() if value != "auto"}
    filled |= {} if _BATCH & filled.keys() or not _BATCH & content.keys() else _LEAST
    for section, given in ("optimizer", {}), ("scheduler", {"total_num_steps": 1000}):
        outer = filled.get(section)
        if isinstance(outer, dict) and isinstance(params := outer.get("params"), dict):
            named = {key: value for key, value in params.items() if value != "auto"}
            made = {key: given[key] for key in params if key in given} | named
            filled[section] = {**outer, "params": made}
    return filled


def _ranks(content: Mapping[str, Any]) -> int:
    """Return the number of ranks that the batch sizes of a JSON stand for."""
    whole, part, steps, sequence = (content.get(key, 1) for key in (*_BATCH_SIZES, "sequence_parallel_size"))
    numbers = all(type(each) is int and each > 0 for each in (whole, part, steps, sequence))
    known = numbers and all(key in content for key in _BATCH_SIZES) and whole % (part * steps) == 0
    return (whole // (part * steps) if known else 1) * (sequence if numbers else 1)


def _in_words(error: Exception) -> list[str]:
    """Return an error of DeepSpeed as lines; pydantic's name the model, the key and the value."""
    if not hasattr(error, "errors"):
        return [" ".join(str(error).split()) or type(error).__name__]
    model = getattr(error, "title", "")
    return [
        f"{'.'.join(map(str, (model, *item['loc'])))} = {show(item['input'])}: {item['msg']}"
        for item in error.errors()
    ]


if __name__ == "__main__":
    main()
