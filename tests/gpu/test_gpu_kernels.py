"""Triton kernels on a GPU: the reference's bits, no waiting, the same bits every time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.gpu import DEVICE, DRY, NEEDS_GPU
from support.kernel_cases import GRAD_DTYPES, Case, agree, same_bits
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from dct_plugin import Compressor
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.codecs.payload import Payload, payload_bound
from dct_plugin.codecs.stats import Stats
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.compression.stream import add_at, encode_at
from dct_plugin.data_parallel.step_ahead.add_on import StepAhead, Unsent
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.errors import DCTError, PayloadError
from dct_plugin.kernels import Backend, Job, get_backend, problem_with, self_check
from dct_plugin.kernels.backend import PACK_BLOCK, mask_of
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import TritonBackend

REFERENCE = ReferenceBackend()
TRITON = TritonBackend()
#: Four blocks of positions, 49 tiles, the last ones not full; the interpreter takes a second for so many.
NUMEL = 20_003 if DRY else 200_003


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensors(dtype: torch.dtype = torch.float32, numel: int = NUMEL) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(numel, generator=generator)
    grad[numel // 8 : numel // 2] *= 0.3
    return grad.to(dtype), 0.5 * torch.randn(numel, generator=generator)


def gradient_of(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def alike(case: Case) -> tuple[Tensor, int]:
    """Compressed and read the same way on both sides."""
    payload, (_, nnz, _, _) = agree(case, REFERENCE, TRITON, DEVICE)
    numel = case.grad.numel()
    outs = [torch.linspace(-1, 1, numel), torch.linspace(-1, 1, numel).cuda()]
    for backend, out in zip((REFERENCE, TRITON), outs, strict=True):
        assert backend.decode_add(payload.to(out.device), out) == nnz
    assert same_bits(outs[0], outs[1].cpu()) or bool(outs[1].isnan().all())
    mask = mask_of(TRITON, payload.cuda(), numel)
    assert torch.equal(mask.cpu(), mask_of(REFERENCE, payload, numel))
    return payload, nnz


@NEEDS_GPU
def test_cuda_tensors_take_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCT_KERNELS", raising=False)
    assert get_backend("cuda").name == "triton"


@pytest.mark.parametrize("value_dtype", list(ValueDtype))
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("capacity", [None, 700])
def test_every_value_type(value_dtype: ValueDtype, in_place: bool, capacity: int | None) -> None:
    grad, residual = tensors()
    for tau in (2.6, 0.9):
        alike(Case(grad, residual, in_place, tau, capacity, 150_000, value_dtype, False))


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("with_residual", [True, False])
def test_every_gradient_type_and_density(dtype: torch.dtype, with_residual: bool) -> None:
    grad, residual = tensors(dtype)
    for tau in (3.5, 2.5, 0.5, 1e-30, math.inf):
        alike(
            Case(
                *(grad, residual if with_residual else None, with_residual, tau, None, 0),
                *(ValueDtype.BF16, True),
            )
        )


@pytest.mark.parametrize("value_dtype", list(ValueDtype))
def test_every_entry(value_dtype: ValueDtype) -> None:
    for numel in (0, 1, 300, 5000):
        grad, residual = tensors(numel=numel)
        alike(Case(grad, residual, True, 0.0, None, 0, value_dtype, False))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**126])
@pytest.mark.parametrize("where", [0, NUMEL - 1])
@pytest.mark.parametrize("in_place", [True, False])
def test_overflow_leaves_the_residual_bitwise_alone(bad: float, where: int, in_place: bool) -> None:
    grad, residual = tensors()
    grad[where] = bad
    for tau in (2.0, 0.0):
        alike(Case(grad, residual, in_place, tau, None, 0, ValueDtype.BF16, False))


@pytest.mark.parametrize("value_dtype", list(ValueDtype))
def test_values_at_positions(value_dtype: ValueDtype) -> None:
    grad, _ = tensors()
    payload, _ = alike(Case(grad, None, True, 2.0, None, 0, ValueDtype.BF16, False))
    written, sums = [], []
    for backend, device in ((REFERENCE, "cpu"), (TRITON, DEVICE)):
        mask, total = payload.to(device), torch.zeros(NUMEL, device=device)
        message, _ = encode_at(backend, grad.flip(0).to(device), mask, value_dtype)
        add_at(backend, message, total, mask)
        written.append(message.cpu())
        sums.append(total.cpu())
    assert same_bits(*written)
    assert same_bits(*sums)


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_thresholds(dtype: torch.dtype) -> None:
    grad, residual = tensors(dtype)
    grad[::1000] = math.nan
    on_device = grad.cuda(), residual.cuda()
    for keep in (0.001, 0.01, 0.3):
        for samples in (8192, 65_536, 100_000):
            found = TRITON.sample_threshold(*on_device, keep, samples, 5)
            assert float(found) == REFERENCE.sample_threshold(grad, residual, keep, samples, 5)
    assert float(TRITON.exact_threshold(*on_device, 999)) == REFERENCE.exact_threshold(grad, residual, 999)


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("scale", [0.5, 1 / 3])
def test_sums_of_messages(dtype: torch.dtype, scale: float) -> None:
    sizes, messages = [5, 70_001, 0, 3000], []
    for sender in range(3):
        writer = MessageWriter(torch.device("cpu"))
        for position, size in enumerate(sizes):
            tensor = gradient_of(size, 10 * sender + position)
            room = writer.reserve(payload_bound(size, None, ValueDtype.BF16))
            tau = 2.0 if size > 5 else 0.0
            writer.advance(REFERENCE.compress(Job(tensor, None, tau, room, value_dtype=ValueDtype.BF16)))
        messages.append(writer.message)
    expected = [torch.zeros(size, dtype=dtype) for size in sizes]
    REFERENCE.sum_messages(messages, expected, scale)
    found = [torch.zeros(size, dtype=dtype, device=DEVICE) for size in sizes]
    TRITON.sum_messages([message.cuda() for message in messages], found, scale)
    for one, other in zip(expected, found, strict=True):
        assert same_bits(one, other.cpu())


def test_nothing_waits_for_the_device() -> None:
    """Threshold, selection, message and back again; two reads, of figures and of headers."""
    grad, residual = (t.cuda() for t in tensors())
    writer, out = MessageWriter(torch.device(DEVICE)), torch.zeros(NUMEL, device=DEVICE)

    def compressed() -> None:
        writer.clear()
        with TRITON.batched():
            written()

    def written() -> None:
        for _ in range(3):
            tau = TRITON.sample_threshold(grad, residual, 0.01, 8192, seed=3)
            room = writer.reserve(payload_bound(NUMEL, 4000, ValueDtype.BF16))
            writer.advance(
                TRITON.compress(Job(grad, residual, tau, room, capacity=4000, value_dtype=ValueDtype.BF16))
            )

    compressed()  # compiles
    with no_waiting():
        compressed()
    message = writer.message
    payloads = Payload.split(message)
    for payload in payloads:
        TRITON.decode_add(payload, out)
    with no_waiting():
        for payload in payloads:
            TRITON.decode_add(payload, out)
    TRITON.sum_messages([message], [torch.zeros(NUMEL, device=DEVICE) for _ in range(3)])


def test_a_bucket_in_one_batch_has_the_bits_of_one_tensor_at_a_time() -> None:
    """Tensors of three types at odd addresses, one of them poisoned, some dense; without waiting."""
    sizes = [5, 70_001, 0, 3000, 4096, 200_000, 64]
    flat = torch.randn(sum(sizes) + 1, generator=torch.Generator().manual_seed(1))[1:]
    flat[-3] = math.nan
    grads = [part.to(GRAD_DTYPES[i % 3]) for i, part in enumerate(flat.split(sizes))]
    residuals = [gradient_of(size, 50 + i) for i, size in enumerate(sizes)]

    def compressed(backend: Backend, device: str, *, at_once: bool) -> tuple[list[Any], list[Stats]]:
        writer, kept, figures = MessageWriter(torch.device(device)), [], []
        made = [[t.to(device, copy=True) for t in pair] for pair in zip(grads, residuals, strict=True)]
        with backend.batched() if at_once else nullcontext():
            for number, (grad, residual) in enumerate(made):
                left = residual if number % 2 else torch.empty_like(residual)
                tau = 0.0
                if grad.numel() > 64:
                    tau = backend.sample_threshold(grad, residual, 0.01, 8192, seed=number)
                room = writer.reserve(payload_bound(grad.numel(), None, ValueDtype.INT8))
                options = {"residual_out": left, "value_dtype": ValueDtype.INT8, "clear": True}
                figures.append(backend.compress(Job(grad, residual, tau, room, **options)))
                writer.advance(figures[-1])
                kept += [grad, left]
        return [writer, *kept], figures

    compressed(TRITON, DEVICE, at_once=True)  # compiles
    torch.cuda.synchronize()
    (first, *rest), expected_figures = compressed(REFERENCE, "cpu", at_once=False)
    expected = [first.message, *rest]
    for at_once in (True, False):
        (writer, *kept), figures = compressed(TRITON, DEVICE, at_once=at_once)
        assert [each.counts for each in figures] == [each.counts for each in expected_figures]
        found = [writer.message, *kept]
        assert all(same_bits(one.cpu(), other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_slots_are_written_and_added_up_without_waiting(dtype: torch.dtype) -> None:
    sizes, room = [5, 70_001, 0, 3000], 65_536
    bounds = [(sender * room, (sender + 1) * room) for sender in range(3)]
    buffer = torch.empty(3 * room, dtype=torch.uint8, device=DEVICE)
    grads = [
        [gradient_of(size, 10 * sender + position).cuda() for position, size in enumerate(sizes)]
        for sender in range(3)
    ]
    writers = [MessageWriter(torch.device(DEVICE)) for _ in grads]
    tau = torch.tensor(2.0, device=DEVICE)

    def exchanged() -> tuple[list[Tensor], Tensor]:
        for place, writer, tensors in zip(bounds, writers, grads, strict=True):
            writer.clear()
            for grad in tensors:
                out = writer.reserve(payload_bound(grad.numel(), None, ValueDtype.BF16))
                threshold = tau if grad.numel() > 5 else 0.0
                writer.advance(TRITON.compress(Job(grad, None, threshold, out, value_dtype=ValueDtype.BF16)))
            TRITON.write_slots(writer, buffer, [place], 7)
        outs = [torch.zeros(size, dtype=dtype, device=DEVICE) for size in sizes]
        return outs, TRITON.prepare_sum(buffer, bounds, outs, 1 / 3)()

    exchanged()  # compiles
    with no_waiting():
        found, heads = exchanged()
    assert heads[:, -1].tolist() == [0, 0, 0]
    expected = [torch.zeros(size, dtype=dtype) for size in sizes]
    REFERENCE.sum_messages([writer.message.cpu() for writer in writers], expected, 1 / 3)
    assert all(same_bits(one, other.cpu()) for one, other in zip(expected, found, strict=True))


@NEEDS_GPU
def test_the_same_bits_every_time() -> None:
    grad, residual = (t.cuda() for t in tensors(numel=3_000_001))
    found = []
    for _ in range(5):
        left = residual.clone()
        out = torch.zeros(payload_bound(3_000_001, 40_000, ValueDtype.INT8), dtype=torch.uint8, device=DEVICE)
        options = {"capacity": 40_000, "start": 2_500_000, "value_dtype": ValueDtype.INT8}
        stats = TRITON.compress(Job(grad, left, 2.2, out, **options))
        total = torch.zeros(3_000_001, device=DEVICE)
        TRITON.decode_add(out[: stats.nbytes], total)
        found.append((stats.counts, out, left, total))
    for other in found[1:]:
        assert other[0] == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(other[1:], found[0][1:], strict=True))


@NEEDS_GPU
def test_a_cuda_graph_is_refused() -> None:
    grad, _ = (t.cuda() for t in tensors())
    compressor = Compressor(sparsity=0.9)
    compressor.compress(grad)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(DCTError, match="CUDA graph records the current stream"), torch.cuda.graph(graph):
        compressor.compress(grad)


def test_damage_is_told_with_the_next_figures() -> None:
    grad, _ = tensors()
    payload, _ = alike(Case(grad, None, True, 2.0, None, 0, ValueDtype.BF16, False))
    damaged = payload.clone()
    damaged[-1] ^= 1
    out = torch.ones(NUMEL, device=DEVICE)
    TRITON.decode_add(damaged.cuda(), out)
    assert bool((out == 1.0).all())
    room = torch.empty(payload_bound(NUMEL, None, 0), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(PayloadError, match="decoded before"):
        TRITON.compress(Job(grad.cuda(), None, 2.0, room)).nbytes  # noqa: B018 (a figure that is read)


def test_slices_at_any_offset() -> None:
    bucket, residuals = (t.cuda() for t in tensors())
    message = torch.zeros(200_000, dtype=torch.uint8, device=DEVICE)
    for offset in (1, 2, 3):
        grad, residual = bucket[offset : offset + 9000], residuals[offset : offset + 9000]
        whole = grad + residual
        stats = TRITON.compress(Job(grad, residual, 1.0, message[offset:], value_dtype=ValueDtype.BF16))
        out = torch.zeros(9003, device=DEVICE)
        TRITON.decode_add(message[offset : offset + stats.nbytes], out[3:])
        assert torch.equal(out[3:] + residual, whole)


@NEEDS_GPU
def test_a_large_tensor() -> None:
    """256 MiB: many programs at once; counted and summed up by torch."""
    numel = 1 << 26
    grad, residual = torch.randn(numel, device=DEVICE), 0.3 * torch.randn(numel, device=DEVICE)
    whole = grad + residual
    tau = TRITON.sample_threshold(grad, residual, 0.01, 65_536, seed=1)
    out = torch.empty(payload_bound(numel, numel // 50, ValueDtype.FP32), dtype=torch.uint8, device=DEVICE)
    stats = TRITON.compress(Job(grad, residual, tau, out, capacity=numel // 50))
    assert stats.above == stats.nnz == int((whole.abs() >= tau).sum())
    assert 0.008 < stats.nnz / numel < 0.012
    sent = torch.zeros(numel, device=DEVICE)
    TRITON.decode_add(out[: stats.nbytes], sent)
    assert torch.equal(sent + residual, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_residuals_in_fewer_bytes(dtype: torch.dtype) -> None:
    _, values = tensors()
    results = []
    for backend, where in ((REFERENCE, "cpu"), (TRITON, DEVICE)):
        out = torch.empty(NUMEL, dtype=dtype, device=where)
        blocks = -(-NUMEL // PACK_BLOCK)
        exponents = torch.empty(blocks, dtype=dtype, device=where) if dtype == torch.int8 else None
        back = torch.empty(NUMEL, device=where)
        backend.pack(values.to(where), out, exponents, seed=12345)
        backend.unpack(out, exponents, back)
        results.append((out.cpu(), back.cpu()))
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))


@NEEDS_GPU
def test_the_self_check_passes() -> None:
    assert self_check.first_difference(TRITON, torch.device(DEVICE)) is None
    assert get_backend("cuda").name == "triton"
    assert problem_with("triton", "cuda") is None


@NEEDS_GPU
def test_entries_beyond_2_to_the_31() -> None:
    """A gradient of more entries than an int32 counts: what is planted comes back, at its place."""
    numel = 2**31 + 5 * 4096 + 77
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of device memory")
    places = torch.tensor([0, 3, 70_000, 2**31 - 1, 2**31, 2**31 + 4096, numel - 1], device=DEVICE)
    grad = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    grad[places] = torch.arange(1.0, 8.0, device=DEVICE).bfloat16()
    residual = torch.zeros(numel, device=DEVICE)
    residual[2**31 + 9] = 0.25
    bound = payload_bound(numel, 1000, ValueDtype.BF16)
    out = torch.empty(bound, dtype=torch.uint8, device=DEVICE)
    job = Job(grad, residual, 0.5, out, capacity=1000, value_dtype=ValueDtype.BF16)
    stats = TRITON.compress(job)
    assert stats.nnz == 7
    payload = Payload.from_tensor(out[: stats.nbytes], verify=True)
    del grad
    assert residual.nonzero().flatten().tolist() == [2**31 + 9]
    residual.zero_()
    assert TRITON.decode_add(payload, residual) == 7
    assert torch.equal(residual.nonzero().flatten(), places)
    assert residual[places].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_step_ahead_does_not_wait_for_the_device() -> None:
    """Moments, positions for coefficients, displaced weights; the bits of two runs are the same."""
    shapes, shown = [(300, 200), (70_001,), (2000, 64), (3, 5, 7)], []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        named = {
            str(at): torch.nn.Parameter(torch.randn(shape, generator=generator).cuda())
            for at, shape in enumerate(shapes)
        }
        residuals = {n: torch.randn(p.numel(), generator=generator).cuda() for n, p in named.items()}
        gradients = [(n, torch.randn(p.numel(), generator=generator).cuda()) for n, p in named.items()]
        ahead = StepAhead(
            named.items(),
            units_of(torch.optim.AdamW(named.values(), lr=0.1)),
            Unsent(residuals.get, lasting=True),
            world_size=2,
            kernels=TRITON,
        )
        for again in (False, True):  # the first time compiles
            with no_waiting() if again else nullcontext():
                ahead.observe(gradients)
                ahead.end_step(skipped=False)
                ahead.displace()
                ahead.coefficients.samples(list(named), 0, torch.device(DEVICE))
            shown.append([parameter.detach().clone() for parameter in named.values()])
            ahead.restore()
    assert all(torch.equal(*pair) for pair in zip(shown[1], shown[3], strict=True))
    assert all(
        bool((one != parameter).any()) for one, parameter in zip(shown[3], named.values(), strict=True)
    )
