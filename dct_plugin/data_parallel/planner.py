"""The planner: from the tensors of a bucket to plans of their exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..codecs.message import Key
from .add_ons import AddOns
from .plan import BoundedTable, Entries, PlannedTensor, ReductionPlan, Shard, Shards, Sparsity, shards_of
from .stream_group import StreamGroup
from .topologies import Phase, Topologies, Topology

#: Bytes of tensors below ``min_numel`` in a bucket that are worth two exchanges of their own.
SMALL_APART = 4096


class Planner:
    """Plans the exchange of tensors: who gets which part, and which share of the entries is sent.

    Args:
        group: The ranks, and the settings.
        topologies: Who sends what to whom.
        add_ons: May change the sparsity of tensors, and compare some.

    Attributes:
        sends_all: True if all entries are sent from now on, whatever add-ons say.
    """

    def __init__(self, group: StreamGroup, topologies: Topologies, add_ons: AddOns) -> None:
        self._group, self._topologies, self._add_ons = group, topologies, add_ons
        self._known: BoundedTable[tuple[tuple[str, int, torch.dtype], ...], list[_Layout]] = BoundedTable()
        """Layouts of an all-reduce, by the names and sizes of its tensors."""
        self._sparsity = Sparsity(1.0)
        self.sends_all = False

    def begin_step(self) -> None:
        """Follow the schedule of the sparsity, when the number of a step is known."""
        self._sparsity = Sparsity(self._group.schedule.density(self._group.step))

    def plan(
        self, entries: Entries, scale: float, shards: Sequence[Sequence[Shard]] | None = None
    ) -> list[tuple[Sequence[Phase], ReductionPlan]]:
        """Return the plans of tensors that are reduced together, in the order of their exchanges, and the
        phases of each.

        Add-ons see each plan before its sparsities are chosen, which may be a collective.

        Args:
            entries, scale: See :meth:`.GradientReducer.all_reduce`.
            shards: By entry, the parts and their owners, see :meth:`.GradientReducer.reduce_scatter`; None
                for an all-reduce.
        """
        if shards is not None:
            layouts = [_Layout(self._group, self._topologies.scatter, entries, range(len(entries)), shards)]
        else:
            key = tuple([(name, tensor.nbytes, tensor.dtype) for name, tensor in entries])
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._layouts(entries)
            layouts = known
        return [(layout.topology.phases, self._planned(layout, entries, scale)) for layout in layouts]

    def dense(self, entries: Entries, scale: float) -> ReductionPlan:
        """Return the plan of a sum as the framework would make it."""
        tensors = [PlannedTensor(n, t, shards_of(n, t.numel(), 1), False) for n, t in entries]
        return ReductionPlan(self._group.operation("dense"), tensors, self._scale(scale))

    def _scale(self, scale: float) -> float:
        """Return the factor of the sums; the mean of a node takes part in place of one rank's gradient."""
        node = self._group.node
        return scale if node is None else scale * node.size

    def _planned(self, layout: _Layout, entries: Entries, scale: float) -> ReductionPlan:
        """Return the plan of the tensors of a layout."""
        tensors, topology, add_ons = [], layout.topology, self._add_ons
        for at, parts, small in layout.tensors:
            tensors.append(PlannedTensor(*entries[at], parts, small))
        plan = ReductionPlan(
            layout.operation,
            tensors,
            self._scale(scale),
            add_ons.compared(layout.large),
            topology.sums_everywhere,
            key=layout.key,
        )
        for see in add_ons.before_reduce:
            see(plan)
        if not self.sends_all:
            for each in tensors:
                if not each.small:
                    each.sparsity = self._sparsity
            add_ons.choose_sparsities(tensors)
        return plan

    def _layouts(self, entries: Entries) -> list[_Layout]:
        """Divide the tensors of an all-reduce into those that are exchanged together.

        The direct topology would send a tensor below ``min_numel`` whole to every rank. With more than two
        ranks fewer bytes cross when an owner sums it: those of a ring.
        """
        group, topologies, numbers = self._group, self._topologies, range(len(entries))
        is_small = [group.is_small(name, tensor.numel()) for name, tensor in entries]
        small, large = ([at for at in numbers if is_small[at] is kind] for kind in (True, False))
        apart = sum([entries[at][1].nbytes for at in small]) >= SMALL_APART
        if topologies.small is None or not apart:
            return [_Layout(group, topologies.all_reduce, entries, numbers)]
        layouts = [_Layout(group, topologies.small, entries, small)]
        return [_Layout(group, topologies.all_reduce, entries, large), *layouts] if large else layouts


class _Layout:
    """The parts of the same tensors, which stay the same in all their plans.

    Args:
        group: The ranks.
        topology: Who sends what to whom.
        entries: ``(name, tensor)``.
        which: The numbers of the entries that it has.
        shards: See :meth:`Planner.plan`.

    Attributes:
        tensors: Number among the entries, parts, and whether it is small, of each tensor.
        large: Names of the tensors that are not small.
        key: Name, entries and parts of each tensor.
    """

    def __init__(
        self,
        group: StreamGroup,
        topology: Topology,
        entries: Entries,
        which: Sequence[int],
        shards: Sequence[Sequence[Shard]] | None = None,
    ) -> None:
        self.topology = topology
        self.operation = group.operation(topology.name + (" between nodes" if group.node else ""))
        self.tensors: list[tuple[int, Shards, bool]] = []
        self.large: list[str] = []
        described = []
        for at in which:
            name, numel = entries[at][0], entries[at][1].numel()
            small = group.is_small(name, numel)
            parts = topology.shards(name, numel, small=small) if shards is None else shards[at]
            parts = parts if isinstance(parts, Shards) else Shards(parts)
            self.tensors.append((at, parts, small))
            described.append((name, numel, parts))
            if not small:
                self.large.append(name)
        self.key = Key(described)
