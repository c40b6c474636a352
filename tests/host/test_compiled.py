"""``torch.compile`` in every order: compiled trainings go on past the dense start, equal to uncompiled ones.

``docs/support.md`` has the table of orders: the test fails with the rows that it should have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from support import megatron_cpu
from support.megatron_cpu import forget_megatron
from support.megatron_gpt import Job
from support.megatron_gpt import train as train_gpt
from support.processes import run
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.integrations.host.patching import Patches

pytestmark = pytest.mark.slow

COMPILE = torch.compile
#: The backend that needs no compiler for C.
BACKEND = "aot_eager"
STEPS, START = 6, 2
SECTION = {
    "data_parallel": {"sparsity": 0.9, "min_numel": 100, "feedback": "step_ahead", "warmup_steps": START}
}

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

#: Words of errors, and the result for the table.
REFUSALS = {
    "optimize_ddp = 'python_reducer' has": "refused",
    "under torch's compiled autograd FSDP2": "refused",
    "dct does not work with compiled autograd": "refused",
    "not compatible with C++ DDP Reducer": "torch refuses it: DDP's reducer is no part of a graph",
}

#: Trains a model on this rank; its second argument compiles a model, or leaves it as it is.
Training = Callable[[nn.Module, Callable[[Any], Any], int], Any]
ORDERS: dict[str, dict[str, Training]] = {}
#: Those that are compared with themselves, uncompiled, and not with the first one of their host.
APART: set[Training] = set()


def order(host: str, words: str) -> Callable[[Training], Training]:
    """A training; ``words`` are the calls in their order, for the table."""

    def note(training: Training) -> Training:
        ORDERS.setdefault(host, {})[words] = training
        return training

    return note


class Net(nn.Module):
    """Layers whose backward pass reads weights: a convolution, a product, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 32)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(32)
        self.matrix = nn.Parameter(0.2 * torch.randn(32, 32))
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + self.conv(h.view(-1, 8, 4)).flatten(1)
        return self.last(self.norm(h @ self.matrix)).square().mean()


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(10 * step + rank))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, rank: int, *, evaluates: bool = False) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs(rank, step))
        if evaluates:
            with torch.no_grad():
                model(inputs(rank, step))
        loss.backward()
        optimizer.step()


# -- torch DDP ---


@order("torch DDP", "`DDP(torch.compile(model))`, `attach`")
def inside(net: nn.Module, compiled: Any, rank: int) -> None:
    ddp = DistributedDataParallel(compiled(net))
    optimizer = adamw(ddp)
    dct_plugin.attach(ddp, optimizer, SECTION)
    train(ddp, optimizer, rank)


@order("torch DDP", "`torch.compile(DDP(model))`, `attach`")
def outside(net: nn.Module, compiled: Any, rank: int, *, evaluates: bool = True) -> None:
    model = compiled(DistributedDataParallel(net))
    optimizer = adamw(model)
    dct_plugin.attach(model, optimizer, SECTION)
    train(model, optimizer, rank, evaluates=evaluates)


@order("torch DDP", "`DDP(model)`, `attach`, `torch.compile`")
def outside_attached(net: nn.Module, compiled: Any, rank: int) -> None:
    ddp = DistributedDataParallel(net)
    optimizer = adamw(ddp)
    dct_plugin.attach(ddp, optimizer, SECTION)
    train(compiled(ddp), optimizer, rank)


@order("torch DDP", "`torch.compile(DDP(model))`, a pass, `attach`")
def used_before(net: nn.Module, compiled: Any, rank: int) -> None:
    model = compiled(DistributedDataParallel(net))
    optimizer = adamw(model)
    model(inputs(rank, 0)).backward()
    dct_plugin.attach(model, optimizer, SECTION)
    train(model, optimizer, rank)


@order("torch DDP", "`model.compile()`, `DDP`, `attach`")
def in_place(net: nn.Module, compiled: Any, rank: int) -> None:
    compiled(net, in_place=True)
    inside(net, lambda model: model, rank)


@order("torch DDP", "`DDP(model)`, `attach`, `model.compile()`")
def in_place_attached(net: nn.Module, compiled: Any, rank: int) -> None:
    ddp = DistributedDataParallel(net)
    optimizer = adamw(ddp)
    dct_plugin.attach(ddp, optimizer, SECTION)
    compiled(net, in_place=True)
    train(ddp, optimizer, rank)


@order("torch DDP", "`DDP(model)`, `ddp.compile()`, `attach`")
def wrapper_in_place(net: nn.Module, compiled: Any, rank: int) -> None:
    ddp = DistributedDataParallel(net)
    compiled(ddp, in_place=True)
    optimizer = adamw(ddp)
    dct_plugin.attach(ddp, optimizer, SECTION)
    train(ddp, optimizer, rank)


@order("torch DDP", "`DDP(torch.compile(model, fullgraph=True))`, `attach`")
def whole_inside(net: nn.Module, compiled: Any, rank: int) -> None:
    inside(net, lambda model: compiled(model, fullgraph=True), rank)


@order("torch DDP", "`torch.compile(DDP(model), fullgraph=True)`, `attach`")
def whole_outside(net: nn.Module, compiled: Any, rank: int) -> None:
    outside(net, lambda model: compiled(model, fullgraph=True), rank)


@order("torch DDP", "`torch.compile(layer)`, `DDP`, `attach`")
def layers(net: Any, compiled: Any, rank: int) -> None:
    net.first, net.norm = compiled(net.first), compiled(net.norm)
    inside(net, lambda model: model, rank)


def _with_mode(mode: Any) -> Training:
    def training(net: nn.Module, compiled: Any, rank: int) -> None:
        with torch._dynamo.config.patch(optimize_ddp=mode):
            outside(net, compiled, rank, evaluates=False)

    return training


for _mode in (
    False, "no_optimization", "ddp_optimizer", "python_reducer", "python_reducer_without_compiled_forward"
):  # fmt: skip
    order("torch DDP", f"`torch.compile(DDP(model))`, `attach`, with `optimize_ddp = {_mode!r}`")(
        _with_mode(_mode)
    )


def _with_compiled_autograd(training: Training) -> Training:
    def compiling(net: nn.Module, compiled: Any, rank: int) -> None:
        with compiled_autograd._enable(torch.compile(backend=BACKEND)):
            training(net, compiled, rank)

    return compiling


order("torch DDP", "`torch.compile(DDP(model))`, `attach`, with compiled autograd")(
    _with_compiled_autograd(outside)
)


# -- FSDP2 ---


def _replicated(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


@order("FSDP2", "`fully_shard`, `attach`, `torch.compile`")
def sharded_outside(net: nn.Module, compiled: Any, rank: int) -> None:
    model = _replicated(net)
    optimizer = adamw(model)
    dct_plugin.attach(model, optimizer, SECTION)
    train(compiled(model), optimizer, rank)


@order("FSDP2", "`fully_shard`, `torch.compile`, `attach`")
def sharded_compiled(net: nn.Module, compiled: Any, rank: int) -> None:
    model = compiled(_replicated(net))
    optimizer = adamw(model)
    dct_plugin.attach(model, optimizer, SECTION)
    train(model, optimizer, rank)


@order("FSDP2", "`model.compile()`, `fully_shard`, `attach`")
def sharded_in_place(net: nn.Module, compiled: Any, rank: int) -> None:
    compiled(net, in_place=True)
    sharded_outside(net, lambda model: model, rank)


@order("FSDP2", "`torch.compile(layer)`, `fully_shard`, `attach`")
def sharded_layers(net: Any, compiled: Any, rank: int) -> None:
    net.first, net.norm = compiled(net.first), compiled(net.norm)
    sharded_outside(net, lambda model: model, rank)


order("FSDP2", "`fully_shard`, `torch.compile`, `attach`, with compiled autograd")(
    _with_compiled_autograd(sharded_compiled)
)


# -- DeepSpeed ---


def _engine(net: nn.Module, stage: int = 1) -> Any:
    feedback = {"feedback": "local" if stage == 3 else "step_ahead"}
    configuration = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "dct": {"data_parallel": SECTION["data_parallel"] | feedback},
    }
    return deepspeed.initialize(model=net, config=configuration, dist_init_required=False)[0]


def _train_engine(engine: Any, rank: int) -> None:
    for step in range(STEPS):
        loss = engine(inputs(rank, step))
        engine.backward(loss)
        engine.step()


@order("DeepSpeed", "`initialize`, `engine.compile()`")
def engine_compiled(net: nn.Module, compiled: Any, rank: int) -> None:
    engine = _engine(net)
    if compiled(None):
        engine.compile(backend=BACKEND)
    _train_engine(engine, rank)


@order("DeepSpeed", "`initialize`, `engine.compile(compiled_autograd_enabled=True)`")
def engine_compiled_backwards(net: nn.Module, compiled: Any, rank: int) -> None:
    engine = _engine(net)
    if compiled(None):
        engine.compile(backend=BACKEND, compiled_autograd_enabled=True)
    _train_engine(engine, rank)


@order("DeepSpeed", "`torch.compile(model)`, `initialize`")
def compiled_engine(net: nn.Module, compiled: Any, rank: int) -> None:
    _train_engine(_engine(compiled(net)), rank)


@order("DeepSpeed", "`model.compile()`, `initialize`")
def in_place_engine(net: nn.Module, compiled: Any, rank: int) -> None:
    compiled(net, in_place=True)
    _train_engine(_engine(net), rank)


def _staged(stage: int) -> Training:
    def training(net: nn.Module, compiled: Any, rank: int) -> Tensor:
        engine = _engine(net, stage)
        if compiled(None):
            engine.compile(backend=BACKEND)
        _train_engine(engine, rank)
        parameters = list(net.parameters())
        with deepspeed.zero.GatheredParameters(parameters) if stage == 3 else nullcontext():
            return _weights(net)

    APART.add(training)
    return training


for each in (0, 2, 3):
    order("DeepSpeed", f"`initialize`, `engine.compile()`, ZeRO-{each}")(_staged(each))


# -- Hugging Face ---


@order("Accelerate", "`Accelerator(dynamo_backend=...)`, `prepare`, `attach`")
def accelerated(net: nn.Module, compiled: Any, rank: int) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from dct_plugin.accelerate import attach

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, dynamo_backend=BACKEND if compiled(None) else None)
    model, optimizer = accelerator.prepare(net, adamw(net))
    attach(accelerator, model, optimizer, SECTION)
    train(model, optimizer, rank)
    AcceleratorState._reset_state(True)


@order("Trainer", "`torch_compile=True`, `DCTCallback`")
def trained(net: nn.Module, compiled: Any, rank: int) -> None:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from dct_plugin.transformers import DCTCallback

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.net(x) + 0.0 * labels.sum()}

    AcceleratorState._reset_state(True)
    data = [{"x": row, "labels": row.sum()} for step in range(STEPS) for row in inputs(0, step)]
    arguments = TrainingArguments(
        "unused", max_steps=STEPS, per_device_train_batch_size=8, use_cpu=True, ddp_backend="gloo",
        report_to=[], save_strategy="no", disable_tqdm=True,
        **({"torch_compile": True, "torch_compile_backend": BACKEND} if compiled(None) else {}),
    )  # fmt: skip
    trainer = Trainer(Labelled(), arguments, train_dataset=data)
    trainer.add_callback(DCTCallback(SECTION, trainer=trainer))
    trainer.train()
    AcceleratorState._reset_state(True)


# -- Megatron ---


@order("Megatron", "`install`, operations that Megatron's `jit_fuser` compiles")
def fused(net: nn.Module, compiled: Any, rank: int) -> Tensor:
    """Megatron decorates them when it is imported."""
    forget_megatron()
    megatron_cpu.install()
    with Patches() as patches:
        patches.replace(torch, "compile", lambda function: compiled(function))
        outcome = train_gpt(Job(fused=True, distributed_optimizer=True, steps=STEPS, dct=SECTION))
    return torch.tensor(list(bytes.fromhex(outcome.parameters)))


# -- all ---


def _compile(model: Any, in_place: bool = False, **options: Any) -> Any:
    if model is None:
        return True
    if in_place:
        return model.compile(backend=BACKEND)
    return COMPILE(model, backend=BACKEND, **options)


def _leave(model: Any, in_place: bool = False, **options: Any) -> Any:
    return model


def _weights(net: nn.Module) -> Tensor:
    local = [getattr(p.data, "to_local", lambda p=p: p.data)() for p in net.parameters()]
    return torch.cat([each.reshape(-1) for each in local])


#: Orders with one of these words are variants of others: they run once a week.
RARE = ("optimize_ddp", "fullgraph", "ZeRO-")


def _chosen(host: str, *, weekly: bool) -> dict[str, Training]:
    orders = ORDERS[host].items()
    return {words: each for words, each in orders if weekly or not any(rare in words for rare in RARE)}


def _trainings(rank: int, world_size: int, host: str, weekly: bool) -> list[str]:
    """Return the result of each order, in words."""
    orders = list(_chosen(host, weekly=weekly).values())
    plain = _end(orders[0], _leave, rank)
    results = []
    for training in orders:
        try:
            end = _end(training, _compile, rank)
            assert counters["stats"]["unique_graphs"], "nothing was compiled"
            expected = _end(training, _leave, rank) if training in APART else plain
            assert torch.equal(end, expected), (training.__name__, (end - expected).abs().max())
            results.append("equal")
        except Unsupported:
            results.append("torch refuses it: hooks are no part of a graph")
        except (dct_plugin.ConfigError, RuntimeError) as error:
            found = [result for words, result in REFUSALS.items() if words in str(error)]
            if not found:
                raise
            results += found
    return results


def _end(training: Training, compiled: Callable[..., Any], rank: int) -> Tensor:
    """Return the weights at the end of a training, or their fingerprint."""
    torch._dynamo.reset()
    counters.clear()
    net = Net()
    found = training(net, compiled, rank)
    return found if isinstance(found, Tensor) else _weights(net)


@pytest.mark.parametrize("weekly", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("host", ORDERS)
def test_the_table_of_orders(host: str, weekly: bool) -> None:
    first, second = run(2, _trainings, host, weekly)
    assert first == second
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {host} | `"))
    equal, other = row.strip("| ").removeprefix(f"{host} | ").partition(" |")[::2]
    table = dict.fromkeys(equal.split("<br>"), "equal")
    table |= dict(re.findall(r"(`.*?) \(([^()`]*)\)(?:<br>|$)", other.strip("| ")))
    assert table.keys() == ORDERS[host].keys()
    found = dict(zip(_chosen(host, weekly=weekly), first, strict=True))
    assert {words: table[words] for words in found} == found
