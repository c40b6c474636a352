"""Memory that ranks on one machine share, for large tensors between them.

A socket copies all bytes twice, and in small parts. Here the sender copies a tensor once, and receivers read
that copy. The memory has no name in a file system. The system frees it when its processes end, also when they
are killed.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .exchange import Exchange
from .node_transport import NodeTransport, Rows, bytes_of, cut
from .tcp_connect import VARIABLE

logger = logging.getLogger("dct_plugin.transport")

#: Bytes of the token at the beginning of a memory. Tensors begin at multiples of the second number of bytes.
_TOKEN, _ALIGNMENT = 32, 64
_PLACE = struct.Struct("=q")
#: Bytes of the JSON in which a rank offers its memories.
_OFFER_BYTES = 512


class SharedMemory(NodeTransport):
    """Memory that each rank of a group writes for the others; :func:`open_shared_memory` makes it. Ranks read
    where another one wrote.

    Args:
        exchange: The ranks.
        memories: Two memories of each rank, used in turn. When the other ranks announce their next operation,
            they have read what was written for the last one.
    """

    def __init__(self, exchange: Exchange, memories: Sequence[Sequence[_Memory]]) -> None:
        super().__init__(exchange)
        self._memories = memories
        self._turn = 0

    def all_to_all(self, outgoing: Rows, like: Rows, fingerprint: int) -> list[list[Tensor]]:
        """See :meth:`.NodeTransport.all_to_all`. One list that several ranks get is written once."""
        self._turn ^= 1
        with self._exchange.preparing():
            self._write(outgoing)
        # With the turn: a rank that failed before it was here would read what was written for another call.
        self._exchange.agree((2 * fingerprint + self._turn) % (1 << 63))
        sent = [(each[self._turn], tensors) for each, tensors in zip(self._memories, like, strict=True)]
        return [
            [] if sender == self._rank else memory.views(memory.place(self._rank), tensors)
            for sender, (memory, tensors) in enumerate(sent)
        ]

    def _write(self, outgoing: Rows) -> None:
        exchange, end = self._exchange, _begin(len(outgoing))
        own = self._memories[exchange.rank][self._turn]
        places: dict[int, int] = {}
        for receiver, tensors in enumerate(outgoing):
            if receiver != exchange.rank:
                exchange.other_bytes += bytes_of(tensors)
                if id(tensors) not in places:
                    places[id(tensors)] = end
                    end += _aligned(bytes_of(tensors))
        own.reserve(end)
        for receiver, tensors in enumerate(outgoing):
            own.set_place(receiver, places.get(id(tensors), 0))
        for tensors in {id(each): each for each in outgoing if id(each) in places}.values():
            for view, tensor in zip(own.views(places[id(tensors)], tensors), tensors, strict=True):
                view.copy_(tensor)


def open_shared_memory(exchange: Exchange) -> SharedMemory | None:
    """Return memory that the ranks of an exchange share; a collective.

    Returns None on every rank if the system has no memory without a name (only Linux has), if a rank may not
    open another rank's memory, or if a rank was told to leave messages to gloo.
    """
    own: list[_Memory] = []
    token, size = secrets.token_bytes(_TOKEN), _begin(exchange.world_size)
    if os.environ.get(VARIABLE) != "gloo" and hasattr(os, "memfd_create"):
        own = [_Memory.of_own(token, size) for _ in range(2)]
    offer = {"pid": os.getpid(), "files": [each.file for each in own], "token": token.hex()}
    offers = exchange.all_gather(_as_tensor(json.dumps(offer).encode().ljust(_OFFER_BYTES)))
    memories, problem = [], ""
    for rank, other in enumerate(json.loads(bytes(answer.tolist())) for answer in offers):
        try:
            memories.append(own if rank == exchange.rank else _opened(other))
        except OSError as error:
            problem = str(error)
    able = all(len(found) == 2 for found in memories) and not problem
    if all(int(answer[0]) for answer in exchange.all_gather(_as_tensor(bytes([able])))):
        return SharedMemory(exchange, memories)
    if problem:
        logger.warning("dct: ranks of a node share no memory, which costs time: %s", problem)
    return None


class _Memory:
    """A memory of this or of another process: a token, the offset of the tensors for each rank, and tensors.

    Args:
        file: Descriptor. The object closes it.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self._map()

    @classmethod
    def of_own(cls, token: bytes, size: int) -> _Memory:
        file = os.memfd_create("dct_plugin")
        os.write(file, token)
        os.ftruncate(file, size)
        return cls(file)

    def reserve(self, size: int) -> None:
        """Make the memory at least so large; what was returned of it before stays valid."""
        if size > len(self._memory):
            os.ftruncate(self.file, size)
            self._map()

    def place(self, receiver: int) -> int:
        """Return where the tensors for a rank begin."""
        return int(_PLACE.unpack_from(self._memory, _TOKEN + _PLACE.size * receiver)[0])

    def set_place(self, receiver: int, place: int) -> None:
        _PLACE.pack_into(self._memory, _TOKEN + _PLACE.size * receiver, place)

    def views(self, start: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the memory from ``start`` on as tensors of the types and sizes of ``like``."""
        if start + bytes_of(like) > len(self._memory):  # its owner has made it larger
            self._map()
        return cut(self._bytes[start:], like)

    def _map(self) -> None:
        self._memory = mmap.mmap(self.file, os.fstat(self.file).st_size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.file)


def _opened(offer: Mapping[str, Any]) -> list[_Memory]:
    """Return the memories that another process offers.

    Raises:
        OSError: They cannot be opened, or are those of another process with the same number.
    """
    found = []
    for number in offer["files"]:
        path = f"/proc/{offer['pid']}/fd/{number}"
        file = os.open(path, os.O_RDWR)
        if os.pread(file, _TOKEN, 0) != bytes.fromhex(offer["token"]):
            os.close(file)
            raise OSError(f"{path} is not what a rank offers")
        found.append(_Memory(file))
    return found


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _begin(ranks: int) -> int:
    """Return where tensors begin: after the token and the offsets for each rank."""
    return _aligned(_TOKEN + _PLACE.size * ranks)
