"""Collectives of dense tensors between the ranks of a node: means, gathers, and messages of known sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .base import mean_into
from .exchange import Exchange

#: 1-D tensors, the largest types first; and such tensors for each rank.
Tensors = Sequence[Tensor]
Rows = Sequence[Tensors]
#: Rows begin at multiples of so many bytes, so that any type can be read in place.
_ALIGNMENT = 8


class NodeTransport(ABC):
    """The way of tensors between the ranks of an exchange. Every method is a collective.

    ``fingerprint`` is that of :meth:`.Exchange.all_to_all`, and so are the errors. A device is not asked.

    Args:
        exchange: The ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._rank = exchange, exchange.rank

    @abstractmethod
    def all_to_all(self, outgoing: Rows, like: Rows, fingerprint: int) -> list[list[Tensor]]:
        """Give ``outgoing[r]`` to rank ``r``; return what it gives, tensors like ``like[r]``, good until the
        next call. Nothing is returned for this rank.
        """

    def reduce_scatter(self, parts: Rows, out: Tensors, fingerprint: int) -> None:
        """Fill ``out`` with the means over the ranks of what they have in ``parts[rank]``.

        Terms are added in the order of the ranks, in fp32 at least. ``out`` may be ``parts[rank]``.
        """
        received: list[Tensors] = [*self.all_to_all(parts, [out] * len(parts), fingerprint)]
        received[self._rank] = parts[self._rank]
        for target, *terms in zip(out, *received, strict=True):
            mean_into(target, terms)

    def all_gather(self, parts: Rows, fingerprint: int) -> None:
        """Fill ``parts[r]`` of all ranks with those of rank ``r``."""
        copy_all(parts, self.all_to_all([parts[self._rank]] * len(parts), parts, fingerprint))


class NodeCollectives(NodeTransport):
    """One collective of the transport for all tensors of a type.

    On a device they are ``reduce_scatter_tensor``, in the tensors' type and nccl's order, and
    ``all_gather_into_tensor``.
    """

    def all_to_all(self, outgoing: Rows, like: Rows, fingerprint: int) -> list[list[Tensor]]:
        self._agree(fingerprint)
        sizes = [0 if rank == self._rank else bytes_of(tensors) for rank, tensors in enumerate(like)]
        received = self._exchange.transfer([self._packed(tensors) for tensors in outgoing], sizes)
        return [cut(row, t) if size else [] for row, size, t in zip(received, sizes, like, strict=True)]

    def reduce_scatter(self, parts: Rows, out: Tensors, fingerprint: int) -> None:
        self._agree(fingerprint)
        for dtype in dict.fromkeys(tensor.dtype for tensor in out):
            rows = [[tensor for tensor in tensors if tensor.dtype == dtype] for tensors in parts]
            sizes = [sum([tensor.numel() for tensor in row]) for row in rows]
            padding = rows[0][0].new_zeros(max(sizes))
            padded = [each for row, n in zip(rows, sizes, strict=True) for each in (*row, padding[n:])]
            flat = torch.cat(padded).view(len(rows), -1)
            self._exchange.reduce_scatter_into(mean := torch.empty_like(flat[0]), flat)
            targets = [tensor for tensor in out if tensor.dtype == dtype]
            copy_all([targets], [mean[: sizes[self._rank]].split([t.numel() for t in targets])])

    def all_gather(self, parts: Rows, fingerprint: int) -> None:
        self._agree(fingerprint)
        width = -(-max(map(bytes_of, parts)) // _ALIGNMENT) * _ALIGNMENT
        rows = torch.empty(len(parts), width, dtype=torch.uint8, device=self._exchange.device)
        own = self._packed(parts[self._rank])
        rows[self._rank, : len(own)] = own
        self._exchange.gather_into(rows.view(-1))
        arrived = [[] if r == self._rank else cut(rows[r], tensors) for r, tensors in enumerate(parts)]
        copy_all(parts, arrived)

    def _agree(self, fingerprint: int) -> None:
        if self._exchange.device.type == "cpu":  # a device would be waited for
            self._exchange.agree(fingerprint)

    def _packed(self, tensors: Tensors) -> Tensor:
        """Return the bytes of tensors, one behind the other."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._exchange.device)
        return torch.cat([nothing, *(tensor.view(torch.uint8) for tensor in tensors)])


def copy_all(targets: Rows, sources: Iterable[Tensors]) -> None:
    """Copy the lists of sources that are not empty."""
    rows = [(to, of) for to, of in zip(targets, sources, strict=True) if of]
    pairs = [pair for to, of in rows for pair in zip(to, of, strict=True)]
    for dtype in dict.fromkeys(target.dtype for target, _ in pairs):
        same = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in same], [source for _, source in same])


def bytes_of(tensors: Tensors) -> int:
    """Return the bytes of all tensors."""
    return sum([tensor.nbytes for tensor in tensors])


def cut(row: Tensor, like: Tensors) -> list[Tensor]:
    """Return the tensors whose bytes stand at the begin of a row."""
    sizes = [tensor.nbytes for tensor in like]
    return [piece.view(t.dtype) for piece, t in zip(row[: sum(sizes)].split(sizes), like, strict=True)]
