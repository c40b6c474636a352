"""Local steps and an exchange of updates under ZeRO-0 in bf16: DeepSpeed's optimizer trains fp32 masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.alone import everyones, loss_of
from support.processes import run
from torch import Tensor, nn

import dct_plugin
from dct_plugin.config import DCTConfig
from dct_plugin.integrations.deepspeed.rules import refusals
from dct_plugin.integrations.deepspeed.section import Job

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

LR, DECAY = 1e-2, 0.1
COMMON = {"min_numel": 64, "verify": {"every": 1, "action": "stop"}}
SECTIONS: dict[str, dict[str, Any]] = {
    "local": {"local_steps": 4, "warmup_steps": 3, **COMMON},
    "updates": {"exchange_of": "updates", "sparsity": 2 / 3, **COMMON},
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 3))


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW as an optimizer that DeepSpeed takes for its own fused one: the masters of a group
    are then one tensor.
    """
    from deepspeed.ops.adam import FusedAdam

    class Base(FusedAdam):
        def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
            torch.optim.Optimizer.__init__(self, params, defaults)

    class AdamW(torch.optim.AdamW, Base): ...

    return AdamW(parameters, lr=LR, weight_decay=DECAY)


def unfused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)


def begun(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer after a step with gradients of zeros, as DeepSpeed's wrappers make it."""
    optimizer = unfused(parameters)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


WRAPPERS = {"FP16_Optimizer": fused, "FP16_UnfusedOptimizer": unfused}


def made(section: dict[str, Any], optimizer: Any, **more: Any) -> Any:
    import deepspeed

    model = model_of()
    no_decay = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2]},
              {"params": no_decay, "weight_decay": 0.0}]  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0, "dct": {"data_parallel": section},
        "bf16": {"enabled": True}, **more,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=optimizer(groups), config=config)[0]


def masters(engine: Any) -> dict[str, Tensor]:
    """Return copies of what the optimizer trains, by the names of the parameters."""
    optimizer, found = engine.optimizer, {}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if not hasattr(optimizer, "fp16_groups"):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    for index, parameters in enumerate(optimizer.fp16_groups):
        if hasattr(optimizer, "fp32_groups"):
            values = [each.detach() for each in optimizer.fp32_groups[index]]
        else:
            flat = optimizer.fp32_groups_flat[index].detach()
            values = list(flat.split([parameter.numel() for parameter in parameters]))
        for parameter, value in zip(parameters, values, strict=True):
            found[names[id(parameter)]] = value.view(parameter.shape).clone()
    return found


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def loss(engine: Any, step: int, rank: int) -> Tensor:
    dtype = next(engine.module.parameters()).dtype
    return loss_of(lambda x: engine(x.to(dtype)).float(), step, rank)  # type: ignore[arg-type]


def steps(engine: Any, rank: int, which: range) -> list[float]:
    """Train, and hold the weights before and after each step against the masters."""
    losses = []
    for step in which:
        for name, master in masters(engine).items():
            parameter = engine.module.get_parameter(name)
            assert torch.equal(parameter, master.to(parameter.dtype)), (step, name)
        losses.append(loss(engine, step, rank))
        engine.backward(losses[-1])
        engine.step()
    return [each.item() for each in losses]


def _trains(rank: int, world_size: int, kind: str, folder: str) -> None:
    section = SECTIONS[kind]
    in_fp32 = steps(made(section, begun, bf16={"enabled": False}), rank, range(16))
    moments = []
    for wrapper, optimizer in WRAPPERS.items():
        engine = made(section, optimizer)
        assert type(engine.optimizer).__name__ == wrapper
        losses = steps(engine, rank, range(9))
        local = engine.dct.reducer.add_ons.local_steps
        states = engine.optimizer.optimizer.state.values()
        moments.append(torch.cat([each["exp_avg"].view(-1).clone() for each in states]))
        mine, common = masters(engine), {n: w.clone() for n, w in local.weights.common.items()}
        assert not equal(*everyones(mine))
        assert equal(*everyones(common))
        # Evaluation and saved models have the common weights in the type of the model.
        state = engine.module.state_dict()
        rounded = {n: common[n].view(w.shape).bfloat16() for n, w in state.items()}
        assert equal(state, rounded)
        plain = model_of().bfloat16()
        plain.load_state_dict(state)
        with torch.no_grad():
            points = torch.randn(8, 24).bfloat16()
            assert torch.equal(engine(points), plain(points))
        assert equal(masters(engine), mine)
        engine.save_checkpoint(folder, tag=wrapper)
        saved = torch.load(f"{folder}/{wrapper}/mp_rank_00_model_states.pt", weights_only=False)
        values = saved["optimizer"]["fp32_groups" if optimizer is unfused else "fp32_groups_flat"]
        ordered = torch.cat([each.view(-1) for group in values for each in group])
        in_groups = torch.cat([common[n] for dim in (2, 1) for n, w in state.items() if w.dim() == dim])
        assert torch.equal(ordered, in_groups)
        losses += steps(engine, rank, range(9, 16))
        torch.testing.assert_close(losses, in_fp32, rtol=0.02, atol=0)
        again = made(section, optimizer)
        again.load_checkpoint(folder, tag=wrapper)
        assert equal(masters(again), mine)
        steps(again, rank, range(9, 16))
        assert equal(masters(again), masters(engine))
        dct_plugin.detach(again)
        steps(again, rank, range(16, 19))
        assert equal(*everyones(masters(again)))
        engine.destroy()  # ends in the middle of local steps: the ranks keep the common weights
        steps(engine, rank, range(0))
        assert equal(*everyones(masters(engine)))
        assert equal(*everyones(dict(engine.module.named_parameters())))
    one_tensor, several = moments
    assert (one_tensor - several).norm() < 0.02 * several.norm()


@pytest.mark.parametrize("kind", list(SECTIONS))
def test_ranks_train_masters_of_their_own_and_resume_bitwise(kind: str, tmp_path: Path) -> None:
    run(2, _trains, kind, str(tmp_path))


def _drifts(rank: int, world_size: int, optimizer: Any) -> None:
    section = {"sparsity": 0.5, "min_numel": 64, "verify": {"every": 2, "action": "resync"}}
    engine = made(section, optimizer)
    for step in range(6):
        engine.backward(loss(engine, step, rank))
        engine.step()
        if step == 2:
            with torch.no_grad():
                for group in engine.optimizer.optimizer.param_groups:
                    for master in group["params"]:
                        master += rank
    assert equal(*everyones(masters(engine)))
    assert equal(*everyones(dict(engine.module.named_parameters())))


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_masters_that_drifted_are_taken_over_from_the_first_rank(wrapper: str) -> None:
    run(2, _drifts, WRAPPERS[wrapper])


#: Exchanges of local steps end these steps; the gradients of rank 0 are not finite in them, and in step 9.
AT_EXCHANGES, BAD = (6, 14), (6, 9, 14)


def _skips(rank: int, world_size: int, kind: str) -> int:
    engine = made(SECTIONS[kind], unfused, gradient_accumulation_steps=2)
    for step in range(16):
        for _ in range(2):
            found = loss(engine, step, rank)
            engine.backward(found * torch.nan if rank == 0 and step in BAD else found)
            engine.step()
    common = engine.dct.reducer.add_ons.local_steps.weights.common
    assert equal(*everyones(common))
    assert all(master.isfinite().all() for master in masters(engine).values())
    steps(engine, rank, range(0))
    return int(engine.skipped_steps)


@pytest.mark.parametrize(("kind", "other"), [("local", len(AT_EXCHANGES)), ("updates", len(BAD))])
def test_steps_that_are_not_finite_are_skipped_before_an_exchange(kind: str, other: int) -> None:
    assert run(2, _skips, kind) == [len(BAD), other]


@pytest.mark.parametrize("kind", list(SECTIONS))
def test_ranks_with_loss_scales_of_their_own_are_refused(kind: str) -> None:
    config = DCTConfig.of({"data_parallel": SECTIONS[kind]})
    content: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": LR}}}
    assert not refusals(Job.of_json({**content, "bf16": {"enabled": True}}), config)
    (why,) = refusals(Job.of_json({**content, "fp16": {"enabled": True}}), config)
    assert "ZeRO stage 0 with fp32 weights or the bf16 section" in why


def _saves(rank: int, world_size: int, kind: str, folder: str) -> dict[str, Tensor]:
    engine = made(SECTIONS[kind], fused)
    steps(engine, rank, range(9))
    engine.save_checkpoint(folder, tag="saved")
    common = engine.dct.reducer.add_ons.local_steps.weights.common
    return {name: each.clone() for name, each in common.items()}


def _goes_on(rank: int, world_size: int, kind: str, folder: str) -> dict[str, Tensor]:
    engine = made(SECTIONS[kind], fused)
    engine.load_checkpoint(folder, tag="saved")
    loaded = masters(engine)
    steps(engine, rank, range(9, 13))
    common = engine.dct.reducer.add_ons.local_steps.weights.common
    assert all(equal(common, each) for each in everyones(common))
    return loaded


@pytest.mark.parametrize("kind", list(SECTIONS))
def test_another_number_of_ranks_starts_at_the_common_masters(kind: str, tmp_path: Path) -> None:
    common, _ = run(2, _saves, kind, str(tmp_path))
    for loaded in run(3, _goes_on, kind, str(tmp_path)):
        assert equal({name: each.view(-1) for name, each in loaded.items()}, common)
