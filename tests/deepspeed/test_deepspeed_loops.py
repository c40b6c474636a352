"""Loops of scripts on DeepSpeed's engines with step-ahead, after a start of two steps; as in
``test_ddp_loops``.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes import logged, run
from support.watched import Watched, equal_on_ranks
from torch import Tensor, nn

from dct_plugin.data_parallel import weights

deepspeed = pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 6
LOOPS: dict[str, Callable[[Job], None]] = {}


class Job:
    """An engine, and what goes wrong in its training."""

    def __init__(self, rank: int, stage: int, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.rank, self.faults = rank, list[str]()
        self.model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 16))
        data = {"sparsity": 0.95, "min_numel": 16, "warmup_steps": 2, "sparsity_warmup_steps": 0}
        configuration = {
            "train_micro_batch_size_per_gpu": 32,
            "gradient_accumulation_steps": accumulate,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "dct": {"data_parallel": {**data, "feedback": "step_ahead"}},
        }
        self.engine: Any = deepspeed.initialize(
            model=self.model, config=configuration, dist_init_required=False
        )[0]
        attached = self.engine.dct
        self.watched = Watched(self.model, lambda: attached.ahead, attached.metrics)

    def batch(self, step: int) -> Tensor:
        return torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * self.rank + step))

    def loss(self, x: Tensor) -> Tensor:
        return (self.engine(x) - x.detach().roll(1, 1)).square().mean()

    def evaluate(self, x: Tensor, when: str) -> None:
        if self.watched.displaced():
            self.faults.append(f"displaced {when}")
        with weights(self.model):
            other = copy.deepcopy(self.model)
        with torch.no_grad():
            if not torch.equal(self.engine(x), other(x)):
                self.faults.append(f"evaluated at displaced weights {when}")


def loop(function: Callable[[Job], None]) -> Callable[[Job], None]:
    LOOPS[function.__name__] = function
    return function


@loop
def training_in_eval_mode(job: Job) -> None:
    job.engine.eval()
    for step in range(STEPS):
        job.engine.backward(job.loss(job.batch(step)))
        job.engine.step()


@loop
def attack_with_frozen_weights(job: Job) -> None:
    for step in range(STEPS):
        x = job.batch(step).requires_grad_()
        job.model.requires_grad_(False)
        (slope,) = torch.autograd.grad(job.model(x).square().mean(), x)
        job.model.requires_grad_(True)
        job.engine.backward(job.loss((x + 0.1 * slope.sign()).detach()))
        job.engine.step()


@loop
def accumulation_and_evaluation(job: Job) -> None:
    for step in range(2 * STEPS + 1):
        x = job.batch(step)
        job.engine.backward(job.loss(x))
        job.evaluate(x, "after a micro-batch")
        job.engine.step()


@loop
def two_passes_and_an_error(job: Job) -> None:
    for step in range(STEPS):
        x = job.batch(step)
        with contextlib.suppress(RuntimeError):
            job.engine(x[:, :7])
        one = job.loss(x)
        job.engine.eval()
        other = (job.model(x) - job.model(x + 0.1)).square().mean()
        job.engine.train()
        job.engine.backward(one + other)
        job.engine.step()


def _all_loops(rank: int, world_size: int) -> dict[str, list[str]]:
    wrong = {}
    for stage in (0, 1, 2):
        for name, function in LOOPS.items():
            job = Job(rank, stage, accumulate=2 if "accumulation" in name else 1)
            function(job)
            faults = job.faults + job.watched.faults()
            if not equal_on_ranks([p.data for p in job.model.parameters()]):
                faults.append("ranks differ")
            job.engine.destroy()
            if faults:
                wrong[f"{name}, stage {stage}"] = faults
    return wrong


def test_every_loop() -> None:
    assert run(2, _all_loops) == [{}, {}]


def _muon(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Weights after six steps, by stage and section; the plain engine's first."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    torch.compiler.set_stance("force_eager")  # its functions compile for longer than this trains
    sections = {
        "plain": None,
        "exact": {"data_parallel": {"sparsity": 0, "value_dtype": "fp32"}},
        "int8": {"data_parallel": {"quality": None, "min_numel": 100}},
    }
    found: dict[str, list[Tensor]] = {}
    for stage, (name, section) in itertools.product((1, 2, 3), sections.items()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 17))
        groups = []
        for is_muon, settings in ((True, {"momentum": 0.9}), (False, {"betas": (0.9, 0.99), "eps": 1e-8})):
            chosen = [p for p in model.parameters() if (p.dim() > 1) == is_muon]
            for parameter in chosen:
                parameter.use_muon = is_muon
            groups.append(
                {"params": chosen, "use_muon": is_muon, "lr": 0.02, "weight_decay": 0.0, **settings}
            )
        zero = {"stage": stage, "reduce_bucket_size": 900, "reduce_scatter": stage < 3}
        configuration = {
            "train_micro_batch_size_per_gpu": 32,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
            **({} if section is None else {"dct": section}),
        }
        with logged() as lines:
            # Not by the JSON, for which DeepSpeed compiles its Adam.
            optimizer = MuonWithAuxAdam(groups)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
            for step in range(STEPS):
                x = torch.randn(32, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
                engine.step()
        if name == "int8" and rank == 0:
            assert any("all entries are sent, in int8" in line for line in lines)
        with deepspeed.zero.GatheredParameters([p for p in model.parameters() if hasattr(p, "ds_id")]):
            found[f"{stage} {name}"] = [p.detach().clone() for p in model.parameters()]
        engine.destroy()
    return found


def test_muon_of_deepspeed() -> None:
    """At sparsity 0 DeepSpeed's own Muon trains as without the plugin; by default it gets int8."""
    first, second = run(2, _muon)
    for stage in (1, 2, 3):
        plain, exact, int8 = (first[f"{stage} {name}"] for name in ("plain", "exact", "int8"))
        assert all(map(torch.equal, exact, second[f"{stage} exact"]))
        assert all(map(torch.equal, int8, second[f"{stage} int8"]))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, exact, strict=True))
        assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(plain, int8, strict=True))
        assert not all(map(torch.equal, plain, int8))
