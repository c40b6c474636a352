"""How often the host waits for a device whose kernels write the messages; the real DeepSpeed engine."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from support.processes import run

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)
pytest.importorskip("triton", reason="triton is for Linux only")

from dct_plugin import kernels
from dct_plugin.codecs import stats
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu has these kernels"),
]
STEPS, MICRO_BATCHES = 4, 2


class _Plain(ReferenceBackend):
    most_kept = staticmethod(TritonBackend.most_kept)


def _train(rank: int, world_size: int, backend: str) -> Any:
    """Weights after a few steps, and the waits in each backward pass."""
    import deepspeed

    from dct_plugin.integrations.autoload import autoload

    autoload()
    kernels.register_backend("plain", _Plain)
    kernels.register_backend("interpreted", TritonBackend)
    os.environ["LOCAL_RANK"] = str(rank)
    waits, copied = 0, stats.to_host

    def counted(figures: torch.Tensor) -> torch.Tensor:
        nonlocal waits
        waits += 1
        return copied(figures)

    stats.to_host = counted
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 61), torch.nn.GELU(), torch.nn.Linear(61, 40))
    section = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "bf16": {"enabled": True},
        # Of several buckets one parameter is larger than they are.
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2450, "overlap_comm": False},
        "dct": {
            "data_parallel": {
                "sparsity": 0.9, "min_numel": 100, "expert": {"threshold": "fixed"},
            },
            "kernels": {"backend": backend},
        },
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=section)
    waited = []
    for step in range(STEPS):
        for part in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randn(16, 40, generator=generator).to(next(model.parameters()).dtype)
            waits = 0
            # Larger gradients in a step that measures no threshold: more than messages hold.
            factor = 3.0 if step == 3 and rank == 1 else 1.0
            engine.backward(factor * (engine(x) - x).float().square().mean())
            waited.append(waits)
            engine.step()
    return [parameter.detach().clone() for parameter in model.parameters()], waited


def _both(rank: int, world_size: int) -> list[Any]:
    """In one process: DeepSpeed keeps the groups of the first engine."""
    return [_train(rank, world_size, backend) for backend in ("plain", "interpreted")]


def test_all_buckets_of_a_backward_pass_are_waited_for_at_once() -> None:
    outcomes = run(2, _both)
    for (other, _), (mine, waited) in outcomes:
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
        assert waited[MICRO_BATCHES:] == [1] * (STEPS - 1) * MICRO_BATCHES


def _coalesce(rank: int, world_size: int, stage: int) -> list[list[torch.Tensor]]:
    """Weights after steps of two backward passes that are reduced together, without and with the plugin."""
    import deepspeed

    from dct_plugin.integrations.autoload import autoload

    autoload()
    os.environ["LOCAL_RANK"] = str(rank)
    everything = {"sparsity": 0.0, "value_dtype": "bf16", "min_numel": 0, "feedback": "local"}
    found = []
    for sections in ({}, {"dct": {"data_parallel": everything}}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 61), torch.nn.GELU(), torch.nn.Linear(61, 40))
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 2450},
            "zero_allow_untested_optimizer": True,
            **sections,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(2):
            with engine.coalesce_grad_reduction():
                for part in range(2):
                    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                    x = torch.randn(16, 40, generator=generator).bfloat16()
                    engine.backward((engine(x) - x).float().square().mean())
            engine.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_passes_that_are_reduced_together(stage: int) -> None:
    for plain, compressed in run(2, _coalesce, stage):
        assert all(torch.equal(one, other) for one, other in zip(plain, compressed, strict=True))
