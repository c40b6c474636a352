"""Error-bounded codes: the bound holds for everything, and nothing that is damaged is believed."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dct_plugin.embedding.entropy import MAX_RICE, _best_rice
from dct_plugin.embedding.error_bounded import decode_bounded, encode_bounded, quantise, step_width
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import get_backend

KERNELS = get_backend("cpu")
REFERENCE = get_backend("cpu", "reference")

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


def drawn(shape: list[tuple[int, float, float, float]], seed: int) -> tuple[Tensor, list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for count, bound, scale, zeros in shape:
        x = torch.randn(count, generator=generator) * scale
        x[torch.rand(count, generator=generator) < zeros] = 0.0
        half = torch.randint(-9, 9, (count,), generator=generator).to(torch.float32) * bound
        parts.append(torch.where(torch.rand(count, generator=generator) < 0.2, half, x))  # ties
    return torch.cat(parts), [s[0] for s in shape], torch.tensor([s[1] for s in shape], dtype=torch.float64)


@given(segments, st.integers(0, 2**31), st.sampled_from(["auto", "rice", "deflate"]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_error_is_within_the_bound_and_codes_survive(
    shape: list, seed: int, entropy: str, repeats: bool
) -> None:
    x, lengths, bounds = drawn(shape, seed)
    sizes = torch.tensor(lengths)
    codes = quantise(x, sizes, bounds)
    payload = encode_bounded(codes, lengths, KERNELS, entropy=entropy, repeats=repeats)
    decoded, q = decode_bounded(payload, lengths, KERNELS)
    assert torch.equal(decoded, codes.decoded + 0.0)
    assert bool(((x.double() - decoded.double()).abs() <= bounds.repeat_interleave(sizes)).all())
    assert torch.equal(q != 0, decoded != 0)
    again, _ = decode_bounded(payload, lengths, REFERENCE)
    assert torch.equal(again, decoded)


@given(st.lists(st.floats(1e-25, 1e30), min_size=1))
def test_steps_are_below_the_bound_and_close(bounds: list[float]) -> None:
    given_bounds = torch.tensor(bounds, dtype=torch.float64)
    half = step_width(given_bounds)
    assert bool((half <= given_bounds).all())
    assert bool((half >= given_bounds * 0.99).all())
    assert step_width(torch.tensor([0.0, 1e-40])).tolist() == [0.0, 0.0]


def test_a_bound_of_nothing_sends_the_values() -> None:
    x = torch.randn(50)
    codes = quantise(x, torch.tensor([50]), torch.tensor([0.0]))
    assert torch.equal(codes.decoded, x)
    assert torch.equal(decode_bounded(encode_bounded(codes, [50], KERNELS), [50], KERNELS)[0], x)


def test_huge_codes_of_many_entries_are_written_all_the_same() -> None:
    x = torch.randn(200_000).sign() * 30_000.0
    codes = quantise(x, torch.tensor([200_000]), torch.tensor([0.5]))
    payload = encode_bounded(codes, [200_000], KERNELS)
    assert torch.equal(decode_bounded(payload, [200_000], KERNELS)[0], codes.decoded)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**126])
def test_non_finite_entries_reach_the_receiver_as_nan(value: float) -> None:
    x = torch.randn(40)
    x[7] = value
    payload = encode_bounded(quantise(x, torch.tensor([40]), torch.tensor([0.1])), [40], KERNELS)
    assert payload.numel() < 40
    assert bool(decode_bounded(payload, [40], KERNELS)[0].isnan().all())


def test_size_is_near_the_entropy_and_zeros_cost_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    for bound in (0.5, 0.1, 0.02):
        x = torch.randn(20_000, generator=generator) * 0.1
        codes = quantise(x, torch.tensor([20_000]), torch.tensor([bound * 0.1]))
        _, counts = np.unique(codes.q.numpy(), return_counts=True)
        share = counts / counts.sum()
        entropy = -(share * np.log2(share)).sum() * len(x) / 8
        assert encode_bounded(codes, [20_000], KERNELS).numel() < 1.2 * entropy + 100
    nothing = quantise(torch.zeros(20_000), torch.tensor([20_000]), torch.tensor([0.1]))
    assert encode_bounded(nothing, [20_000], KERNELS).numel() < 30


@given(st.lists(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=30), min_size=1, max_size=5))
def test_the_search_for_a_rice_parameter_finds_the_best_one(parts: list[list[int]]) -> None:
    starts = np.cumsum([0, *map(len, parts[:-1])])
    counts = np.array([float(len(part)) for part in parts])
    found, bits = _best_rice(
        np.concatenate(parts), counts, MAX_RICE + 1, lambda values: np.add.reduceat(values, starts) * 1.0
    )
    everything = [[sum((z >> k) + k + 1 for z in part) for k in range(MAX_RICE + 1)] for part in parts]
    assert found.tolist() == [int(np.argmin(costs)) for costs in everything]
    assert bits.tolist() == [min(costs) for costs in everything]


def test_repeated_vectors_are_found_by_deflate() -> None:
    rows = torch.randn(20, 16).repeat(100, 1).reshape(-1)
    codes = quantise(rows, torch.tensor([len(rows)]), torch.tensor([0.01]))
    plain = encode_bounded(codes, [len(rows)], KERNELS).numel()
    assert encode_bounded(codes, [len(rows)], KERNELS, repeats=True).numel() < plain / 5


def _typical() -> tuple[Tensor, list[int]]:
    x, lengths, bounds = drawn(
        [(50, 0.1, 1.0, 0.0), (40, 0.1, 1.0, 0.95), (9, 1e-9, 1.0, 0.0), (5, 1.0, 1e-6, 0.0)], 1
    )
    codes = quantise(x, torch.tensor(lengths), bounds)
    return encode_bounded(codes, lengths, KERNELS), lengths


def test_every_truncation_and_every_changed_byte_is_refused() -> None:
    payload, lengths = _typical()
    for size in range(payload.numel()):
        with pytest.raises(PayloadError):
            decode_bounded(payload[:size].clone(), lengths, KERNELS)
    for at in range(payload.numel()):
        damaged = payload.clone()
        damaged[at] ^= 0x41
        with pytest.raises(PayloadError):
            decode_bounded(damaged, lengths, KERNELS)
    for wrong in (lengths[:-1], [*lengths, 0], [lengths[0] + 1, *lengths[1:]]):
        with pytest.raises(PayloadError):
            decode_bounded(payload, wrong, KERNELS)


@given(st.integers(20, 400), st.integers(0, 255), st.integers(0, 2**31))
@settings(max_examples=300, deadline=None)
def test_a_damaged_body_with_a_right_checksum_is_refused_or_decoded(at: int, value: int, seed: int) -> None:
    """What a checksum cannot see: nothing but PayloadError, and nothing but finite numbers."""
    x, lengths, bounds = drawn([(60, 0.05, 1.0, 0.2), (60, 0.05, 0.2, 0.97), (8, 1e-9, 1.0, 0.0)], seed)
    entropy = ["auto", "rice", "deflate"][seed % 3]
    payload = encode_bounded(quantise(x, torch.tensor(lengths), bounds), lengths, KERNELS, entropy=entropy)
    data = bytearray(payload.numpy().tobytes())
    data[20 + (at - 20) % (len(data) - 20)] = value
    data[16:20] = b"\0" * 4
    data[16:20] = struct.pack("<I", zlib.crc32(bytes(data[20:]), zlib.crc32(bytes(data[:20]))))
    try:
        decoded, _ = decode_bounded(torch.frombuffer(data, dtype=torch.uint8), lengths, KERNELS)
    except PayloadError:
        return
    assert bool(decoded.isfinite().all())


def _golden(name: str) -> tuple[Tensor, list[int], Tensor]:
    """Inputs made of integers, so that they do not depend on a random generator."""
    count = {"dense": 300, "sparse": 2000, "mixed": 1500}[name]
    n = torch.arange(count, dtype=torch.int64)
    x = ((n * 7919 + 31) % 257 - 128).to(torch.float32) / 64
    if name == "sparse":
        x = torch.where(n % 23 == 0, x, torch.zeros_like(x))
        return x, [700, 0, 1300], torch.tensor([0.05, 0.1, 0.01], dtype=torch.float64)
    if name == "mixed":
        x = torch.where((n < 500) | (n % 41 == 0), x, torch.zeros_like(x))
        x[1400:] = 0
        return x, [400, 100, 900, 100], torch.tensor([0.03, 0.0, 0.02, 0.5], dtype=torch.float64)
    return x, [100, 120, 80], torch.tensor([0.5, 0.01, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "entropy", "size", "check"),
    [
        ("dense", "rice", 249, 0x6C707B9F),
        ("sparse", "rice", 193, 0xD0B603C9),
        ("mixed", "rice", 826, 0x055D3BC5),
        ("mixed", "auto", 826, 0x055D3BC5),
    ],
)
@pytest.mark.parametrize(("device", "backend"), [("cpu", "auto"), ("cpu", "reference"), ("cuda", "auto")])
def test_payloads_are_byte_for_byte_those_of_format_1(
    name: str, entropy: str, size: int, check: int, device: str, backend: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    kernels = get_backend(device, backend)
    x, lengths, bounds = _golden(name)
    codes = quantise(x.to(device), torch.tensor(lengths, device=device), bounds.to(device))
    payload = encode_bounded(codes, lengths, kernels, entropy=entropy)
    assert payload.device.type == device
    assert (payload.numel(), zlib.crc32(payload.cpu().numpy())) == (size, check)
    decoded, q = decode_bounded(payload, lengths, kernels)
    assert torch.equal(decoded, codes.decoded)
    assert torch.equal(q != 0, decoded != 0)


def test_a_small_payload_is_the_documented_one() -> None:
    x = torch.tensor([0.0, 0.5, -0.5, 1.0, 0.0, 0.0, 0.25, 0.0])
    codes = quantise(x, torch.tensor([4, 4]), torch.tensor([0.25, 0.0]))
    payload = encode_bounded(codes, [4, 4], KERNELS, entropy="rice")
    assert payload.numpy().tobytes().hex() == (
        "7bdc010008000000020000002100000086acac7e000f7f3e0000030000000025021000000000000000000000000000803e00000000"
    )


def test_deflate_streams_hold_the_codes_as_bytes_or_words() -> None:
    """Deflate's own bytes depend on the library; what is packed does not."""
    for bound, wide in ((0.5, 0), (0.001, 1)):
        x, lengths, _ = _golden("dense")
        codes = quantise(x, torch.tensor(lengths), torch.full((3,), bound))
        payload = encode_bounded(codes, lengths, KERNELS, entropy="deflate").numpy().tobytes()
        body = payload[20:]
        assert body[:3] == bytes([14] * 3)
        assert body[9 + 4] == wide
        packed = zlib.decompress(body[9 + 5 :], -15)
        assert packed == codes.q.numpy().astype("<i2" if wide else np.int8).tobytes()
