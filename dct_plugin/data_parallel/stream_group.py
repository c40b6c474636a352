"""A rank as a member of a group that exchanges thresholded tensors: its streams, and what they cost.

What reductions of gradients and updates of weights have in common.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.message import MessageWriter, read_messages
from ..config import DataParallelConfig, KernelConfig
from ..errors import PayloadError
from ..feedback import Rooms
from ..metrics import Metrics, Record
from ..schedules import SparsitySchedule
from ..stream import Compressor, Encoded, backend_of
from ..transport import Exchange

logger = logging.getLogger("dct_plugin")


class Written(NamedTuple):
    """What a message holds of one tensor, to be accounted for when the message is complete."""

    name: str | None
    """Of a gradient of this rank; None for weights, and for an owner's answer, where what is not finite was
    so at other ranks.
    """
    cls: str
    encoded: Encoded
    stream: Compressor | None
    dense_bytes: float
    copies: Sequence[int]
    """How often each payload leaves this rank."""
    share: str = ""
    """Of the class, as which it is recorded besides."""


class Member:
    """The streams of a rank, and the group they are exchanged over.

    Args:
        settings: Of the streams.
        group: Process group (gloo or nccl), None for the default one.
        metrics: Where bytes, density and times are recorded.
        device: Of the tensors.
        kernels: Which kernels run; the defaults when None.
        transactional: Take skipped steps back.
        step: Optimizer steps so far.
    """

    def __init__(
        self,
        settings: DataParallelConfig,
        group: dist.ProcessGroup | None,
        *,
        metrics: Metrics | None,
        device: torch.device | str,
        kernels: KernelConfig | None,
        transactional: bool,
        step: int,
    ) -> None:
        self.device = torch.device(device)
        self.exchange = Exchange(group, self.device)
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.metrics = metrics
        self.schedule = SparsitySchedule.of(settings)
        self.step = step
        """Optimizer steps so far."""
        self.streams: dict[str, Compressor] = {}
        """By tensor: one for each that this rank sends by itself."""
        self._settings = settings
        self._kernels = kernels
        self.backend = backend_of(kernels, self.device)
        self._transactional = transactional
        self._rooms = Rooms()
        self._loaded: dict[str, dict[str, Any]] = {}
        """States of streams that were not used since."""
        self._nonfinite_reported = False

    def _streams_state(self) -> dict[str, Any]:
        return {**self._loaded, **{name: stream.state_dict() for name, stream in self.streams.items()}}

    def owes(self, name: str) -> bool:
        """Whether a tensor has a residual by now."""
        stream = self.streams.get(name)
        if stream is None:
            return name in self._loaded and self._loaded[name]["residual"] is not None
        return stream.residual is not None

    def stream(self, name: str) -> Compressor:
        """The stream of a tensor, made when it is first asked for."""
        stream = self.streams.get(name)
        if stream is None:
            stream = Compressor(
                self._settings,
                name=name,
                rank=self.rank,
                kernels=self._kernels,
                transactional=self._transactional,
                rooms=self._rooms,
            )
            if name in self._loaded:
                stream.load_state_dict(self._loaded.pop(name))
            self.streams[name] = stream
        return stream

    @property
    def frames(self) -> bool:
        """Whether messages travel in frames."""
        return self.backend.writes_slots and self.world_size > 1

    def complete(
        self, writers: Sequence[MessageWriter], written: Sequence[Written], whole: Record
    ) -> list[Tensor]:
        """The complete messages, and with them, in one read from the device, what was written: thresholds
        follow, metrics record.
        """
        messages = read_messages(writers)
        self.account(written, whole)
        return messages

    def account(self, written: Sequence[Written], whole: Record) -> None:
        """Thresholds follow what was written, metrics record it; the first look reads all figures."""
        for name, cls, encoded, stream, dense_bytes, copies, share in written:
            totals = encoded.totals()
            if totals.nonfinite and name is not None and not self._nonfinite_reported:
                self._report_nonfinite(name)
            if stream is not None:
                stream.observe(encoded, totals)
            sent = sum([n * part.nbytes for n, part in zip(copies, encoded.stats, strict=True)])
            record = encoded.record(cls, dense_bytes=dense_bytes, sent_bytes=sent, totals=totals)
            self._record(record, whole)
            if share and self.metrics is not None:
                self.metrics.record(replace(record, cls=f"{cls}/{share}"))

    def sum_messages(
        self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float, *, sender: int = 0
    ) -> None:
        """``outs``, which hold zeros, become ``scale`` times the sum of the messages of ``sender`` and the
        ranks behind it, added up in fp32 in rank order.
        """
        with self._naming_sender(sender):
            self.backend.sum_messages(messages, outs, scale)

    def _report_nonfinite(self, name: str) -> None:
        """Say, on the rank where it arose, which gradient poisons the step."""
        self._nonfinite_reported = True
        skips = self._settings.nonfinite_action == "skip"
        logger.warning(
            "dct: rank %d: the gradient of %s is not finite in step %d%s",
            self.rank,
            name,
            self.step,
            ""
            if skips
            else " and reaches all ranks as NaN; said once. To skip such steps on all ranks: "
            "dct.data_parallel.nonfinite_action = 'skip'",
        )

    @contextmanager
    def _naming_sender(self, first: int = 0) -> Iterator[None]:
        """A message that is found damaged in the block came from ``first`` or so many ranks behind it."""
        try:
            yield
        except PayloadError as error:
            sender = first + error.message
            raise PayloadError(
                f"rank {self.rank}: message from rank {sender} of the group: {error}"
            ) from error

    # -- metrics ---

    @contextmanager
    def recorded(self, cls: str) -> Iterator[Record]:
        """The record of an exchange as a whole: size messages, the time of exchange and decoding, and as time
        of selection whatever no other figure holds.
        """
        whole = Record(cls, tensors=0)
        with self.recording(whole):
            yield whole
        if self.metrics is not None:
            self.metrics.record(whole)

    @contextmanager
    def recording(self, whole: Record) -> Iterator[None]:
        """Adds what the block takes of an exchange to the record of the ``whole``."""
        exchange = self.exchange
        exchange.step = self.step
        sent, waited, began = exchange.sent_bytes, exchange.waited_ms, time.perf_counter()
        elsewhere = whole.exchange_ms + whole.decode_ms
        yield
        whole.sent_bytes += exchange.sent_bytes - sent
        whole.waited_ms += exchange.waited_ms - waited
        elsewhere -= whole.exchange_ms + whole.decode_ms
        whole.select_ms += 1e3 * (time.perf_counter() - began) + elsewhere

    def _record(self, record: Record, whole: Record) -> None:
        """A tensor's share of the exchange."""
        whole.sent_bytes -= record.sent_bytes
        whole.select_ms -= record.select_ms + record.encode_ms
        if self.metrics is not None:
            self.metrics.record(record)
