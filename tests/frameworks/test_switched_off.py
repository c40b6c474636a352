"""``"enabled": false``, at both places, leaves every framework as it is: bitwise, no hook, no message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.processes import logged, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.config import DCTConfig
from dct_plugin.integrations.host.attachment import PlainTraining
from dct_plugin.transport.exchange import Exchange

pytestmark = pytest.mark.slow

OFF: dict[str, dict[str, Any]] = {
    "dct.enabled": {"enabled": False},
    "dct.data_parallel.enabled": {"data_parallel": {"enabled": False, "sparsity": 0.99, "verify": {}}},
}
Section = dict[str, Any] | None


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 3))


def train(model: Any, optimizer: Any, backward: Callable[[Any], None], rank: int) -> list[torch.Tensor]:
    for step in range(4):
        points = torch.randn(8, 70, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        backward(model(points).square().mean())
        optimizer.step()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def hooks_in(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def _attached(model: Any, section: Section, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if section is not None:
        before = hooks_in(model)
        state = dct_plugin.attach(model, optimizer, section)
        assert isinstance(state, PlainTraining)
        assert hooks_in(model) == before
        assert not optimizer._optimizer_step_post_hooks
        assert state.state_dict() == {}
        state.detach()
    return train(model, optimizer, lambda loss: loss.backward(), rank)


def ddp(section: Section, rank: int) -> list[torch.Tensor]:
    return _attached(DistributedDataParallel(model_of()), section, rank)


def communication_hook(section: Section, rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(model_of())
    if section is not None:
        model.register_comm_hook(dct_plugin.DCTState(section), dct_plugin.dct_hook)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda loss: loss.backward(), rank)


def fsdp2(section: Section, rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = model_of()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _attached(model, section, rank)


def accelerate(section: Section, rank: int) -> list[torch.Tensor]:
    from accelerate import Accelerator

    from dct_plugin.accelerate import attach

    model = model_of()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if section is not None:
        assert isinstance(attach(accelerator, model, optimizer, section), PlainTraining)
    return train(model, optimizer, accelerator.backward, rank)


def torchft(section: Section, rank: int) -> list[torch.Tensor]:
    import torchft as host

    from dct_plugin.torchft import ProcessGroupGloo

    group: Any = host.ProcessGroupGloo() if section is None else ProcessGroupGloo(section)
    store = dist.PrefixStore(str(section), dist.distributed_c10d._get_default_store())
    group._pg = group._create_pg(store, rank, dist.get_world_size())
    tensor = torch.arange(6000.0) * (rank + 1)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    group.allreduce([tensor], options).wait()
    return [tensor]


def deepspeed(section: Section, rank: int) -> list[torch.Tensor]:
    import deepspeed as host

    weights: list[torch.Tensor] = []
    for stage in range(4):
        model = model_of()
        content = {
            "train_micro_batch_size_per_gpu": 8,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            **({} if section is None else {"dct": section}),
        }
        engine, *_ = host.initialize(model=model, config=content, model_parameters=model.parameters())
        assert "dct" not in engine.__dict__
        for step in range(3):
            points = torch.randn(8, 70, generator=torch.Generator().manual_seed(10 * step + rank))
            engine.backward(engine(points).square().mean())
            engine.step()
        with host.zero.GatheredParameters(list(engine.module.parameters())):
            weights += [parameter.detach().clone() for parameter in engine.module.parameters()]
        engine.destroy()
    return weights


def megatron(section: Section, rank: int) -> list[torch.Tensor]:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from dct_plugin.integrations.megatron import install, uninstall

    before = _ParamAndGradBucketGroup.start_grad_sync
    if section is not None:
        assert install(DCTConfig.parse(section)) == {}
        uninstall()
    assert _ParamAndGradBucketGroup.start_grad_sync is before
    return []


HOSTS = (ddp, communication_hook, fsdp2, accelerate, torchft, deepspeed, megatron)


def _switched_off(rank: int, world_size: int) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    for host in HOSTS:
        plain = host(None, rank)
        for where, section in OFF.items():
            no_message = patch.object(Exchange, "__init__", side_effect=AssertionError("a message of ours"))
            with logged() as lines, no_message:
                off = host(section, rank)
            for one, other in zip(plain, off, strict=True):
                assert torch.equal(one, other), (host.__name__, where)
            said[f"{host.__name__}, {where}"] = lines
    return said


def test_a_training_that_is_switched_off_is_the_plain_one() -> None:
    first, second = run(2, _switched_off)
    for name, lines in first.items():
        if name.startswith("megatron"):
            continue
        where = name.partition(", ")[2]
        expected = 4 if name.startswith("deepspeed") else 1
        assert lines == [f"dct: nothing to do: {where} is false"] * expected, name
        assert set(second[name]) <= set(lines)


def _failed_attach(rank: int, world_size: int) -> list[str]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    before, said = hooks_in(model), []
    for _ in range(2):
        with pytest.raises(dct_plugin.errors.ConfigError) as raised:
            dct_plugin.attach(model, optimizer)
        said.append(str(raised.value))
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    for wrong in (other, [optimizer, other]):
        again = DistributedDataParallel(model_of())
        with pytest.raises(dct_plugin.errors.ConfigError):
            dct_plugin.attach(again, wrong)
        assert again._comm_hooks == []
    assert hooks_in(model) == before
    assert len(model._comm_hooks) == 1
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    state = dct_plugin.attach(again, optimizer, {"data_parallel": {"sparsity": 0.9, "feedback": "local"}})
    train(again, optimizer, lambda loss: loss.backward(), rank)
    assert state.metrics.summary().steps
    assert state.fallback_hook is None
    state.close()
    return said


def test_an_attach_that_fails_leaves_nothing_behind() -> None:
    for said in run(2, _failed_attach):
        for text in said:
            assert "the model has a communication hook already (allreduce_hook)" in text
