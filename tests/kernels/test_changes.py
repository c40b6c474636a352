"""Records of changed weights: what arrives is what the owner has, bit for bit, and all backends agree."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from dct_plugin.codecs.changes import FIRST_BITS, add_steps, record_bound, steps_between
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.compression.stream import encode_all
from dct_plugin.errors import PayloadError
from dct_plugin.kernels.backend import Backend
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend

BACKENDS = [ReferenceBackend(), CpuBackend()]
NUMEL = 5000
# First 16 hex digits of the record's SHA-256 and its bytes.
GOLDEN = {
    "none": ("373a0b75006b95a3", 40),
    "few": ("ae760eb6cc311f42", 111),
    "small": ("f95ae0d38eb6cc11", 612),
    "medium": ("0f6c641bb7b2c54c", 988),
    "large": ("9ee170611bf71aa6", 2319),
    "far": ("5267333547eeebf8", 1230),
    "all": ("167ab95d1de7cbbb", 10040),
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


def record(kernels: Backend, held: Tensor, wanted: Tensor) -> Tensor:
    out = torch.empty(record_bound(held.numel()), dtype=torch.uint8)
    stats = kernels.encode_changes(wanted, held, out)
    bits = torch.int16
    assert stats.nnz == int((wanted.view(bits) != held.view(bits)).sum())
    return out[: stats.nbytes].clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_arrive_bitwise_and_backends_agree(case: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 63, 64, 65, NUMEL):
        held, wanted = (bits.view(dtype) for bits in pair(case, numel))
        first, second = (record(kernels, held, wanted) for kernels in BACKENDS)
        assert torch.equal(first, second)
        assert first.numel() <= record_bound(numel)
        for kernels in BACKENDS:
            found = held.clone()
            kernels.apply_changes(torch.cat([first, first]), [found, held.clone()])
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_bytes(case: str) -> None:
    """Whoever changes one of these changes the wire format."""
    held, wanted = (bits.view(torch.bfloat16) for bits in pair(case))
    written = record(BACKENDS[1], held, wanted)
    assert (hashlib.sha256(written.numpy().tobytes()).hexdigest()[:16], written.numel()) == GOLDEN[case]


def test_zeros_and_nan_go_by_their_bits() -> None:
    """Signs of zero, infinities, NaN with any payload, and the widest differences there are."""
    special = torch.tensor(
        [0, -32768, 1, -32767, 0x7F80, -128, 0x7FC0, 0x7FFF, -1, 0x7FC1], dtype=torch.int16
    )
    held = special.repeat_interleave(len(special)).repeat(40)
    wanted = special.repeat(len(special)).repeat(40)
    held = torch.cat([held, torch.zeros(40_000, dtype=torch.int16)])
    wanted = torch.cat([wanted, torch.zeros(40_000, dtype=torch.int16)])
    for dtype in (torch.bfloat16, torch.float16):
        written = [record(kernels, held.view(dtype), wanted.view(dtype)) for kernels in BACKENDS]
        assert torch.equal(*written)
        assert written[0][4] in FIRST_BITS  # not whole
        for kernels in BACKENDS:
            found = held.clone().view(dtype)
            kernels.apply_changes(written[0], [found])
            assert torch.equal(found.view(torch.int16), wanted)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda each: each.name)
def test_damaged_messages_are_refused_and_change_nothing(kernels: Backend) -> None:
    pairs = [[bits.view(torch.bfloat16) for bits in pair(case)] for case in ("small", "all", "few")]
    message = torch.cat([record(kernels, held, wanted) for held, wanted in pairs])
    damaged = [message[:-1], torch.cat([message, message[:1]]), message[:0]]
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(message.numel(), (300,), generator=generator).tolist() + list(range(40)):
        damaged.append(message.clone())
        damaged[-1][at] ^= 1 << at % 8
    for each in damaged:
        found = [held.clone() for held, _ in pairs]
        with pytest.raises(PayloadError):
            kernels.apply_changes(each, found)
        for out, (held, _) in zip(found, pairs, strict=True):
            assert torch.equal(out.view(torch.int16), held.view(torch.int16))


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda each: each.name)
def test_wrong_records_with_right_checksums_are_refused(kernels: Backend) -> None:
    """A foreign sender can compute checksums, too: nothing outside the weights is touched, nothing hangs."""
    from dct_plugin.codecs.payload import checksum

    held, wanted = (bits.view(torch.bfloat16) for bits in pair("medium"))
    good = record(kernels, held, wanted)
    generator = torch.Generator().manual_seed(1)
    refused = 0
    for at in range(2, good.numel()):
        if at in range(32, 40):
            continue
        bad = good.clone()
        bad[at] = int(torch.randint(256, (), generator=generator))
        sums = checksum(bad[:32].numpy().tobytes(), bad[40:])
        bad[32:40] = torch.tensor(sums, dtype=torch.int64).to(torch.int32).view(torch.uint8)
        room = torch.zeros(NUMEL + 128, dtype=torch.int16)
        room[64:-64] = held.view(torch.int16)
        try:
            kernels.apply_changes(bad, [room[64:-64].view(torch.bfloat16)])
        except PayloadError:
            refused += 1
            assert torch.equal(room[64:-64], held.view(torch.int16))
        assert not room[:64].any()
        assert not room[-64:].any()
    assert refused > 30


#: Digests of both payloads of a part whose figures stay on a device.
GOLDEN_STEPS = {
    "none": "aa2e5d0b9107da9c",
    "few": "3e213866bdcb2801",
    "small": "84ae6778466162d6",
    "medium": "8a93f836def8dd51",
}


@pytest.mark.parametrize("case", GOLDEN_STEPS)
def test_golden_bytes_of_steps(case: str) -> None:
    held, wanted = (bits.view(torch.bfloat16) for bits in pair(case))
    single, others, cut = steps_between(wanted, held)
    assert not cut
    digests = []
    for kernels in BACKENDS:
        writer, found = MessageWriter(torch.device("cpu")), torch.zeros(2, NUMEL, dtype=torch.float16)
        for steps, code in ((single, ValueDtype.INT2), (others, ValueDtype.FP16)):
            encode_all(kernels, steps, writer, code, zeros=False)
        kernels.sum_messages([writer.message], list(found))
        weights = held.clone()
        add_steps(weights, *found)
        assert torch.equal(weights.view(torch.int16), wanted.view(torch.int16))
        digests.append(hashlib.sha256(writer.message.numpy().tobytes()).hexdigest()[:16])
    assert digests == [GOLDEN_STEPS[case]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_lead_from_any_weight_to_any_other_or_say_that_they_do_not(dtype: torch.dtype) -> None:
    held = torch.arange(-(2**15), 2**15).to(torch.int16)
    for distance in (0, 1, 2, 3, 127, 31_743, 31_744, 32_768, 40_000, 65_535):
        wanted = held.roll(distance)
        *steps, cut = steps_between(wanted.view(dtype), held.view(dtype))
        assert all(torch.isfinite(each).all() for each in steps)
        found = held.clone()
        add_steps(found.view(dtype), *steps)
        assert torch.equal(found, wanted) != bool(cut)
