"""The exchange of requests for rows: every rank tells every owner of tables which rows it needs."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..errors import PayloadError
from ..transport.exchange import Exchange
from ..transport.fixed_size import FixedSizeExchange
from .bounds import TableLimits
from .device_requests import REQUEST, DeviceRequests
from .request_message import MOST_BYTES, Bags, RowRequest, read_request, write_request
from .requests import BatchLookup, RequestBuilder
from .timer import ExchangeTimer

logger = logging.getLogger("dct_plugin")

_HOST = torch.device("cpu")
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class RequestExchange:
    """Sends the requests of a batch, and receives those of all ranks.

    Requests are written and read on the host. If ids are one row per sample, to be de-duplicated, and on the
    device of the tables, kernels that write messages do it there (:mod:`.device_requests`).

    Args:
        builder: Builds the requests.
        limits: Gives the kernels.
        name: Name of the tables, part of the fingerprint by which ranks out of step are found.
    """

    def __init__(self, builder: RequestBuilder, limits: TableLimits, name: str) -> None:
        self._builder = builder
        self._limits = limits
        self._name = name
        self._fingerprint = zlib.crc32(f"{name}/ids".encode())
        self._slots: FixedSizeExchange | None = None
        self._device: dict[torch.device, DeviceRequests | None] = {}
        self._warned = False

    def exchange(
        self, categorical: Tensor | Sequence[Bags], transport: Exchange, timer: ExchangeTimer
    ) -> tuple[BatchLookup, list[RowRequest]]:
        """Send the requests for ``categorical``; return them, and the requests of every rank to this one.

        Args:
            categorical: See :meth:`.tables.ShardedTables.forward`.
            timer: With four phases: distinct rows found, requests written, sent, read.

        Raises:
            IndexError: An id is outside its table. The other ranks are told.
            ValueError: The ids have another shape.
            PayloadError: A request is damaged, or about other tables.
            DesyncError: A rank failed, or is at another exchange.
        """
        if not self._limits.backend(transport.device).writes_slots:
            self._slots = None
        elif self._slots is None or self._slots.exchange is not transport:
            self._slots = FixedSizeExchange(transport, self._fingerprint)
        slots = self._slots
        if slots is not None and slots.known:
            device = self._on_device(transport.device)
            if device is not None and self._is_on_device(categorical, transport.device):
                return device.exchange(categorical, slots, self.read, timer.lap)
        return self._exchange_on_host(categorical, transport, timer.lap)

    def _is_on_device(self, categorical: Tensor | Sequence[Bags], device: torch.device) -> TypeGuard[Tensor]:
        """Return True if distinct rows can be found on the tables' device."""
        if not isinstance(categorical, Tensor) or categorical.dim() != 2 or not self._builder.deduplicates:
            return False
        return categorical.device == device and categorical.numel() > 0

    def _on_device(self, device: torch.device) -> DeviceRequests | None:
        """Return what exchanges requests of a device's ids; None if the host writes and reads them."""
        if device not in self._device:
            builder = self._builder
            kernels = self._limits.backend(device).request_kernels(
                [len(tables) for tables in builder.placement],
                [first_rows[-1] for first_rows in builder.first_rows],
                builder.rank,
                device,
            )
            several = len(builder.placement) > 1
            self._device[device] = (
                DeviceRequests(builder, kernels, device) if several and kernels is not None else None
            )
        return self._device[device]

    def _exchange_on_host(
        self, categorical: Tensor | Sequence[Bags], transport: Exchange, lap: Callable[[], None]
    ) -> tuple[BatchLookup, list[RowRequest]]:
        builder, device, slots = self._builder, transport.device, self._slots
        if slots is not None and not self._is_on_device(categorical, device) and not self._warned:
            self._warned = True
            logger.info(
                "dct: %s: requests for ids that come from the host, or are several per sample, are "
                "written and read there; the device is waited for once per forward pass",
                self._name,
            )
        sizes = [REQUEST] * transport.world_size
        transfer = slots.slots(sizes, sizes, device) if slots is not None and slots.known else None
        # Peers learn of an error in the exchange they are waiting in.
        with transport.preparing() if slots is None or transfer is None else slots.telling(transfer):
            lookup = builder.build(categorical, self._limits.host_kernels())
            lap()
            backend = self._limits.backend(_HOST)
            messages = [
                _NO_BYTES if owner == builder.rank else write_request(request, first_rows, backend)
                for owner, (request, first_rows) in enumerate(
                    zip(lookup.requests, builder.first_rows, strict=True)
                )
            ]
            if device.type != "cpu":
                lookup = lookup.to(device)
        lap()
        if slots is not None and transfer is not None:
            received = slots.exchange_from_host(transfer, messages)
        else:
            messages = [to_device(message, device) for message in messages]
            fingerprint = self._fingerprint if slots is None else slots.fingerprint
            bounds = [MOST_BYTES] * transport.world_size
            received = transport.all_to_all(messages, fingerprint, bounds=bounds)
            if slots is not None:
                sent_bytes, got_bytes = (
                    {r: each.numel() for r, each in enumerate(part)} for part in (messages, received)
                )
                slots.remember(sizes, sent_bytes, sizes, got_bytes)
        lap()
        requests = [
            lookup.requests[source] if source == builder.rank else self.read(message, source)
            for source, message in enumerate(received)
        ]
        lap()
        return lookup, requests

    def read(self, message: Tensor, source: int) -> RowRequest:
        """Read what rank ``source`` of the group asks of this one.

        Raises:
            PayloadError: The request is damaged, or about other tables; names the ranks.
        """
        builder = self._builder
        try:
            return read_request(message, builder.first_rows[builder.rank], self._limits.backend(_HOST))
        except PayloadError as error:
            raise PayloadError(
                f"{self._name}: rank {builder.rank}: request from rank {source} of the group: {error}"
            ) from error
