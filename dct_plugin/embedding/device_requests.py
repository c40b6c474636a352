"""Requests for rows whose ids are on the tables' device: written there, read there, and waited for once.

The bytes are the host's, so that every rank may have its ids where it wants. A rank whose ids are impossible
says so in its frames, which leave before the host knows.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..codecs.copies import to_device, to_host
from ..codecs.slots import FAILED, PREFIX, WORDS
from ..codecs.stats import read_figures
from ..kernels import Backend
from ..kernels.embedding_format import OutOfRange
from .frames import Leg, Shape
from .request_message import MOST_BYTES, Answer, Bags
from .requests import Request, Requests

if TYPE_CHECKING:
    from ..kernels.triton.requests import Opened, TritonRequests, Written

__all__ = ["REQUEST", "DeviceRequests"]

#: What is known of a request beforehand.
REQUEST = Shape(1, 0, MOST_BYTES)


class DeviceRequests:
    """The way of requests from and to a device, of at least two ranks.

    Args:
        requests: What is asked.
        codec: Writes and reads it.
        device: Of the tables.
    """

    def __init__(self, requests: Requests, codec: TritonRequests, device: torch.device) -> None:
        self._requests, self._codec, self._device = requests, codec, device
        self._rank, self._placement = requests.rank, requests.placement
        self._peers = [r for r in range(len(requests.placement)) if r != requests.rank]
        ends = itertools.accumulate((len(tables) for tables in requests.placement), initial=0)
        self._bounds = list(ends)
        self._owners = to_device(torch.tensor(self._bounds), device)
        self._first_rows = requests.first_rows[self._rank]

    def cross(
        self, ids: Tensor, leg: Leg, backend: Backend
    ) -> tuple[Request, list[Answer], tuple[float, float]]:
        """This rank's request and what every rank asks for; what the exchange took, and reading, ms.

        Args:
            ids: int [B, F] on the device, at least one.
            leg: Of frames for requests.
            backend: For what arrives that a device does not read.

        Raises:
            IndexError: An id is outside its table. The others are told.
            ValueError: Ids of another shape.
            PayloadError: A request is damaged, or about other tables.
            DesyncError: A rank failed, or is at another exchange.
        """
        began = time.perf_counter()
        frames = leg.frames
        with frames.telling(leg):
            ids = self._requests.checked(ids, self._device)
            distinct = self._requests.distinct_on(self._device)
            found = distinct.find(ids)
            sorted_out = time.perf_counter()
            before = torch.cat([found.counts.new_zeros(1), found.counts.cumsum(0)])
            written = self._codec.write(found.rows, before.index_select(0, self._owners), len(ids))
            self._fill(leg, written, found.outside[0] < ids.numel())
        filled = time.perf_counter()
        frames.send(leg)
        sent = time.perf_counter()
        words, opened = self._opened(leg)
        also = words, written.nbytes, found.counts, found.outside, opened.figures
        told, sizes, counts, outside, figures = read_figures((), [each.contiguous() for each in also])
        try:
            distinct.check(ids, outside)
        except OutOfRange as error:
            raise self._requests.outside(error.column, error.found) from None
        shapes = [REQUEST] * len(self._placement)
        arrived = frames.checked(told, self._peers, shapes)
        taken = {r: sizes[r] for r in self._peers}
        late = frames.again(leg, {r: written.framed(r, size) for r, size in taken.items()}, arrived)
        frames.note(shapes, taken, 0)
        frames.note(shapes, arrived, 1)
        answers = self._read(leg, opened.rows, figures, arrived, late, backend)
        each_owner = [counts[a:b] for a, b in itertools.pairwise(self._bounds)]
        first, own = sum(counts[: self._bounds[self._rank]]), each_owner[self._rank]
        answers.insert(self._rank, _answer(len(ids), own, found.rows[first : first + sum(own)]))
        ended = time.perf_counter()
        request = Request(
            len(ids),
            [],
            answers[self._rank],
            each_owner,
            found.positions,
            {},
            distinct_ms=1e3 * (sorted_out - began),
            encode_ms=1e3 * (filled - sorted_out),
        )
        return request, answers, (1e3 * (sent - filled), 1e3 * (ended - sent))

    def _fill(self, leg: Leg, written: Written, failed: Tensor) -> None:
        """Put requests into their frames, as far as they fit; a rank that failed says so there."""
        heads = torch.zeros(len(written.nbytes), WORDS, dtype=torch.int64, device=self._device)
        heads[:, 0] = torch.where(failed, FAILED, written.nbytes)
        heads[:, 1] = leg.frames.fingerprint
        for r in self._peers:
            frame = leg.frame(r)
            body = written.framed(r, len(frame) - PREFIX)
            frame.view(torch.int64)[:WORDS] = heads[r]
            frame[PREFIX : PREFIX + len(body)] = body

    def _opened(self, leg: Leg) -> tuple[Tensor, Opened]:
        """The first words of the frames that arrived, and the requests in them."""
        words = leg.words(self._peers)
        begins = [leg.bounds[r][0] + PREFIX for r in self._peers]
        rooms = [leg.bounds[r][1] - begin for r, begin in zip(self._peers, begins, strict=True)]
        nbytes = torch.minimum(words[:, 0], to_device(torch.tensor(rooms), self._device)).clamp(min=0)
        return words, self._codec.open(leg.arriving, begins, nbytes, max(rooms), self._first_rows)

    def _read(
        self,
        leg: Leg,
        rows: Tensor,
        figures: Sequence[int],
        arrived: dict[int, int],
        late: dict[int, Tensor],
        backend: Backend,
    ) -> list[Answer]:
        """What the others ask for. The host reads, and refuses, what a device does not read."""
        answers, width = [], len(self._first_rows) + 2
        for at, source in enumerate(self._peers):
            samples, for_the_host, several, *each = figures[width * at : width * (at + 1)]
            if source in late or for_the_host:
                begin = leg.bounds[source][0] + PREFIX
                message = late.get(source, leg.arriving[begin : begin + arrived[source]])
                answers.append(self._requests.read(to_host(message), source, backend))
            else:
                answers.append(_answer(samples, each, rows[at, :several]))
        return answers


def _answer(samples: int, each: Sequence[int], rows: Tensor) -> Answer:
    """For distinct rows of all tables, so many of each."""
    nothing = torch.empty(0, dtype=torch.int64)
    return Answer(samples, list(enumerate(each)), rows, Bags(nothing, nothing))
