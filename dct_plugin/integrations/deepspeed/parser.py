"""The judgement of the installed DeepSpeed about a JSON: it is asked, since every version reads other keys.

:func:`ask` starts a process of its own: importing DeepSpeed takes seconds and prints. In a job DeepSpeed is
there, and :func:`keys_read` asks it.
"""

from __future__ import annotations

import difflib
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
#: Optimizers whose construction needs the model, other packages or a process group.
_NOT_CONSTRUCTED = ("mu", "onebit", "zeroone")
#: What DeepSpeed raises about a JSON. Its other errors come from what the process does not have.
_REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)


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


def ask(
    contents: Sequence[Mapping[str, Any]], *, ranks: int | None = None, device: str = "cuda"
) -> list[Answer]:
    """Return what DeepSpeed makes of each JSON, from one process of its own.

    Args:
        contents: The JSONs.
        ranks: Ranks of the jobs; None for as many as the batch sizes of each JSON say.
        device: The accelerator of the jobs, ``"cuda"`` or ``"cpu"``. This machine need not have it.

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
            input=json.dumps([contents, ranks, device]),
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
    contents, ranks, device = json.load(sys.stdin)
    judgements = []
    for content in contents:
        try:
            judgements.append(_answer(content, ranks, device))
        except RecursionError:
            judgements.append((["nested too deeply"], {}))
    print(json.dumps([sorted(keys_read()), judgements], default=str))


def _answer(content: Mapping[str, Any], ranks: int | None, device: str) -> tuple[list[str], dict[str, Any]]:
    """Return why DeepSpeed does not take a JSON, each reason after its key, and what it reads in sections."""
    left, faults = _filled(content), []
    while reasons := _reasons(left, ranks, device):
        if _BATCH & left.keys():
            # The cause is the key without which DeepSpeed says nothing, or else something different.
            without = [{k: v for k, v in left.items() if k != key} for key in left]
            after = [_reasons(_LEAST | each, ranks, device) for each in without]
            others = [index for index, found in enumerate(after) if found != reasons]
            rest = without[min(others, key=lambda index: bool(after[index]))] if others else {}
            for key in left.keys() - rest.keys() if rest else [""]:
                faults += [_about(key, left.get(key), reason) for reason in reasons]
        else:
            rest, faults = left, [*faults, *reasons]
        if not rest or rest | _LEAST == left:
            return faults, {}
        left = rest if _BATCH & rest.keys() else rest | _LEAST
    config = _parse(left, ranks or _ranks(left))
    return faults, {
        key: getattr(config, name).model_dump(mode="python")
        for key, name in _SECTIONS.items()
        if key in left and hasattr(config, name)
    }


def _about(key: str, value: Any, reason: str) -> str:
    """Return a reason with the key that it is about."""
    if reason[:1] == ".":
        return key + reason
    if "argument after ** must be a mapping" in reason:
        reason = "must be a JSON object"
    given = "" if isinstance(value, (dict, list)) else f" = {show(value)}"
    return f"{key}{given}: {reason}" if key else reason


def _reasons(content: Mapping[str, Any], ranks: int | None, device: str) -> list[str]:
    """Return the first reasons for which DeepSpeed does not take a JSON; none if it does."""
    try:
        config = _parse(content, ranks or _ranks(content))
    except Exception as error:
        return _in_words(error)
    try:
        _construct(config, device)
    except _REFUSALS as error:
        return _in_words(error)
    except Exception as error:  # of what only a real job has
        return _in_words(error) if type(error).__module__.startswith("deepspeed.") else []
    return []


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


class _Operations:
    """Stands for compiled operations, none of which is called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _construct(config: Any, device: str) -> None:
    """Take the steps of an engine's construction that depend on its JSON alone.

    The engine has no model. Optimizers are constructed without their compiled parts.
    """
    import torch
    from deepspeed.ops.op_builder import builder
    from deepspeed.ops.op_builder.cpu import no_impl
    from deepspeed.runtime import engine as module
    from deepspeed.runtime.zero import utils

    engine = module.DeepSpeedEngine.__new__(module.DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine.__dict__.update(
        _config=config, client_optimizer=None, client_lr_scheduler=None, pipeline_parallelism=False,
        has_moe_layers=False, global_rank=1, zenflow=config.zero_config.zenflow is not None,
    )  # fmt: skip
    with Patches() as patches:
        patches.replace(utils, "dist", _job_of(1))
        patches.replace(builder.OpBuilder, "load", lambda *_, **__: _Operations())
        if device == "cuda":
            support = {"is_fp16_supported": lambda: True, "is_bf16_supported": lambda: True}
            patches.replace(module, "get_accelerator", lambda: SimpleNamespace(**support))
            patches.replace(no_impl.NotImplementedBuilder, "load", builder.OpBuilder.load)
        name = engine.optimizer_name()
        if name and not engine._is_supported_optimizer(name):
            raise ValueError(f".type = {show(name)}: DeepSpeed has no such optimizer{_meant(name, module)}")
        engine._do_sanity_check()
        engine.get_data_types()
        size = (config._param_dict.get("tensor_parallel") or {}).get("autotp_size", 0)
        if isinstance(size, str) and size != "auto":
            raise ValueError(f".autotp_size = {show(size)}: must be an integer")
        parameters = [torch.nn.Parameter(torch.zeros(1))]
        optimizer = torch.optim.Adam(parameters)
        if name and not name.lower().startswith(_NOT_CONSTRUCTED):
            optimizer = engine._configure_basic_optimizer(parameters)
            engine._do_optimizer_sanity_check(optimizer)
        engine._scheduler_from_config(optimizer)


def _meant(name: str, module: Any) -> str:
    """Return the optimizer that was probably meant, as a question; mostly empty."""
    import torch

    classes = [each for each in dir(torch.optim) if isinstance(getattr(torch.optim, each), type)]
    names = {each.lower(): each for each in (*module.DEEPSPEED_OPTIMIZERS, *classes)}  # torch's writing wins
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
    return f"; did you mean {show(names[close[0]])}?" if close else ""


def _in_words(error: Exception) -> list[str]:
    """Return an error of DeepSpeed as lines. Those of pydantic start with a dot and the path of the value."""
    if not hasattr(error, "errors"):
        return [" ".join(str(error).split()) or type(error).__name__]
    return [
        f"{''.join(f'.{key}' for key in item['loc'])} = {show(item['input'])}: "
        + ("DeepSpeed has no such key" if item["type"] == "extra_forbidden" else item["msg"])
        if item["loc"]
        else item["msg"].removeprefix("Value error, ")
        for item in error.errors()
    ]


if __name__ == "__main__":
    main()
