"""The ranks of one node: dense sums and gathers between them, over the fast link."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...compression.feedback import unpacked
from ...metrics import Metrics, Record
from ...transport import Exchange
from ...transport.node_transport import NodeCollectives, NodeTransport, Rows, copy_all
from ...transport.nodes import Nodes
from ...transport.shared_memory import open_shared_memory
from ..plan import ALIGNED, Entries, Part, common, divided, fingerprint_of

#: By name of a tensor, the parts of it that each rank of a node gets.
Wanted = Mapping[str, Sequence[Sequence[Part]]]

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
        self._on_host = device.type == "cpu"
        self._transport: NodeTransport | None = None
        self.sizes: dict[str, int] = {}
        """Entries of the tensors that were asked about."""
        self._min_numel, self._metrics = min_numel, metrics
        if metrics is not None:
            metrics.has_nodes = True

    @property
    def transport(self) -> NodeTransport:
        """The way of tensors between the ranks; the first use is a collective."""
        if self._transport is None:
            memory = open_shared_memory(self.exchange) if self._on_host else None
            self._transport = memory or NodeCollectives(self.exchange)
        return self._transport

    def is_divided(self, numel: int) -> bool:
        """Return whether every rank has a part of a tensor of so many entries."""
        return numel >= max(self._min_numel, ALIGNED * self.size)

    def parts(self, name: str, numel: int) -> list[Part]:
        """Return the part of each rank in a tensor; it depends on name and size only."""
        self.sizes[name] = numel
        if not self.is_divided(numel):
            owner = zlib.crc32(name.encode()) % self.size
            return [(0, numel if rank == owner else 0) for rank in range(self.size)]
        return divided(numel, self.size)

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
        out = own if in_place else [torch.empty_like(mine) for mine in own]
        with self._recorded():
            self.transport.reduce_scatter(views, out, _fingerprint("node sum", entries))
        found = {name: mean for (name, _), mean in zip(ordered, out, strict=True)}
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
        if wanted is None:
            self.gather_rows(operation, incoming, entries)
            return
        outgoing = [views(own, receiver) for receiver in ranks]
        copy_all(incoming, self.all_to_all_in_node(operation, outgoing, incoming, entries))

    def gather_rows(self, operation: str, rows: Rows, entries: Entries) -> None:
        """Fill ``rows[r]`` with those of rank ``r`` of the node; see :meth:`all_to_all_in_node`."""
        with self._recorded():
            self.transport.all_gather(rows, _fingerprint(operation, entries))

    def all_to_all_in_node(
        self, operation: str, outgoing: Rows, like: Rows, entries: Entries
    ) -> list[list[Tensor]]:
        """Send ``outgoing[r]`` to rank ``r`` of the node; return what it sends, tensors like ``like[r]``.

        Tensors are 1-D, the largest types first. Ranks compare ``operation``, names and sizes of ``entries``.
        """
        with self._recorded():
            return self.transport.all_to_all(outgoing, like, _fingerprint(operation, entries))

    def sum_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace small tensors of one type by their sums over the node; a collective."""
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        with self._recorded():
            self.exchange.all_reduce(flat)
        totals = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_([tensor.view(-1) for tensor in tensors], list(totals))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the bytes that the block sends."""
        before, _ = self.exchange.counters()
        yield
        if self._metrics is not None:
            sent = self.exchange.counters()[0] - before
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

    def failing_together(self) -> AbstractContextManager[Any]:
        """Surround work whose results the other ranks of the node wait for: they are told of an error."""
        return self.exchange.preparing() if self._on_host else nullcontext()


def _fingerprint(operation: str, entries: Entries) -> int:
    """Return a description of an operation on these names and sizes."""
    return fingerprint_of(operation, tuple([(name, tensor.nbytes, ()) for name, tensor in entries]))


def _by_size(entries: Entries) -> list[tuple[str, Tensor]]:
    """Return the entries with the largest types first, so that bytes of all of them can be read in place."""
    return sorted(entries, key=lambda entry: -entry[1].element_size())
