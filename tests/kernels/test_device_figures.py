"""Figures that stay on the device: one read for all tensors of a collective, and the same messages."""

from __future__ import annotations

import math

import pytest
import torch
from support.deferred_backend import DeferredBackend, OnDevice, on_device
from torch import Tensor

from dct_plugin import Compressor, kernels
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.codecs.payload import Payload, payload_bound
from dct_plugin.codecs.stats import Figures, Stats, read_stats
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.config import KernelConfig
from dct_plugin.errors import ConfigError
from dct_plugin.kernels import Backend, Job
from dct_plugin.kernels.job import SMALLEST_TAU
from dct_plugin.kernels.reference import ReferenceBackend

REFERENCE = ReferenceBackend()
SIZES = [0, 1, 70, 257, 1000, 4099, 20_000]


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(17)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    grads = [
        torch.randn(SIZES[i % len(SIZES)], generator=generator).to(dtypes[i % len(dtypes)]) for i in range(20)
    ]
    grads[6][5] = math.nan
    return grads


def encode(backend: Backend, writer: MessageWriter, receivers: int = 3) -> list[Stats]:
    """Twenty tensors to the receivers in turn, one of them dense."""
    stats = []
    for i, grad in enumerate(gradients()):
        tau = 0.0 if i == 4 else backend.sample_threshold(grad, None, 0.05, 1000, seed=i)
        value_dtype = ValueDtype(i % 4)
        room = writer.reserve(payload_bound(grad.numel(), None, value_dtype), i % receivers)
        stats.append(backend.compress(Job(grad, None, tau, room, value_dtype=value_dtype)))
        writer.advance(stats[-1], i % receivers)
    return stats


def new_writer(receivers: int = 3) -> MessageWriter:
    return MessageWriter(torch.device("cpu"), receivers)


def test_one_read_for_all_tensors_of_all_messages() -> None:
    expected_writer, writer = new_writer(), new_writer()
    backend = DeferredBackend()
    for _ in range(3):  # memory of one step serves the next
        expected_writer.clear()
        writer.clear()
        expected_stats = encode(REFERENCE, expected_writer)
        expected = expected_writer.read()
        before = OnDevice.reads
        stats = encode(backend, writer)
        assert OnDevice.reads == before
        assert all(each.pending for each in stats)
        messages = writer.read()
        assert OnDevice.reads == before + 1
        for message, other in zip(messages, expected, strict=True):
            assert torch.equal(message, other)
        assert [each.counts for each in read_stats(stats)] == [each.counts for each in expected_stats]
        assert [each.tau for each in stats] == [each.tau for each in expected_stats]
        assert [bool(each.nonfinite) for each in stats].index(True) == 6
        assert OnDevice.reads == before + 1


def test_statistics_read_first_are_not_read_again_by_the_messages() -> None:
    expected, writer = new_writer(2), new_writer(2)
    encode(REFERENCE, expected, 2)
    stats = encode(DeferredBackend(), writer, 2)
    before = OnDevice.reads
    assert read_stats(stats) == stats
    for message, other in zip(writer.read(), expected.read(), strict=True):
        assert torch.equal(message, other)
    assert OnDevice.reads == before + 1


def test_numbers_on_the_cpu_are_never_copied_and_leave_no_gaps() -> None:
    writer = new_writer()
    before = OnDevice.reads
    stats = encode(REFERENCE, writer)
    assert not any(each.pending for each in stats)
    assert read_stats(stats) == stats
    buffers = [buffer.data_ptr() for buffer in writer._buffers]
    assert [message.data_ptr() for message in writer.read()] == buffers
    assert OnDevice.reads == before


def test_a_message_goes_on_after_it_was_read() -> None:
    """Sizes known and unknown in turn, and a message looked at in between."""
    writer = MessageWriter(torch.device("cpu"))
    expected = b""
    for i in range(8):
        content = bytes([i + 1] * (3 * i + 1))
        room = writer.reserve(40)
        room[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        counts = Figures(on_device([len(content), 0, 0, 0], torch.int64))
        writer.advance(Stats.on_device(counts) if i % 3 == 1 else len(content))
        expected += content
        if i in (0, 4):
            assert bytes(writer.message.tolist()) == expected
    assert bytes(writer.message.tolist()) == expected
    writer.clear()
    assert writer.message.numel() == 0


def test_a_received_message_is_split_with_one_read() -> None:
    writer = new_writer(1)
    encode(REFERENCE, writer, 1)
    received = writer.message.clone().as_subclass(OnDevice)
    before = OnDevice.reads
    payloads = Payload.split(received, verify=False)
    assert OnDevice.reads == before + 1
    assert len(payloads) == 20
    assert all(isinstance(payload.data, OnDevice) for payload in payloads)
    assert [p.header for p in payloads] == [p.header for p in Payload.split(writer.message)]


def test_a_figure_that_is_asked_for_early_is_right_at_the_price_of_a_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_factories", dict(kernels._factories))
    monkeypatch.setattr(kernels, "_instances", dict(kernels._instances))
    kernels.register_backend("deferred", DeferredBackend)
    source = torch.randn(20_000, generator=torch.Generator().manual_seed(5))
    streams = [
        Compressor(sparsity=0.99, kernels=KernelConfig(backend=name)) for name in ("reference", "deferred")
    ]
    before = OnDevice.reads
    for _ in range(4):
        expected, found = (stream.compress(source) for stream in streams)
        assert torch.equal(expected.data, found.data)
    assert OnDevice.reads > before


def test_a_threshold_on_the_device_counts_as_positive() -> None:
    grad = torch.tensor([0.0, 1.0, 2.0])
    for backend in (REFERENCE, DeferredBackend(), kernels.get_backend("cpu")):
        out = torch.empty(payload_bound(3, None, 0), dtype=torch.uint8)
        stats = backend.compress(Job(grad, None, torch.tensor(0.0), out))
        assert (stats.nnz, stats.tau) == (2, SMALLEST_TAU)
        assert backend.compress(Job(grad, None, torch.tensor(1.5), out)).nnz == 1
        assert backend.compress(Job(grad, None, torch.tensor(math.nan), out)).nnz == 0
        for wrong in (torch.ones(1), torch.tensor(1.0, dtype=torch.float64), torch.ones((), device="meta")):
            with pytest.raises(ValueError, match=r"tau must be|is on cpu"):
                backend.compress(Job(grad, None, wrong, out))


def test_a_registered_backend_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("_factories", "_instances"):  # other modules register the backend in this process
        own = ("reference", "cpu", "triton")
        kept = {name: made for name, made in vars(kernels)[known].items() if name in own}
        monkeypatch.setattr(kernels, known, kept)
    allowed = 'must be one of "auto", "reference", "cpu", "triton"$'
    with pytest.raises(ConfigError, match=rf'^dct\.kernels\.backend = "deferred": {allowed}'):
        kernels.get_backend("cpu", "deferred")
    kernels.register_backend("deferred", DeferredBackend)
    assert kernels.backend_names() == ("auto", "reference", "cpu", "triton", "deferred")
    assert isinstance(kernels.get_backend("cpu", "deferred"), DeferredBackend)
