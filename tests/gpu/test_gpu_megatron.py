"""A GPT of megatron-core's own parts with CUDA tensors: two processes on one device.

gloo has no coalesced collectives of CUDA tensors, so they need nccl.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.gpu import DEVICE, NCCL, run_on_gpu

pytest.importorskip("triton", reason="needs triton")
pytest.importorskip("megatron.core", reason="needs megatron-core")

from support.megatron_gpt import Job, train_all

pytestmark = pytest.mark.slow
DCT = {"data_parallel": {"sparsity": 0.9, "min_numel": 0}}
LAYOUTS = {
    "fp16": Job(fp16=True, loss_scale=2.0**24, steps=12, device=DEVICE),
    "bf16, overlapped": Job(bf16=True, overlap_grad_reduce=True, steps=12, device=DEVICE),
    "bf16, distributed optimizer": Job(
        bf16=True, overlap_grad_reduce=True, distributed_optimizer=True, steps=12, device=DEVICE
    ),
}


@pytest.mark.parametrize("backend", [NCCL])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpt_learns_with_the_same_weights_on_both_ranks(name: str, backend: str) -> None:
    job = LAYOUTS[name]
    outcomes = run_on_gpu(backend, 2, train_all, [job.with_dct(DCT)])
    (one,), (other,) = outcomes
    # Gathers that overlap have not brought every rank the last step's weights yet.
    assert (one.parameters == other.parameters) or job.distributed_optimizer
    assert math.isfinite(one.losses[-1])
    assert one.losses[-1] < one.losses[0]
    # The scale is too large at first: steps are skipped and taken back until it fits.
    assert (one.skipped > 0) == job.fp16
    assert one.classes["gradient"]["sent_bytes"] < 0.3 * one.classes["gradient"]["dense_bytes"]


@pytest.mark.parametrize("backend", [NCCL])
@pytest.mark.parametrize("overlap", [False, True])
def test_everything_sent_trains_as_megatron_does(overlap: bool, backend: str) -> None:
    job = Job(bf16=True, overlap_grad_reduce=overlap, device=DEVICE)
    everything = {"data_parallel": {"sparsity": 0.0, "value_dtype": "fp32"}}
    (plain, through), _ = run_on_gpu(
        backend, 2, train_all, [job, job.with_dct(everything, through_codec=True)]
    )
    assert through.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.parametrize("backend", [NCCL])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linears_of_transformer_engine(sequence_parallel: bool, backend: str) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
    job = Job(tp=2, sequence_parallel=sequence_parallel, engine=True, bf16=True, steps=6, device=DEVICE)

    def section(sparsity: float, value_dtype: str) -> dict[str, object]:
        forward = {"method": "threshold", "sparsity": sparsity, "value_dtype": value_dtype}
        tensor = {"forward": forward, "gather": sequence_parallel}
        return {"data_parallel": {"enabled": False}, "model_parallel": {"tensor": tensor}}

    jobs = [
        replace(job, engine=False),
        job,
        job.with_dct(section(0.0, "fp32"), through_codec=True),
        job.with_dct(section(0.9, "bf16"), steps=12),
    ]
    (megatron, plain, same, sparse), _ = run_on_gpu(backend, 2, train_all, jobs)
    assert plain.losses == pytest.approx(megatron.losses, rel=1e-2)
    assert same.losses == pytest.approx(plain.losses, rel=1e-3)
    assert sparse.losses[-1] < sparse.losses[0]
    assert sparse.classes["tensor"]["sent_bytes"] < 0.2 * sparse.classes["tensor"]["dense_bytes"]
