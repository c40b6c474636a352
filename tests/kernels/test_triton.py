"""Triton kernels, run by Triton's interpreter (or a GPU): the reference's bits, and no look at the device."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT
from support.host_reads import HostReads
from support.kernel_cases import GRAD_DTYPES, Case, agree, cases, same_bits
from support.production_form import alike, compressed, gradients
from torch import Tensor
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton", reason="triton is for Linux only")

import triton.language as tl
from kernels.triton_compile import WARPS
from support.launches import counted_launches
from triton import jit
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from dct_plugin import Compressor, kernels
from dct_plugin.codecs.index import index_form
from dct_plugin.codecs.message import ONE, Key, MessageWriter
from dct_plugin.codecs.payload import Payload, payload_bound
from dct_plugin.codecs.stats import read_stats
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.compression.feedback import Residual, unpacked
from dct_plugin.compression.stream import Encoded
from dct_plugin.config import KernelConfig
from dct_plugin.errors import DCTError, PayloadError
from dct_plugin.kernels import Backend, Job
from dct_plugin.kernels.backend import mask_of
from dct_plugin.kernels.job import SMALLEST_TAU, PartedJob, Parts, Spans
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton import backend as triton_backend
from dct_plugin.kernels.triton import batch as triton_batch
from dct_plugin.kernels.triton import message_kernels, selection_kernels
from dct_plugin.kernels.triton.backend import TritonBackend
from dct_plugin.kernels.triton.batch import Batch, upload
from dct_plugin.kernels.triton.messages import UnopenedMessages

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off: tests/gpu has these kernels"
)
REFERENCE = ReferenceBackend()
TRITON = TritonBackend()
BOTH: tuple[Backend, Backend] = (REFERENCE, TRITON)
SIZES = [0, 1, 7, 33, 256, 257, 1023, 4095, 4097, 9000]


def read_alike(payload: Tensor, nnz: int, numel: int) -> None:
    """Everything that reads the payload gives the same bits."""
    outs = [torch.linspace(-1, 1, numel), torch.linspace(-1, 1, numel)]
    for backend, out in zip(BOTH, outs, strict=True):
        assert backend.decode_add(payload, out) == nnz
    assert same_bits(*outs) or bool((outs[0].isnan() & outs[1].isnan()).all())
    assert torch.equal(*[backend.positions(payload, numel) for backend in BOTH])


@given(case=cases(sizes=SIZES))
@settings(max_examples=25, deadline=None)
def test_triton_kernels_equal_the_reference(case: Case) -> None:
    payload, (_, nnz, _, _) = agree(case, *BOTH)
    read_alike(payload, nnz, case.grad.numel())


@pytest.mark.parametrize("tau", [0.1, 2.0])
@pytest.mark.parametrize("capacity", [None, 500])
def test_several_blocks_and_programs(tau: float, capacity: int | None) -> None:
    """Two blocks of positions, one of them hardly used, and a limit that wraps around."""
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(70_001, generator=generator)
    grad[2000:60_000] *= 0.1
    case = Case(
        grad, torch.randn(70_001, generator=generator) * 0.3, capacity is None, tau, capacity, 66_000,
        ValueDtype.BF16, False,
    )  # fmt: skip
    payload, (_, nnz, above, _) = agree(case, *BOTH)
    assert (nnz == capacity) == (capacity is not None)
    assert above > 500
    read_alike(payload, nnz, grad.numel())


@pytest.mark.parametrize(
    ("tau", "capacity"),
    [
        (0.3, 300),
        (1.9, 9000),
        (1.9, 200_000),  # more than there is
        *(pytest.param(*each, marks=pytest.mark.long) for each in [(1.9, 300), (0.3, 9000), (0.3, 200_000)]),
    ],
)
def test_counts_of_many_blocks(tau: float, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven blocks, in two payloads of a message. Groups are small here."""
    for module in (selection_kernels, message_kernels):
        monkeypatch.setattr(module, "COUNTED", tl.constexpr(2))
    generator = torch.Generator().manual_seed(4)
    payloads = []
    for numel, residual in ((5 * 65_536 + 9, True), (65_537, False)):
        grad = torch.randn(numel, generator=generator)
        grad[numel // 3 :] *= 0.5
        beside = torch.randn(numel, generator=generator) * 0.3 if residual else None
        case = Case(grad, beside, False, tau, capacity, numel // 2, ValueDtype.INT2, False)
        payload, (_, nnz, _, _) = agree(case, *BOTH)
        read_alike(payload, nnz, numel)
        payloads.append(payload)
    message = torch.cat(payloads)
    outs = [[torch.zeros(5 * 65_536 + 9), torch.zeros(65_537)] for _ in BOTH]
    for backend, into in zip(BOTH, outs, strict=True):
        backend.sum_messages([message, message], into)
    assert all(same_bits(one, other) for one, other in zip(*outs, strict=True))


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_thresholds_equal_the_reference(data: st.DataObject) -> None:
    case = data.draw(cases(sizes=SIZES))
    numel = case.grad.numel()
    arguments = (
        data.draw(st.floats(1e-6, 1.0)),
        data.draw(st.sampled_from([1, 10, 1000, max(1, numel), 2 * numel + 1])),
        data.draw(st.integers(-(2**63), 2**64)),
    )
    found, expected = (float(each.sample_threshold(case.grad, case.residual, *arguments)) for each in BOTH)
    assert found == expected
    k = data.draw(st.integers(1, numel + 2))
    assert len({float(each.exact_threshold(case.grad, case.residual, k)) for each in BOTH}) == 1


@pytest.mark.parametrize("numel", [0, 1, 64, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("scale", [1.0, 1e-37, 1e37])
def test_packed_residuals_equal_the_reference(numel: int, dtype: torch.dtype, scale: float) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    values[::9] *= 20
    results = []
    for backend in BOTH:
        out, exponents = torch.empty(numel, dtype=dtype), torch.empty(-(-numel // 64), dtype=torch.int8)
        grouped = exponents if dtype == torch.int8 else None
        backend.pack(values, out, grouped, seed=0x9E3779B97F4A)
        back = torch.full((numel,), 5.0)
        backend.unpack(out, grouped, back)
        results.append((out.view(torch.uint8), exponents if grouped is not None else out[:0], back))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_an_empty_tensor_has_nothing_to_read() -> None:
    case = Case(torch.empty(0), None, True, 1.0, None, 0, ValueDtype.INT8, False)
    payload, _ = agree(case, *BOTH)
    read_alike(payload, 0, 0)


def test_thresholds_of_more_than_one_program_holds() -> None:
    grad = torch.randn(70_000, generator=torch.Generator().manual_seed(1))
    grad[::3] = math.nan
    assert len({float(each.sample_threshold(grad, None, 0.02, 100_000, 5)) for each in BOTH}) == 1
    assert len({float(each.exact_threshold(grad, None, 69_999)) for each in BOTH}) == 1
    grad[:] = math.inf
    assert float(TRITON.exact_threshold(grad, None, 5)) == SMALLEST_TAU


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("scale", [0.5, 1 / 3])
def test_sums_of_messages(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes, messages = [5, 3000, 0, 2000, 7], []
    for sender in range(3):
        writer = MessageWriter(torch.device("cpu"))
        for position, size in enumerate(sizes):
            tensor = torch.randn(size, generator=generator)
            if size == 7 and sender == 1:
                tensor[3] = math.inf
            value_dtype = ValueDtype(position)
            room = writer.reserve(payload_bound(size, None, value_dtype))
            tau = 1.5 * (size > 5)
            writer.advance(REFERENCE.compress(Job(tensor, None, tau, room, value_dtype=value_dtype)))
        messages.append(writer.message)
    outs = [[torch.zeros(size, dtype=dtype) for size in sizes] for _ in BOTH]
    for backend, into in zip(BOTH, outs, strict=True):
        with HostReads() as reads, counted_launches() as names:
            backend.sum_messages(messages, into, scale)
    assert names == ["open_messages", "scan", "place", "add"]
    assert reads.places == ["kernels/triton/backend.py:cpu", "kernels/triton/backend.py:tolist"]
    for expected, found in zip(*outs, strict=True):
        assert same_bits(found, expected) or bool((found.isnan() & expected.isnan()).all())
    assert bool(outs[1][4].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("searched", [4, pytest.param(32, marks=pytest.mark.long)])
def test_sums_of_more_messages_and_entries_than_a_program_looks_at(
    dtype: torch.dtype, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages than are searched at once, and tensors of several programs, few or many entries."""
    monkeypatch.setattr(message_kernels, "SEARCHED", tl.constexpr(searched))
    generator = torch.Generator().manual_seed(5)
    sizes = [2 * message_kernels.RANGE.value + 9, message_kernels.RANGE.value, 1]
    messages = []
    for sender in range(searched + 2):
        writer = MessageWriter(torch.device("cpu"))
        for size in sizes:
            tensor, tau = torch.randn(size, generator=generator), (2.5, 0.5, 1.5)[sender % 3]
            room = writer.reserve(payload_bound(size, None, ValueDtype.FP32))
            job = Job(tensor, None, tau, room, value_dtype=ValueDtype.FP32)
            writer.advance(REFERENCE.compress(job))
        messages.append(writer.message)
    results = [[torch.zeros(size, dtype=dtype) for size in sizes] for _ in BOTH]
    for backend, outs in zip(BOTH, results, strict=True):
        backend.sum_messages(messages, outs, 1 / 3)
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_written_and_added_up_without_a_look(dtype: torch.dtype) -> None:
    """Three senders; then one whose message does not fit, and one whose frame is damaged."""
    sizes = [5, 3000, 0, 2000]
    with HostReads() as reads:
        writer = MessageWriter(torch.device("cpu"), 5)
        for receiver in (0, 2, 3, 4):  # one slot has no payload
            random = torch.Generator().manual_seed(min(receiver, 3))
            for position, size in enumerate(sizes):
                tensor = torch.randn(size, generator=random)
                value_dtype = ValueDtype((0, 1, 3, 5)[position])
                room = writer.reserve(payload_bound(size, None, value_dtype), receiver)
                tau = 0.0 if size <= 5 else torch.tensor(1.5)
                job = Job(tensor, None, tau, room, value_dtype=value_dtype)
                writer.advance(TRITON.compress(job), receiver)
        buffer = torch.full((3 * 16_384 + 288 + 1056,), 0xA5, dtype=torch.uint8)
        *frames, empty, short = buffer.split([16_384, 16_384, 16_384, 288, 1056])
        bounds = [(at, at + 16_384) for at in (0, 16_384, 32_768)]
        places = [bounds[0], (49_152, 49_440), *bounds[1:], (49_440, 50_496)]
        empty.zero_()
        with counted_launches() as launched:  # the last one has too little room
            TRITON.write_slots(writer, buffer, places, 7)
        assert launched == ["fill_slots"]
        found = [torch.zeros(size, dtype=dtype) for size in sizes]
        heads = TRITON.prepare_sum(buffer, bounds, found, 1 / 3)()
    assert reads.places == []
    assert heads[:, -1].tolist() == [0, 0, 0]
    expected = [torch.zeros(size, dtype=dtype) for size in sizes]
    contents = [message for receiver, message in enumerate(writer.read()) if receiver not in (1, 4)]
    assert empty.view(torch.int64).tolist() == [0, 7, *[0] * 34]
    assert short.view(torch.int64)[:4].tolist() == [contents[2].numel(), 7, 0, 0]
    assert same_bits(short[32:], contents[2][:1024])
    REFERENCE.sum_messages(contents, expected, 1 / 3)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    for frame, content in zip(frames, contents, strict=True):
        assert frame.view(torch.int64)[:4].tolist() == [content.numel(), 7, 0, 0]
        assert same_bits(frame[32 : 32 + content.numel()], content)
        assert bool((frame[32 + content.numel() :] == 0xA5).all())
    expected, found = ([torch.linspace(-1, 1, size).to(dtype) for size in sizes] for _ in BOTH)
    untouched = [out.clone() for out in found]
    heads = TRITON.prepare_sum(buffer, [(0, 1024)], found, 1.0, spare=True)()
    assert heads[:, -1].tolist() == [0]
    assert all(same_bits(one, other) for one, other in zip(found, untouched, strict=True))
    heads = TRITON.prepare_sum(buffer, bounds[:1], found, 1.0, spare=True)()
    assert heads[:, -1].tolist() == [0]
    for payload, out in zip(Payload.split(contents[0]), expected, strict=True):
        total = out.to(torch.float32)
        REFERENCE.decode_add(payload, total)
        out.copy_(total)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    buffer[16_384 + 300] ^= 1
    found = [torch.zeros(size, dtype=dtype) for size in sizes]
    heads = TRITON.prepare_sum(buffer, [(0, 1024), bounds[1]], found, 1.0)()
    assert heads[:, -1].tolist() == [0, 1]
    assert all(bool(out.isnan().all()) for out in found)
    buffer[16_384 + 32] ^= 1  # no header at all
    found = [torch.zeros(size, dtype=dtype) for size in sizes]
    heads = TRITON.prepare_sum(buffer, bounds[1:2], found, 1.0)()
    assert heads[:, -1].tolist() == [7]
    assert not any(bool(out.any()) for out in found)


@pytest.mark.parametrize(("room", "expected"), [(triton_backend.ROOM, 1), (2, 2)], ids=["one batch", "two"])
def test_payloads_slots_and_the_coming_sum_are_one_upload(
    monkeypatch: pytest.MonkeyPatch, room: int, expected: int
) -> None:
    """Two messages are added to bf16 tensors, in fp32 memory that is made when they are there."""
    uploaded: list[int] = []

    def counted(table: Any, where: torch.device) -> Tensor:
        uploaded.append(len(table))
        return upload(table, where)

    monkeypatch.setattr(triton_batch, "upload", counted)
    monkeypatch.setattr(triton_backend, "ROOM", room)
    generator, writer = torch.Generator().manual_seed(8), MessageWriter(torch.device("cpu"))
    slot, sizes = torch.zeros(2 * 8192, dtype=torch.uint8), [700, 5, 1301]
    found, wanted = ([torch.zeros(size, dtype=torch.bfloat16) for size in sizes] for _ in BOTH)
    with TRITON.batched():
        for size in sizes:
            out = writer.reserve(payload_bound(size, None, ValueDtype.BF16))
            grad, tau = torch.randn(size, generator=generator), torch.tensor(1.5)
            writer.advance(TRITON.compress(Job(grad, None, tau, out, value_dtype=ValueDtype.BF16)))
        TRITON.write_slots(writer, slot, [(0, 8192)], 7)
        add_up = TRITON.prepare_sum(slot, [(0, 8192), (8192, 16_384)], found, 1 / 3)
    slot[8192:] = slot[:8192]  # that of the other rank arrives
    heads = add_up()
    assert len(uploaded) == expected
    assert heads[:, -1].tolist() == [0, 0]
    REFERENCE.sum_messages([writer.message] * 2, wanted, 1 / 3)
    assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))


def test_room_for_positions_is_that_of_the_values_and_a_message_with_more_is_damaged() -> None:
    size, writer = 2000, MessageWriter(torch.device("cpu"))
    values = torch.randn(size, generator=torch.Generator().manual_seed(6))
    room = writer.reserve(payload_bound(size, None, ValueDtype.INT2))
    writer.advance(TRITON.compress(Job(values, None, 0.01, room, value_dtype=ValueDtype.INT2)))
    slot = torch.zeros(1024, dtype=torch.uint8)
    TRITON.write_slots(writer, slot, [(0, 1024)], 7)
    for bits, expected, positions in ((2, 0, size), (16, 7, 8 * 1024 // 17)):
        out = [torch.zeros(size)]
        targets = np.array([[[size, 0, 0, 0, 0]]])
        messages = UnopenedMessages(slot, [(0, 1024)], Spans.whole((size,)), targets, slots=True, bits=bits)
        opened = messages.open(upload(messages.table(), slot.device))
        heads = TRITON.prepare_sum(slot, [(0, 1024)], out, 1.0, bits=bits)()
        assert (heads[:, -1].tolist(), opened.positions.numel()) == ([expected], positions)
        assert bool(out[0].any()) == (not expected)


def test_production_forms_have_the_bits_of_the_reference() -> None:
    for seed in range(2):
        found, expected = (compressed(each, gradients(seed, "cpu")) for each in (TRITON, REFERENCE))
        assert alike(found, expected)


def test_two_threads_get_their_own_tables() -> None:
    def uploads(own: int) -> bool:
        where = torch.device("cpu")
        return all(upload(np.array([[own, turn]]), where).tolist() == [[own, turn]] for turn in range(3000))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(uploads, range(2)))


@pytest.mark.parametrize("clear", [False, True])
def test_a_residual_of_several_blocks_is_put_back_where_one_entry_is_not_finite(clear: bool) -> None:
    sizes = [70_001, 5_000, 3]  # two blocks, two tiles of one block, one tile
    made = torch.Generator().manual_seed(7)
    for poisoned in (0, 1, 2):
        grads = [torch.randn(size, generator=made) for size in sizes]
        grads[poisoned][-1] = math.inf
        residuals = [torch.randn(size, generator=made) for size in sizes]
        found = []
        for backend in BOTH:
            with backend.batched():
                for grad, residual in zip(grads, residuals, strict=True):
                    grad, left = grad.clone(), torch.full_like(residual, 5.0)
                    room = torch.empty(payload_bound(len(grad), None, ValueDtype.FP32), dtype=torch.uint8)
                    backend.compress(Job(grad, residual, 1.5, room, residual_out=left, clear=clear))
                    found.append((grad, left))
        for (grad, left), (other, theirs) in zip(found[:3], found[3:], strict=True):
            assert same_bits(left, theirs)
            assert same_bits(grad, other)
        assert same_bits(found[3 + poisoned][1], residuals[poisoned])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1 / 3), (torch.bfloat16, 0.5)])
def test_slots_of_owners_are_added_at_once(dtype: torch.dtype, scale: float) -> None:
    """Each to tensors of its own, none or several; one is damaged, one does not fit its slot."""
    generator = torch.Generator().manual_seed(5)
    sizes: list[list[int]] = [[3000, 5], [], [70_001], [900, 0, 2000], [4000], [500, 600], [64]]
    writer = MessageWriter(torch.device("cpu"), len(sizes))
    for receiver, each in enumerate(sizes):
        for size in each:
            room = writer.reserve(payload_bound(size, None, ValueDtype.BF16), receiver)
            job = Job(torch.randn(size, generator=generator), None, 1.5, room, value_dtype=ValueDtype.BF16)
            writer.advance(TRITON.compress(job), receiver)
    ends = itertools.accumulate([1056 if each == [4000] else 32_800 for each in sizes], initial=0)
    bounds = list(itertools.pairwise(ends))
    buffer = torch.zeros(bounds[-1][1], dtype=torch.uint8)
    TRITON.write_slots(writer, buffer, bounds, 7)
    buffer[bounds[5][0] + 32 + 60] ^= 0x55
    more = bounds[6][0]
    buffer[more : more + 8] = torch.tensor([32_800 - 32]).view(torch.uint8)  # more than its payload
    results, begins = [], itertools.accumulate([0, *itertools.chain.from_iterable(sizes)])
    of = [[(0, begin, begin + size) for size, begin in zip(each, begins, strict=False)] for each in sizes]
    first = sum(map(sum, sizes))
    for at_once in (False, True):
        together = torch.zeros(first, dtype=dtype)
        outs = [[together[start:stop] for _, start, stop in each] for each in of]
        with counted_launches() as launched:
            if at_once:
                found = [TRITON.prepare_sum(buffer, bounds, [together], scale, Spans(of))()]
            else:
                pairs = zip(bounds, outs, strict=True)
                found = [TRITON.prepare_sum(buffer, [place], own, scale)() for place, own in pairs]
        results.append((torch.cat(found), [out for each in outs for out in each]))
    assert launched == ["open_messages", "scan", "place", "add"]
    (one, expected), (other, sums) = results
    assert one[:, -1].tolist() == other[:, -1].tolist() == [0, 0, 0, 0, 0, 1, 7]
    for mine, theirs in zip(sums, expected, strict=True):
        assert same_bits(mine, theirs) or bool((mine.isnan() & theirs.isnan()).all())
    assert sum(bool(out.any()) for out in sums) >= 5


def bucket(tensors: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients of two types and their residuals, one of them poisoned, some at odd addresses, one empty."""
    generator = torch.Generator().manual_seed(tensors)
    sizes = [(0, 5, 4099, 900, 70, 2500)[at % 6] for at in range(tensors)]
    flat = torch.randn(sum(sizes) + 1, generator=generator)[1:]
    made = [
        ((part.bfloat16() if at % 2 else part), 0.5 * torch.randn(len(part), generator=generator))
        for at, part in enumerate(flat.split(sizes))
    ]
    made[4][0][7] = math.nan
    return made


def reduced(backend: Backend, tensors: int, *, at_once: bool) -> tuple[list[Tensor], list[Any]]:
    """A bucket's way through a message: some dense, the others above a threshold that is found on the device,
    with residuals in place or beside, and the gradients cleared.
    """
    writer, grads, kept, figures = MessageWriter(torch.device("cpu")), [], [], []
    with backend.batched() if at_once else contextlib.nullcontext():
        for number, (grad, residual) in enumerate(bucket(tensors)):
            left = residual if number % 4 < 2 else torch.empty_like(residual)
            tau: Any = 0.0
            if number % 3:
                tau = backend.sample_threshold(grad, residual, 0.1, 1000, seed=number)
            capacity = max(1, len(grad) // 12)  # less than what passes: positions wrap around
            room = writer.reserve(payload_bound(len(grad), len(grad), ValueDtype.BF16))
            stats = backend.compress(Job(
                *(grad, residual, tau, room), residual_out=left, capacity=capacity, start=len(grad) // 2,
                value_dtype=ValueDtype.BF16, clear=True,
            ))  # fmt: skip
            writer.advance(stats)
            grads.append(grad)
            kept.append(left)
            figures.append(stats)
    read = [(each.counts, each.tau) for each in read_stats(figures)]
    return [writer.message.clone(), *grads, *kept], read


def test_a_bucket_takes_as_many_launches_as_a_few_tensors() -> None:
    """With the bytes of one tensor at a time, and of the reference. The message outgrows its memory."""
    launched = []
    for tensors in (12, 24):
        expected = reduced(REFERENCE, tensors, at_once=False)
        with counted_launches() as names:
            found = reduced(TRITON, tensors, at_once=True)
        launched.append(names)
        assert found[1] == expected[1]
        assert all(same_bits(one, other) for one, other in zip(found[0], expected[0], strict=True))
    assert sorted(launched[0]) == sorted(launched[1])
    with counted_launches() as names:
        one_by_one = reduced(TRITON, 24, at_once=False)
    assert len(names) > 2 * len(launched[1])
    assert all(same_bits(one, other) for one, other in zip(one_by_one[0], found[0], strict=True))


def test_a_batch_is_launched_when_it_is_full_or_when_something_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_backend, "ROOM", 2)
    grad = torch.randn(300, generator=torch.Generator().manual_seed(1))
    with counted_launches() as names, TRITON.batched():
        rooms = [torch.empty(payload_bound(300, None, 0), dtype=torch.uint8) for _ in range(3)]
        stats = [TRITON.compress(Job(grad, None, 2.0, room)) for room in rooms]
        assert names.count("select") == 1
        nbytes = stats[2].nbytes
        assert names.count("select") == 2
        TRITON.decode_add(rooms[0][:nbytes], torch.zeros(300))
    assert names.count("select") == 2
    assert all(same_bits(room[:nbytes], rooms[0][:nbytes]) for room in rooms)


def written(backend: Backend, numel: int = 3000, tau: float = 1.5) -> Tensor:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    out = torch.empty(payload_bound(numel, None, ValueDtype.BF16), dtype=torch.uint8)
    stats = backend.compress(Job(grad, None, tau, out, value_dtype=ValueDtype.BF16))
    return out[: stats.nbytes]


@pytest.mark.parametrize("tau", [0.1, 1.5])
def test_a_damaged_payload_is_not_added_and_is_told_with_the_next_figures(tau: float) -> None:
    good = written(REFERENCE, tau=tau)
    for at in (20, 25, good.numel() - 1):
        damaged = good.clone()
        damaged[at] ^= 0x55
        out = torch.ones(3000)
        TRITON.decode_add(damaged, out)
        assert bool((out == 1.0).all())
        with pytest.raises(PayloadError, match="decoded before"):
            written(TRITON)
        written(TRITON)  # told once


def test_a_damaged_payload_is_told_on_the_stream_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no streams: their numbers are given by hand."""

    def on_stream(number: int) -> None:
        monkeypatch.setattr(triton_backend, "stream_number", lambda where: number)

    damaged = written(REFERENCE)
    damaged[25] ^= 0x55
    for stream in (1, 2):
        on_stream(stream)
        TRITON.decode_add(damaged, torch.zeros(3000))
        TRITON.positions(damaged, 3000)
    on_stream(3)
    written(TRITON)
    for stream in (2, 1):
        on_stream(stream)
        with pytest.raises(PayloadError, match="decoded before"):
            written(TRITON)
        written(TRITON)  # told once


@pytest.mark.parametrize("spots", [8, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("tau", [0.1, 1.5, 2.5])
def test_wrong_positions_under_right_checksums(tau: float, spots: int) -> None:
    """As a sender that is wrong would write them: bits of either part, the last byte, and one bit moved in so
    many spots.
    """
    good = written(REFERENCE, tau=tau)
    header = Payload.from_tensor(good).header
    end, bitmap = header.index_nbytes, -(-index_form(header.nnz, header.numel).bits // 8)
    changes = [(at % end, flip) for at in (0, 4, bitmap - 1, bitmap, end - 1) for flip in (0xFF, 0x80, 0x11)]
    for at, flip in [*changes, *((at, 3 << at % 7) for at in range(0, end, max(5, end // spots)))]:
        body = good[24:].clone()
        body[at] ^= flip
        wrong = torch.cat([torch.tensor(list(header.with_checks(body).pack()), dtype=torch.uint8), body])
        try:
            REFERENCE.decode_add(wrong, torch.zeros(3000))
        except PayloadError:
            out = torch.zeros(3000)
            TRITON.decode_add(wrong, out)
            assert not bool(out.any())
            with pytest.raises(PayloadError, match="decoded before"):
                written(TRITON, 64)
        else:  # other positions, none of them impossible
            outs = [torch.zeros(3000), torch.zeros(3000)]
            for backend, out in zip(BOTH, outs, strict=True):
                backend.decode_add(wrong, out)
            assert same_bits(*outs)


def test_nothing_waits_for_the_device() -> None:
    """From the threshold to the payload, and back: only figures and headers are read, once per message."""
    grad, residual = torch.randn(5000), torch.zeros(5000)
    writer = MessageWriter(torch.device("cpu"))
    stats = []
    with HostReads() as reads:
        for value_dtype in ValueDtype:
            tau = TRITON.sample_threshold(grad, residual, 0.05, 1000, seed=1)
            room = writer.reserve(payload_bound(5000, 1000, value_dtype))
            options: dict[str, Any] = {"capacity": 1000, "value_dtype": value_dtype}
            stats.append(TRITON.compress(Job(grad, residual, tau, room, **options)))
            writer.advance(stats[-1])
        writer.reserve(payload_bound(5000, 5000, 0))
        writer.advance(TRITON.compress(Job(grad, None, 0.0, writer.reserve(payload_bound(5000, 5000, 0)))))
    assert reads.places == []
    assert all(each.pending for each in stats)
    with HostReads() as reads:
        message = writer.message
        read_stats(stats)
    assert set(reads.places) == {"codecs/copies.py:cpu", "codecs/stats.py:tolist"}
    payloads = Payload.split(message)
    with HostReads() as reads:
        for payload in payloads:
            TRITON.decode_add(payload, residual)
            mask_of(TRITON, payload, 5000)
    assert reads.places == []


def test_a_stream_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_factories", dict(kernels._factories))
    monkeypatch.setattr(kernels, "_instances", dict(kernels._instances))
    kernels.register_backend("interpreted", TritonBackend)
    kernels.register_backend("plain", lambda: REFERENCE)
    for transactional, beside in ((False, False), (False, True), (True, False)):
        streams = [
            Compressor(sparsity=0.9, transactional=transactional, kernels=KernelConfig(backend=name))
            for name in ("plain", "interpreted")
        ]
        for step in range(3):
            gradient = torch.randn(3000, generator=torch.Generator().manual_seed(step)).bfloat16()
            if step == 1:
                gradient[5] = math.nan
            expected, found = (stream.compress(gradient).data for stream in streams)
            assert same_bits(expected, found)
            assert streams[1].residual is not None
            streams[1].residual._beside = beside  # as on CUDA
            for stream in streams:
                stream.end_step(skipped=transactional and step == 1)
        states = [stream.state_dict() for stream in streams]
        assert same_bits(states[0]["residual"], states[1]["residual"])
        assert states[0]["threshold"] == states[1]["threshold"]


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("failing", ["threshold", "between tensors", "launch"])
@pytest.mark.usefixtures("uninitialised_memory_is_nan")
def test_a_residual_survives_an_exception(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """A pass writes into fresh memory, as on CUDA. The residual is the old one, or all of the new one."""
    monkeypatch.setattr(kernels, "_factories", dict(kernels._factories))
    monkeypatch.setattr(kernels, "_instances", dict(kernels._instances))
    kernels.register_backend("interpreted", TritonBackend)
    streams = [
        Compressor(sparsity=0.9, name=str(at), kernels=KernelConfig(backend="interpreted")) for at in range(2)
    ]
    gradient = torch.randn(900, generator=torch.Generator().manual_seed(1))
    for stream in streams:
        stream.compress(gradient)
        assert isinstance(stream.residual, Residual)
        stream.residual._beside = True
    before = [stream.state_dict() for stream in streams]

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    def encode_both() -> None:
        with streams[0].backend(gradient.device).batched():
            for stream in streams:
                stream.encode(gradient, writer)
                if failing == "between tensors":
                    fails()

    if failing == "threshold":
        monkeypatch.setattr(streams[1], "propose", fails)
    elif failing != "between tensors":
        monkeypatch.setattr(Batch, "_write", fails)
        monkeypatch.setattr(Batch, "_pass", fails)
    writer = MessageWriter(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="out of memory"):
        encode_both()
    after = [stream.state_dict() for stream in streams]
    assert_same_state(before[1]["residual"], after[1]["residual"])
    if failing == "launch":
        assert_same_state(before[0]["residual"], after[0]["residual"])
    else:  # the first tensor was taken down, and is launched with what it left
        assert bool(torch.isfinite(after[0]["residual"]).all())
        assert not torch.equal(before[0]["residual"], after[0]["residual"])


@pytest.mark.parametrize(
    ("remembered", "transactional"),
    [
        ({"residual_dtype": "bf16"}, False),
        ({"residual_dtype": "bf16", "expert": {"threshold": "topk"}}, False),
        ({"residual_dtype": "int8"}, True),
    ],
    ids=["bf16", "of all", "int8"],
)
def test_streams_of_a_bucket_take_as_many_launches_whatever_they_remember(
    monkeypatch: pytest.MonkeyPatch, remembered: dict[str, Any], transactional: bool
) -> None:
    """Three steps, the second of which is poisoned in a part of one stream, and skipped if it can be; then a
    restart. Nobody looks at a figure before the end of a step.
    """
    monkeypatch.setattr(kernels, "_factories", dict(kernels._factories))
    monkeypatch.setattr(kernels, "_instances", dict(kernels._instances))
    kernels.register_backend("interpreted", TritonBackend)
    kernels.register_backend("plain", lambda: REFERENCE)
    if remembered.get("expert"):  # by torch's sort, which reads what the batch unpacks
        monkeypatch.setattr(triton_backend, "_MOST_SAMPLES", 1000)
    launched = []
    for tensors in (2, 3):
        pairs = [
            [
                Compressor(
                    sparsity=0.9, name=f"{at}", transactional=transactional,
                    kernels=KernelConfig(backend=name), **remembered,
                )
                for name in ("plain", "interpreted")
            ]
            for at in range(tensors)
        ]  # fmt: skip
        launched.append([])
        for step in range(3):
            if step == 2:
                for pair in pairs:
                    state = pair[0].state_dict()
                    state["residual"] = unpacked(state["residual"])
                    for stream in pair:
                        stream.load_state_dict(state)
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randn((900, 1301)[at % 2], generator=generator) for at in range(tensors)]
            grads = [grad.bfloat16() if at % 2 else grad for at, grad in enumerate(grads)]
            grads[1][1200] = math.nan if step == 1 else 1.0
            copies = [grad.clone() for grad in grads]
            writers = [MessageWriter(torch.device("cpu")) for _ in BOTH]
            # Parts that begin at multiples of 16 bytes, and others.
            cuts = [304 if len(grad) > 900 else 301 for grad in grads]
            parts = [Key([(0, cut), (cut, len(grad))]) for grad, cut in zip(grads, cuts, strict=True)]
            both = Key((0, 0))
            expected = [
                pair[0].encode(grad, writers[0], None, part, both, clear=True)
                for pair, grad, part in zip(pairs, grads, parts, strict=True)
            ]
            kernel = pairs[0][1].backend(grads[0].device)
            with HostReads() as reads, counted_launches() as names, kernel.batched():
                found = [
                    pair[1].encode(grad, writers[1], None, part, both, clear=True)
                    for pair, grad, part in zip(pairs, copies, parts, strict=True)
                ]
            assert reads.places == []
            if step < 2:  # a residual that was loaded in another type is packed first
                launched[-1].append(sorted(names))
            assert same_bits(*(writer.message for writer in writers))
            for (plain, triton), one, other, grad, copy in zip(
                pairs, expected, found, grads, copies, strict=True
            ):
                assert one.totals()[:4] == other.totals()[:4]
                assert sizes_of(one) == sizes_of(other)
                assert same_bits(grad, copy)
                plain.observe(one)
                triton.observe(other)
                for stream in (plain, triton):
                    stream.end_step(skipped=transactional and step == 1)
                assert_same_state(plain.state_dict(), triton.state_dict())
    assert launched[0] == launched[1] or "threshold" in remembered.get("expert", {})


def sizes_of(encoded: Encoded) -> list[int]:
    return [size for stats in encoded.stats for size in stats.sizes]


def assert_same_state(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert same_bits(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    else:
        assert one == other


def test_cuda_tensors_take_triton_where_there_is_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DCT_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_instances", {})
    monkeypatch.setattr(kernels, "_problems", {})
    assert kernels.get_backend("cuda").name == "triton"
    assert kernels.get_backend("cpu").name != "triton"
    with pytest.raises(ValueError, match="serves cuda tensors, not cpu"):
        kernels.get_backend("cpu", "triton")
    monkeypatch.setattr(kernels, "_instances", {})
    monkeypatch.setattr(kernels, "_problems", {})
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "dct_plugin.kernels.triton.backend")
    with caplog.at_level(logging.INFO, logger="dct_plugin.kernels"):
        assert kernels.get_backend("cuda").name == "reference"
        assert kernels.get_backend("cuda").name == "reference"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'triton' is not available (triton cannot be imported" in warnings[0]
    assert "plain torch on cuda tensors" in warnings[0]


@pytest.mark.parametrize("groups", [[4, 2, 1, 0, 130, 5], [0, 0, 0, 0, 0, 0]])
def test_planes_of_numbers_of_few_bits(groups: list[int]) -> None:
    count = sum(groups)
    generator = torch.Generator().manual_seed(count)
    widths = torch.tensor([3, 0, 32, 7, 10, 1])
    numbers = torch.randint(-(2**31), 2**31, (count, 8), generator=generator).to(torch.int32)
    described, nbytes = (widths, torch.tensor(groups)), int((widths * torch.tensor(groups)).sum())
    with HostReads() as reads:
        packed = TritonBackend().planes.pack(numbers, *described, nbytes)
        found = TritonBackend().planes.unpack(packed, *described, count)
    assert not reads.places
    assert torch.equal(packed, ReferenceBackend().planes.pack(numbers, *described, nbytes))
    assert torch.equal(found, ReferenceBackend().planes.unpack(packed, *described, count))


def test_a_message_that_cannot_grow_leaves_a_batch_without_the_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the batch, which is launched also after an error, would write to no address."""
    writer, left = MessageWriter(torch.device("cpu")), [torch.full((1000,), 7.0) for _ in BOTH]
    grad, parts = torch.linspace(-1, 1, 1000), Parts.whole(1000, 500, ValueDtype.FP32)
    jobs = [PartedJob(grad, torch.zeros(1000), 0.5, each, parts) for each in left]

    def compress() -> None:
        with TRITON.batched():
            for job in jobs:
                TRITON.compress_parts(job, writer, ONE)
                monkeypatch.setattr(writer, "_with_room", mock.Mock(side_effect=MemoryError))

    with pytest.raises(MemoryError):
        compress()
    assert bool((left[0] != 7).all())
    assert bool((left[1] == 7).all())


def _without_interpreter(script: str, *arguments: str) -> list[str]:
    """Return the lines that a script prints where kernels are compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_kernels_that_are_kept_are_those_that_triton_would_launch() -> None:
    """In all steps that benchmarks/host_work.py counts; the driver is a stub, as there is no GPU."""
    (line,) = _without_interpreter("benchmarks/launches.py", "--check")
    assert int(line.split()[0]) >= 24


def test_kernels_are_compiled_here_with_the_warps_of_their_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grad, writer = torch.randn(20_000), MessageWriter(torch.device("cpu"))
    warps: dict[str, set[int]] = {}
    launch = GridExecutor.__call__

    def noted(executor: Any, *arguments: Any, **constants: Any) -> Any:
        if "num_warps" in constants:
            warps.setdefault(executor.fn.__name__, set()).add(constants["num_warps"])
        return launch(executor, *arguments, **constants)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    tau = TRITON.sample_threshold(grad, None, 0.01, 1 << 14, 1)
    room = writer.reserve(payload_bound(grad.numel(), None, ValueDtype.BF16))
    writer.advance(TRITON.compress(Job(grad, None, tau, room, value_dtype=ValueDtype.BF16)))
    TRITON.sum_messages([writer.message], [torch.zeros_like(grad)])
    assert warps == {name: {number} for name, number in WARPS.items()}


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    """What the interpreter takes, the compiler may refuse: machine code for sm_90, which needs no GPU."""
    names = [
        "overflow",
        "select",
        "compact",
        "kth_largest",
        "write",
        "settle",
        "fill_slots",
        "open_messages",
        "scan",
        "place",
        "add",
        "displace",
    ]
    assert len(_without_interpreter("tests/kernels/triton_compile.py", *names)) == 31


@jit
def _count_before(positions, counts, limit, found):
    each = tl.arange(0, 4)
    count = tl.load(counts + each)
    tl.store(found + each, message_kernels._count_before(positions + 0 * each, count, limit))


def test_a_program_finds_its_share_of_a_message_in_a_few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load waits for the one before; a bisection of 50,000 positions takes 16."""
    loads: list[np.ndarray] = []
    load = InterpreterBuilder.create_masked_load

    def counted(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        loads.append(pointers.data[mask.data])
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    positions = torch.randperm(1 << 20)[:50_000].sort().values.to(torch.int32)
    first = positions.data_ptr()
    for counts in ([0, 1, 7, 8], [9, 63, 64, 65], [513, 50_000, 49_999, 32_768]):
        for limit in (0, 1, *(int(positions[count // 2]) + 1 for count in counts), 1 << 20):
            found = torch.zeros(4, dtype=torch.int64)
            loads.clear()
            _count_before[(1,)](positions, torch.tensor(counts), limit, found)
            expected = [int(torch.searchsorted(positions[:count], limit)) for count in counts]
            assert found.tolist() == expected
            assert len(loads) <= 7
            places = (np.concatenate(loads[1:]).astype(np.int64) - first) // positions.itemsize
            assert 0 <= places.min() <= places.max() < max(counts)


def test_positions_far_apart_and_side_by_side() -> None:
    """Words of the bitmap without a bit, with 32, and positions that share their upper bits."""
    places = torch.cat(
        [torch.arange(40), torch.tensor([70_000, 70_001, 260_000]), torch.arange(270_000, 270_100)]
    )
    grad = torch.zeros(300_000)
    grad[places] = torch.arange(1.0, len(places) + 1)
    payload, (_, nnz, _, _) = agree(Case(grad, None, True, 0.5, None, 0, ValueDtype.BF16, False), *BOTH)
    out = torch.zeros_like(grad)
    assert TRITON.decode_add(payload, out) == nnz == len(places)
    assert torch.equal(out, grad)


def test_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's answer and the tensors are stubs: there is no device."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        gradient = torch.empty(100, device="cuda")
    before = Compressor(sparsity=0.9)
    with pytest.raises(DCTError, match="CUDA graph records the current stream"):
        before.encode(gradient, MessageWriter(torch.device("cpu")))
    assert before.residual is None
    with pytest.raises(DCTError, match="CUDA graph records the current stream"):
        upload(np.array([[1]]), gradient.device)
    assert upload(np.array([[1]]), torch.device("cpu")).tolist() == [[1]]
