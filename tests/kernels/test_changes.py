"""Payloads of changed weights: what arrives is what the owner has, bit for bit, and all backends agree."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
from torch import Tensor

from dct_plugin.codecs.changes import BANDS, changes_bound
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.compression.stream import encode_all
from dct_plugin.errors import PayloadError
from dct_plugin.kernels.backend import Backend
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend

BACKENDS: list[Backend] = [ReferenceBackend(), CpuBackend()]
NUMEL = 5000
# First 16 hex digits of the message's SHA-256 and its bytes.
GOLDEN = {
    "none": ("4a4d7309994f21f4", 120),
    "few": ("e4fd34abd5d983a2", 190),
    "small": ("9ffde2cec1be0910", 882),
    "medium": ("86c2f763a842d283", 1191),
    "large": ("d05370bdecb0a247", 2520),
    "far": ("008eb880b7f4aff3", 2206),
}


def pair(case: str, numel: int = NUMEL) -> tuple[Tensor, Tensor]:
    """Bits to hold and bits to want, int16, by integer arithmetic alone."""
    scrambled = (torch.arange(numel) * 2654435761) % 2**32
    held = (scrambled >> 16).to(torch.int32).to(torch.int16)
    other = (scrambled * 40503 % 2**31) >> 7
    step = {"few": 1, "small": 2, "medium": 7, "large": 100, "far": 30000}.get(case, 1)
    moved = 1 + other % step
    chosen = other % {"few": 97, "small": 7, "medium": 5, "large": 3, "far": 11}.get(case, 1) == 0
    if case == "none":
        chosen = torch.zeros(numel, dtype=torch.bool)
    if case == "all":
        moved = scrambled >> 8
    sign = 1 - 2 * (scrambled >> 31)
    wanted = torch.where(chosen, held + sign * moved, held).to(torch.int32).to(torch.int16)
    return held, wanted


def message(kernels: Backend, held: Tensor, wanted: Tensor) -> Tensor | None:
    """The message, or None if it lacks a change."""
    writer = MessageWriter(torch.device("cpu"))
    stats = kernels.encode_changes(wanted, held, writer)
    bits = torch.int16
    assert sum(each.above for each in stats) == int((wanted.view(bits) != held.view(bits)).sum())
    lacks = any(each.above > each.nnz for each in stats)
    return None if lacks else writer.message.clone()


def moved(kernels: Backend, held: Tensor, by: Tensor) -> Tensor:
    found = held.view(torch.int16).clone()
    kernels.sum_messages([by], [found] * len(BANDS))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["none", "few", "small", "medium", "large", "far", "all"])
def test_weights_arrive_bitwise_and_backends_agree(case: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 63, 64, 65, 4096 if case == "all" else NUMEL):
        held, wanted = (bits.view(dtype) for bits in pair(case, numel))
        first, second = (message(kernels, held, wanted) for kernels in BACKENDS)
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)
        assert first.numel() <= changes_bound(numel)
        for kernels in BACKENDS:
            assert torch.equal(moved(kernels, held, first), wanted.view(torch.int16))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("case", "numel", "first"), [("none", 64, 0), ("few", NUMEL, 0), ("far", 4100, 3), ("all", 65, 1)]
)
def test_a_device_writes_these_bytes(case: str, numel: int, first: int) -> None:
    """Also where weights do not begin at a multiple of 16 bytes."""
    triton = pytest.importorskip("dct_plugin.kernels.triton.backend")
    held, wanted = (bits.view(torch.bfloat16)[first:] for bits in pair(case, numel))
    expected, found = (message(kernels, held, wanted) for kernels in (BACKENDS[0], triton.TritonBackend()))
    assert expected is not None
    assert found is not None
    assert torch.equal(expected, found)


def test_changes_without_room_are_told() -> None:
    """Or the message is longer than the weights."""
    held, wanted = (bits.view(torch.bfloat16) for bits in pair("all", 100_000))
    for kernels in BACKENDS:
        written = message(kernels, held, wanted)
        assert written is None or written.numel() > 200_000


@pytest.mark.parametrize("case", ["none", "few", "small", "medium", "large", "far"])
def test_golden_bytes(case: str) -> None:
    """Whoever changes one of these changes the wire format."""
    held, wanted = (bits.view(torch.bfloat16) for bits in pair(case))
    written = message(BACKENDS[1], held, wanted)
    assert written is not None
    assert (hashlib.sha256(written.numpy().tobytes()).hexdigest()[:16], written.numel()) == GOLDEN[case]


def test_zeros_and_nan_go_by_their_bits() -> None:
    """Signs of zero, infinities, NaN with any payload, and the widest distances there are."""
    special = torch.tensor(
        [0, -32768, 1, -32767, 0x7F80, -128, 0x7FC0, 0x7FFF, -1, 0x7FC1], dtype=torch.int16
    )
    nothing = torch.zeros(40_000, dtype=torch.int16)
    held = torch.cat([special.repeat_interleave(len(special)).repeat(40), nothing])
    wanted = torch.cat([special.repeat(len(special)).repeat(40), nothing])
    for dtype in (torch.bfloat16, torch.float16):
        written = [message(kernels, held.view(dtype), wanted.view(dtype)) for kernels in BACKENDS]
        assert torch.equal(*written)
        for kernels in BACKENDS:
            assert torch.equal(moved(kernels, held, written[0]), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_any_weight_moves_to_any_other(dtype: torch.dtype) -> None:
    everything = torch.arange(-(2**15), 2**15).to(torch.int16)
    for distance in (0, 1, 2, 3, 9, 10, 127, 128, 31_744, 32_767, 32_768, 40_000, 65_535):
        wanted = everything.roll(distance)
        for part in (slice(0, 4000), slice(31_000, 35_000), slice(61_536, None)):
            ends = wanted[part].view(dtype), everything[part].view(dtype)
            for kernels in BACKENDS:
                written = message(kernels, ends[1], ends[0])
                assert written is not None
                assert torch.equal(moved(kernels, ends[1], written), wanted[part])


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda each: each.name)
def test_whole_numbers_arrive_whatever_their_group_holds(kernels: Backend) -> None:
    """Levels of four and eight bits lie between the smallest and the largest distance of a group."""
    held = torch.zeros(NUMEL, dtype=torch.int16)
    for low in (*range(1, 12), 60, 126):
        for high in (*range(low, 12), 60, 127, 128, 2048, 2049):
            if high < low:
                continue
            places = low + torch.arange(NUMEL, dtype=torch.int16) % (high - low + 1)
            places[::3] *= -1
            wanted = places ^ (places >> 15 & 0x7FFF)
            written = message(kernels, held.view(torch.bfloat16), wanted.view(torch.bfloat16))
            assert written is not None
            assert torch.equal(moved(kernels, held, written), wanted), (low, high)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda each: each.name)
def test_damaged_messages_are_refused(kernels: Backend) -> None:
    held, wanted = (bits.view(torch.bfloat16) for bits in pair("medium"))
    good = message(kernels, held, wanted)
    assert good is not None
    damaged = [good[:-1], torch.cat([good, good[:1]]), good[:0]]
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(good.numel(), (300,), generator=generator).tolist() + list(range(40)):
        damaged.append(good.clone())
        damaged[-1][at] ^= 1 << at % 8
    for each in damaged:
        with pytest.raises(PayloadError):
            moved(kernels, held, each)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda each: each.name)
def test_weights_are_moved_by_one_message_that_is_finite(kernels: Backend) -> None:
    writer, bits = MessageWriter(torch.device("cpu")), torch.zeros(8, dtype=torch.int16)
    encode_all(kernels, torch.full((8,), float("inf")), writer, ValueDtype.FP32)
    with pytest.raises(PayloadError):
        kernels.sum_messages([writer.message], [bits])
    assert not bits.any()
