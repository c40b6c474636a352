"""Error-bounded codes in Triton kernels, run by the interpreter: the host's bytes, values and refusals."""

from __future__ import annotations

import logging
import os
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounded_cases import drawn, segments
from support.host_reads import HostReads
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux only")

from support.interpreted_masks import needs_masks

from dct_plugin import kernels
from dct_plugin.config import EmbeddingChannelConfig, KernelConfig
from dct_plugin.config.methods import BoundMethod
from dct_plugin.embedding.messages import VectorBlock, VectorMessages
from dct_plugin.embedding.vector_codec import VectorCodec
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import fallbacks, get_backend
from dct_plugin.kernels.embedding_format import Outgoing
from dct_plugin.kernels.embedding_reference import ReferenceEmbeddingKernels
from dct_plugin.kernels.triton.backend import TritonBackend
from dct_plugin.kernels.triton.embedding import TritonCodeKernels
from dct_plugin.model_parallel.compressors import COMPRESSORS, Site

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="the interpreter is off: tests/gpu has these kernels",
    ),
    needs_masks,
]
HOST, DEVICE = ReferenceEmbeddingKernels(), TritonCodeKernels()


def alike(parts: list[Outgoing]) -> list[Tensor]:
    """The messages, which are the host's, and decode to the same values."""
    with HostReads() as reads:
        coded = DEVICE.encode(parts, 0, decoded=True)
    assert [read for read in reads.places if not read.endswith(":tolist")] == ["codecs/copies.py:cpu"]
    messages, lengths, outs, values = [], [], [], []
    for part, mine, other in zip(parts, coded, HOST.encode(parts, 0, decoded=True), strict=True):
        assert mine.finite == other.finite
        assert (mine.decoded is None) == (other.decoded is None)
        assert mine.decoded is None or torch.equal(mine.decoded, other.decoded)
        assert (mine.message is None) == (other.message is None)
        if mine.message is not None:
            assert torch.equal(mine.message, other.message)
            messages.append(mine.message[:-1])
            lengths.append(part.lengths)
            outs.append(torch.zeros(part.x.numel()))
            values.append(mine.decoded)
    assert all(
        opened is not None and opened.fault is None for opened in DEVICE.decode(messages, lengths, outs)
    )
    for out, value in zip(outs, values, strict=True):
        assert bool(out.isnan().all()) if value is None else torch.equal(out, value)
    return messages


@given(first=segments, second=segments, seed=st.integers(0, 1 << 30))
@settings(max_examples=4, deadline=None)
def test_the_bytes_of_the_host(first: Any, second: Any, seed: int) -> None:
    alike([drawn(first, seed)._replace(kind=1), drawn(second, seed + 1)._replace(kind=3)])


def test_several_programs_raw_entries_and_what_is_not_finite() -> None:
    parts = [
        drawn([(2100, 0.01, 1.0, 0.3), (0, 1.0, 1.0, 0.0), (40, 1e-9, 1.0, 0.0)], 1)._replace(kind=1),
        drawn([(70, 0.1, 1.0, 0.0)], 2)._replace(send=False),
        drawn([(33, 0.1, 1.0, 0.0)], 3),
        drawn([(50, 0.0, 1.0, 1.0), (20, 0.1, 0.0, 1.0)], 4),
    ]
    parts[2].x[7] = float("nan")
    parts[3].x.zero_()
    assert len(alike(parts)) == 3


def test_whatever_is_damaged_is_refused() -> None:
    part = drawn([(50, 0.1, 1.0, 0.0), (9, 1e-9, 1.0, 0.0), (6, 1.0, 1e-6, 0.0)], 1)
    (payload,) = alike([part])
    damaged = [payload[:size].clone() for size in (0, 19, 20, 22, len(payload) - 1)]
    for at in (0, 2, 3, 5, 8, 13, 17, 20, 24, 40, len(payload) - 1):
        damaged.append(payload.clone())
        damaged[-1][at] ^= 0x41
    unknown, trailing = payload.clone(), torch.cat([payload, payload[:3]])
    unknown[20] = 40  # under a checksum that is right
    for each in (unknown, trailing):
        data = bytearray(each.numpy().tobytes())
        data[12:16] = (len(data) - 20).to_bytes(4, "little")
        data[16:20] = zlib.crc32(bytes(data[20:]), zlib.crc32(bytes(data[:16]))).to_bytes(4, "little")
        damaged.append(torch.frombuffer(data, dtype=torch.uint8))
    outs = [torch.empty(65) for _ in damaged]
    found = DEVICE.decode(damaged, [part.lengths] * len(damaged), outs)
    faults = [None if opened is None else opened.fault for opened in found]
    expected = HOST.decode(damaged, [part.lengths] * len(damaged), outs)
    assert faults == [opened.fault for opened in expected]
    assert None not in faults


def test_the_messages_of_an_exchange(caplog: pytest.LogCaptureFixture) -> None:
    """Those of an exchange on the host, in both directions; Rice codes of a peer are read there."""
    triton, plain = TritonBackend(), get_backend("cpu", "reference")

    def of(backend: Any, bit_cost: int = 0, host: Any = HOST) -> VectorMessages:
        config = EmbeddingChannelConfig.of({"error_bound": 0.1, "gradient_bound": 0.1})
        codec = VectorCodec(config, name="t", backend=lambda _: backend, host=lambda: host)
        codec.bit_cost = bit_cost
        return VectorMessages(codec, 4)

    generator = torch.Generator().manual_seed(0)
    rows = [[3, 2], [4, 1]]
    blocks = [
        VectorBlock(torch.randn(5, 4, generator=generator), each, None, np.array([0.05, 0.1]))
        for each in rows
    ]
    gradients = [torch.randn(5, 4, generator=generator) for _ in rows]
    host, device = of(plain), of(triton)
    results = []
    for messages in (host, device):
        sent = messages.encode(blocks, 0)
        answers = messages.encode_gradients(gradients, 0, rows, [None, None], quantised=True)
        got, _ = messages.decode(sent.data, 0, sent.own, rows)
        back, _ = messages.decode(answers.data, 0, answers.own, rows, [None, None])
        results.append((sent.data[1], answers.data[1], sent.own, got, back, torch.tensor(answers.kept)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    fallbacks.say_once.cache_clear()
    rice = of(plain, 1 << 20, get_backend("cpu", "cpu").embedding_kernels()).encode(blocks, 0)
    with caplog.at_level(logging.WARNING, logger="dct_plugin.kernels"):
        got, _ = device.decode(rice.data, 0, rice.own, rows)
        assert torch.equal(got, results[0][3])
    (record,) = caplog.records
    assert record.getMessage().startswith("a rank sends Rice codes or deflated ones, which the host reads,")
    damaged = results[1][0].clone()
    damaged[30] ^= 1
    with pytest.raises(PayloadError, match=r"t: message from rank 1 of the group: error-bounded payload has"):
        device.decode([rice.data[0], damaged], 0, rice.own, rows)


def test_bounded_activations_are_coded_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the host's codes, which another rank may send."""
    monkeypatch.setattr(kernels, "_factories", dict(kernels._factories))
    monkeypatch.setattr(kernels, "_instances", dict(kernels._instances))
    kernels.register_backend("interpreted", TritonBackend)
    config = BoundMethod(error_bound=0.1)
    device, host = (
        COMPRESSORS["bound"](config, Site("point", kernels=KernelConfig(backend=name)))
        for name in ("interpreted", "reference")
    )
    parts = [torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.zeros(2, 7)]
    with HostReads() as reads:
        written = device.encode(parts)
    assert [read for read in reads.places if not read.endswith(":tolist")] == ["codecs/copies.py:cpu"]
    for part, mine, other in zip(parts, written.messages, host.encode(parts).messages, strict=True):
        assert mine.numel() <= device.nbytes(part.shape, part.dtype)
        outs = [torch.zeros_like(part) for _ in range(3)]
        device.decode(mine, outs[0], 0)
        host.decode(mine, outs[1], 0)
        device.decode(other, outs[2], 0)
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
        assert float((outs[0] - part).abs().max()) <= 0.11
