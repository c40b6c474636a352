"""Kernels: compiled ones equal the reference bit for bit; nothing is lost between sent and kept."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import GRAD_DTYPES, Case, agree, cases, same_bits
from torch import Tensor

from dct_plugin.codecs.index import MAX_NUMEL
from dct_plugin.codecs.message import Key, MessageWriter
from dct_plugin.codecs.payload import Payload, payload_bound
from dct_plugin.codecs.stats import Stats
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.compression.stream import Encoded, add_at, encode_at, values_nbytes
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import Backend, Job, build
from dct_plugin.kernels.backend import mask_of
from dct_plugin.kernels.cpu import ISA_NAMES, CpuBackend
from dct_plugin.kernels.job import SMALLEST_TAU, PartedJob, Parts, Tau
from dct_plugin.kernels.reference import ReferenceBackend, rank_of, sample_positions

REFERENCE = ReferenceBackend()
CPU = CpuBackend()


@pytest.fixture(params=["reference", *ISA_NAMES])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "reference":
        return REFERENCE
    if CPU.set_isa(request.param) != request.param:
        pytest.skip(f"this machine has no {request.param}")
    return CPU


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_instruction_set_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: a second thread only waits
    yield
    torch.set_num_threads(threads)
    CPU.set_isa(ISA_NAMES[-1])  # or the best there is


# ---- reference against compiled -----------------------------------------------------------------------


@given(case=cases(), isa=st.sampled_from(ISA_NAMES), threads=st.sampled_from([1, 2, 3, 9]))
@settings(max_examples=300, deadline=None)
def test_compiled_kernels_equal_the_reference(case: Case, isa: str, threads: int) -> None:
    compiled = CpuBackend(threads)
    compiled.set_isa(isa)
    payload, _ = agree(case, REFERENCE, compiled)

    numel = case.grad.numel()
    outs = [torch.linspace(-1, 1, numel), torch.linspace(-1, 1, numel)]
    assert REFERENCE.decode_add(payload, outs[0]) == compiled.decode_add(payload, outs[1])
    assert same_bits(*outs)
    assert torch.equal(mask_of(REFERENCE, payload, numel), mask_of(compiled, payload, numel))


@given(case=cases(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_compiled_thresholds_equal_the_reference(case: Case, data: st.DataObject) -> None:
    numel = case.grad.numel()
    arguments = (
        data.draw(st.floats(1e-6, 1.0)),
        data.draw(st.sampled_from([1, 10, 1000, max(1, numel), 2 * numel + 1])),
        data.draw(st.integers(-(2**63), 2**64)),
    )
    expected = REFERENCE.sample_threshold(case.grad, case.residual, *arguments)
    assert CPU.sample_threshold(case.grad, case.residual, *arguments) == expected
    k = data.draw(st.integers(1, numel + 2))
    assert CPU.exact_threshold(case.grad, case.residual, k) == REFERENCE.exact_threshold(
        case.grad, case.residual, k
    )


@pytest.mark.parametrize("kind", ["normal", "mostly zero", "one value", "few values", "with nan"])
@pytest.mark.parametrize("fraction", [1e-5, 0.01, 0.3, 0.999])
def test_exact_threshold_of_a_large_tensor(kind: str, fraction: float) -> None:
    """Large enough for the way by a sample and a bracket."""
    numel = 300_001
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    if kind == "mostly zero":
        grad[torch.rand(numel, generator=torch.Generator().manual_seed(2)) < 0.99] = 0
    elif kind == "one value":
        grad[:] = -3.0
    elif kind == "few values":
        grad = (grad * 2).round()
    elif kind == "with nan":
        grad[::3] = math.nan
        grad[1::3] = math.inf
    k = max(1, int(fraction * numel))
    assert CPU.exact_threshold(grad, None, k) == REFERENCE.exact_threshold(grad, None, k)


@pytest.fixture(scope="module")
def plainest(tmp_path_factory: pytest.TempPathFactory) -> CpuBackend:
    """The library as built for another architecture, with its own threads instead of torch's."""
    path = tmp_path_factory.mktemp("plain") / "kernels.so"
    flags = ["-O1", "-DDCT_PORTABLE", "-DDCT_NO_OPENMP", '-DDCT_BUILD_ID="test"']
    command = [*build.compilers()[0], *build.FLAGS, *flags, str(build.SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load", lambda: (ctypes.CDLL(str(path)), path))
        return CpuBackend(threads=3)


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_without_intrinsics_and_openmp(plainest: CpuBackend, case: Case) -> None:
    assert plainest.set_isa(ISA_NAMES[-1]) == "portable"
    expected, found = case.run(REFERENCE), case.run(plainest)
    assert found[0].counts == expected[0].counts
    assert same_bits(found[1], expected[1])
    if expected[2] is not None:
        assert found[2] is not None
        assert same_bits(found[2], expected[2])


# ---- what one compression does, for each implementation -----------------------------------------------


def decoded(backend: Backend, payload: Tensor, numel: int) -> Tensor:
    out = torch.zeros(numel)
    backend.decode_add(payload, out)
    return out


def compress(
    backend: Backend, grad: Tensor, residual: Tensor | None, tau: float, **options: object
) -> tuple[Stats, Tensor]:
    capacity, dtype = options.get("capacity"), options.get("value_dtype", ValueDtype.FP32)
    bound = payload_bound(grad.numel(), None if tau == 0 else capacity, dtype)  # type: ignore[arg-type]
    out = torch.empty(bound, dtype=torch.uint8)
    options["capacity"] = MAX_NUMEL if capacity is None else capacity
    stats = backend.compress(Job(grad, residual, tau, out, **options))  # type: ignore[arg-type]
    return stats, out[: stats.nbytes]


@pytest.mark.parametrize("value_dtype", list(ValueDtype))
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("tau", [0.0, 0.8, 2.3, math.inf])
def test_sent_and_kept_add_up_exactly(
    backend: Backend, value_dtype: ValueDtype, grad_dtype: torch.dtype, tau: float
) -> None:
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(20_011, generator=generator).to(grad_dtype)
    residual = torch.randn(20_011, generator=generator) * 0.5
    whole = grad.float() + residual
    for capacity in (None, 100):
        left = residual.clone()
        stats, payload = compress(
            backend, grad, left, tau, capacity=capacity, value_dtype=value_dtype, start=9000
        )
        sent = decoded(backend, payload, grad.numel())
        if value_dtype in (
            ValueDtype.INT2,
            ValueDtype.SIGN,
        ):  # their levels are too far from small values to subtract exactly
            assert torch.allclose(sent + left, whole, rtol=0, atol=2**-21)
        else:
            assert torch.equal(sent + left, whole)
        kept = mask_of(backend, payload, grad.numel())
        assert int(kept.sum()) == stats.nnz
        assert same_bits(left[~kept], whole[~kept])
        if value_dtype is ValueDtype.FP32:
            assert same_bits(sent[kept], whole[kept])
            assert not bool(left[kept].any())


def test_error_feedback_loses_nothing_over_many_steps(backend: Backend) -> None:
    """The sum of what was sent plus the last residual is the sum of the gradients, up to fp32 rounding."""
    generator = torch.Generator().manual_seed(11)
    residual, total, sent = torch.zeros(5000), torch.zeros(5000, dtype=torch.float64), torch.zeros(5000)
    exact_sent = torch.zeros(5000, dtype=torch.float64)
    for step in range(20):
        grad = torch.randn(5000, generator=generator).bfloat16()
        total += grad
        tau = backend.sample_threshold(grad, residual, 0.02, 1000, step)
        sent.zero_()
        _, payload = compress(
            backend, grad, residual, tau, value_dtype=ValueDtype.BF16, capacity=150, start=step * 997
        )
        backend.decode_add(payload, sent)
        exact_sent += sent
    assert torch.allclose(exact_sent + residual, total, atol=1e-4)


@pytest.mark.parametrize("start", [0, 1, 500, 999, 1000, 12345])
def test_capacity_takes_entries_from_start_on_and_wraps(backend: Backend, start: int) -> None:
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(1000, generator=generator)
    above = (grad.abs() >= 1.0).nonzero().reshape(-1)
    capacity = 100
    cyclic = sorted(above.tolist(), key=lambda i: (i - start) % 1000)[:capacity]
    residual = torch.zeros(1000)
    stats, payload = compress(backend, grad, residual, 1.0, capacity=capacity, start=start)
    assert (stats.nnz, stats.above) == (capacity, above.numel())
    kept = mask_of(backend, payload, 1000)
    assert kept.nonzero().reshape(-1).tolist() == sorted(cyclic)
    assert same_bits(residual, torch.where(kept, torch.zeros(()), grad))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**126, -(2.0**126)])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("where", [0, 4096, 9999])
def test_overflow_leaves_the_residual_bitwise_alone(
    backend: Backend, bad: float, grad_dtype: torch.dtype, where: int
) -> None:
    grad = torch.randn(10_000, generator=torch.Generator().manual_seed(2)).to(grad_dtype)
    grad[where] = torch.tensor(bad).to(grad_dtype)  # 2**126 becomes inf in fp16
    residual = torch.randn(10_000, generator=torch.Generator().manual_seed(3))
    for tau in (0.0, 1.0, math.inf):
        for threads in (1, 3):
            if isinstance(backend, CpuBackend):
                backend.threads = threads
            in_place, apart = residual.clone(), torch.ones(10_000)
            stats, payload = compress(backend, grad, in_place, tau)
            assert same_bits(in_place, residual)
            compress(backend, grad, residual, tau, residual_out=apart)
            assert same_bits(apart, residual)
            assert stats.counts == (24, 0, 0, True)
            assert bool(decoded(backend, payload, 10_000).isnan().all())
    CPU.threads = None


def test_largest_magnitude_that_is_no_overflow(backend: Backend) -> None:
    grad = torch.tensor([math.nextafter(2.0**126, 0.0), -(2.0**125)])
    grad = torch.minimum(grad, torch.tensor(2.0**126).nextafter(torch.tensor(0.0)))
    stats, payload = compress(backend, grad, torch.zeros(2), 1.0)
    assert not stats.nonfinite
    assert same_bits(decoded(backend, payload, 2), grad)


def test_residual_that_has_grown_to_infinity_is_sent_as_the_largest_finite_value(backend: Backend) -> None:
    top = torch.finfo(torch.float32).max
    residual = torch.tensor([top, -top, 1.0])
    grad = torch.tensor([2.0**125, -(2.0**125), 0.5])
    for value_dtype in ValueDtype:
        left = residual.clone()
        _, payload = compress(backend, grad, left, 1e30, value_dtype=value_dtype)
        assert bool(torch.isfinite(decoded(backend, payload, 3)).all())
        assert bool(torch.isfinite(left).all())


def test_threshold_is_inclusive_and_infinity_keeps_nothing(backend: Backend) -> None:
    grad = torch.tensor([1.0, -1.0, math.nextafter(1.0, 0.0) - 1e-7, 0.0])
    stats, payload = compress(backend, grad, None, 1.0)
    assert stats.nnz == 2
    assert decoded(backend, payload, 4).tolist() == [1.0, -1.0, 0.0, 0.0]
    stats, payload = compress(backend, grad, None, math.inf)
    assert (stats.nnz, stats.nbytes) == (0, 24)


def test_a_positive_tau_never_selects_zeros(backend: Backend) -> None:
    """1e-60 is 0 in fp32."""
    stats, _ = compress(backend, torch.tensor([0.0, -0.0, 1.0]), None, 1e-60)
    assert stats.nnz == 1


def test_tau_zero_sends_everything_dense(backend: Backend) -> None:
    grad = torch.tensor([0.0, -0.0, 1.0, 1e-45])
    stats, payload = compress(backend, grad, None, 0.0, capacity=1)
    assert (stats.nnz, stats.above) == (4, 4)
    assert Payload.from_tensor(payload).density == 1
    assert torch.equal(decoded(backend, payload, 4), grad)


def test_decoding_adds(backend: Backend) -> None:
    _, payload = compress(backend, torch.tensor([0.0, 2.0, 0.0]), None, 1.0)
    out = torch.tensor([1.0, 1.0, -0.0])
    assert backend.decode_add(payload, out) == 1
    assert same_bits(out, torch.tensor([1.0, 3.0, -0.0]))


@given(
    seed=st.integers(0, 2**31),
    senders=st.integers(1, 4),
    dtype=st.sampled_from(GRAD_DTYPES),
    value_dtype=st.sampled_from(list(ValueDtype)),
    density=st.sampled_from([0.01, 0.3, 1.0]),
    scale=st.sampled_from([1.0, 0.5, 0.25, 1 / 3, 3.0]),
    bad=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_sums_of_messages(
    seed: int,
    senders: int,
    dtype: torch.dtype,
    value_dtype: ValueDtype,
    density: float,
    scale: float,
    bad: int,
) -> None:
    """All tensors of all messages at once, for every type of gradient; the scratch stays zero in between."""
    generator = torch.Generator().manual_seed(seed)
    sizes, messages, tensors = [5, 3000, 0, 70_000], [], []
    for sender in range(senders):
        writer = MessageWriter(torch.device("cpu"))
        for size in sizes:
            # Halves of large numbers pass what fp16 holds.
            tensor = torch.randn(size, generator=generator) * 3e4
            if size == 3000 and sender == bad:
                tensor[7] = math.inf
            tensors.append(tensor)
            tau = REFERENCE.exact_threshold(tensor, None, max(1, int(density * size))) if density < 1 else 0.0
            room = writer.reserve(payload_bound(size, None, value_dtype))
            writer.advance(CPU.compress(Job(tensor, None, tau, room, value_dtype=value_dtype)))
        messages.append(writer.message)
    outs = [[torch.zeros(size, dtype=dtype) for size in sizes] for _ in range(3)]
    for backend, into in zip((REFERENCE, CPU, CPU), outs, strict=True):
        backend.sum_messages(messages, into, scale)
    for expected, found, again in zip(*outs, strict=True):
        assert same_bits(found, again)
        assert same_bits(found, expected) or bool((found.isnan() & expected.isnan()).all())
    assert bool(outs[1][1].isnan().all()) == (bad < senders)


@pytest.mark.parametrize("tau", [0.0, 1.5])
@pytest.mark.parametrize("count", [1, 2])
def test_parts_for_another_threshold_are_refused(tau: float, count: int) -> None:
    """They may have too little room."""
    bounds = [(0, 640), (640, 700)][:count]
    parts = Parts(bounds, [640, 60][:count], ValueDtype.SIGN, dense=tau != 0.0)
    writer = MessageWriter(torch.device("cpu"), 2)
    job = PartedJob(torch.randn(bounds[-1][-1]), None, tau, None, parts)
    with pytest.raises(ValueError, match="the parts are for"):
        CPU.compress_parts(job, writer, Key(range(count)))


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("receivers", [(2, 0, 1), (1, 0, 1)])
@pytest.mark.parametrize("tau", [0.0, 1.5, torch.tensor(1.5)])
@pytest.mark.parametrize("residual", ["none", "in place", "beside"])
def test_parts_of_a_tensor_go_to_their_receivers(
    dtype: torch.dtype, receivers: tuple[int, ...], tau: Tau, residual: str
) -> None:
    """At once where each part has a receiver of its own; behind a payload, and with a part that overflows."""
    bounds = [(0, 640), (640, 700), (700, 5003)]
    parts = Parts(bounds, [640, 9 if tau else 60, 4303], ValueDtype.BF16, dense=float(tau) == 0.0)
    results = []
    for backend in (REFERENCE, CPU):
        generator = torch.Generator().manual_seed(3)
        grad, before = (torch.randn(5003, generator=generator).to(dtype) for _ in range(2))
        grad[650] = math.inf
        kept = None if residual == "none" else before.float()
        left = kept if residual == "in place" or kept is None else torch.zeros(5003)
        writer, clear = MessageWriter(torch.device("cpu"), 3), residual != "beside"
        writer.reserve(7).fill_(1)
        writer.advance(7)
        job = PartedJob(grad, kept, tau, left, parts, turn=4000, clear=clear)
        encoded = Encoded(backend.compress_parts(job, writer, Key(receivers)), 5003)
        sizes = [nbytes for stats in encoded.stats for nbytes in stats.sizes]
        totals = encoded.totals()
        results.append(([*writer.read(), grad, *([] if left is None else [left])], sizes, totals))
    (expected, *figures), (found, *others) = results
    assert figures == others
    assert others[1].nonfinite
    assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True))


def test_messages_that_are_wrong_are_named(backend: Backend) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    writer = MessageWriter(torch.device("cpu"))
    for part in x[:100], x[100:]:
        room = writer.reserve(payload_bound(part.numel(), None, 0))
        writer.advance(backend.compress(Job(part, None, 1.0, room)))
    good = writer.message.clone()
    first = Payload.split(good)[0].nbytes
    for damage in (
        *[good[:-1], good[:first], torch.cat([good, good[:first]]), good[first:]],
        *[_with_byte(good, at) for at in (0, 2, 3, 4, 5, 6, 7, 8, 16, 24, 33, 50, first + 3, first + 60)],
    ):
        outs = [torch.zeros(100), torch.zeros(200)]
        with pytest.raises(PayloadError) as caught:
            backend.sum_messages([good, damage, good], outs)
        assert caught.value.message == 1


def _with_byte(message: Tensor, at: int) -> Tensor:
    damaged = message.clone()
    damaged[at] ^= 0x11
    return damaged


def test_payloads_whose_header_is_known(backend: Backend) -> None:
    """As split from a message: decoded as the bytes are, checked as the bytes are."""
    grad = torch.randn(900, generator=torch.Generator().manual_seed(1))
    _, forward = compress(backend, grad, None, 1.0)
    (mask,) = Payload.split(forward)
    by_bytes, by_payload = torch.zeros(900), torch.zeros(900)
    for total, payload in ((by_bytes, forward), (by_payload, mask)):
        assert backend.decode_add(payload, total) == mask.nnz
        assert int(mask_of(backend, payload, 900).sum()) == mask.nnz
    assert same_bits(by_bytes, by_payload)

    corrupted = forward.clone()
    corrupted[-1] ^= 1
    for broken in (Payload(corrupted, mask.header), Payload(forward, mask.header._replace(numel=901))):
        with pytest.raises(PayloadError):
            backend.decode_add(broken, by_bytes)
    assert same_bits(by_bytes, by_payload)


def test_slices_at_any_offset(backend: Backend) -> None:
    """Gradients and residuals are views into buckets, payloads views into messages."""
    bucket, residuals = torch.randn(1003), torch.randn(1003)
    message = torch.zeros(5000, dtype=torch.uint8)
    for offset in (1, 2, 3):
        grad, residual = bucket[offset : offset + 900], residuals[offset : offset + 900]
        whole = grad + residual
        stats = backend.compress(Job(grad, residual, 1.0, message[offset:], value_dtype=ValueDtype.BF16))
        out = torch.zeros(903)
        backend.decode_add(message[offset : offset + stats.nbytes], out[3:])
        assert torch.equal(out[3:] + residual, whole)


# ---- values at the positions of another payload -------------------------------------------------------


@pytest.mark.parametrize("value_dtype", list(ValueDtype))
@pytest.mark.parametrize("source_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("tau", [0.0, 1.0, math.inf])
def test_values_at_positions_send_values_only(
    backend: Backend, value_dtype: ValueDtype, source_dtype: torch.dtype, tau: float
) -> None:
    generator = torch.Generator().manual_seed(4)
    _, forward = compress(backend, torch.randn(3000, generator=generator), None, tau)
    mask = mask_of(backend, forward, 3000)
    source = torch.randn(3000, generator=generator).to(source_dtype)
    message, stats = encode_at(backend, source, forward, value_dtype)
    assert stats.nbytes == message.numel() == values_nbytes(forward, value_dtype)
    assert stats.nnz == int(mask.sum())
    received = torch.zeros(3000)
    add_at(backend, message, received, forward)
    assert not bool(received[~mask].any())
    tolerance = {ValueDtype.FP32: 0.0, ValueDtype.BF16: 2**-8, ValueDtype.FP16: 2**-11, ValueDtype.INT8: 0.02}
    tolerance |= {ValueDtype.INT4: 0.3, ValueDtype.INT2: 2.5, ValueDtype.LOG4: 0.3, ValueDtype.SIGN: 4.0}
    assert torch.allclose(
        received[mask], source.float()[mask], rtol=tolerance[value_dtype], atol=tolerance[value_dtype]
    )


def test_overflow_of_values_at_positions(backend: Backend) -> None:
    _, forward = compress(backend, torch.tensor([3.0, 0.0, 3.0]), None, 1.0)
    _, overflowed = compress(backend, torch.tensor([math.nan, 0.0, 0.0]), None, 1.0)
    for mask, source, flagged in [
        (forward, [1.0, math.nan, 1.0], False),
        (forward, [math.inf, 0.0, 0.0], True),
        (forward, [0, 0, 2.0**126], True),
        (overflowed, [1.0, 1.0, 1.0], True),
    ]:
        message, stats = encode_at(backend, torch.tensor(source), mask, ValueDtype.FP16)
        received = torch.zeros(3)
        add_at(backend, message[: stats.nbytes], received, mask)
        assert bool(received.isnan().all()) is flagged
    _, other = compress(backend, torch.tensor([3.0, 0.0, 0.0]), None, 1.0)
    with pytest.raises(PayloadError):
        add_at(backend, encode_at(backend, torch.ones(3), forward, ValueDtype.FP32)[0], torch.zeros(3), other)


# ---- thresholds ---------------------------------------------------------------------------------------


def test_sampled_threshold_hits_the_density(backend: Backend) -> None:
    grad = torch.randn(400_000, generator=torch.Generator().manual_seed(8))
    tau = backend.sample_threshold(grad, None, 0.01, 100_000, seed=1)
    density = float((grad.abs() >= tau).float().mean())
    assert 0.0085 < density < 0.0115
    assert backend.sample_threshold(grad, None, 0.01, 100_000, seed=1) == tau
    assert backend.sample_threshold(grad, None, 0.01, 100_000, seed=2) != tau


def test_sampling_everything_is_exact(backend: Backend) -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(8))
    residual = torch.randn(1000, generator=torch.Generator().manual_seed(9))
    tau = backend.sample_threshold(grad, residual, 0.05, 1000, seed=0)
    assert int(((grad + residual).abs() >= tau).sum()) == 50
    assert tau == backend.exact_threshold(grad, residual, 50)


@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_threshold_is_positive_and_ignores_non_finite_entries(
    backend: Backend, grad_dtype: torch.dtype
) -> None:
    assert backend.exact_threshold(torch.zeros(100, dtype=grad_dtype), None, 5) == SMALLEST_TAU
    assert backend.sample_threshold(torch.zeros(100, dtype=grad_dtype), None, 0.1, 10, 0) == SMALLEST_TAU
    assert backend.sample_threshold(torch.zeros(0, dtype=grad_dtype), None, 0.1, 10, 0) == SMALLEST_TAU
    grad = torch.tensor([math.nan, math.inf, 4.0, -8.0, 2.0], dtype=grad_dtype)
    assert [backend.exact_threshold(grad, None, k) for k in (1, 2, 3, 4)] == [8.0, 4.0, 2.0, 2.0]
    assert backend.sample_threshold(grad, None, 0.34, 5, 0) == 8.0


def test_sample_positions_cover_the_tensor_evenly() -> None:
    where = sample_positions(10, 100_000, seed=123, device=torch.device("cpu"))
    counts = torch.bincount(where, minlength=10)
    assert counts.numel() == 10
    assert float(counts.max() - counts.min()) < 800
    huge = sample_positions(2**32 - 1, 1000, seed=5, device=torch.device("cpu"))
    assert int(huge.min()) >= 0
    assert 2**31 < int(huge.max()) < 2**32 - 1
    assert (rank_of(0.001, 10), rank_of(1.0, 10), rank_of(0.25, 10)) == (1, 10, 3)


# ---- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"grad": torch.zeros(10, dtype=torch.float64)}, TypeError),
        ({"grad": torch.zeros(20)[::2]}, ValueError),
        ({"grad": torch.zeros(2, 5)}, ValueError),
        ({"residual": torch.zeros(9)}, ValueError),
        ({"residual": torch.zeros(10, dtype=torch.bfloat16)}, TypeError),
        ({"residual_out": torch.zeros(11)}, ValueError),
        ({"tau": -1.0}, ValueError),
        ({"tau": math.nan}, ValueError),
        ({"out": torch.zeros(payload_bound(10, None, 0) - 1, dtype=torch.uint8)}, ValueError),
        ({"out": torch.zeros(1000)}, TypeError),
        ({"capacity": -1}, ValueError),
        ({"value_dtype": 8}, ValueError),
    ],
)
def test_arguments_that_do_not_fit_change_nothing(
    backend: Backend, change: dict[str, object], error: type[Exception]
) -> None:
    arguments: dict[str, object] = {
        "grad": torch.ones(10),
        "residual": torch.ones(10),
        "tau": 0.5,
        "out": torch.zeros(1000, dtype=torch.uint8),
    } | change
    before = arguments["residual"].clone()  # type: ignore[attr-defined]
    with pytest.raises(error):
        backend.compress(Job(**arguments))  # type: ignore[arg-type]
    assert torch.equal(arguments["residual"], before)  # type: ignore[arg-type]


def test_other_arguments(backend: Backend) -> None:
    with pytest.raises(TypeError, match="int32"):
        backend.decode_add(torch.zeros(40, dtype=torch.uint8), torch.zeros(10, dtype=torch.int32))
