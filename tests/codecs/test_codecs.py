"""Wire format: header, positions, value types; what is malformed is refused and changes nothing."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dct_plugin.codecs.index import decode_indices, encode_indices, index_bound, index_form
from dct_plugin.codecs.payload import HEADER_NBYTES, Header, Payload, checksum, payload_bound
from dct_plugin.codecs.values import VALUE_CODECS, ValueDtype, decode_values, encode_values
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import Job, build
from dct_plugin.kernels.backend import Backend, mask_of
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend

#: Kept entries of 300: Elias-Fano code, a bitmap, and no section.
KEPT = {"few": 12, "many": 150, "all": 300}
SIZES = [0, 1, 255, 256, 257, 65535, 65536, 65537]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: a second thread only waits
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return ReferenceBackend() if request.param == "reference" else CpuBackend()


def supports(numel: int) -> Iterator[torch.Tensor]:
    """Positions at every density: none, the ends, a few, every k-th, runs, all but one, all."""
    yield torch.empty(0, dtype=torch.int64)
    if not numel:
        return
    generator = torch.Generator().manual_seed(numel)
    yield torch.tensor([0])
    yield torch.tensor([numel - 1])
    yield torch.tensor([0, numel - 1]).unique()
    for part in (1000, 100, 10, 2):
        count = max(1, numel // part)
        yield torch.randperm(numel, generator=generator)[:count].sort().values
    yield torch.arange(0, numel, 2)
    yield torch.arange(numel // 3, numel // 2)
    everything = torch.arange(numel)
    yield everything[everything != numel // 2]
    yield everything


# ---- indices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
def test_indices_round_trip(backend: Backend, numel: int) -> None:
    for idx in supports(numel):
        data = backend.encode_indices(idx, numel)
        assert data.numel() == index_form(idx.numel(), numel).nbytes <= index_bound(idx.numel(), numel)
        assert torch.equal(backend.decode_indices(data, idx.numel(), numel), idx)


def test_the_number_of_lower_bits_makes_the_code_smallest() -> None:
    for numel in (2, 65, 1000, 70_001):
        for nnz in {1, 2, numel // 100, numel // 10, numel // 3} - {0, numel}:
            sizes = [-(-(nnz + ((numel - 1) >> lower)) // 8) + -(-nnz * lower // 8) for lower in range(1, 17)]
            # Either end of a code fills a byte: another number may fit a byte better.
            assert index_form(nnz, numel).nbytes <= min(*sizes, -(-numel // 8)) + 1


@pytest.mark.parametrize("numel", [1, 9, 300, 5000])
def test_the_bound_holds_for_every_smaller_number(numel: int) -> None:
    largest = 0
    for nnz in range(numel + 1):
        largest = max(largest, index_form(nnz, numel).nbytes)
        assert largest <= index_bound(nnz, numel)


def test_positions_beyond_two_to_the_31(backend: Backend) -> None:
    numel = 2**32 - 1
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 65536, 2**32 - 3, 2**32 - 2]
    spread = torch.randint(0, numel, (2000,), generator=torch.Generator().manual_seed(3))
    for idx in (
        torch.tensor(edges),
        torch.cat([spread, torch.tensor(edges)]).unique(),
        torch.tensor([numel - 1]),
    ):
        data = backend.encode_indices(idx, numel)
        assert torch.equal(data, encode_indices(idx, numel))
        assert torch.equal(backend.decode_indices(data, idx.numel(), numel), idx)
        with pytest.raises(PayloadError):  # the last one is outside, or the section's size is wrong
            backend.decode_indices(data, idx.numel(), int(idx[-1]))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_both_implementations_write_the_same_indices(data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 3000))
    idx = torch.tensor(sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=300))), dtype=torch.int64)
    assert torch.equal(CpuBackend().encode_indices(idx, numel), encode_indices(idx, numel))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_arbitrary_index_sections_are_decoded_alike_or_refused_alike(data: st.DataObject) -> None:
    numel = data.draw(st.sampled_from([1, 9, 64, 300, 70000]))
    nnz = data.draw(st.integers(0, min(numel, 40)))
    size = index_form(nnz, numel).nbytes
    byte = st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 128, 255]))
    if data.draw(st.booleans()):  # few of all sections are good ones
        idx = data.draw(st.sets(st.integers(0, numel - 1), min_size=nnz, max_size=nnz))
        section = bytearray(encode_indices(torch.tensor(sorted(idx), dtype=torch.int64), numel).tolist())
        if size:
            section[data.draw(st.integers(0, size - 1))] ^= data.draw(st.sampled_from([0, 1, 3, 6, 128]))
    else:
        section = bytearray(data.draw(st.lists(byte, min_size=min(size, 60), max_size=min(size, 60) + 1)))
    results: list[list[int] | None] = []
    for decode in (decode_indices, CpuBackend().decode_indices):
        tensor = torch.from_numpy(np.frombuffer(bytes(section), dtype=np.uint8).copy())
        try:
            results.append(decode(tensor, nnz, numel).tolist())
        except PayloadError:
            results.append(None)
    assert results[0] == results[1]
    if results[0]:
        assert results[0] == sorted(set(results[0]))
        assert results[0][-1] < numel


@pytest.mark.parametrize(
    ("section", "nnz", "numel"),
    [
        ([0x01], 2, 8),  # a bitmap with fewer bits than announced
        ([0x07], 2, 8),  # with more
        ([0x80], 3, 7),  # past the end
        ([0x01, 0x00], 2, 8),  # too long
        ([0b00000011, 0, 0, 0], 1, 200),  # Elias-Fano code, one position: two bits
        ([0, 0], 1, 200),  # none
        ([0b00000100, 0], 1, 200),  # a bit behind the bitmap of two bits
        ([0b00000001, 0x80], 1, 200),  # lower bits: 7, then a bit that no encoder sets
        ([0b00000010, 0b01111111], 1, 200),  # position 255 of 200
        ([0b00011, 0b001001], 2, 100),  # 9 and 9: positions that do not ascend; 5 lower bits
        ([], 7, 8),
        ([0xFF], 9, 8),  # more positions than entries
        ([0xFF], 8, 8),  # a section where all are kept
        ([0x00], 0, 8),  # where none is
    ],
)
def test_malformed_index_sections(backend: Backend, section: list[int], nnz: int, numel: int) -> None:
    with pytest.raises(PayloadError):
        backend.decode_indices(torch.tensor(section, dtype=torch.uint8), nnz, numel)


@pytest.mark.parametrize("bad", [[3, 3], [4, 1], [-1, 2], [0, 8]])
def test_positions_that_cannot_be_encoded(backend: Backend, bad: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        backend.encode_indices(torch.tensor(bad), 8)
    with pytest.raises(ValueError, match="numel"):
        backend.encode_indices(torch.tensor([1]), 2**32)


def test_a_huge_count_is_refused_before_memory_is_asked_for(backend: Backend) -> None:
    for nnz in (1, 2**31, 2**32 - 2, 2**32):
        with pytest.raises(PayloadError):
            backend.decode_indices(torch.zeros(7, dtype=torch.uint8), nnz, 2**32 - 1)


# ---- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(ValueDtype))
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_values_round_trip(dtype: ValueDtype, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 10
    data, decoded = encode_values(values, dtype)
    assert torch.equal(decode_values(data, count, dtype), decoded)
    if dtype is ValueDtype.FP32:
        assert torch.equal(decoded, values)
    elif dtype in (ValueDtype.INT8, ValueDtype.INT4, ValueDtype.INT2):
        share = {ValueDtype.INT8: 1 / 127 / 2, ValueDtype.INT4: 1 / 7 / 2 + 1 / 256, ValueDtype.INT2: 0.505}
        for lo in range(0, count, 256):
            group, got = values[lo : lo + 256], decoded[lo : lo + 256]
            assert float((group - got).abs().max()) <= float(group.abs().max()) * share[dtype] * 1.0001
    elif dtype is ValueDtype.SIGN:
        for lo in range(0, count, 256):
            group, got = values[lo : lo + 256], decoded[lo : lo + 256]
            torch.testing.assert_close(got.abs(), group.abs().mean().expand(len(group)), rtol=1e-4, atol=0)
            assert torch.equal(got < 0, group < 0)
    elif dtype is ValueDtype.LOG4:
        for lo in range(0, count, 32):
            group, got = values[lo : lo + 32], decoded[lo : lo + 32]
            bound = torch.maximum(group.abs() * 0.26, group.abs().max() * 2**-4.5 / 2)
            assert bool(((group - got).abs() <= bound * 1.0625).all())  # the scale has three mantissa bits
    else:
        torch_dtype = torch.bfloat16 if dtype is ValueDtype.BF16 else torch.float16
        assert torch.equal(decoded, values.to(torch_dtype).float())


@pytest.mark.parametrize("dtype", list(ValueDtype))
def test_values_out_of_range_are_clamped_to_something_finite(dtype: ValueDtype) -> None:
    extreme = torch.tensor([float("inf"), -float("inf"), 3.4e38, -3.4e38, 65520.0, 1e-45, -1e-45, 0.0])
    data, decoded = encode_values(extreme, dtype)
    assert bool(torch.isfinite(decoded).all())
    assert torch.equal(decode_values(data, extreme.numel(), dtype), decoded)


def test_log4_scales_are_bytes_below_the_largest_of_1024_values() -> None:
    blocks = torch.tensor([1.0, 1.06, 1.07, 1.9375, 1e-9, 1e-10, 1e-30, 1e-45, 0.0, 2.0**-40])
    data, decoded = encode_values(torch.cat([blocks, 1e-30 * blocks]).repeat_interleave(32), ValueDtype.LOG4)
    assert data.numel() == 1 + 20 + 320
    # The exponent is that of 2, to which 1.9375 is rounded. Smaller blocks than 9 * 2 ** -33 have this scale.
    assert data[:21].tolist() == [128, 239, 239, 240, 247, *[0] * 16]
    expected = [1.0, 1.0, 1.125, 2.0, 9 * 2.0**-33, 9 * 2.0**-36.75, 0.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(decoded[:320:32], torch.tensor(expected))
    # A block of tiny values alone has all of its bits.
    for size in (1e-30, 2.0**-125, 2.0**126.9):
        alone = encode_values(torch.full((33,), size), ValueDtype.LOG4)[1]
        torch.testing.assert_close(alone, torch.full((33,), size), rtol=0.0625, atol=0)


def test_int8_scale_that_is_subnormal() -> None:
    values = (
        torch.tensor([190.0, -100.0, 1.0]) * 2.0**-149
    )  # the scale rounds to one unit, 190 / 1 passes 127
    data, decoded = encode_values(values, ValueDtype.INT8)
    assert torch.equal(decoded, torch.tensor([127.0, -100.0, 1.0]) * 2.0**-149)
    assert torch.equal(decode_values(data, 3, ValueDtype.INT8), decoded)


@pytest.mark.parametrize(
    ("dtype", "section"),
    [
        (ValueDtype.FP32, struct.pack("<f", float("inf"))),
        (ValueDtype.FP32, struct.pack("<f", float("nan"))),
        (ValueDtype.BF16, b"\x80\x7f"),
        (ValueDtype.FP16, b"\x00\xfc"),
        (ValueDtype.INT8, struct.pack("<fb", float("nan"), 1)),
        (ValueDtype.INT8, struct.pack("<fb", -1.0, 1)),
        (ValueDtype.INT8, struct.pack("<fb", 3e38, 1)),  # 127 * scale overflows
        (ValueDtype.INT8, struct.pack("<fb", 1.0, -128)),
        (ValueDtype.INT4, struct.pack("<HHB", 0x3F80, 0x3F00, 0)),  # the lowest level above the highest
        (ValueDtype.INT4, struct.pack("<HHB", 0xBF80, 0x3F80, 0)),
        (ValueDtype.INT4, struct.pack("<HHB", 0x3F80, 0x7F80, 0)),
        (ValueDtype.INT4, struct.pack("<HHB", 0x3F80, 0x3F80, 0x10)),  # trailing bits
        (ValueDtype.INT2, struct.pack("<HHB", 0x7FC0, 0x7FC0, 0)),
        (ValueDtype.INT2, struct.pack("<HHB", 0x3F80, 0x3F80, 0x04)),
        (ValueDtype.SIGN, struct.pack("<fB", -1.0, 1)),
        (ValueDtype.SIGN, struct.pack("<fB", float("inf"), 1)),
        (ValueDtype.SIGN, struct.pack("<fB", 1.0, 2)),  # trailing bits
        (ValueDtype.LOG4, bytes((255, 247, 1))),
        (ValueDtype.LOG4, bytes((127, 255, 1))),
        (ValueDtype.LOG4, bytes((127, 247, 0x10))),  # trailing bits
        (ValueDtype.LOG4, bytes((127, 247, 8))),  # a negative zero
    ],
)
def test_values_no_encoder_writes(backend: Backend, dtype: ValueDtype, section: bytes) -> None:
    tensor = torch.frombuffer(bytearray(section), dtype=torch.uint8)
    with pytest.raises(PayloadError):
        decode_values(tensor, 1, dtype)
    with pytest.raises(PayloadError):
        decode_values(tensor[:-1], 1, dtype)
    payload = assemble(Header(dtype, False, 1, 1), section)
    out = torch.zeros(1)
    with pytest.raises(PayloadError):
        backend.decode_add(payload, out)
    assert float(out) == 0


# ---- payload ---------------------------------------------------------------------------------------


def assemble(header: Header, body: bytes) -> torch.Tensor:
    """A payload with right checksums, whatever else is wrong with it."""
    section = torch.from_numpy(np.frombuffer(body, dtype=np.uint8).copy())
    return torch.frombuffer(bytearray(header.with_checks(section).pack() + body), dtype=torch.uint8)


def resealed(data: bytes) -> bytes:
    """The same bytes with right checksums."""
    body = torch.from_numpy(np.frombuffer(data[HEADER_NBYTES:], dtype=np.uint8).copy())
    return data[:16] + struct.pack("<II", *checksum(data[:16], body)) + data[24:]


def sample_payload(
    backend: Backend, numel: int = 300, kept: int = 12, dtype: int = ValueDtype.BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    """A payload and what it decodes to."""
    grad = torch.zeros(numel)
    generator = torch.Generator().manual_seed(numel + kept)
    where = torch.randperm(numel, generator=generator)[:kept]
    grad[where] = torch.randn(kept, generator=generator).sign() * (1 + torch.rand(kept, generator=generator))
    out = torch.empty(payload_bound(numel, None, dtype), dtype=torch.uint8)
    stats = backend.compress(Job(grad, None, 0.5, out, value_dtype=dtype))
    assert stats.nnz == kept
    decoded = torch.zeros(numel)
    backend.decode_add(out[: stats.nbytes], decoded)
    return out[: stats.nbytes].clone(), decoded


def test_payload_attributes(backend: Backend) -> None:
    data, _ = sample_payload(backend)
    payload = Payload.from_tensor(data)
    assert (payload.numel, payload.nnz, payload.nbytes) == (300, 12, data.numel())
    assert payload.density == 12 / 300
    assert (payload.value_dtype, payload.nonfinite) == ("bf16", False)
    again = Payload.from_bytes(payload.to_bytes())
    assert torch.equal(again.data, data)
    assert again.header == payload.header


def test_a_payload_written_by_version_2_stays_readable(backend: Backend) -> None:
    """Every byte is fixed; a change of the format needs a new version number."""
    grad = torch.tensor([0.0, 1.5, 0.0, -2.0, 0.0, 0.25, 0.0, 0.0, 3.0])
    out = torch.empty(payload_bound(9, None, ValueDtype.BF16), dtype=torch.uint8)
    nbytes = backend.compress(Job(grad, None, 1.0, out, value_dtype=ValueDtype.BF16)).nbytes
    expected = "7adc0201000000000900000003000000909d0381d36147c10a01c03f00c04040"
    assert bytes(out[:nbytes].tolist()).hex() == expected
    decoded = torch.zeros(9)
    assert backend.decode_add(torch.frombuffer(bytearray.fromhex(expected), dtype=torch.uint8), decoded) == 3
    assert decoded.tolist() == [0.0, 1.5, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0, 3.0]


def test_message_is_split_into_its_payloads(backend: Backend) -> None:
    parts = [sample_payload(backend, numel, kept)[0] for numel, kept in [(300, 12), (7, 0), (65, 65), (9, 1)]]
    message = torch.cat(parts)
    payloads = Payload.split(message)
    assert [p.numel for p in payloads] == [300, 7, 65, 9]
    for payload, part in zip(payloads, parts, strict=True):
        assert torch.equal(payload.data, part)
        direct, within = torch.zeros(payload.numel), torch.zeros(payload.numel)
        backend.decode_add(part, direct)
        backend.decode_add(payload.data, within)  # at whatever alignment the message gives it
        assert torch.equal(direct, within)
    assert Payload.split(message[:0]) == []
    with pytest.raises(PayloadError):
        Payload.split(message[:-1])
    with pytest.raises(PayloadError):
        Payload.split(torch.cat([message, torch.zeros(3, dtype=torch.uint8)]))


@pytest.mark.parametrize("numel", [10**6, 3 * 10**6])
def test_size_at_99_percent_sparsity(backend: Backend, numel: int) -> None:
    """At most 25 bits per kept entry with bf16 values, header included."""
    kept = numel // 100
    grad = torch.zeros(numel)
    grad[torch.randperm(numel, generator=torch.Generator().manual_seed(1))[:kept]] = 1.0
    out = torch.empty(payload_bound(numel, kept, ValueDtype.BF16), dtype=torch.uint8)
    stats = backend.compress(Job(grad, None, 0.5, out, value_dtype=ValueDtype.BF16, capacity=kept))
    assert stats.nnz == kept
    assert 8 * stats.nbytes / kept <= 25
    decoded = torch.zeros(numel)
    backend.decode_add(out[: stats.nbytes], decoded)
    assert torch.equal(decoded, grad)


def refuse(backend: Backend, data: torch.Tensor, numel: int) -> None:
    """Assert that a payload is refused everywhere and that the output is untouched."""
    out = torch.full((numel,), 1.25)
    with pytest.raises(PayloadError):
        backend.decode_add(data, out)
    assert bool((out == 1.25).all())
    with pytest.raises(PayloadError):
        mask_of(backend, data, numel)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", list(ValueDtype), ids=lambda value: value.label)
def test_every_truncation_is_refused(backend: Backend, kept: str, dtype: ValueDtype) -> None:
    numel = 300
    data, _ = sample_payload(backend, numel, KEPT[kept], dtype)
    for length in range(data.numel()):
        refuse(backend, data[:length].clone(), numel)
        with pytest.raises(PayloadError):
            Payload.from_tensor(data[:length])
    refuse(backend, torch.cat([data, data[:1]]), numel)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", list(ValueDtype), ids=lambda value: value.label)
def test_every_changed_byte_is_refused(backend: Backend, kept: str, dtype: ValueDtype) -> None:
    numel = 300
    data, _ = sample_payload(backend, numel, KEPT[kept], dtype)
    for at in range(data.numel()):
        for flip in (0x01, 0x80, 0xFF):
            changed = data.clone()
            changed[at] ^= flip
            refuse(backend, changed, numel)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_changed_payloads_with_right_checksums(data: st.DataObject) -> None:
    """Past the checksum: both implementations take the same payloads, and these decode to finite values."""
    reference, compiled = ReferenceBackend(), CpuBackend()
    numel = 300
    kept = data.draw(st.sampled_from([*KEPT.values()]))
    original, _ = sample_payload(compiled, numel, kept, data.draw(st.sampled_from(list(ValueDtype))))
    changed = bytearray(original.tolist())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    sealed = torch.frombuffer(bytearray(resealed(bytes(changed))), dtype=torch.uint8)
    outcomes: list[list[int] | None] = []
    for backend in (reference, compiled):
        out = torch.zeros(numel)
        try:
            backend.decode_add(sealed, out)
            assert Payload.from_tensor(sealed).nonfinite or bool(torch.isfinite(out).all())
            outcomes.append(out.view(torch.int32).tolist())
        except PayloadError:
            assert not bool(out.any())
            outcomes.append(None)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"\x7a\xdd", "magic"),
        (2, b"\x01", "version 1"),
        (3, b"\x08", "value dtype 8"),
        (4, b"\x02", "flags"),
        (4, b"\x01", "impossible"),
        (5, b"\x01", "reserved"),
        (7, b"\x01", "reserved"),
        (8, struct.pack("<I", 299), "299"),
        (8, struct.pack("<I", 2**32 - 1), "truncated|bytes"),
        (12, struct.pack("<I", 301), "impossible"),
        (12, struct.pack("<I", 2**32 - 1), "impossible"),
        (12, struct.pack("<I", 11), "bytes"),
    ],
)
def test_wrong_header_fields_are_named(
    backend: Backend, offset: int, replacement: bytes, message: str
) -> None:
    data, _ = sample_payload(backend)
    changed = bytearray(data.tolist())
    changed[offset : offset + len(replacement)] = replacement
    tensor = torch.frombuffer(bytearray(resealed(bytes(changed))), dtype=torch.uint8)
    out = torch.zeros(300)
    with pytest.raises(PayloadError, match=message):
        backend.decode_add(tensor, out)
    assert not bool(out.any())


def test_payload_of_another_tensor(backend: Backend) -> None:
    data, _ = sample_payload(backend)
    for numel in (0, 299, 301):
        out = torch.zeros(numel)
        with pytest.raises(PayloadError, match="300"):
            backend.decode_add(data, out)
        assert not bool(out.any())
    with pytest.raises(PayloadError, match="uint8"):
        Payload.from_tensor(torch.zeros(50))
    with pytest.raises(PayloadError, match="uint8"):
        Payload.split(torch.zeros(2, 50, dtype=torch.uint8))


def test_nonfinite_payload(backend: Backend) -> None:
    grad = torch.ones(40)
    grad[7] = float("nan")
    out = torch.empty(payload_bound(40, None, ValueDtype.BF16), dtype=torch.uint8)
    stats = backend.compress(Job(grad, None, 0.5, out, value_dtype=ValueDtype.BF16))
    payload = Payload.from_tensor(out[: stats.nbytes])
    assert stats.nonfinite
    assert payload.nonfinite
    assert (payload.nbytes, payload.nnz) == (HEADER_NBYTES, 0)
    decoded = torch.zeros(40)
    backend.decode_add(payload.data, decoded)
    assert bool(decoded.isnan().all())
    assert not bool(mask_of(backend, payload.data, 40).any())
    for at in range(HEADER_NBYTES):
        changed = payload.data.clone()
        changed[at] ^= 0x01
        refuse(backend, changed, 40)


def test_bounds_hold_for_every_choice(backend: Backend) -> None:
    for numel in (1, 300, 65537):
        for kept in {0, 1, numel // 100, numel // 3, numel}:
            for dtype in ValueDtype:
                data, _ = sample_payload(backend, numel, kept, dtype)
                assert data.numel() <= payload_bound(numel, kept, dtype)


@pytest.mark.parametrize("name", ["fp64", "BF17", 9])
def test_unknown_names_list_the_allowed_ones(name: str | int) -> None:
    with pytest.raises(ValueError, match="fp32, bf16, fp16, int8, int4, int2, log4, sign"):
        ValueDtype.parse(name)


# ---- tables ----------------------------------------------------------------------------------------


def test_every_value_type_has_one_codec() -> None:
    assert list(VALUE_CODECS) == list(ValueDtype)


def test_numbers_on_the_wire_are_stable() -> None:
    assert {member.label: int(member) for member in ValueDtype} == {
        "fp32": 0,
        "bf16": 1,
        "fp16": 2,
        "int8": 3,
        "int4": 4,
        "int2": 5,
        "log4": 6,
        "sign": 7,
    }


def test_compiled_kernels_number_value_types_alike() -> None:
    (names,) = re.findall(r"enum { (VALUE_\w+, .*?) };", build.SOURCE.read_text())
    expected = [*(f"VALUE_{member.name}" for member in ValueDtype), "VALUE_COUNT"]
    assert names.split(", ") == expected


def test_lossless_value_types() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        value_dtype = ValueDtype.lossless(dtype)
        values = torch.randn(300, generator=torch.Generator().manual_seed(1)).to(dtype)
        _, decoded = encode_values(values.float(), value_dtype)
        assert torch.equal(decoded.to(dtype), values)
        assert value_dtype.bits == 8 * dtype.itemsize
    assert ValueDtype.lossless(torch.float64) is ValueDtype.FP32
    assert ValueDtype.INT8.bits == 8
