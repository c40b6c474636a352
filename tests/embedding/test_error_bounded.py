"""Error-bounded codes: the bound holds for everything, and nothing that is damaged is believed."""

from __future__ import annotations

import struct
import zlib
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from embedding import bounded_reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dct_plugin.config import EmbeddingChannelConfig
from dct_plugin.embedding.tables import take_rows
from dct_plugin.embedding.vector_codec import VectorCodec
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import embedding as kernels
from dct_plugin.kernels import get_backend
from dct_plugin.kernels.embedding import IntArray, Outgoing

#: The compiled kernels, and the plain code that defines their bytes and values.
BOTH = [pytest.param(kernels, id="compiled"), pytest.param(bounded_reference, id="reference")]
GIGABIT = 1000  # picoseconds of a bit

#: Picoseconds of a bit: any work is worth it, none is, or what it is on a link of 1 Gbit/s.
COSTS = {"rice": 1 << 20, "packed": 0, "auto": GIGABIT}
entropies = st.sampled_from(list(COSTS))
segments = st.lists(
    st.tuples(
        st.integers(0, 60),  # entries
        st.floats(1e-30, 1e4),  # bound
        st.floats(1e-12, 1e6),  # scale of the entries
        st.floats(0, 1),  # share of zeros
    ),
    min_size=1,
    max_size=6,
)


def drawn(shape: list[tuple[int, float, float, float]], seed: int) -> Outgoing:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for count, bound, scale, zeros in shape:
        x = torch.randn(count, generator=generator) * scale
        x[torch.rand(count, generator=generator) < zeros] = 0.0
        half = torch.randint(-9, 9, (count,), generator=generator).to(torch.float32) * bound
        parts.append(torch.where(torch.rand(count, generator=generator) < 0.2, half, x))  # ties
    return outgoing(torch.cat(parts), [s[0] for s in shape], [s[1] for s in shape])


def outgoing(x: Tensor, lengths: list[int], bounds: list[float]) -> Outgoing:
    return Outgoing(x, np.array(lengths, dtype=np.int64), np.array(bounds, dtype=np.float64))


class Coded(NamedTuple):
    payload: Tensor
    decoded: Tensor | None


def encode(part: Outgoing, entropy: str = "rice", codes: ModuleType = kernels) -> Coded:
    """The payload of one part, and what its receiver gets."""
    (encoded,) = codes.encode([part], COSTS[entropy], decoded=True)
    assert encoded.message is not None
    assert int(encoded.message[-1]) == part.kind
    return Coded(encoded.message[:-1], encoded.decoded)


def decode(payload: Tensor, lengths: IntArray, codes: ModuleType = kernels) -> Tensor:
    out = torch.full((int(lengths.sum()),), 7.0)
    (fault,) = codes.decode([payload], [lengths], [out])
    if fault is not None:
        raise PayloadError(fault)
    return out


@given(segments, st.integers(0, 2**31), entropies)
@settings(max_examples=300, deadline=None)
def test_error_is_within_the_bound_and_codes_survive(shape: list, seed: int, entropy: str) -> None:
    part = drawn(shape, seed)
    payload, decoded = encode(part, entropy)
    assert decoded is not None
    assert torch.equal(decode(payload, part.lengths), decoded)
    error = (part.x.double() - decoded.double()).abs().numpy()
    assert bool((error <= np.repeat(part.bounds, part.lengths)).all())
    # The reference defines bytes and values.
    again, expected = encode(part, entropy, bounded_reference)
    assert torch.equal(payload, again)
    assert expected is not None
    assert torch.equal(decoded, expected)
    assert torch.equal(decode(payload, part.lengths, bounded_reference), decoded)


@given(st.lists(segments, min_size=1, max_size=4), st.integers(0, 2**31), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_all_messages_of_a_step_are_coded_in_one_call(shapes: list, seed: int, kept_here: int) -> None:
    parts = [drawn(shape, seed + r)._replace(send=r != kept_here, kind=r) for r, shape in enumerate(shapes)]
    together = kernels.encode(parts, GIGABIT)
    squares = kernels.mean_squares(parts)
    for part, encoded, square in zip(parts, together, squares, strict=True):
        (alone,) = bounded_reference.encode([part], GIGABIT, decoded=True)
        assert alone.decoded is not None
        assert square.tolist() == bounded_reference.mean_squares([part])[0].tolist()
        if part.send:
            assert alone.message is not None
            assert encoded.message is not None
            assert encoded.decoded is None
            assert torch.equal(encoded.message, alone.message)
        else:
            assert encoded.message is None
            assert encoded.decoded is not None
            assert torch.equal(encoded.decoded, alone.decoded)
    sent = [(p, e.message) for p, e in zip(parts, together, strict=True) if e.message is not None]
    outs = [torch.empty(len(part.x)) for part, _ in sent]
    payloads = [message[:-1] for _, message in sent]
    assert not any(kernels.decode(payloads, [part.lengths for part, _ in sent], outs))
    for (part, _), out in zip(sent, outs, strict=True):
        (expected,) = bounded_reference.encode([part], 0, decoded=True)
        assert expected.decoded is not None
        assert torch.equal(out, expected.decoded)


@given(st.floats(1e-25, 1e30))
def test_steps_are_below_the_bound_and_close(bound: float) -> None:
    half = bounded_reference.half_step(bound)
    assert 0.99 * bound <= half <= bound


def test_steps_that_are_too_small_are_none() -> None:
    assert bounded_reference.half_step(0.0) == bounded_reference.half_step(1e-40) == 0.0


@pytest.mark.parametrize("codes", BOTH)
def test_a_bound_of_nothing_sends_the_values(codes: ModuleType) -> None:
    part = outgoing(torch.randn(50), [50], [0.0])
    payload, decoded = encode(part, codes=codes)
    assert decoded is not None
    assert torch.equal(decoded, part.x)
    assert torch.equal(decode(payload, part.lengths, codes), part.x)


def test_huge_codes_of_many_entries_are_written_all_the_same() -> None:
    x = torch.randn(200_000).sign() * 30_000.0
    x[::7] = 0.9
    for entropy in ("rice", "packed"):
        part = outgoing(x, [200_000], [0.5])
        payload, decoded = encode(part, entropy)
        assert decoded is not None
        assert torch.equal(decode(payload, part.lengths), decoded)


@pytest.mark.parametrize("codes", BOTH)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**126])
def test_non_finite_entries_reach_the_receiver_as_nan(value: float, codes: ModuleType) -> None:
    part = outgoing(torch.randn(40), [40], [0.1])
    part.x[7] = value
    payload, decoded = encode(part, "rice", codes)
    assert decoded is None
    assert payload.numel() < 40
    assert bool(decode(payload, part.lengths, codes).isnan().all())


def test_size_is_near_the_entropy_and_zeros_cost_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    for bound in (0.5, 0.1, 0.02):
        part = outgoing(torch.randn(20_000, generator=generator) * 0.1, [20_000], [bound * 0.1])
        codes = np.rint(part.x.numpy() / (2 * part.bounds))
        _, counts = np.unique(codes, return_counts=True)
        share = counts / counts.sum()
        entropy = -(share * np.log2(share)).sum() * len(part.x) / 8
        small, fast = encode(part).payload.numel(), encode(part, "packed").payload.numel()
        assert small < 1.2 * entropy + 100
        assert small < fast < 2.5 * entropy + 100
    nothing = outgoing(torch.zeros(20_000), [20_000], [0.1])
    for name in ("rice", "packed"):
        assert encode(nothing, name).payload.numel() < 30


def test_auto_weighs_the_link_against_the_work() -> None:
    part = outgoing(torch.randn(20_000, generator=torch.Generator().manual_seed(0)), [20_000], [0.1])
    sizes = []
    for bit_cost in (0, 100, 10_000, 1 << 20):  # unlimited, 10 Gbit/s, 100 Mbit/s, nothing else counts
        (encoded,) = kernels.encode([part], bit_cost)
        assert encoded.message is not None
        sizes.append(encoded.message.numel())
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]


def test_the_cost_of_a_bit_follows_the_fastest_of_the_last_exchanges() -> None:
    config = EmbeddingChannelConfig.of({"error_bound": 0.1})
    cpu = get_backend("cpu")
    codec = VectorCodec(config, name="t", backend=lambda _: cpu)
    slow = codec.bit_cost
    codec.observe(0, 1.0)  # says nothing
    assert codec.bit_cost == slow
    codec.observe(12_500, 1e-4)  # 1 Gbit/s
    assert codec.bit_cost == GIGABIT
    codec.observe(12_500, 5e-3)  # had to wait for a peer
    assert GIGABIT < codec.bit_cost < 1.1 * GIGABIT
    for _ in range(100):
        codec.observe(12_500, 1e-3)
    assert codec.bit_cost == 10 * GIGABIT


def _typical() -> Outgoing:
    return drawn(
        [
            *[(50, 0.1, 1.0, 0.0), (40, 0.1, 1.0, 0.95), (9, 1e-9, 1.0, 0.0)],
            *[(5, 1.0, 1e-6, 0.0), (6, 1e-4, 3.0, 0.0)],
        ],
        1,
    )


@pytest.mark.parametrize("entropy", ["rice", "packed"])
def test_every_truncation_and_every_changed_byte_is_refused(entropy: str) -> None:
    part = _typical()
    payload = encode(part, entropy).payload

    def refused(damaged: Tensor, sizes: IntArray) -> None:
        said = []
        for codes in (kernels, bounded_reference):
            with pytest.raises(PayloadError) as caught:
                decode(damaged, sizes, codes)
            said.append(str(caught.value))
        assert said[0] == said[1]

    for size in range(payload.numel()):
        refused(payload[:size].clone(), part.lengths)
    for at in range(payload.numel()):
        damaged = payload.clone()
        damaged[at] ^= 0x41
        refused(damaged, part.lengths)
    lengths = part.lengths.tolist()
    for wrong in (lengths[:-1], [*lengths, 0], [lengths[0] + 1, *lengths[1:]]):
        refused(payload, np.array(wrong))


def _signed(data: bytearray) -> Tensor:
    """The payload with a body size and checksum that are right again."""
    data[12:16] = struct.pack("<I", len(data) - 20)
    data[16:20] = struct.pack("<I", zlib.crc32(bytes(data[20:]), zlib.crc32(bytes(data[:16]))))
    return torch.frombuffer(data, dtype=torch.uint8)


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(-60, 60),
    st.integers(0, 2**31),
)
@example([(1, 15), (6, 0), (7, 0x7F)], 0, 0)  # zeros whose step width is infinite in fp32
@settings(max_examples=500, deadline=None)
def test_a_damaged_body_with_a_right_checksum_is_refused_or_decoded(
    changes: list[tuple[int, int]], longer: int, seed: int
) -> None:
    """Damage under a right checksum gives a fault or finite numbers, the same from both implementations."""
    part = drawn(
        [(60, 0.05, 1.0, 0.2), (60, 0.05, 0.2, 0.97), (8, 1e-9, 1.0, 0.0), (9, 1e-3, 1.0, 0.0)], seed
    )
    data = bytearray(encode(part, ["rice", "packed"][seed % 2]).payload.numpy().tobytes())
    data = data[: 20 + max(len(data) - 20 + longer, 0)] + bytes(max(longer, 0))
    for at, value in changes:
        if len(data) > 20:
            data[20 + at % (len(data) - 20)] = value
    payload = _signed(data)
    # A margin on both sides shows what is written out of bounds.
    room = torch.full((int(part.lengths.sum()) + 64,), 7.0)
    (fault,) = kernels.decode([payload], [part.lengths], [room[32:-32]])
    assert bool((room[:32] == 7.0).all())
    assert bool((room[-32:] == 7.0).all())
    expected = torch.full_like(room, 7.0)
    assert bounded_reference.decode([payload], [part.lengths], [expected[32:-32]]) == [fault]
    if fault is None:
        assert bool(room.isfinite().all())
        assert torch.equal(room, expected)


@given(st.binary(max_size=120), st.sampled_from([0, 1, 2, 3]), st.lists(st.integers(0, 9), max_size=5))
@example(bytes([32, 0x80, 0x3F, 0xFE, 0xFF]), 0, [1])  # the largest code
@example(bytes([32, 0x80, 0x3F, 0xFF, 0xFF]), 0, [1])  # one more
@example(bytes([1, 0x80, 0x3F, 0xAA]), 0, [4])  # Rice codes of nine bits in eight
@settings(max_examples=300, deadline=None)
def test_bodies_of_noise_are_refused_or_decoded(body: bytes, flags: int, lengths: list[int]) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    head = struct.pack("<HBBIHHII", 0xDC7B, 2, flags, int(sizes.sum()), len(sizes), 0, 0, 0)
    payload = _signed(bytearray(head + body))
    out, expected = torch.zeros(int(sizes.sum())), torch.zeros(int(sizes.sum()))
    (fault,) = kernels.decode([payload], [sizes], [out])
    assert bounded_reference.decode([payload], [sizes], [expected]) == [fault]
    if fault is None:
        assert flags == 1 or bool(out.isfinite().all())
        assert torch.equal(out.nan_to_num(5.0), expected.nan_to_num(5.0))


def _golden(name: str) -> Outgoing:
    """Inputs made of integers, so that they do not depend on a random generator."""
    count = {"dense": 300, "sparse": 2000, "mixed": 1500}[name]
    n = torch.arange(count, dtype=torch.int64)
    x = ((n * 7919 + 31) % 257 - 128).to(torch.float32) / 64
    if name == "sparse":
        x = torch.where(n % 23 == 0, x, torch.zeros_like(x))
        return outgoing(x, [700, 0, 1300], [0.05, 0.1, 0.01])
    if name == "mixed":
        x = torch.where((n < 500) | (n % 41 == 0), x, torch.zeros_like(x))
        x[1400:] = 0
        return outgoing(x, [400, 100, 900, 100], [0.03, 0.0, 0.02, 0.5])
    return outgoing(x, [100, 120, 80], [0.5, 0.01, 0.1])


@pytest.mark.parametrize("codes", BOTH)
@pytest.mark.parametrize(
    ("name", "entropy", "size", "check"),
    [
        ("dense", "rice", 231, 0x851BA22B),
        ("dense", "packed", 237, 0x55C84296),
        ("sparse", "rice", 177, 0x9D7C8537),
        ("mixed", "rice", 802, 0xE0EDD10B),
        ("mixed", "auto", 823, 0xD78009A1),
    ],
)
def test_payloads_are_byte_for_byte_those_of_format_2(
    name: str, entropy: str, size: int, check: int, codes: ModuleType
) -> None:
    part = _golden(name)
    payload, decoded = encode(part, entropy, codes)
    assert (payload.numel(), zlib.crc32(payload.numpy())) == (size, check)
    assert decoded is not None
    assert torch.equal(decode(payload, part.lengths, codes), decoded)


@pytest.mark.parametrize(
    ("name", "check"), [("dense", 0xCC1348F7), ("sparse", 0x79DBE9A0), ("mixed", 0x09CDE964)]
)
def test_decoded_values_are_those_of_format_1(name: str, check: int) -> None:
    decoded = encode(_golden(name)).decoded
    assert decoded is not None
    assert zlib.crc32(decoded.numpy()) == check


def test_a_small_payload_is_the_documented_one() -> None:
    part = outgoing(torch.tensor([0.0, 0.5, -0.5, 1.0, 0.0, 0.0, 0.25, 0.0]), [4, 4], [0.25, 0.0])
    assert encode(part, "packed").payload.numpy().tobytes().hex() == (
        "7bdc0200080000000200000017000000983abfaf120e7f3e000000000000000000000000803e00000000e4"
    )


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 60), st.integers(0, 2**31))
@settings(deadline=None)
def test_gradients_of_rows_are_those_of_torch(rows: int, dim: int, count: int, seed: int) -> None:
    """Bitwise: equal rows are added in the same order."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(rows, (count,), generator=generator)
    weights = torch.randn(count, dim, generator=generator)
    found = []
    for take in (
        lambda matrix: torch.nn.functional.embedding(at, matrix),
        lambda matrix: take_rows(matrix, at),
    ):
        matrix = torch.arange(rows * dim, dtype=torch.float32).view(rows, dim).requires_grad_()
        taken = take(matrix)
        (taken * weights).sum().backward()
        found.append((taken.detach(), matrix.grad))
    (expected, gradient), (taken, own) = found
    assert torch.equal(taken, expected)
    assert gradient is not None
    assert own is not None
    assert torch.equal(own, gradient)


def test_without_compiled_kernels_rows_are_found_and_codes_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = _typical()
    payload = encode(part).payload
    monkeypatch.setattr(kernels, "_library", lambda: OSError("no C compiler found"))
    for call in (lambda: encode(part), lambda: decode(payload, part.lengths)):
        with pytest.raises(OSError, match="error-bounded codes need the compiled kernels: no C compiler"):
            call()
    rows, x = torch.tensor([1, 0, 1]), torch.tensor([[1.0], [2.0], [4.0]])
    out = torch.zeros(2, 1)
    kernels.add_rows(out, rows, x)
    assert out.tolist() == [[2.0], [5.0]]
