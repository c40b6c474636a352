"""The ranks of one node: dense sums and gathers between them, over the fast link."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compression.feedback import unpacked
from ..metrics import Metrics, Record
from ..transport import Exchange
from ..transport.nodes import Nodes
from ..transport.shared_memory import SharedMemory, open_shared_memory
from .plan import fingerprint_of

Entries = Sequence[tuple[str, Tensor]]
#: Bounds of a part of a tensor, and by name of a tensor the parts of it that each rank of a node gets.
Part = tuple[int, int]
Wanted = Mapping[str, Sequence[Sequence[Part]]]

#: Entries that are added up at once, which stay in a cache meanwhile.
_BLOCK = 1 << 17
#: Class in the metrics of what ranks of a node send each other.
CLASS = "node"


class NodeRanks:
    """The ranks of one node, which sum and gather tensors between them.

    A large tensor has a part for each rank, a small one is the part of one of them.

    Args:
        nodes: Nodes of the host's process group.
        device: Device of the tensors.
        min_numel: Tensors with fewer entries are small.
        metrics: Records bytes.
    """

    def __init__(self, nodes: Nodes, device: torch.device, min_numel: int, metrics: Metrics | None) -> None:
        self.exchange = Exchange(nodes.group, device, nodes.inside)
        self.size, self.position = self.exchange.world_size, self.exchange.rank
        self._on_host = self._may_share = device.type == "cpu"
        self._memory: SharedMemory | None = None
        self.sizes: dict[str, int] = {}
        """Entries of the tensors that were asked about."""
        self._min_numel, self._metrics = min_numel, metrics
        if metrics is not None:
            metrics.has_nodes = True

    def _shared_memory(self) -> SharedMemory | None:
        """Return memory that these ranks share, if they can; the first call is a collective."""
        if self._memory is None and self._may_share:
            self._memory = open_shared_memory(self.exchange)
            self._may_share = self._memory is not None
        return self._memory

    def is_divided(self, numel: int) -> bool:
        """Return whether every rank has a part of a tensor of so many entries."""
        return numel >= max(self._min_numel, self.size)

    def parts(self, name: str, numel: int) -> list[Part]:
        """Return the part of each rank in a tensor; it depends on name and size only."""
        self.sizes[name] = numel
        if not self.is_divided(numel):
            owner = zlib.crc32(name.encode()) % self.size
            return [(0, numel if rank == owner else 0) for rank in range(self.size)]
        bounds = [numel * rank // self.size for rank in range(self.size + 1)]
        return list(itertools.pairwise(bounds))

    def part(self, name: str, numel: int) -> Part:
        """Return this rank's part of a tensor."""
        return self.parts(name, numel)[self.position]

    def means(self, entries: Entries, *, in_place: bool = False) -> list[tuple[str, Tensor]]:
        """Return this rank's part of the mean of each tensor over the node; a collective. Parts without
        entries are left out.

        Args:
            entries: ``(name, tensor)``, 1-D.
            in_place: The means replace what is in the tensors; else they get memory of their own.
        """
        ordered = _by_size(entries)
        parts = [self.parts(name, tensor.numel()) for name, tensor in ordered]
        views = [
            [tensor[slice(*bounds[rank])] for (_, tensor), bounds in zip(ordered, parts, strict=True)]
            for rank in range(self.size)
        ]
        own = views[self.position]
        received = self.all_to_all_in_node("node sum", views, [own] * self.size, entries)
        del received[self.position]
        found = {}
        for index, ((name, _), mine) in enumerate(zip(ordered, own, strict=True)):
            found[name] = mine if in_place else torch.empty_like(mine)
            _mean_into(found[name], [mine, *(theirs[index] for theirs in received)])
        return [(name, found[name]) for name, _ in entries if found[name].numel()]

    def gather(
        self, operation: str, entries: Entries, wanted: Wanted | None = None, held: Wanted | None = None
    ) -> None:
        """Give every rank what other ranks hold of tensors; a collective.

        Args:
            operation: Description for errors of ranks that are out of step.
            entries: ``(name, tensor)``, 1-D.
            wanted: What each rank gets; None: everything.
            held: What each rank holds; None: its part.
        """
        ordered, own = _by_size(entries), self.position
        if held is None:
            held = {n: [[part] for part in self.parts(n, tensor.numel())] for n, tensor in entries}

        def views(holder: int, receiver: int) -> list[Tensor]:
            return [
                tensor[slice(*common(part, each))]
                for name, tensor in ordered
                for part in held[name][holder]
                for each in ([(0, tensor.numel())] if wanted is None else wanted[name][receiver])
            ]

        ranks = range(self.size)
        incoming = [views(holder, own) for holder in ranks]
        outgoing = [views(own, receiver) for receiver in ranks]
        if wanted is None:
            outgoing = [outgoing[own]] * self.size
        for holder, received in enumerate(self.all_to_all_in_node(operation, outgoing, incoming, entries)):
            for view, arrived in zip(incoming[holder], received, strict=holder != own):
                view.copy_(arrived)

    def all_to_all_in_node(
        self,
        operation: str,
        outgoing: Sequence[Sequence[Tensor]],
        like: Sequence[Sequence[Tensor]],
        entries: Entries,
    ) -> list[list[Tensor]]:
        """Send ``outgoing[r]`` to rank ``r`` of the node; return what it sends, tensors like ``like[r]``.

        Tensors are 1-D, the largest types first. Ranks compare ``operation``, names and sizes of ``entries``.
        """
        fingerprint = fingerprint_of(operation, tuple([(name, t.numel(), ()) for name, t in entries]))
        with self._recorded():
            if (memory := self._shared_memory()) is not None:
                return memory.all_to_all_in_node(outgoing, like, fingerprint)
            return self._all_to_all_messages(outgoing, like, fingerprint)

    def _all_to_all_messages(
        self, outgoing: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]], fingerprint: int
    ) -> list[list[Tensor]]:
        exchange, own = self.exchange, self.position
        with self.failing_together():
            messages = [self._bytes(views if rank != own else ()) for rank, views in enumerate(outgoing)]
        sizes = [sum(t.numel() * t.element_size() for t in views) for views in like]
        sizes[own] = 0
        if self._on_host:
            received = exchange.all_to_all(messages, fingerprint, bounds=sizes)
        else:  # sizes in headers would be waited for
            received = exchange.transfer(messages, sizes)
        return [
            [] if rank == own else _cut(message, views)
            for rank, (message, views) in enumerate(zip(received, like, strict=True))
        ]

    def sum_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace small tensors of one type by their sums over the node; a collective."""
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        with self._recorded():
            self.exchange.all_reduce(flat)
        for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the bytes that the block sends."""
        before = self.exchange.sent_bytes
        yield
        if self._metrics is not None:
            sent = self.exchange.sent_bytes - before
            self._metrics.record(Record(CLASS, intra_node=sent))

    def state_dict(self, streams: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts that ``streams`` are of: their bounds, and the entries of the tensors."""
        return {name: [*self.part(name, n), n] for name, n in self.sizes.items() if name in streams}

    def own_parts(self, streams: dict[str, Any], saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the states of streams of this rank's parts.

        Args:
            streams: States of streams.
            saved: What :meth:`state_dict` returned with them; None: they are of whole tensors.
        """
        if saved is not None:
            self.sizes.update({name: numel for name, (_, _, numel) in saved.items()})
            return streams
        found = {}
        for name, stream in streams.items():
            if stream["residual"] is not None:
                residual = unpacked(stream["residual"])
                start, stop = self.part(name, residual.numel())
                own = residual[start:stop].clone()
                found[name] = {**stream, "residual": own, "shape": None}
        return found

    def failing_together(self) -> AbstractContextManager[None]:
        """Surround work whose results the other ranks of the node wait for: they are told of an error."""
        return self.exchange.preparing() if self._on_host else nullcontext()

    def _bytes(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the bytes of 1-D tensors, one behind the other."""
        if not tensors:
            return torch.empty(0, dtype=torch.uint8, device=self.exchange.device)
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors])


def _mean_into(out: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the mean of tensors of one type, added up in fp32 at least; ``out`` may be the first of them."""
    wide, factor = max(out.dtype, torch.float32, key=lambda dtype: dtype.itemsize), 1.0 / len(tensors)
    for start in range(0, out.numel(), _BLOCK):
        target, first, *others = [each[start : start + _BLOCK] for each in (out, *tensors)]
        total = target if out.dtype == wide else torch.empty_like(target, dtype=wide)
        if total.data_ptr() != first.data_ptr():
            total.copy_(first)
        for theirs in others:
            total += theirs
        total *= factor
        if total is not target:
            target.copy_(total)


def _by_size(entries: Entries) -> list[tuple[str, Tensor]]:
    """Return the entries with the largest types first, so that bytes of all of them can be read in place."""
    return sorted(entries, key=lambda entry: -entry[1].element_size())


def common(one: Part, other: Part) -> Part:
    """Return what two parts have in common; the second bound is never below the first."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _cut(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose bytes are in a message."""
    pieces = message.split([t.numel() * t.element_size() for t in like])
    return [piece.view(t.dtype) for piece, t in zip(pieces, like, strict=True)]
