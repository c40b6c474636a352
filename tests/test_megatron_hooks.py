"""The hooks in the real megatron-core, on CPU with gloo: a small GPT in every topology.

One launch per topology runs Megatron alone, the hooks at sparsity 0 (everything through the codec: losses and
parameters must be bitwise the same), and the hooks at work (losses must fall).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import processes
import pytest
import torch
from megatron_gpt import Job, Outcome, train_all

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

OFF = {"enabled": False}


def section(
    pipeline: float | None = None, tensor: float | None = None, data: float | None = None, **options: Any
) -> dict[str, Any]:
    """A ``dct`` section that switches on what is given; lossless values where the sparsity is 0."""
    exact = {"value_dtype": "fp32", "gradient_value_dtype": "fp32"}
    parts: dict[str, Any] = {"pipeline": OFF, "tensor": OFF}
    for name, sparsity in (("pipeline", pipeline), ("tensor", tensor)):
        if sparsity is not None:
            parts[name] = {"sparsity": sparsity, **({} if sparsity else exact), **options}
    result: dict[str, Any] = {"model_parallel": parts, "data_parallel": OFF}
    if data is not None:
        result["data_parallel"] = {"sparsity": data, "min_numel": 256}
        result["data_parallel"]["value_dtype"] = "bf16" if data else "fp32"
    return result


def run(world_size: int, *jobs: Job) -> list[list[Outcome]]:
    """Outcomes by job, then rank."""
    by_rank = processes.run(world_size, train_all, list(jobs))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def losses(outcomes: list[Outcome]) -> list[float]:
    return next(outcome.losses for outcome in outcomes if outcome.losses)


def assert_same(plain: list[Outcome], hooked: list[Outcome], hooks: set[str]) -> None:
    """Bitwise the same training, and the hooks did run."""
    assert losses(plain) == losses(hooked)
    for ours, theirs in zip(hooked, plain, strict=True):
        assert ours.losses == theirs.losses
        assert ours.evaluations == theirs.evaluations
        assert ours.parameters == theirs.parameters
        assert hooks <= set(ours.active)
    assert any(outcome.classes for outcome in hooked)


def assert_learns(outcomes: list[Outcome], by: float = 0.3) -> None:
    values = losses(outcomes)
    assert values[-1] < values[0] - by, values


def ratio(outcomes: list[Outcome], cls: str) -> float:
    """Dense over sent bytes of a class, all ranks together."""
    parts = [outcome.classes[cls] for outcome in outcomes if cls in outcome.classes]
    return sum(p["dense_bytes"] for p in parts) / sum(p["sent_bytes"] for p in parts)


def test_pipeline_1f1b() -> None:
    job = Job(pp=2, evaluate=True)
    plain, same, left, sparse, unlike, recomputed, bf16, bf16_same = run(
        2,
        job,
        job.with_dct(section(pipeline=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.5, boundary_sparsity=[0.0])),
        job.with_dct(section(pipeline=0.9), steps=10),
        job.with_dct(section(pipeline=0.9, evaluation=False, warmup_steps=2), steps=10),
        job.with_dct(section(pipeline=0.9), steps=10, recompute="full"),
        job.with_dct(None, bf16=True),
        job.with_dct(section(pipeline=0.0), through_codec=True, bf16=True),
    )
    assert_same(plain, same, {"pipeline"})
    assert losses(left) == losses(plain)  # a boundary of sparsity 0 is left to Megatron
    assert not any(outcome.classes for outcome in left)
    assert_same(bf16, bf16_same, {"pipeline"})
    for outcomes in (sparse, unlike, recomputed):
        assert_learns(outcomes)
    assert losses(recomputed) == losses(sparse)
    assert ratio(sparse, "pipeline") >= 8
    assert ratio(sparse, "pipeline_gradient") >= 20
    assert "pipeline_evaluation" in sparse[0].classes
    assert "pipeline_evaluation" not in unlike[0].classes
    assert losses(unlike)[:2] == losses(plain)[:2]  # warm-up
    assert losses(unlike)[3] != losses(plain)[3]


def test_pipeline_interleaved_with_overlap() -> None:
    job = Job(pp=2, vpp=2, overlap_p2p=True, evaluate=True)
    plain, same, sparse = run(
        2,
        job,
        job.with_dct(section(pipeline=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.75), steps=10),
    )
    assert_same(plain, same, {"pipeline"})
    assert_learns(sparse)


def test_pipeline_interleaved_four_stages() -> None:
    job = Job(pp=4, vpp=2, layers=8, steps=3)
    plain, same, sparse = run(
        4,
        job,
        job.with_dct(section(pipeline=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.9, boundary_sparsity=[0.0, 0.5]), steps=10),
    )
    assert_same(plain, same, {"pipeline"})
    assert_learns(sparse)
    # The first boundary is left to Megatron, the second is half dense, the others follow the common value.
    sent = [outcome.classes["pipeline"]["density_target"] for outcome in sparse]
    assert sent == [None, pytest.approx(0.5), pytest.approx(0.1), pytest.approx(0.1)]


def test_data_parallel() -> None:
    job = Job()
    plain, same, sparse, overlapped, bf16, bf16_overlapped = run(
        2,
        job,
        job.with_dct(section(data=0.0), through_codec=True),
        job.with_dct(section(data=0.9), steps=10),
        job.with_dct(section(data=0.9), steps=10, overlap_grad_reduce=True),
        job.with_dct(section(data=0.9), steps=10, bf16=True),
        job.with_dct(section(data=0.9), steps=10, bf16=True, overlap_grad_reduce=True),
    )
    assert_same(plain, same, {"data_parallel"})
    for outcomes in (sparse, overlapped, bf16, bf16_overlapped):
        assert_learns(outcomes)
        assert outcomes[0].parameters == outcomes[1].parameters
        assert ratio(outcomes, "gradient") > 10
    assert losses(overlapped) == losses(sparse)
    assert losses(bf16_overlapped) == losses(bf16)


def test_distributed_optimizer() -> None:
    job = Job(distributed_optimizer=True)
    plain, same, overlap, overlap_same, sparse, bf16 = run(
        2,
        job,
        job.with_dct(section(data=0.0), through_codec=True),
        job.with_dct(None, overlap_grad_reduce=True),
        job.with_dct(section(data=0.0), through_codec=True, overlap_grad_reduce=True),
        job.with_dct(section(data=0.9), steps=10, overlap_grad_reduce=True),
        job.with_dct(section(data=0.9), steps=10, bf16=True),
    )
    assert_same(plain, same, {"data_parallel"})
    assert_same(overlap, overlap_same, {"data_parallel"})
    for outcomes in (sparse, bf16):
        assert_learns(outcomes)
        assert ratio(outcomes, "gradient") > 10


def test_fp16_overflow_is_rolled_back() -> None:
    """Megatron skips steps until its loss scale fits; residuals are then what they were, in the new unit."""
    job = Job(fp16=True, loss_scale=2.0**30, steps=24)
    plain, sharded_plain, sparse, sharded = run(
        2,
        job,
        job.with_dct(None, distributed_optimizer=True),
        job.with_dct(section(data=0.9)),
        job.with_dct(section(data=0.9), distributed_optimizer=True),
    )
    assert plain[0].skipped > 1
    for outcomes, reference in ((sparse, plain), (sharded, sharded_plain)):
        assert [o.skipped for o in outcomes] == [o.skipped for o in reference]
        assert_learns(outcomes, by=0.2)
        assert torch.tensor(losses(outcomes)).isfinite().all()


def test_tensor_parallel() -> None:
    job = Job(tp=2)
    plain, same, sparse, skipping, skipping_all = run(
        2,
        job,
        job.with_dct(section(tensor=0.0), through_codec=True),
        job.with_dct(section(tensor=0.9), steps=10),
        job.with_dct(section(tensor=0.9, skip_first_layers=1, skip_last_layers=2)),
        job.with_dct(section(tensor=0.9, skip_first_layers=2, skip_last_layers=2)),
    )
    assert_same(plain, same, {"tensor"})
    assert_learns(sparse)
    assert losses(skipping_all) == losses(plain)
    assert not skipping_all[0].classes
    once, whole = skipping[0].classes["tensor"], same[0].classes["tensor"]
    assert 4 * once["dense_bytes"] == whole["dense_bytes"]
    assert ratio(sparse, "tensor") > 8


def test_tensor_and_sequence_parallel() -> None:
    job = Job(tp=2, sequence_parallel=True)
    plain, same, sparse, gathered, recomputed = run(
        2,
        job,
        job.with_dct(section(tensor=0.0, gather=True), through_codec=True),
        job.with_dct(section(tensor=0.9), steps=10),
        job.with_dct(section(tensor=0.9, gather=True), steps=10),
        job.with_dct(section(tensor=0.9), steps=10, recompute="full"),
    )
    assert_same(plain, same, {"tensor"})
    assert_learns(sparse)
    assert_learns(gathered)
    assert losses(recomputed) == losses(sparse)
    assert ratio(sparse, "tensor") > 8
    assert ratio(sparse, "tensor_gradient") > 12


def test_pipeline_with_data_parallel() -> None:
    job = Job(pp=2, distributed_optimizer=True)
    plain, same, sparse = run(
        4,
        job,
        job.with_dct(section(pipeline=0.0, data=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.9, data=0.9), steps=10),
    )
    assert_same(plain, same, {"pipeline", "data_parallel"})
    assert_learns(sparse)


def test_tensor_with_pipeline_parallel() -> None:
    job = Job(tp=2, pp=2, sequence_parallel=True, steps=3)
    plain, same, sparse = run(
        4,
        job,
        job.with_dct(section(pipeline=0.0, tensor=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.75, tensor=0.75), steps=10),
    )
    assert_same(plain, same, {"pipeline", "tensor"})
    assert_learns(sparse, by=0.2)


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    import megatron_cpu

    megatron_cpu.install()
    from types import SimpleNamespace

    from dct_plugin.integrations.megatron import hooks, hooks_pipeline, hooks_tensor

    from dct_plugin.config import DCTConfig
    from dct_plugin.errors import DCTError

    config = SimpleNamespace(pipeline_dtype=torch.float32, num_layers=2)
    engine = type("TEColumnParallelLinear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})
    cases = {
        "variable": lambda: hooks_pipeline._check(SimpleNamespace(**vars(config), variable_seq_lengths=True)),
        "ring": lambda: hooks_pipeline._check(SimpleNamespace(**vars(config), use_ring_exchange_p2p=True)),
        "dtype": lambda: hooks_pipeline._check(SimpleNamespace(pipeline_dtype=torch.float64)),
    }

    def layer(linear: torch.nn.Module, **settings: Any) -> torch.nn.Module:
        module = torch.nn.Module()
        module.mlp, module.layer_number = linear, 2
        module.config = SimpleNamespace(**vars(config), **settings)
        return module

    cases["engine"] = lambda: hooks_tensor._check(layer(engine(2, 2)))
    cases["fp8"] = lambda: hooks_tensor._check(layer(torch.nn.Linear(2, 2), fp8="hybrid"))
    cases["graphs"] = lambda: hooks_tensor._check(layer(torch.nn.Linear(2, 2), cuda_graph_impl="local"))
    found = {}
    for name, case in cases.items():
        try:
            case()
        except DCTError as error:
            found[name] = str(error)
    first = DCTConfig.parse(section(pipeline=0.5))
    assert [item.name for item in hooks.install(first)] == ["pipeline"]
    assert [item.name for item in hooks.install(first)] == ["pipeline"]
    try:
        hooks.install(DCTConfig.parse(section(pipeline=0.6)))
    except DCTError as error:
        found["twice"] = str(error)
    hooks.uninstall()
    assert hooks.install(DCTConfig(enabled=False)) == []
    hooks.uninstall()
    return found


def test_what_cannot_work_is_refused_by_name() -> None:
    (found,) = processes.run(1, _refusals)
    assert "variable_seq_lengths" in found["variable"]
    assert "use_ring_exchange_p2p" in found["ring"]
    assert "float64" in found["dtype"]
    assert "layer 2: mlp is Transformer Engine's TEColumnParallelLinear" in found["engine"]
    assert "fp8 = hybrid" in found["fp8"]
    assert "CUDA graphs" in found["graphs"]
    assert "another configuration" in found["twice"]
