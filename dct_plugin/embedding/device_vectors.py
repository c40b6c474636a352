"""Vectors, or their gradients, between devices whose kernels write messages: the host waits once.

Messages are written into slots of fixed size (:mod:`~dct_plugin.transport.fixed_size`) and read from them on
the device. The host reads in one copy afterwards whether all of them fitted and are right. Under a threshold
this is not possible: what crosses decides over sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..codecs.index import IndexEncoding
from ..codecs.message import MessageWriter
from ..codecs.payload import payload_bound
from ..codecs.slots import PREFIX
from ..codecs.stats import KERNEL_ERRORS, Stats, read_figures
from ..codecs.values import ValueDtype
from ..kernels.embedding_format import CodedMessages, DeviceCodeKernels, FloatArray, IntArray, Outgoing
from ..stream import as_flat, encode_all
from ..transport.fixed_size import FixedSizeExchange, MessageSize, SlotTransfer
from .device_slots import arrived_messages, fill_slots
from .error_bounded import relative_parts
from .vector_codec import BOUNDED, VectorCodec


def coded_size(lengths: IntArray) -> MessageSize:
    """Return the size of a message of error-bounded codes of so many entries in each segment."""
    entries, fixed = int(lengths.sum()), 24 + 3 * len(lengths)
    return MessageSize(entries, fixed, fixed + 4 * entries + 8)


def _values_size(lengths: IntArray, code: ValueDtype) -> MessageSize:
    """Return the size of a payload of all entries, whose size is known."""
    entries = int(lengths.sum())
    nbytes = payload_bound(entries, entries, code, IndexEncoding.DENSE)
    return MessageSize(entries, nbytes, nbytes)


class DeviceVectors:
    """One direction of an exchange of vectors.

    Args:
        codec: That of the exchange.
        slots: The fixed-size exchange of this direction; sizes of earlier messages are known.
        blocks: What goes to every rank, [rows, dim].
        sent, got: Entries of the segments that go to every rank, and that come from it.
        rounded: Whether what stays here becomes what a peer would get.
        lap: Called when messages are queued, and when they are exchanged.
    """

    def __init__(
        self,
        codec: VectorCodec,
        slots: FixedSizeExchange,
        blocks: Sequence[Tensor],
        sent: Sequence[IntArray],
        got: Sequence[IntArray],
        *,
        rounded: bool,
        lap: Callable[[], None],
    ) -> None:
        self._codec, self._slots, self._lap = codec, slots, lap
        self._rank = rank = slots.exchange.rank
        self._dtype, self._device = blocks[0].dtype, blocks[0].device
        self._flats = [as_flat(block) for block in blocks]
        self._sent, self._got, self._rounded = sent, got, rounded
        numels = [int(each.sum()) for each in got]
        self._out = torch.empty(sum(numels), dtype=torch.float32, device=self._device)
        self._outs = list(self._out.split(numels))
        self._receivers = [r for r, flat in enumerate(self._flats) if r != rank and flat.numel()]
        self._senders = [r for r, numel in enumerate(numels) if r != rank and numel]
        self._written = [*self._receivers, *([rank] if rounded and numels[rank] else [])]
        if not rounded:
            self._outs[rank].copy_(self._flats[rank])

    def bounded(self, bounds: Sequence[FloatArray] | None, relative: float = 0.0) -> Tensor:
        """Exchange error-bounded codes; return what arrived, 1-D in rank order, in the blocks' dtype.

        Args:
            bounds: Absolute, of every rank's segments; None: ``relative`` to their root mean squares.

        Raises:
            PayloadError: A message is damaged, or not of these rows; names the rank.
            DesyncError: A rank failed, or is at another exchange.
        """
        kernels = self._codec.on_device(self._device)
        assert kernels is not None
        sent, got = ([coded_size(each) for each in lengths] for lengths in (self._sent, self._got))
        transfer = self._slots.slots(sent, got, self._device)
        with self._slots.telling(transfer):
            coded = self._write_codes(kernels, transfer, bounds, relative)
        self._send(transfer)
        if coded is not None and coded.values is not None:  # those of this rank are the last
            exact = self._flats[self._rank].to(torch.float32)  # what is not finite, nobody rounds
            torch.where(coded.finite[-1], coded.values[-1], exact, out=self._outs[self._rank])
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        arrived, opened, kinds = arrived_messages(transfer, self._senders, spare=1), nothing, nothing
        lengths, outs = [self._got[s] for s in self._senders], [self._outs[s] for s in self._senders]
        if self._senders:
            opened = kernels.open(
                transfer.arriving, arrived.begins, arrived.nbytes, arrived.most, lengths, outs
            )
            begins = to_device(torch.tensor(arrived.begins), self._device)
            kinds = transfer.arriving[begins + arrived.nbytes].to(torch.int64)
        sizes = nothing if coded is None else coded.sizes
        words, sizes_read, opened_read, kinds_read = read_figures((), (arrived.words, sizes, opened, kinds))
        messages = {}
        for at, r in enumerate(self._receivers):
            assert coded is not None
            messages[r] = coded.head(at, sizes_read[4 * at] + 1)
        late, received = self._slots.finish(transfer, messages, words, self._senders)
        to_read = {}
        results = zip(self._senders, kernels.opened(opened_read, lengths, outs), kinds_read, strict=True)
        for source, each, kind in results:
            if source in late:
                to_read[source] = late[source][:-1]
            elif kind != BOUNDED:
                self._codec.refuse("message", source, f"has the unknown kind {kind}")
            elif each is None:  # codes that only the host reads
                to_read[source] = transfer.message_from(source, received[source] - 1)
            elif each.fault is not None:
                self._codec.refuse("message", source, each.fault)
        self._codec.decode(to_read, dict(enumerate(self._got)), dict(enumerate(self._outs)))
        return self._out.to(self._dtype)

    def _write_codes(
        self,
        kernels: DeviceCodeKernels,
        transfer: SlotTransfer,
        bounds: Sequence[FloatArray] | None,
        relative: float,
    ) -> CodedMessages | None:
        """Write the messages of :meth:`bounded` into their slots; return them, None if there are none."""
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
        if not parts:
            return None
        if bounds is None:
            parts = relative_parts(parts, relative, kernels)
        coded = kernels.write(parts)
        numbers = {r: at for at, r in enumerate(self._receivers)}
        fill_slots(transfer, self._slots.fingerprint, numbers, coded, coded.sizes[:, 0] + 1)
        return coded

    def values(self, code: ValueDtype) -> Tensor:
        """Exchange payloads of all entries as values of one type; results and errors as :meth:`bounded`."""
        backend = self._codec.backend(self._device)
        sent, got = ([_values_size(each, code) for each in lengths] for lengths in (self._sent, self._got))
        transfer = self._slots.slots(sent, got, self._device)
        exact = code is ValueDtype.lossless(self._flats[self._rank].dtype)
        own = torch.empty(0, dtype=torch.uint8, device=self._device)
        stats: list[Stats] = []
        with self._slots.telling(transfer):
            writers = {}
            with backend.batched():
                for r in self._written:
                    if r != self._rank or not exact:
                        writers[r] = MessageWriter(self._device)
                        stats += encode_all(backend, self._flats[r], writers[r], code).stats
            for r, writer in writers.items():
                slot = transfer.slot_to(r)
                if r == self._rank:
                    slot = own = own.new_empty(PREFIX + sent[r].fixed)
                backend.write_slot(writer, slot, self._slots.fingerprint)
        self._send(transfer)
        if len(own):
            backend.sum_slots(own, [(0, len(own))], [self._outs[self._rank].zero_()], 1.0)
        elif self._rounded:
            self._outs[self._rank].copy_(self._flats[self._rank])
        wrong = [torch.empty(0, dtype=torch.int64, device=self._device)]
        for s in self._senders:
            errors, _ = backend.sum_slots(
                transfer.arriving, [transfer.bounds[s]], [self._outs[s].zero_()], 1.0
            )
            wrong.append(errors.to(torch.int64))
        words, faults = read_figures(stats, (transfer.words(self._senders), torch.cat(wrong)))
        self._slots.finish(transfer, {}, words, self._senders)
        for source, error in zip(self._senders, faults, strict=True):
            if error:
                self._codec.refuse("message", source, KERNEL_ERRORS[error])
        return self._out.to(self._dtype)

    def _send(self, transfer: SlotTransfer) -> None:
        self._lap()
        self._slots.send(transfer)
        self._lap()
