"""DCT-MP against plain torch: masks, gradients at the mask only, sparsity 0, messages of known size."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support import ROOT, processes
from torch import Tensor

from dct_plugin.config import ActivationConfig, PipelineConfig, TensorConfig
from dct_plugin.errors import PayloadError
from dct_plugin.model_parallel import ActivationStream, CompressedCollectives, FixedMessages
from dct_plugin.model_parallel.compressors import threshold


def section(kind: type[ActivationConfig], sparsity: float, value_dtype: str = "auto", **more: Any) -> Any:
    """A section whose forward method is a threshold."""
    forward = {"method": "threshold", "sparsity": sparsity, "value_dtype": value_dtype}
    return kind.of({"forward": forward, **more})


def lossless(kind: type[ActivationConfig], sparsity: float) -> Any:
    """A section without rounding; thresholds of tensors this small are those of all entries."""
    return section(kind, sparsity, "fp32", backward={"method": "answer", "value_dtype": "fp32"})


def activation(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def top(tensor: Tensor, density: float) -> Tensor:
    """Mask of the round(density * n) largest magnitudes."""
    flat = tensor.detach().abs().reshape(-1)
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[flat.topk(round(density * flat.numel())).indices] = True
    return kept.view(tensor.shape)


# -- messages of known size -----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 2, 64), (1,), (3,), (64, 2, 128)])
def test_sparsity_zero_is_bitwise_both_ways(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    messages = FixedMessages(ActivationStream(PipelineConfig()))
    x, g = activation(1, *shape, dtype=dtype), activation(2, *shape, dtype=dtype)
    message, mask, encoded = messages.encode(x, 3)
    assert message.numel() == messages.nbytes(x.shape, dtype)
    assert encoded.totals().nnz == x.numel()
    out = torch.full_like(x, 9)
    received = messages.decode(message, out)
    assert torch.equal(out, x)
    answer, _ = messages.encode_gradient(g, received)
    assert answer.numel() == messages.nbytes(x.shape, dtype, gradient=True)
    back = torch.full_like(g, 9)
    masks = {3: mask}
    messages.decode_gradient(answer, masks, back)
    assert torch.equal(back, g)
    assert not masks


def test_both_ends_have_the_same_mask_and_only_it_gets_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "CAPACITY", 2.0)
    messages = FixedMessages(ActivationStream(lossless(PipelineConfig, 0.9)))
    x, g = activation(1, 16, 2, 64), activation(2, 16, 2, 64)
    message, mask, _ = messages.encode(x, 0)
    kept = top(x, 0.1)
    out = torch.empty_like(x)
    received = messages.decode(message, out)
    assert torch.equal(out, x * kept)
    assert torch.equal(mask.content, received.content)
    answer, encoded = messages.encode_gradient(g, received)
    assert encoded.totals().nnz == int(kept.sum())
    back = torch.empty_like(g)
    messages.decode_gradient(answer, {0: mask}, back)
    assert torch.equal(back, g * kept)


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.5])
def test_capacity_bounds_the_message_and_what_overflows_is_dropped(
    capacity: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threshold, "CAPACITY", capacity)
    config = lossless(PipelineConfig, 0.9)
    messages = FixedMessages(ActivationStream(config))
    x = activation(1, 64, 2, 128)
    message, _, encoded = messages.encode(x, 0)
    assert encoded.totals().nnz <= capacity * 0.1 * x.numel()
    assert message.numel() <= capacity * 0.1 * x.numel() * 4 + x.numel() // 8 + 64
    out = torch.empty_like(x)
    messages.decode(message, out)
    sent = out != 0
    assert int(sent.sum()) == encoded.totals().nnz
    assert torch.equal(out, x * sent)
    assert not (sent & ~top(x, 0.1)).any()


def test_bytes_at_sparsity_09_against_fp32() -> None:
    messages = FixedMessages(ActivationStream(section(PipelineConfig, 0.9)))
    numel = 128 * 4 * 256
    assert 4 * numel / messages.nbytes(torch.Size([numel]), torch.float32) >= 8
    assert 4 * numel / messages.nbytes(torch.Size([numel]), torch.float32, gradient=True) >= 20


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("forward", "back"), [("auto", "int8"), ("int8", "int8"), ("bf16", "bf16")])
@pytest.mark.parametrize("exact", [False, True])
def test_values_of_each_type_fit_the_messages(
    capacity: float,
    dtype: torch.dtype,
    forward: str,
    back: str,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threshold, "CAPACITY", capacity)
    config = section(PipelineConfig, 0.9, forward, backward={"method": "answer", "value_dtype": back})
    messages = FixedMessages(ActivationStream(config))
    x, g = activation(1, 64, 2, 128).to(dtype), activation(2, 64, 2, 128).to(dtype)
    message, mask, encoded = messages.encode(x, 5)
    assert encoded.totals().nnz > 0
    received = messages.decode(message, torch.empty_like(x))
    answer, _ = messages.encode_gradient(g, received, exact=exact)
    size = messages.nbytes(x.shape, dtype, gradient=True, kept=mask if exact else None)
    assert answer.numel() == size
    if exact:  # 48 bytes of number and header, a scale per block of int8 values
        assert size <= 48 + encoded.totals().nnz * (1.05 if back == "int8" else 2) + 8
    out = torch.empty_like(g)
    messages.decode_gradient(answer, {5: mask}, out)
    there = out != 0
    assert int(there.sum()) >= 0.9 * encoded.totals().nnz
    tolerance = float(g.abs().max()) / 100
    torch.testing.assert_close(out[there], g[there], atol=tolerance, rtol=0.01)


def test_bytes_of_int8_gradients_against_fp32() -> None:
    messages = FixedMessages(
        ActivationStream(section(PipelineConfig, 0.9, backward={"method": "answer", "value_dtype": "int8"}))
    )
    numel = 128 * 4 * 256
    assert 4 * numel / messages.nbytes(torch.Size([numel]), torch.float32, gradient=True) >= 38


def test_several_messages_in_flight_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "CAPACITY", 9.0)
    messages = FixedMessages(ActivationStream(lossless(PipelineConfig, 0.5)))
    xs = [activation(seed, 8, 8) for seed in range(4)]
    sent = {n: messages.encode(x, n) for n, x in enumerate(xs)}
    masks = {n: mask for n, (_, mask, _) in sent.items()}
    received = {n: messages.decode(message, torch.empty(8, 8)) for n, (message, _, _) in sent.items()}
    for n in (2, 0, 3, 1):
        answer, _ = messages.encode_gradient(torch.ones(8, 8), received[n])
        back = torch.empty(8, 8)
        messages.decode_gradient(answer, masks, back)
        assert torch.equal(back != 0, xs[n].abs() >= sent[n][2].totals().tau)  # that of the step
    with pytest.raises(PayloadError, match="gradient of message 1; awaited are none"):
        messages.decode_gradient(answer, masks, back)


def test_damaged_and_foreign_messages_are_refused() -> None:
    messages = FixedMessages(ActivationStream(lossless(PipelineConfig, 0.5)))
    message, _, _ = messages.encode(activation(1, 8, 8), 0)
    for offset in (8, 20, 60):
        bad = message.clone()
        bad[offset] ^= 0x55
        with pytest.raises(PayloadError):
            messages.decode(bad, torch.empty(8, 8))
    with pytest.raises(PayloadError):
        messages.decode(message, torch.empty(9, 8))


def test_non_finite_entries_arrive_as_nan_forward_and_backward() -> None:
    messages = FixedMessages(ActivationStream(lossless(PipelineConfig, 0.5)))
    x = activation(1, 8, 8)
    x[0, 0] = float("inf")
    message, mask, _ = messages.encode(x, 0)
    out = torch.zeros(8, 8)
    received = messages.decode(message, out)
    assert out.isnan().all()
    for exact in (False, True):
        answer, _ = messages.encode_gradient(torch.ones(8, 8), received, exact=exact)
        messages.decode_gradient(answer, {0: mask}, out.zero_())
        assert out.isnan().all()


def test_threshold_changes_between_steps_only() -> None:
    stream = ActivationStream(lossless(TensorConfig, 0.9))
    messages = FixedMessages(stream)
    first, second = activation(1, 4096), 3 * activation(2, 4096)
    tau = messages.encode(first, 0)[2].totals().tau
    assert messages.encode(second, 1)[2].totals().tau == tau
    stream.training = False
    stream.end_step()
    assert messages.encode(second, 2)[2].totals().tau == tau
    stream.training = True
    assert messages.encode(second, 3)[2].totals().tau > 2 * tau


@pytest.mark.parametrize("evaluated_first", [True, False])
def test_evaluations_leave_the_threshold_of_a_step_alone(evaluated_first: bool) -> None:
    streams = [ActivationStream(lossless(TensorConfig, 0.9)) for _ in range(2)]
    x, evaluated = activation(1, 4096), activation(2, 4096) * (100 if evaluated_first else torch.nan)
    for stream, evaluates in zip(streams, (False, True), strict=True):
        messages = FixedMessages(stream)
        for tensor in (evaluated, x) if evaluated_first else (x, evaluated):
            stream.training = tensor is x
            if evaluates or tensor is x:
                messages.encode(tensor, 0)
        stream.end_step()
    assert streams[0].state_dict() == streams[1].state_dict()


@pytest.mark.parametrize("poisoned_part", [0, 1])
@pytest.mark.parametrize("clean_steps", [0, 1, 3])
def test_a_poisoned_tensor_leaves_the_threshold_bitwise(poisoned_part: int, clean_steps: int) -> None:
    """Whether tau was measured on it or on another micro-batch of the step."""
    stream = ActivationStream(section(TensorConfig, 0.9))
    messages = FixedMessages(stream)
    for step in range(clean_steps):
        messages.encode(activation(step, 4096), 0)
        stream.end_step()
    before = stream.state_dict()["threshold"]
    for part in range(2):
        x = activation(9 + part, 4096)
        x[17] = float("nan") if part == poisoned_part else 0.0
        _, mask, encoded = messages.encode(x, part)
        assert encoded.totals().nonfinite == (part == poisoned_part)
        assert torch.equal(messages.encode(x, part)[1].content, mask.content)  # recomputation
    stream.end_step()
    assert stream.state_dict()["threshold"] == before
    assert stream.step == clean_steps + 1


def test_warmup_steps_are_dense() -> None:
    stream = ActivationStream(section(TensorConfig, 0.9, warmup_steps=2))
    densities = []
    for _ in range(3):
        densities.append(stream.density)
        stream.end_step()
    assert densities == [1.0, 1.0, pytest.approx(0.1)]


# -- between processes -----


def _collectives(rank: int, world_size: int) -> dict[str, Any]:
    """Every collective against its definition in plain torch, all ranks' tensors rebuilt from their seeds."""
    comm = CompressedCollectives()
    report: dict[str, Any] = {}
    for density in (1.0, 0.25):
        config = lossless(TensorConfig, 1.0 - density)
        shape = (2 * world_size, 5, 4)
        xs = [activation(10 + r, *shape).requires_grad_() for r in range(world_size)]
        chunk = [slice(2 * r, 2 * r + 2) for r in range(world_size)]
        by_whole = [top(x, density) for x in xs]
        # Where chunks go to their ranks, the own one takes no part in finding the threshold.
        by_others = []
        for me, x in enumerate(xs):
            kept = torch.ones_like(x, dtype=torch.bool)
            away = torch.cat([torch.arange(2 * r, 2 * r + 2) for r in range(world_size) if r != me])
            kept[away] = top(x[away], density)
            by_others.append(kept)

        def define(
            kind: str,
            me: int,
            xs: Any = xs,
            chunk: Any = chunk,
            whole: Any = by_whole,
            others: Any = by_others,
        ) -> Any:
            chunked = kind in ("reduce_scatter", "all_to_all")
            part = chunk[me] if chunked else slice(0, 2 * world_size)
            kept = others if chunked else whole
            arriving = [
                xs[r][part] if r == me and kind != "all_reduce" else xs[r][part] * kept[r][part]
                for r in range(world_size)
            ]
            return torch.cat(arriving) if kind in ("all_gather", "all_to_all") else sum(arriving)

        for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"):
            mine = xs[rank].detach().clone().requires_grad_()
            stream = ActivationStream(config, name=kind, rank=rank)
            out = getattr(comm, kind)(mine, stream)
            with torch.no_grad():
                torch.testing.assert_close(out, define(kind, rank), rtol=0, atol=1e-6)
            replicated = kind == "all_reduce"
            weights = [activation(50 + (0 if replicated else r), *out.shape) for r in range(world_size)]
            (out * weights[rank]).sum().backward()
            for x in xs:
                x.grad = None
            if replicated:  # the gradient of the sum is replicated, not summed
                (define(kind, rank) * weights[rank]).sum().backward()
            else:
                sum((define(kind, r) * weights[r]).sum() for r in range(world_size)).backward()
            torch.testing.assert_close(mine.grad, xs[rank].grad, rtol=0, atol=1e-6)
            report[f"{kind}@{density}"] = out.detach()
    return report


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_and_their_gradients(world_size: int) -> None:
    reports = processes.run(world_size, _collectives)
    for density in (1.0, 0.25):
        for report in reports[1:]:
            assert torch.equal(report[f"all_reduce@{density}"], reports[0][f"all_reduce@{density}"])


def _uneven(rank: int, world_size: int) -> None:
    comm = CompressedCollectives()
    stream = ActivationStream(lossless(TensorConfig, 0.5), rank=rank)
    rows = [[1, 2], [3, 0]]
    x = activation(rank, sum(rows[rank]), 6).requires_grad_()
    out = comm.all_to_all(x, stream, rows[rank], [rows[r][rank] for r in range(world_size)])
    assert out.shape[0] == sum(rows[r][rank] for r in range(world_size))
    out.sum().backward()
    ones = torch.ones_like(x)
    away = slice(1, 3) if rank == 0 else slice(0, 3)
    ones[away] = top(x[away], 0.5).float()
    assert torch.equal(x.grad, ones)
    with pytest.raises(ValueError, match="do not add up"):
        comm.all_to_all(x, stream, [1, 1])
    for arriving in ([rows[rank][rank]], [2, 2], [1, 0, 1], [-1, -1]):
        with pytest.raises(ValueError, match=re.escape(f"output splits {arriving} are not the rows from 2")):
            comm.all_to_all(x, stream, rows[rank], arriving)


@pytest.mark.slow
def test_all_to_all_with_uneven_splits() -> None:
    processes.run(2, _uneven)


def _documented(rank: int, world_size: int, code: str) -> None:
    exec(code, {"rank": rank})


def test_the_documented_sizes_of_messages(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "megatron-hooks.md").read_text()
    code = next(block.split("```")[0] for block in page.split("```python\n")[1:] if "FixedMessages" in block)
    torch.manual_seed(1)
    exec(code, {})
    sizes = [tuple(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]
    assert {size[:2] for size in sizes} == {(17_400, 13_106)}
    assert "17 400" in page
    assert "13 106" in page
    assert all(12_000 < size[2] <= 13_106 for size in sizes)


@pytest.mark.slow
def test_the_documented_example_runs() -> None:
    page = (ROOT / "docs" / "model-parallel.md").read_text()
    processes.run(2, _documented, page.split("```python\n")[1].split("```")[0])
