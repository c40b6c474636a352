"""Requests for rows in Triton kernels, run by the interpreter: the host's bytes, and what it reads."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from support.host_reads import HostReads
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux only")

from support.interpreted_masks import needs_masks

from dct_plugin.embedding.device_requests import DistinctRows
from dct_plugin.embedding.request_message import Bags, RowRequest, read_request, write_request
from dct_plugin.kernels.reference import ReferenceBackend
from dct_plugin.kernels.triton.backend import WRITTEN
from dct_plugin.kernels.triton.requests import TritonRequestKernels

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="the interpreter is off: tests/gpu has these kernels",
    ),
    needs_masks,
]
HOST, CPU = ReferenceBackend(WRITTEN), torch.device("cpu")
#: Rows of each owner's tables: few, which are all named or need bitmaps; many; one table, and none.
OWNERS = [[3, 40], [300, 90_000, 5], [700_000], [], [1200]]
RANK = 4


def first_rows(tables: list[int]) -> list[int]:
    return [0, *np.cumsum(tables, dtype=np.int64).tolist()]


def asked(samples: int, seed: int) -> tuple[list[RowRequest], list[Tensor]]:
    """What a rank wants of every owner, and the requests that a device writes."""
    rng = np.random.default_rng(seed)
    limits = [rows for tables in OWNERS for rows in tables]
    ids = torch.stack([torch.from_numpy(rng.integers(0, n, samples)) for n in limits], dim=1)
    base = np.concatenate([first_rows(tables)[:-1] for tables in OWNERS if tables]).astype(np.int64)
    found = DistinctRows(np.arange(len(limits)), np.array(limits), base, CPU).find(ids)
    counts = [len(tables) for tables in OWNERS]
    edges = torch.tensor(first_rows(counts))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), found.counts.cumsum(0)])[edges]
    codec = TritonRequestKernels(counts, [sum(tables) for tables in OWNERS], RANK, CPU)
    with HostReads() as reads:
        written = codec.write(found.rows, starts, samples)
    assert reads.places == []
    wanted = []
    for owner, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        each = found.counts[edges[owner] : edges[owner + 1]].tolist()
        wanted.append(RowRequest(samples, [True] * len(each), each, found.rows[begin:end]))
    return wanted, [written.head(owner, int(size)) for owner, size in enumerate(written.nbytes)]


def opened(messages: list[Tensor], tables: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Rows and figures of requests as a device reads them, in one buffer with other bytes between them."""
    room = max(len(message) for message in messages) // 8 * 8 + 16
    buffer = torch.full((room * len(messages),), 0xA5, dtype=torch.uint8)
    for at, message in enumerate(messages):
        buffer[room * at : room * at + len(message)] = message
    codec = TritonRequestKernels([len(tables)], [sum(tables)], -1, CPU)
    begins, nbytes = [room * at for at in range(len(messages))], torch.tensor([len(m) for m in messages])
    with HostReads() as reads:
        rows, figures = codec.open(buffer, begins, nbytes, room, first_rows(tables))
    assert reads.places == []
    return rows, figures.tolist()


@pytest.mark.parametrize("samples", [1, 7, 150, 600])
def test_the_bytes_of_the_host_and_what_it_reads(samples: int) -> None:
    wanted, messages = asked(samples, samples)
    for owner, (tables, want, message) in enumerate(zip(OWNERS, wanted, messages, strict=True)):
        if owner == RANK:
            continue
        assert torch.equal(message, write_request(want, first_rows(tables), HOST))
        answer = read_request(message, first_rows(tables), HOST)
        rows, ((found, wrong, several, *each),) = opened([message], tables)
        assert (found, wrong, list(enumerate(each))) == (samples, 0, answer.segments)
        assert torch.equal(rows[0, :several], answer.rows)


def test_what_is_damaged_or_not_for_a_device_is_left_to_the_host() -> None:
    tables = OWNERS[1]
    wanted, messages = asked(150, 1)
    good = messages[1]
    damaged = [good.clone() for _ in range(3)]
    for at, message in zip((30, 36, len(good) - 1), damaged, strict=True):
        message[at] ^= 0x55
    two = Bags(torch.tensor([301, 302]), torch.tensor([1, 1]))  # of the second table
    bags = RowRequest(2, [True, False, True], [0, 0, 2], bags=two)
    rice = wanted[1]._replace(rows=torch.arange(40) * 2200)
    others = [
        *(good[:-1], good[:20], good[:0]),
        write_request(bags, first_rows(tables), HOST),
        write_request(wanted[0]._replace(samples=2), first_rows(OWNERS[0]), HOST),
        write_request(rice, first_rows(tables), ReferenceBackend()),
    ]
    _, figures = opened([good, *damaged, *others], tables)
    assert [wrong for _, wrong, *_ in figures] == [0, *[1] * 9]
