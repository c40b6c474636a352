"""The memory that a rank needs for the plugin, beside what its framework needs anyway.

Source: sums over the buffers that are kept from step to step; ``tests/policy/test_memory.py`` compares them
with what reducers hold.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import psutil
import torch

from ..codecs.payload import payload_bound
from ..codecs.values import ValueDtype
from ..config import DataParallelConfig
from ..metrics import format_bytes
from .evidence import Training
from .resolve import resolve
from .rules import exchange_by_rule

#: Bytes of an entry of a residual, by ``residual_dtype``.
_RESIDUAL = {"auto": 4.0, "fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 1 / 64}
#: Entries kept by exchanges that wait for their check, from which on the next exchange makes it. Right after
#: a dense start messages are as large as gradients, and their slots stay until then.
MOST_PENDING = 1 << 26
#: Share of the free memory from which on the log says what the plugin keeps.
LARGE_SHARE = 0.1
#: Bytes of a trained parameter (weights, gradients and Adam's moments in fp32, weights in 16 bits) and of a
#: frozen one.
TRAINED, FROZEN = 18, 6
#: Room of a message beside its bytes: that of a buffer that grew, and that of a slot.
_GROWN, _SLOT = 1.25, 9 / 8


class Job(NamedTuple):
    """A kind of training, as far as memory depends on it.

    Attributes:
        name: Host and setting, in words.
        section: The section ``dct.data_parallel``, with the feedback that ``auto`` becomes.
        ranks: Ranks, or nodes, that exchange messages.
        inside: Ranks of a node, each of which has a part of the node's residual.
        weight_bytes: Bytes of a weight that a rank trains with.
        weights_inside: Ranks among which those are divided.
        shards: Ranks among which the optimizer divides its states; 0 if it does not.
        copies: True if the ranks of a node keep a copy of the weights.
        transactional: True if skipped steps are taken back.
        in_slots: True if a step's messages stay until its end, as on a GPU; else those of a bucket.
    """

    name: str
    section: dict[str, Any]
    ranks: int = 8
    inside: int = 1
    weight_bytes: float = 2.0
    weights_inside: int = 1
    shards: int = 0
    copies: bool = False
    transactional: bool = False
    in_slots: bool = True


_AHEAD: dict[str, Any] = {"feedback": "step_ahead"}
_EXACT, _INT8 = _AHEAD | {"parameters": "exact"}, {"residual_dtype": "int8"}
_UPDATES: dict[str, Any] = {"exchange_of": "updates"}
#: The rows of the table.
JOBS = (
    Job("DDP, fp32 weights", _AHEAD, weight_bytes=4.0),
    Job("the same, after a rejected batch", _AHEAD, weight_bytes=4.0, transactional=True),
    Job("DDP, fp32 weights, exchange of updates", _UPDATES, weight_bytes=4.0),
    Job("the same, residual_dtype int8", _UPDATES | _INT8, weight_bytes=4.0),
    Job("DDP, two nodes of 8 ranks", _AHEAD, ranks=2, inside=8, weight_bytes=4.0),
    Job("ZeRO-1 and 2, Megatron, bf16 weights", _EXACT, shards=8),
    Job("the same, residual_dtype int8", _EXACT | _INT8, shards=8),
    Job("the same, fp16 weights", _EXACT, shards=8, transactional=True),
    Job("FSDP2, two replicas of 8 ranks", _AHEAD, ranks=2, inside=8, weight_bytes=4.0, weights_inside=8),
    Job("torchft", {"feedback": "local"}, transactional=True),
    Job("ZeRO-3", _INT8 | {"feedback": "local"}, shards=8),
    Job("ZeRO-3, copies in two nodes of 8", _EXACT | _INT8, 2, 8, 2.0, 8, shards=8, copies=True),
)


def residual_bytes(settings: DataParallelConfig) -> float:
    """Return the bytes of an entry of a residual; 0 where none is kept."""
    return _RESIDUAL[settings.residual_dtype] * settings.feedback.keeps_residual


def kept_in_words(settings: DataParallelConfig, entries: float, weights: float, free: float) -> str:
    """Return what a rank keeps from step to step and two smaller settings, in words; empty if it is less
    than a tenth of what is free.

    Args:
        settings: The settings as they are applied.
        entries: Entries of the residuals that this rank keeps.
        weights: Bytes of the weights that it trains with.
        free: Bytes of memory that are free.
    """
    feedback, dtype = settings.feedback, settings.residual_dtype
    copies = (1.0 + (settings.nonfinite_action == "skip")) * feedback.keeps_residual
    parts = {
        "residual": copies * _RESIDUAL[dtype] * entries,
        "displaced weights": weights * feedback.looks_ahead,
        "common weights": weights * settings.trains_alone,
    }
    kept = sum(parts.values())
    if kept <= LARGE_SHARE * free:
        return ""
    words = " and ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items() if size)
    int8 = format_bytes(kept - parts["residual"] + copies * _RESIDUAL["int8"] * entries)
    can_pack = dtype != "int8" and feedback.keeps_residual
    smaller = [f'"residual_dtype": "int8" keeps {int8}'] if can_pack else []
    smaller.append('"sparsity": 0, "value_dtype": "int8", "feedback": "none" keeps nothing')
    share = f"{100 * kept / free:.0f} % of the free memory" if free else "no memory is free"
    return f"this rank keeps {words} ({share}); smaller: {', or '.join(smaller)}"


def node_memory(ranks: int, local: int, device: str) -> float:
    """Return the bytes of memory of a node: that of a GPU for each of its ranks, or its part of the CPU's.

    Args:
        ranks: Ranks of the node.
        local: Ranks of this machine.
        device: Type of the device that they train on.
    """
    if device == "cuda":
        return float(ranks * torch.cuda.get_device_properties(0).total_memory)
    return psutil.virtual_memory().total * ranks / local


def replicas_in_words(needed: float, available: float) -> str:
    """Return whether each node should have a replica (HSDP), in words: where its memory holds one."""
    sizes = f"{format_bytes(needed)} of weights, gradients and states, {format_bytes(available)} of memory"
    if needed > available:
        return f"one mesh: a node cannot hold a replica ({sizes})"
    return (
        f"better: HSDP, which gathers no weights between nodes, since a node can hold a replica ({sizes}); "
        "pass fully_shard a mesh of (nodes, ranks per node) (docs/settings.md#sharded-jobs)"
    )


def memory(job: Job, parameters: float, *, width: int = 1024, bucket: int = 6_553_600) -> dict[str, float]:
    """Return the bytes of each kind of buffer that a rank keeps after the start.

    Args:
        job: The training.
        parameters: Number of its parameters.
        width: Rows and columns of their matrices.
        bucket: Entries that are exchanged together: 25 MiB of fp32.
    """
    settings = resolve(DataParallelConfig.of(job.section), Training(["AdamW"], ranks=job.ranks)).settings
    feedback, entries, weights = settings.feedback, parameters / job.inside, job.weight_bytes * parameters
    kept = (1.0 + job.transactional) * residual_bytes(settings) * entries
    answers = not job.shards and exchange_by_rule(settings, job.ranks) != "direct"
    updates = weights / job.shards if job.shards and settings.parameters else 0.0
    sent = min(entries, bucket + (MOST_PENDING / settings.density if job.in_slots else 0.0))
    kind = "residual"
    if settings.exchange_of == "updates":  # a part of the entries crosses, all of it in one exchange
        kind, sent = "unsent progress", settings.density * entries
        settings = settings.model_copy(update={"sparsity": 0.0})
    copies = 2.0 if job.shards else 3.0 if answers else job.ranks  # of a message, the own one with them
    arrive = _SLOT * copies if job.in_slots else copies - 1.0
    return {
        kind: kept,
        "common weights": weights * settings.trains_alone,
        "owners' residuals": kept / job.ranks * answers,
        "displaced weights": weights / job.weights_inside * feedback.looks_ahead,
        "second moments": 16.0 * parameters / width * feedback.looks_ahead,
        "weights": weights / job.weights_inside * job.copies,
        "updates": updates,
        "messages of updates": _GROWN * updates,
        "messages": _GROWN * _message(settings, sent, 2.0) + arrive * _message(settings, sent, 1.0),
    }


def _message(settings: DataParallelConfig, entries: float, room: float) -> int:
    dtype = ValueDtype.parse(settings.value_dtype)
    kept = math.ceil(room * settings.density * entries)
    return payload_bound(int(entries), kept, dtype, dense=settings.density >= 1.0)
