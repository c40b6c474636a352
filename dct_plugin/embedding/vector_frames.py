"""Vectors, or their gradients, between devices whose kernels write messages: the host waits once.

Messages are written into frames (:mod:`~dct_plugin.embedding.frames`) and read from them on the device. What
the host has to know, whether all of them fitted and are right, it reads in one copy behind them. Under a
threshold this is not possible: what crosses decides over sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..codecs.index import IndexEncoding
from ..codecs.message import MessageWriter
from ..codecs.payload import payload_bound
from ..codecs.slots import PREFIX, WORDS
from ..codecs.stats import KERNEL_ERRORS, Stats, read_figures
from ..codecs.values import ValueDtype
from ..errors import PayloadError
from ..kernels.embedding_format import FloatArray, IntArray, Outgoing
from ..stream import as_flat, encode_all
from .frames import Frames, Leg, Shape
from .messages import BOUNDED, VectorMessages

if TYPE_CHECKING:
    from ..kernels.triton.embedding import Coded, TritonEmbeddingKernels

__all__ = ["VectorFrames", "coded_shape", "plain_shape"]


def coded_shape(lengths: IntArray) -> Shape:
    """Of a message of error-bounded codes of so many entries in each segment."""
    entries, fixed = int(lengths.sum()), 24 + 3 * len(lengths)
    return Shape(entries, fixed, fixed + 4 * entries + 8)


def plain_shape(lengths: IntArray, code: ValueDtype) -> Shape:
    """Of a payload of all entries, whose size is known."""
    entries = int(lengths.sum())
    nbytes = payload_bound(entries, entries, code, IndexEncoding.DENSE)
    return Shape(entries, nbytes, nbytes)


class VectorFrames:
    """One direction of a channel's crossing.

    Args:
        messages: The channel's.
        frames: Of this direction; their sizes are known.
        blocks: What goes to every rank, [rows, dim].
        sent, got: Entries of the segments that go to every rank, and that come from it.
        rounded: Whether what stays here becomes what a peer would get.
        lap: Called when messages are queued, and when their exchange is.
    """

    def __init__(
        self,
        messages: VectorMessages,
        frames: Frames,
        blocks: Sequence[Tensor],
        sent: Sequence[IntArray],
        got: Sequence[IntArray],
        *,
        rounded: bool,
        lap: Callable[[], None],
    ) -> None:
        self._messages, self._frames, self._lap = messages, frames, lap
        self._rank = frames.exchange.rank
        self._flats = [as_flat(block) for block in blocks]
        self._sent, self._got, self._rounded = sent, got, rounded
        self._device = blocks[0].device
        self._dtype = blocks[0].dtype
        numels = [int(each.sum()) for each in got]
        self._out = torch.empty(sum(numels), dtype=torch.float32, device=self._device)
        self._parts = list(self._out.split(numels))
        ranks = range(len(blocks))
        self._receivers = [r for r in ranks if r != self._rank and self._flats[r].numel()]
        self._senders = [r for r in ranks if r != self._rank and numels[r]]
        self._written = [*self._receivers, *([self._rank] if rounded and numels[self._rank] else [])]
        if not rounded:
            self._parts[self._rank].copy_(self._flats[self._rank])

    # -- error-bounded codes ---

    def bounded(self, bounds: Sequence[FloatArray] | None, relative: float = 0.0) -> Tensor:
        """What arrived, [rows, dim] in rank order.

        Args:
            bounds: Absolute, of every rank's segments; None: ``relative`` to their root mean squares.

        Raises:
            PayloadError: a message is damaged, or not of these rows; names the rank.
            DesyncError: a rank failed, or is at another exchange.
        """
        codec = self._messages.codec(self._device)
        assert codec is not None
        leg = self._leg([coded_shape(each) for each in self._sent], [coded_shape(each) for each in self._got])
        with self._frames.telling(leg):
            parts = [
                Outgoing(
                    self._flats[r].to(torch.float32),
                    self._sent[r],
                    np.zeros(len(self._sent[r])) if bounds is None else bounds[r],
                    send=r != self._rank,
                    kind=BOUNDED,
                )
                for r in self._written
            ]
            found = None
            if parts and bounds is None:
                found = [relative * square.sqrt() for square in codec.mean_squares(parts)]
            coded = codec.write(parts, bounds=found) if parts else None
            if coded is not None:
                self._fill(leg, coded)
        self._send(leg)
        if coded is not None and coded.values is not None:  # the own ones are the last
            exact = self._flats[self._rank].to(torch.float32)  # what is not finite, nobody rounds
            torch.where(coded.finite[-1], coded.values[-1], exact, out=self._parts[self._rank])
        opened, kinds = self._opened(leg, codec)
        sizes = coded.sizes if coded is not None else opened
        words, sizes_read, opened_read, kinds_read = read_figures(
            (), (self._words(leg), sizes, opened, kinds)
        )
        arrived = self._frames.checked(words, self._senders, self._shapes[1])
        written = {}
        for at, r in enumerate(self._receivers):
            assert coded is not None
            written[r] = coded.buffer[coded.starts[at] : coded.starts[at] + sizes_read[4 * at] + 1]
        late = self._frames.again(leg, written, arrived)
        lengths, outs = [self._got[s] for s in self._senders], [self._parts[s] for s in self._senders]
        to_read = {}
        found_here = zip(self._senders, codec.opened(opened_read, lengths, outs), kinds_read, strict=True)
        for source, each, kind in found_here:
            if source in late:
                to_read[source] = late[source][:-1]
            elif kind != BOUNDED:
                self._refuse(source, f"has the unknown kind {kind}")
            elif each is None:  # codes that only the host reads
                begin = leg.bounds[source][0] + PREFIX
                to_read[source] = leg.arriving[begin : begin + arrived[source] - 1]
            elif each.fault is not None:
                self._refuse(source, each.fault)
        self._messages.read_coded(
            "message", to_read, [self._got[s] for s in to_read], [self._parts[s] for s in to_read]
        )
        self._learn({r: message.numel() for r, message in written.items()}, arrived)
        return self._whole()

    def _fill(self, leg: Leg, coded: Coded) -> None:
        """Put messages into their frames, as far as they fit."""
        heads = torch.zeros(len(self._written), WORDS, dtype=torch.int64, device=self._device)
        heads[:, 0] = coded.sizes[:, 0] + 1
        heads[:, 1] = self._frames.fingerprint
        for at, r in enumerate(self._receivers):
            frame = leg.frame(r)
            body = coded.framed(at, len(frame) - PREFIX)
            frame.view(torch.int64)[:WORDS] = heads[at]
            frame[PREFIX : PREFIX + len(body)] = body

    def _opened(self, leg: Leg, codec: TritonEmbeddingKernels) -> tuple[Tensor, Tensor]:
        """What is read of the frames that arrived, and the kinds of their messages."""
        if not self._senders:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return nothing, nothing
        begins = [leg.bounds[s][0] + PREFIX for s in self._senders]
        rooms = [leg.bounds[s][1] - begin - 1 for s, begin in zip(self._senders, begins, strict=True)]
        known = to_device(torch.tensor([begins, rooms]), self._device)
        nbytes = torch.minimum(self._words(leg)[:, 0] - 1, known[1]).clamp(min=0)
        lengths, outs = [self._got[s] for s in self._senders], [self._parts[s] for s in self._senders]
        opened = codec.open(leg.arriving, begins, nbytes, max(rooms), lengths, outs)
        return opened, leg.arriving[known[0] + nbytes].to(torch.int64)

    # -- values of one floating type ---

    def plain(self, code: ValueDtype) -> Tensor:
        """What arrived, [rows, dim] in rank order, of payloads of all entries; raises as :meth:`bounded`."""
        backend = self._messages.backend(self._device)
        kernels = backend
        sent, got = ([plain_shape(each, code) for each in lengths] for lengths in (self._sent, self._got))
        leg = self._leg(sent, got)
        exact = code is ValueDtype.lossless(self._flats[self._rank].dtype)
        own = torch.empty(0, dtype=torch.uint8, device=self._device)
        stats: list[Stats] = []
        with self._frames.telling(leg):
            writers = {}
            with backend.batched():
                for r in self._written:
                    if r != self._rank or not exact:
                        writers[r] = MessageWriter(self._device)
                        stats += encode_all(backend, self._flats[r], writers[r], code).stats
            for r, writer in writers.items():
                frame = leg.frame(r)
                if r == self._rank:
                    frame = own = own.new_empty(PREFIX + sent[r].fixed)
                kernels.write_slot(writer, frame, self._frames.fingerprint)
        self._send(leg)
        for s in self._senders:
            self._parts[s].zero_()
        if len(own):
            kernels.sum_slots(own, [(0, len(own))], [self._parts[self._rank].zero_()], 1.0)
        elif self._rounded:
            self._parts[self._rank].copy_(self._flats[self._rank])
        wrong = [
            kernels.sum_slots(leg.arriving, [leg.bounds[s]], [self._parts[s]], 1.0)[0] for s in self._senders
        ]
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        also = self._words(leg), torch.cat([nothing, *(each.to(torch.int64) for each in wrong)])
        words, errors = read_figures(stats, also)
        arrived = self._frames.checked(words, self._senders, got)
        for source, error in zip(self._senders, errors, strict=True):
            if error:
                self._refuse(source, KERNEL_ERRORS[error])
        self._learn({}, arrived)
        return self._whole()

    # -- inside ---

    def _leg(self, sent: Sequence[Shape], got: Sequence[Shape]) -> Leg:
        self._shapes = sent, got
        return self._frames.leg(sent, got, self._device)

    def _send(self, leg: Leg) -> None:
        self._lap()
        self._frames.send(leg)
        self._lap()

    def _words(self, leg: Leg) -> Tensor:
        return leg.words(self._senders)

    def _learn(self, sent: dict[int, int], arrived: dict[int, int]) -> None:
        for direction, sizes in enumerate((sent, arrived)):
            self._frames.note(self._shapes[direction], sizes, direction)

    def _refuse(self, source: int, what: str) -> None:
        with self._messages.blame("message", source):
            raise PayloadError(what)

    def _whole(self) -> Tensor:
        return self._out.view(-1, self._messages.dim).to(self._dtype)
