"""A second attachment to a module takes the first one's hooks off, and ``detach`` leaves none.

Megatron's are in ``tests/megatron/test_megatron_step_ahead.py``.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from support.processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import dct_plugin
from dct_plugin.data_parallel.passes import ModuleHook, calls_of
from dct_plugin.integrations.host import lost_peers

pytestmark = pytest.mark.slow

DATA = {"sparsity": 0.9, "min_numel": 100, "feedback": "step_ahead", "value_dtype": "fp32"}
#: Nothing of a second attachment is displaced while its start is dense.
SPARSE, DENSE = {"data_parallel": DATA}, {"data_parallel": {**DATA, "warmup_steps": 50}}


class Net(nn.Module):
    """Shows the weights that a pass has found."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(20, 64), nn.Tanh())
        self.head = nn.Linear(64, 1)
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = held(self)
        return self.head(self.body(x)).square().mean()


class Head(nn.Module):
    """A model of its own that trains a part of another one."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def held(model: nn.Module) -> Tensor:
    local = [getattr(p.data, "to_local", lambda p=p: p.data)() for p in model.parameters()]
    return torch.cat([each.reshape(-1) for each in local]).clone()


def hooks_on(model: nn.Module, optimizer: Any = None) -> int:
    """Number of our hooks on a model, of those of its optimizer, of all optimizers, and of the process."""
    found = [
        [hook for hook in hooks.values() if isinstance(getattr(hook, "hook", hook), ModuleHook)]
        for module in model.modules()
        for hooks in (
            module._state_dict_pre_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
        )
    ]
    followed = sum(len(calls_of(module)._followers) for module in model.modules())
    others = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    if optimizer is not None:
        others += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return followed + sum(map(len, [*found, *others])) + len(lost_peers._excepthook.jobs)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(10 * step + rank))


def train(called: nn.Module, net: Net, optimizer: Any, rank: int, steps: range) -> float:
    """Return how far the weights that passes have found were from the weights before, at most."""
    off = 0.0
    for step in steps:
        optimizer.zero_grad()
        before = held(net)
        loss = called(inputs(rank, step))
        off = max(off, float((net.seen - before).abs().max()))
        loss.backward()
        optimizer.step()
    return off


def largest_residual(*reducers: Any) -> float:
    """Return the largest entry that a rank has not sent."""
    kept = [
        (each, s.residual) for each in reducers for s in each.group.streams.values() if s.residual is not None
    ]
    return max(float(residual.show(each.group.streams.scratch, "own").abs().max()) for each, residual in kept)


# -- torch DDP ---

Script = Callable[[Net, Any], nn.Module]


def _wrapped_again(net: Net, ddp: Any) -> nn.Module:
    return DistributedDataParallel(net)


def _same_wrapper(net: Net, ddp: Any) -> nn.Module:
    return ddp


def _part(net: Net, ddp: Any) -> nn.Module:
    net.body.requires_grad_(False)
    return DistributedDataParallel(Head(net))


def _failed(net: Net, ddp: Any) -> nn.Module:
    """As of a batch that was too large: the wrapper takes over what it finds, displaced or not."""

    def fail(_: Tensor) -> None:
        raise MemoryError

    handle = net.head.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        ddp(torch.ones(4, 20)).backward()
    handle.remove()
    return DistributedDataParallel(net)


def _twice(rank: int, world_size: int, scripts: list[Script]) -> list[dict[str, Any]]:
    results = []
    for again in scripts:
        net = Net()
        none = hooks_on(net)
        ddp: Any = DistributedDataParallel(net)
        first = dct_plugin.attach(ddp, adamw(ddp), SPARSE)
        assert first is not None
        displaced = train(ddp, net, adamw(ddp), rank, range(6))
        one = hooks_on(net)
        before = held(net)
        ddp = again(net, ddp)
        optimizer = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
        second = dct_plugin.attach(ddp, optimizer, DENSE)
        assert second is not None
        same = torch.equal(before, held(net))
        off = train(ddp, net, optimizer, rank, range(6, 10))
        two = hooks_on(net)
        dct_plugin.detach(second)
        off = max(off, train(ddp, net, optimizer, rank, range(10, 13)))
        results.append(
            {
                "displaced": displaced,
                "same weights": same,
                "off": off,
                "hooks": (none, one, two, hooks_on(net, optimizer)),
                "weights": held(net),
                "steps": (first.metrics.summary().steps, second.metrics.summary().steps),
            }
        )
    return results


def test_a_second_attachment_under_ddp() -> None:
    scripts = [_wrapped_again, _same_wrapper, _part, _failed]
    for first, second, script in zip(*run(2, _twice, scripts), scripts, strict=True):
        for result in (first, second):
            none, one, two, after = result["hooks"]
            assert result["displaced"] > 0
            assert result["off"] == 0.0, script
            assert result["same weights"], script
            assert none == after < one, script
            assert two <= one, script
            assert result["steps"] == (6, 5)  # the last one brings what was unsent
        assert torch.equal(first["weights"], second["weights"]), script


def _gone(rank: int, world_size: int) -> tuple[float, int]:
    net = Net()
    before = hooks_on(net)
    ddp = DistributedDataParallel(net)
    dct_plugin.attach(ddp, adamw(ddp), SPARSE)
    train(ddp, net, adamw(ddp), rank, range(4))
    del ddp
    gc.collect()
    weights = held(net)
    net(inputs(rank, 0))
    return float((net.seen - weights).abs().max()), hooks_on(net) - before


def test_hooks_leave_with_the_wrapper() -> None:
    assert run(2, _gone) == [(0.0, 0)] * 2


class Scaled:
    """The training of a model with a scaler or without, and with an optimizer that was told or not."""

    def __init__(self, *, scaler: bool) -> None:
        self.net = Net()
        self.ddp = DistributedDataParallel(self.net)
        self.optimizer = adamw(self.ddp)
        self.scaler = torch.amp.GradScaler("cpu", enabled=True) if scaler else None

    def step(self, rank: int, passes: int = 1) -> None:
        self.optimizer.zero_grad()
        for number in range(passes):
            loss = self.ddp(inputs(rank, number))
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def found(self) -> dict[str, Any]:
        """Return all that can hold a hook of the training or of the process."""
        left: dict[str, Any] = {}
        owners = {
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "optimizers": optimizers,
            "modules": nn.modules.module,
            **dict(self.ddp.named_modules()),
        }
        for place, owner in owners.items():
            for name, value in vars(owner).items() if owner is not None else ():
                if "hook" in name and isinstance(value, dict):
                    left[f"{place}.{name}"] = len(value)
        for name, parameter in self.net.named_parameters():
            hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            left[name] = [len(each or ()) for each in hooks]
        for owner in (self.net, self.optimizer, *([self.scaler] if self.scaler else [])):
            left[f"attributes of {type(owner).__name__}"] = sorted(vars(owner))
        methods = {name: id(value) for name, value in vars(torch.distributed.ProcessGroup).items()}
        finalizers = [each for each in weakref.finalize._registry if "dct_plugin" in repr(each.peek())]
        threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("dct"))
        return left | {"process": (sys.excepthook, methods, len(finalizers), threads)}


def _everything(rank: int, world_size: int) -> list[tuple[str, Any, Any]]:
    differ = []
    for scaler in (False, True):
        for feedback in ("local", "step_ahead"):
            for ends in ("detach", "close"):
                training = Scaled(scaler=scaler)
                before = training.found()
                data = {**DATA, "feedback": feedback, "verify": {"every": 1}}
                section = {"data_parallel": data}
                state = dct_plugin.attach(training.ddp, training.optimizer, section, scaler=training.scaler)
                assert state is not None
                training.step(rank)
                training.step(rank, passes=2)
                assert training.found() != before
                getattr(state, ends)()
                for _ in range(2 if ends == "detach" else 1):  # the next pass removes the hooks
                    training.step(rank)
                after = training.found()
                differ += [
                    (f"{scaler} {feedback} {ends} {k}", v, after[k])
                    for k, v in before.items()
                    if v != after[k]
                ]
    return differ


def test_detach_leaves_no_hook_of_any_kind() -> None:
    assert run(2, _everything) == [[], []]


def _counted(rank: int, world_size: int) -> dict[str, int]:
    """Optimizer steps that are counted, of five steps of three passes that are all reduced."""
    counted = {}
    for case in ("attach", "not told", "by hand"):
        training = Scaled(scaler=False)
        data = {"data_parallel": {**DATA, "feedback": "local", "warmup_steps": 2}}
        told = training.optimizer if case == "attach" else None
        state: Any = dct_plugin.attach(training.ddp, told, data)
        for step in range(5):
            if case != "by hand":
                training.step(rank, passes=3)
                continue
            training.ddp(inputs(rank, step)).backward()
            for parameter in training.ddp.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
        state.state_dict()
        counted[case] = state.steps.step
        state.close()
    return counted


def test_optimizer_steps_are_counted_where_passes_accumulate() -> None:
    assert run(2, _counted) == [{"attach": 5, "not told": 5, "by hand": 5}] * 2


# -- FSDP2 ---


def _sharded(rank: int, world_size: int) -> dict[str, Any]:
    net = Net()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(net.body, mesh=mesh)
    model: Any = fully_shard(net, mesh=mesh)
    optimizer = adamw(model)
    none, unsent, reduce = hooks_on(net, optimizer), [], _fsdp_param_group.foreach_reduce
    first = dct_plugin.attach(model, optimizer, SPARSE)
    train(model, net, optimizer, rank, range(6))
    one = hooks_on(net, optimizer)
    optimizer = adamw(model)
    second: Any = dct_plugin.attach(model, optimizer, DENSE)
    off = train(model, net, optimizer, rank, range(6, 10))
    two = hooks_on(net, optimizer)
    third: Any = dct_plugin.attach(model, optimizer, SPARSE)
    train(model, net, optimizer, rank, range(10, 14))
    dct_plugin.detach(third)
    for step in (14, 15):
        train(model, net, optimizer, rank, range(step, step + 1))
        unsent.append(largest_residual(*third._reducers.values()))
    return {
        "off": off,
        "hooks": (none, one, two, hooks_on(net, optimizer)),
        "steps": [each.metrics.summary().steps for each in (first, second, third)],
        "unsent": unsent,
        "patched": _fsdp_param_group.foreach_reduce is not reduce,
        "weights": held(net),
    }


def test_a_second_attachment_under_fsdp2() -> None:
    first, second = run(2, _sharded)
    for result in (first, second):
        none, one, two, after = result["hooks"]
        assert result["off"] == 0.0
        assert none == after < one == two
        assert result["steps"] == [6, 4, 5]  # the last one brings what was unsent
        assert result["unsent"] == [0.0, 0.0]
        assert not result["patched"]
    assert torch.equal(first["weights"], second["weights"])


# -- DeepSpeed ---


def _engine(net: nn.Module, section: dict[str, Any], stage: int) -> Any:
    configuration = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "dct": section,
    }
    return deepspeed.initialize(model=net, config=configuration, dist_init_required=False)[0]


def _step(engine: Any, net: Net, rank: int, steps: range) -> float:
    off = 0.0
    for step in steps:
        before = held(net)
        loss = engine(inputs(rank, step))
        off = max(off, float((net.seen - before).abs().max()))
        engine.backward(loss)
        engine.step()
    return off


def _engines(rank: int, world_size: int) -> list[dict[str, Any]]:
    results = []
    for stage in (0, 1):
        net = Net()
        engine = _engine(net, SPARSE, stage)
        first = engine.dct
        displaced = _step(engine, net, rank, range(6))
        one = hooks_on(net)
        before = held(net)
        with pytest.raises(MemoryError):
            _fail(engine, net)
        engine = _engine(net, DENSE, stage)
        same = torch.equal(before, held(net))
        off = _step(engine, net, rank, range(6, 10))
        two = hooks_on(net)
        engine = _engine(net, SPARSE, stage)
        third = engine.dct
        _step(engine, net, rank, range(10, 14))
        dct_plugin.detach(engine)
        off = max(off, 0.0 if _step(engine, net, rank, range(14, 15)) else 1.0)
        off = max(off, _step(engine, net, rank, range(15, 17)))
        results.append(
            {
                "displaced": displaced,
                "same weights": same,
                "off": off,
                "hooks": (one, two, hooks_on(net)),
                "steps": [each.metrics.summary().steps for each in (first, third)],
                "unsent": largest_residual(third.reducer),
                "weights": held(net),
            }
        )
    return results


def _fail(engine: Any, net: Net) -> None:
    def fail(_: Tensor) -> None:
        raise MemoryError

    handle = net.head.bias.register_hook(fail)
    try:
        engine.backward(engine(torch.ones(16, 20)))
    finally:
        handle.remove()


def test_a_second_engine_of_deepspeed() -> None:
    for first, second in zip(*run(2, _engines), strict=True):
        for result in (first, second):
            one, two, after = result["hooks"]
            assert result["displaced"] > 0
            assert result["same weights"]
            assert result["off"] == 0.0
            assert after < one == two
            assert result["unsent"] == 0.0
            assert result["steps"] == [6, 5]
        assert torch.equal(first["weights"], second["weights"])
