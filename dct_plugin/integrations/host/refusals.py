"""The options of ``dct.data_parallel`` that a framework cannot serve, as one table.

A row says why and what to set instead. :func:`refuse` judges a section by the table; the table of keys in
``docs/support.md`` is made from it. What depends on more than the framework (a ZeRO stage, the optimizer) is
judged where that is known: :mod:`..deepspeed.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from dct_plugin.config import DataParallelConfig
from dct_plugin.errors import ConfigError

_WHOLE_OPTIMIZER = "every rank has the whole optimizer, no weights are gathered after a step"
_MESH = "under FSDP2 the replicas of the mesh are the nodes, inside which FSDP gathers the weights"
_BARE = "this needs parameters and optimizer, and torchft hands over bare tensors"
_WHOLE = "all ranks shard one copy of the model, and gradients cross whole, without a residual"
_NO_INT8 = "copies of the weights in int8 are for FSDP2 on one mesh and ZeRO stage 3"
_MEGATRON = "Megatron's iterations exchange gradients in every step"


class Refusal(NamedTuple):
    """An option that a framework refuses.

    Attributes:
        key: Below ``dct.data_parallel``.
        why: The reason, in words.
        instead: What to write in its place.
    """

    key: str
    why: str
    instead: str = "leave it out"
    value: Any = None
    """The value that is refused; None: any that asks for something."""


#: By framework.
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    "torch DDP": (Refusal("parameters", _WHOLE_OPTIMIZER),),
    "FSDP2": (Refusal("parameters", _MESH), Refusal("nodes", _MESH)),
    "FSDP2 on one mesh": tuple(
        Refusal(key, _WHOLE)
        for key in ("sparsity", "feedback", "adaptive", "quality", "local_steps", "exchange_of")
    ),
    "torchft": tuple(
        Refusal(key, _BARE)
        for key in (
            "feedback", "nodes", "nonfinite_action", "parameters", "local_steps", "verify", "adaptive",
            "quality", "exchange_of",
        )
    ),
    "Megatron": (
        Refusal("local_steps", _MEGATRON), Refusal("exchange_of", _MEGATRON),
        Refusal("parameters", _NO_INT8, value="int8"),
    ),
    "DeepSpeed": (),  # by stage: deepspeed.rules
}  # fmt: skip


def asks_for(key: str, settings: DataParallelConfig) -> bool:
    """Return whether settings ask for an option, and do not just have a value of it that changes nothing."""
    value: Any = getattr(settings, key)
    if key == "sparsity":
        return key in settings.model_fields_set and value > 0
    if key == "feedback":
        return settings.feedback.looks_ahead
    if key == "nodes":
        return value not in ("auto", 1)
    if key == "verify":
        return settings.asks_to_verify
    return value not in (None, "pass", "gradients")


def refused(framework: str, settings: DataParallelConfig) -> Iterator[Refusal]:
    """Yield the options of a section that a framework cannot serve."""
    for row in REFUSALS.get(framework, ()):
        if asks_for(row.key, settings) and row.value in (None, getattr(settings, row.key)):
            yield row


def refuse(framework: str, settings: DataParallelConfig) -> None:
    """Refuse a section that asks for something that a framework cannot serve.

    Raises:
        ConfigError: Names the option, its value, the rank, the reason, and what to write instead.
    """
    for row in refused(framework, settings) if settings.enabled else ():
        value = getattr(settings, row.key)
        shown = value.label() if row.key == "feedback" else value
        rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        given = f" = {shown!r}" if isinstance(shown, (str, int, float)) else ""
        raise ConfigError(f"{rank}dct.data_parallel.{row.key}{given}: {framework}: {row.why}; {row.instead}")
