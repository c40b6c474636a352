"""Error-bounded codes in a fixed number of bits per table: the values of the compiled kernels' codes.

The reference runs, and Triton's interpreter in place of a device.
"""

from __future__ import annotations

import hashlib
import itertools
import os

import numpy as np
import pytest
import torch
from support.host_reads import HostReads
from torch import Tensor

from dct_plugin.codecs import planes
from dct_plugin.config import EmbeddingChannelConfig
from dct_plugin.embedding.messages import VectorBlock, VectorMessages
from dct_plugin.embedding.vector_codec import VectorCodec
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import embedding, packed
from dct_plugin.kernels.backend import Backend
from dct_plugin.kernels.embedding import Outgoing
from dct_plugin.kernels.reference import ReferenceBackend

LENGTHS = [np.array([40, 7, 0, 64, 16]), np.array([8]), np.array([3, 24])]
BOUNDS = [np.array([0.01, 0.3, 0.1, 1e-9, 0.02]), np.array([5.0]), np.array([0.1, 0.0])]


def backends() -> list[Backend]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return [ReferenceBackend()]
    triton = pytest.importorskip("dct_plugin.kernels.triton.backend")
    return [ReferenceBackend(), triton.TritonBackend()]


def parts(poisoned: int | None = None) -> list[Outgoing]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number, (lengths, bounds) in enumerate(zip(LENGTHS, BOUNDS, strict=True)):
        x = torch.randn(int(lengths.sum()), generator=generator)
        x[-16:-12] = 0.0
        if number == 0:
            x[-16:] = 0.0
        if number == poisoned:
            x[3] = torch.inf
        made.append(Outgoing(x, lengths, bounds, send=number != 1, kind=5))
    return made


@pytest.mark.parametrize("relative", [None, 0.1])
@pytest.mark.parametrize("poisoned", [None, 0, 1])
def test_the_values_of_the_compiled_codes(relative: float | None, poisoned: int | None) -> None:
    sent = parts(poisoned)
    oracle = sent
    if relative is not None:
        with np.errstate(all="ignore"):
            squares = [relative * each**0.5 for each in embedding.mean_squares(sent)]
        oracle = [part._replace(bounds=each) for part, each in zip(sent, squares, strict=True)]
    expected = embedding.encode(oracle, 0, decoded=True)
    messages: list[list[Tensor]] = []
    for backend in backends():
        with HostReads() as reads:
            found = packed.encode(backend, sent, relative)
        assert reads.places == ["codecs/copies.py:cpu", "kernels/packed.py:numpy"]  # one copy
        assert [each.message is None for each in found] == [False, True, False]
        for number, (part, one, other) in enumerate(zip(sent, found, expected, strict=True)):
            assert one.decoded is not None
            if number == poisoned:  # the segment crosses as it is
                assert torch.equal(one.decoded[: LENGTHS[number][0]], part.x[: LENGTHS[number][0]])
            elif relative is None:
                assert other.decoded is not None
                assert torch.equal(one.decoded, other.decoded)
            else:  # sums have another order
                assert other.decoded is not None
                assert torch.allclose(one.decoded, other.decoded, rtol=0.02)
        messages.append([each.message for each in found if each.message is not None])
        outs = [torch.full((sent[number].x.numel(),), 7.0) for number in (0, 2)]
        payloads = [message[:-1] for message in messages[-1]]
        with HostReads() as reads:
            faults = packed.decode(backend, payloads, [LENGTHS[0], LENGTHS[2]], outs)
        assert reads.places == ["codecs/copies.py:cpu", "kernels/packed.py:numpy"]
        assert faults == [None, None]
        for out, number in zip(outs, (0, 2), strict=True):
            decoded = found[number].decoded
            assert decoded is not None
            assert torch.equal(out, decoded)
    for others in messages[1:]:
        assert all(torch.equal(one, other) for one, other in zip(messages[0], others, strict=True))


def test_the_bytes_of_a_message() -> None:
    message = packed.encode(ReferenceBackend(), parts()[2:])[0].message
    assert message is not None
    data = bytes(message.tolist())
    # Bits of both tables, of which the second is not coded; half step widths; planes.
    assert data[:2] == bytes([3, 32])
    half = torch.frombuffer(bytearray(data[2:6]), dtype=torch.bfloat16).float()
    assert half.tolist() == pytest.approx([0.0996, 0.0], abs=1e-4)
    x = parts()[2].x
    numbers = torch.cat([(x[:3] / (2 * half[0])).round().to(torch.int32), torch.zeros(5, dtype=torch.int32)])
    described = torch.tensor([3, 32]), torch.tensor([1, 3])
    rows = torch.cat([numbers, x[3:].view(torch.int32)]).view(-1, 8)
    assert data[6:-5] == bytes(planes.pack(rows, *described, 3 + 96).tolist())
    check = sum(byte * (2 * at + 1) for at, byte in enumerate(data[:-5])) % 2**32
    assert data[-5:] == check.to_bytes(4, "little") + b"\x05"
    assert hashlib.sha256(data).hexdigest()[:16] == "e6c0be4d8ae6f5c0"


@pytest.mark.parametrize("ranks", [2, 5, 9])
@pytest.mark.parametrize("value_dtype", [None, "bf16"])
def test_plain_vectors_are_looked_at_once_per_direction(ranks: int, value_dtype: str | None) -> None:
    """At the last bytes of all messages; the host knows the sizes of what every entry of crosses."""
    config = EmbeddingChannelConfig.of({"value_dtype": value_dtype} if value_dtype else {})
    rows, x = [[3, 2]] * ranks, [torch.randn(5, 16) for _ in range(ranks)]
    x[1][2, 3] = float("inf")
    backend = backends()[-1]
    if backend.lengths_on_host:
        pytest.skip("needs the kernels of a device")
    messages = VectorMessages(VectorCodec(config, name="t", backend=lambda _: backend), 16)
    blocks = [VectorBlock(each, count, None, None) for each, count in zip(x, rows, strict=True)]
    none: list[Tensor | None] = [None] * ranks
    with HostReads() as reads:
        sent = messages.encode(blocks, 0)
        got, _ = messages.decode(sent.data, 0, sent.own, rows)
        answers = messages.encode_gradients(x, 0, rows, none, quantised=False)
        back, _ = messages.decode(answers.data, 0, answers.own, rows, none)
    assert reads.places == ["embedding/messages.py:tolist"] * 2
    for each in (got, back):
        assert each[5:10].isnan().all()  # of the rank whose vectors are not finite
        assert torch.allclose(torch.cat([each[:5], each[10:]]), torch.cat([x[0], *x[2:]]), rtol=0.01)
    short = [sent.data[0], sent.data[1][1:], *sent.data[2:]]
    with pytest.raises(PayloadError, match="t: message from rank 1 of the group: "):
        messages.decode(short, 0, sent.own, rows)


def _under_a_threshold(
    ranks: int, section: dict[str, float]
) -> tuple[VectorMessages, list[list[int]], list[Tensor], list[Tensor]]:
    """Return the messages of a device's kernels, and rows, vectors and masks of each rank."""
    rows, x = [[3, 2]] * ranks, [torch.randn(5, 16) for _ in range(ranks)]
    backend = backends()[-1]
    if backend.lengths_on_host:
        pytest.skip("needs the kernels of a device")
    codec = VectorCodec(EmbeddingChannelConfig.of(section), name="t", backend=lambda _: backend)
    return VectorMessages(codec, 16), rows, x, [each.abs() > 0.7 for each in x]


@pytest.mark.parametrize("ranks", [2, 9])
def test_vectors_under_a_threshold_are_looked_at_once_per_direction(ranks: int) -> None:
    """At the sizes of all messages, or the entries of all masks; then at heads, with those entries."""
    messages, rows, x, masks = _under_a_threshold(ranks, {"sparsity": 0.5})
    blocks = [VectorBlock(*each, None) for each in zip(x, rows, masks, strict=True)]
    counts = [0]

    def note() -> None:
        copied = {"codecs/payload.py:numpy", "codecs/stats.py:tolist"}  # they read what is on the host
        counts.append(sum(place not in copied for place in reads.places))

    with HostReads() as reads:
        sent = messages.encode(blocks, 0)
        note()
        got, found = messages.decode(sent.data, 0, sent.own, rows)
        note()
        answers = messages.encode_gradients(x, 0, rows, sent.masks, quantised=False)
        note()
        messages.decode(answers.data, 0, answers.own, rows, sent.masks)
        note()
    waits = [after - before for before, after in itertools.pairwise(counts)]
    assert waits == [1, 1, 1, 1]
    assert torch.allclose(got, torch.cat(x) * torch.cat(masks), rtol=0.01)
    assert all(
        each is not None and torch.equal(each, m) for each, m in zip(found[1:], masks[1:], strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 9])
def test_bounded_vectors_under_a_threshold_are_looked_at_as_often_for_all_ranks(ranks: int) -> None:
    section = {"sparsity": 0.5, "error_bound": 0.1, "gradient_bound": 0.1}
    messages, rows, x, masks = _under_a_threshold(ranks, section)
    blocks = [VectorBlock(*each, np.array([0.1, 0.2])) for each in zip(x, rows, masks, strict=True)]
    with HostReads() as reads:
        sent = messages.encode(blocks, 0)
        got, found = messages.decode(sent.data, 0, sent.own, rows)
        answers = messages.encode_gradients(x, 0, rows, sent.masks, quantised=True)
        messages.decode(answers.data, 0, answers.own, rows, sent.masks)
    copied = ["codecs/copies.py:cpu", "kernels/packed.py:numpy"]  # the second one of what is on the host
    read = ["embedding/messages.py:tolist", *copied]
    assert reads.places == [*copied, "embedding/messages.py:__int__", *read, *read, *read]
    assert float((got - torch.cat(x) * torch.cat(masks)).abs().max()) <= 0.2
    assert all(
        each is not None and torch.equal(each, m) for each, m in zip(found[1:], masks[1:], strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 5])
def test_an_exchange_looks_at_the_device_three_times_whatever_the_number_of_ranks(ranks: int) -> None:
    """At bits when messages are written; at last bytes, and at heads, when they are read. (Codes of the host
    would take a copy of the vectors to each rank, and of each rank's message.)
    """
    config = EmbeddingChannelConfig.of({"error_bound": 0.1, "gradient_bound": 0.1})
    rows, x = [[3, 2]] * ranks, [torch.randn(5, 16) for _ in range(ranks)]
    bounds = np.array([0.05, 0.1])
    for backend in backends():
        codec = VectorCodec(config, name="t", backend=lambda _, backend=backend: backend)
        messages = VectorMessages(codec, 16)
        blocks = [VectorBlock(each, count, None, bounds) for each, count in zip(x, rows, strict=True)]
        none: list[Tensor | None] = [None] * ranks
        with HostReads() as reads:
            sent = messages.encode(blocks, 0)
            got, _ = messages.decode(sent.data, 0, sent.own, rows)
            answers = messages.encode_gradients(x, 0, rows, none, quantised=True)
            back, _ = messages.decode(answers.data, 0, answers.own, rows, none)
        copied = ["codecs/copies.py:cpu", "kernels/packed.py:numpy"]  # the second one of what is on the host
        assert reads.places == [*copied, "embedding/messages.py:tolist", *copied] * 2
        assert float((got - torch.cat(x)).abs().max()) <= 0.1
        assert float((back - torch.cat(x)).abs().max()) <= 0.15


def test_distinct_rows_are_found_where_the_ids_are() -> None:
    ids = torch.tensor([[3, 0], [1, 0], [3, 6]])
    order, limits, base = (np.array(each) for each in ([1, 0], [4, 7], [0, 0]))
    with HostReads() as reads:
        rows, counts, positions = embedding.distinct_rows_in_torch(ids, order, limits, base)
    # How many there are, then they themselves; the rest reads that copy.
    assert reads.places[:2] == ["kernels/embedding.py:unique", "codecs/copies.py:cpu"]
    assert set(reads.places[2:]) <= {"kernels/embedding.py:__bool__", "kernels/embedding.py:numpy"}
    assert (rows.tolist(), counts.tolist()) == ([0, 6, 1, 3], [2, 2])
    assert positions.tolist() == [[3, 0], [2, 0], [3, 1]]


def test_damage_is_named() -> None:
    sent = parts()
    message = packed.encode(ReferenceBackend(), sent)[0].message
    assert message is not None

    def read(data: Tensor, sizes: np.ndarray = LENGTHS[0]) -> str:
        out = torch.full((int(sizes.sum()),), 7.0)
        (fault,) = packed.decode(ReferenceBackend(), [data], [sizes], [out])
        assert fault is not None
        assert (out == 7).all()
        return fault

    payload = message[:-1]
    for at in range(len(payload)):
        changed = payload.clone()
        changed[at] ^= 1 << at % 8
        assert read(changed) == (
            "error-bounded payload has a wrong checksum: corrupted in transit or in memory"
        )
    assert read(payload[:18]) == "error-bounded payload is truncated"
    assert "checksum" in read(payload[:-1])
    assert read(payload, LENGTHS[0] + 8) == "error-bounded payload is not of these segments"
