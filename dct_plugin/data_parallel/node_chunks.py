"""The chunks of an all-reduce between nodes.

The ranks of a node sum the tensors of a chunk before it leaves. When the messages of all chunks have arrived,
these ranks give each other the messages of their parts, which are far smaller than the sums, and every rank
adds up those of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from ..metrics import Record
from .node_ranks import Entries, NodeRanks, fingerprint_in_node
from .plan import ReductionPlan


class NodeChunks:
    """Sums the chunks of an all-reduce over the ranks of a node, and shares their messages there.

    Args:
        node: The ranks of this rank's node.
        chunks: Tensors of each chunk, whole.
        plans: By rank of the node, its parts of each chunk.
        observe: Shown this rank's parts of a chunk when they hold the node's means.
        step: Optimizer steps so far.

    Attributes:
        sizes: Number of tensors of each chunk.
    """

    def __init__(
        self,
        node: NodeRanks,
        chunks: Sequence[Entries],
        plans: Sequence[Sequence[ReductionPlan]],
        observe: Callable[[Entries], None],
        step: int,
    ) -> None:
        self.sizes = [len(chunk) for chunk in chunks]
        self.own = plans[node.position]
        self._node, self._chunks, self._plans, self._observe = node, chunks, plans, observe
        self._entered, self._step = 0, step

    def enter(self, index: int, whole: Record) -> None:
        """Put the node's means into this rank's parts of the chunks up to this one, and zeros into the other
        parts; a collective of the node.
        """
        self._node.exchange.step = self._step
        while self._entered <= index:
            with whole.timed("exchange"):
                means = self._node.means(self._chunks[self._entered], in_place=True, clear=True)
            self._entered += 1
            with self.failing_together():
                self._observe(means)

    def failing_together(self) -> AbstractContextManager[None]:
        """See :meth:`.NodeRanks.failing_together`."""
        return self._node.failing_together()

    def share(self, messages: Sequence[Tensor], whole: Record) -> list[tuple[ReductionPlan, list[Tensor]]]:
        """Return, for the parts of the other ranks, the plan of each chunk and its messages; a collective.

        Args:
            messages: Those that hold the sums of this rank's parts: of each chunk, one of each node.
            whole: Record of the time.
        """
        entries = [each for chunk in self._chunks for each in chunk]
        with whole.timed("exchange"):
            shared = self._node.share(messages, fingerprint_in_node("messages", entries))
        del shared[self._node.position]
        others = [plans for plans in self._plans if plans is not self.own]
        count = len(messages) // len(self._chunks)
        return [
            (plan, theirs[count * index : count * (index + 1)])
            for plans, theirs in zip(others, shared, strict=True)
            for index, plan in enumerate(plans)
        ]
