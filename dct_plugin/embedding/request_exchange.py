"""The exchange of requests for rows: every rank tells every owner of tables which rows it needs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.copies import to_device
from ..errors import PayloadError
from ..transport.exchange import Exchange
from .bounds import TableLimits
from .request_message import MOST_BYTES, Bags, RowRequest, read_request, write_request
from .requests import BatchLookup, RequestBuilder
from .timer import ExchangeTimer

_HOST = torch.device("cpu")
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class RequestExchange:
    """Sends the requests of a batch, and receives those of all ranks. They are written and read on the host.

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
        builder, device = self._builder, transport.device
        with transport.preparing():  # peers learn of an error in the exchange they are waiting in
            lookup = builder.build(categorical, self._limits.host_kernels())
            timer.lap()
            backend = self._limits.backend(_HOST)
            messages = [
                _NO_BYTES if owner == builder.rank else write_request(request, first_rows, backend)
                for owner, (request, first_rows) in enumerate(
                    zip(lookup.requests, builder.first_rows, strict=True)
                )
            ]
            if device.type != "cpu":
                lookup = lookup.to(device)
        timer.lap()
        received = transport.all_to_all(
            [to_device(message, device) for message in messages],
            self._fingerprint,
            bounds=[MOST_BYTES] * transport.world_size,
        )
        timer.lap()
        requests = [
            lookup.requests[source] if source == builder.rank else self._read(message, source)
            for source, message in enumerate(received)
        ]
        timer.lap()
        return lookup, requests

    def _read(self, message: Tensor, source: int) -> RowRequest:
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
