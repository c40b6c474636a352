"""The part of ``dct advise`` in the ranks of the user's job: it measures dense steps, and writes figures.

The script is not changed. Every ``DistributedDataParallel`` gets the hook when it is made, every DeepSpeed
engine gets a section, Megatron's launch wrapper reads the section from a file, and FSDP's model is found in
the first forward pass.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin.config import MetricsConfig
from dct_plugin.data_parallel.autotune.add_on import AutomaticSparsity
from dct_plugin.data_parallel.autotune.cost_model import CostModel, Link
from dct_plugin.data_parallel.autotune.measurements import largest, probe_link
from dct_plugin.data_parallel.passes import calls_of
from dct_plugin.host_traffic import HostTraffic
from dct_plugin.metrics import HOST, Metrics
from dct_plugin.policy import Training
from dct_plugin.policy.rules import Setting

from .host.measured_job import FACTS, SECTION, VARIABLE
from .host.patching import Function, Patches
from .host.settings import training_of

#: Optimizer steps after which a job of one rank is stopped.
_MOST_STEPS = 20
#: The facts of a training on one mesh that depend on its machines.
_FACTS_OF_SHARDS = ("exact_unavailable", "shares_copy", "int8_copies")
_steps = itertools.count()
#: Names of the script's communication hooks.
_left_out: list[str] = []


def observe() -> None:
    """Measure the training of this process from its first step on; at most once."""
    if AutomaticSparsity.observer is not None:
        return
    AutomaticSparsity.observer = staticmethod(_write)
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_note_optimizer)

    def search(model: torch.nn.Module, _: Any) -> None:
        if _compress_sharded(model):
            handle.remove()

    handle = register_module_forward_pre_hook(search)
    Patches().intercept(torch.nn.parallel.DistributedDataParallel, "__init__", _make_attached)


def _make_attached(original: Function, model: Any, *arguments: Any, **keywords: Any) -> None:
    original(model, *arguments, **keywords)
    from .ddp import DCTState

    DCTState(SECTION).register(model)
    # The script's own hook would be a second one; DDP refuses that.
    model.register_comm_hook = functools.partial(_leave_out, model)


def _leave_out(model: Any, state: object, hook: Callable[..., Any]) -> None:
    """Leave out a communication hook of the script; the plugin's own takes the place of the first one."""
    from .ddp import DCTState

    if isinstance(state, DCTState):
        torch.nn.parallel.DistributedDataParallel.register_comm_hook(model, state, hook)
    else:
        _left_out.append(getattr(hook, "__name__", type(hook).__name__))


def _compress_sharded(model: torch.nn.Module) -> bool:
    """Compress a model if FSDP shards it; return whether the search for one is over."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or FACTS["optimizer"]:
        return bool(FACTS["optimizer"])  # the first step is made: the job trains without FSDP
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    if not any(isinstance(module, kinds) for module in model.modules()):
        return False
    from .fsdp.compression import compress_replicas, is_compressed
    from .fsdp.parameter_groups import has_replicas, parameter_groups

    if not any(map(has_replicas, parameter_groups(model))):
        _measure_shards(model)
    elif not is_compressed(model):
        compress_replicas(model)
    return True


def _measure_shards(model: torch.nn.Module) -> None:
    """Follow the steps of a model on one mesh, in its first forward pass."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    measurement, stepped = _turns(model), [True]

    def go_on(_: bool) -> None:
        """Begin a step in its first forward pass: no collective of FSDP's is under way."""
        if stepped:
            stepped.clear()
            next(measurement, None)

    go_on(True)
    register_optimizer_step_pre_hook(lambda *_: stepped.append(True))
    calls_of(model).follow(go_on)


def _turns(model: torch.nn.Module) -> Iterator[None]:
    """Time steps in turns, as they are and with gradients in int8 and log4, and write the figures; yields
    once a step.
    """
    from .fsdp.shards import ShardCompression

    rules, attached = AutomaticSparsity.rules, None
    metrics = Metrics(MetricsConfig(), rank=dist.get_rank(), world_size=dist.get_world_size())
    timed: dict[Setting, list[list[float]]] = {Setting(0.0, each): [] for each in (None, "int8", "log4")}
    with HostTraffic(metrics):
        for setting in [*timed] * rules.rounds:
            if attached is not None:
                attached.close()
            SECTION["data_parallel"] = {"value_dtype": setting.value_dtype}
            attached = None if setting.is_dense else ShardCompression(model, metrics=metrics)
            for step in range(rules.settling_steps + rules.trial_steps):
                before = _counters(metrics)
                yield
                if step >= rules.settling_steps:
                    timed[setting].append([b - a for a, b in zip(before, _counters(metrics), strict=True)])
    assert attached is not None
    group, inside = attached.groups[0].reducer.group, attached.applied.inside
    FACTS.update({key: getattr(attached.training, key) for key in _FACTS_OF_SHARDS})
    medians = [[statistics.median(each) for each in zip(*rows, strict=True)] for rows in timed.values()]
    # A ring leaves a node at one of its ranks; the plugin's messages leave it at all of them.
    sent = [host / inside + own for _, host, own in medians]
    rounds = list(zip(timed, largest(group, [each[0] for each in medians]), sent, strict=True))
    link, others = probe_link(group), group.world_size - 1
    rate = min(link.seconds_per_byte, *(s * others / n for _, s, n in rounds))  # no step is shorter
    steps = {setting: (s - rate * n / others, n) for setting, s, n in rounds}
    entries, link = sum(p.numel() for p in model.parameters()), Link(link.latency, rate)
    _write(CostModel(0.0, None, {}, link, entries, 0, group.world_size, False, steps=steps))


def _counters(metrics: Metrics) -> list[float]:
    """Return the seconds, and the bytes that FSDP and the plugin have sent so far."""
    classes = [(name, sums.sent_bytes) for name, sums in metrics.summary().classes.items() if "/" not in name]
    host = sum(sent for name, sent in classes if name.startswith(HOST))
    return [time.perf_counter(), host, sum(sent for _, sent in classes) - host]


def _note_optimizer(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    if next(_steps) == _MOST_STEPS and not (dist.is_initialized() and dist.get_world_size() > 1):
        sys.exit("dct advise: the job trains on one rank, which sends nothing")
    training = training_of(optimizer, Training())
    FACTS.update(optimizer=list(training.optimizer), momentum=training.momentum, lr=training.lr)


def _write(model: CostModel) -> None:
    if dist.get_rank():
        return
    if FACTS["stage"] == 3:  # in the forward and in the backward pass
        model = model._replace(weight_gathers=2)
    figures = model._asdict() | {
        "codings": [[*setting[:2], *coding] for setting, coding in model.codings.items()],
        "link": list(model.link),
        "steps": [[*setting, *step] for setting, step in model.steps.items()],
    }
    path = Path(os.environ[VARIABLE])
    part = path.with_suffix(".part")
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    content = {"facts": FACTS, "model": figures, "left_out": _left_out, "device": device}
    part.write_text(json.dumps(content), encoding="utf-8")
    part.replace(path)  # the command waits for the whole file
