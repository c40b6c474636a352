"""Exchanges whose messages travelled in slots, and that the host has not checked yet.

Lengths, figures and errors of all pending exchanges are read in one copy: those of reductions once in a step,
when the host framework needs the sums; those of updates of weights before the weights are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from ..codecs.slots import WORDS
from ..codecs.stats import KERNEL_ERRORS, read_figures
from ..errors import DesyncError, PayloadError
from ..kernels.job import GRAD_DTYPES
from ..metrics import Record
from ..policy.memory import MOST_PENDING
from ..transport import lost_ranks
from ..transport.bounded_table import BoundedTable
from ..transport.slots import AgreedCapacities, fail
from .plan import ReductionPlan
from .plan_exchange import PlanExchange, SendOrder, SentPhase
from .stream_group import StreamGroup
from .topology import Phase


class PendingExchanges:
    """The exchanges of a group: begins them, and checks those that are pending.

    Args:
        group: Streams and process group.
        cls: Class of the exchanges in the metrics.
        finished: Called for each plan whose results are complete.
    """

    def __init__(
        self, group: StreamGroup, cls: str, finished: Callable[[ReductionPlan], None] = lambda _: None
    ) -> None:
        self._group, self._cls, self._finished = group, cls, finished
        self._capacities: BoundedTable[_Known] = BoundedTable()
        """The value of each chunk, by its fingerprint."""
        self._pending: list[PlanExchange] = []
        self._kept = 0.0
        """Entries kept by the exchanges since the last check, the same on all ranks."""
        self._order = SendOrder()

    def preparing(self) -> AbstractContextManager[None]:
        """Surround work before the next exchange. The others wait there for headers, or, as in the last step,
        for slots: an error is told where they wait.
        """
        return self._group.exchange.preparing(posts=0, failed=self._fail_next)

    def _fail_next(self) -> None:
        if expected := self._expected():
            fail(expected, self._group.device)
        else:
            self._group.exchange.abort()

    def _expected(self) -> list[AgreedCapacities]:
        """Return the capacities of the slots that this step is still to send, if it is like the last one."""
        following = self._order.following(self._group.step)
        known = self._capacities
        return [known[chunk].of_phases[phase] for chunk, phase in following if known.has(chunk)]

    def begin(self, phases: Sequence[Phase], plan: ReductionPlan, exchange_record: Record) -> PlanExchange:
        """Return an exchange of a plan, to be posted and given to :meth:`complete`."""
        group = self._group
        large = [each for each in plan.tensors if not each.small]
        for each, sparsity in zip(large, group.sparsities([each.name for each in large]), strict=True):
            each.sparsity = sparsity
        chunks = plan.chunks(group.backend.message_entries)
        in_slots = bool(chunks) and not group.backend.lengths_on_host
        if in_slots:
            in_slots = {each.tensor.dtype for each in plan.tensors}.issubset(GRAD_DTYPES)
            known = [self._capacities.has(chunk.fingerprint) for chunk in chunks]  # all: ranks ask alike
            if not (in_slots and all(known)):
                self._compare_unknown(chunks[0].fingerprint)
        # The stream of a pending tensor needs to know what it sent.
        names = {tensor.name for tensor in plan.tensors} if self._pending else ()
        again = any(t.name in names for each in self._pending for t in each.plan.tensors)
        if not in_slots or again or self._kept > MOST_PENDING:
            self.finish()
        self._kept += sum([each.kept for each in plan.tensors])
        capacities = [self._agreed(phases, chunk) for chunk in chunks] if in_slots else None
        return PlanExchange(group, self._order, phases, plan, chunks, exchange_record, capacities)

    def complete(self, exchange: PlanExchange) -> None:
        """Receive and add up the messages of an exchange, which stays pending if they are in slots."""
        exchange.finish()
        if exchange.in_slots:
            self._pending.append(exchange)
            return
        for chunk in exchange.chunks:
            self._group.give_back(chunk.writers)
        self._finished(exchange.plan)

    def _agreed(self, phases: Sequence[Phase], chunk: ReductionPlan) -> Sequence[AgreedCapacities]:
        """Return the capacities of a chunk's slots, by phase."""
        kept = [(each.sparsity.density, each.tensor.dtype) for each in chunk.tensors]
        known = self._capacities.get(chunk.fingerprint)
        if known is None or (known.kept, known.value_bits) != (kept, self._group.value_bits):
            of_phases = [phase.capacities(chunk) for phase in phases]
            known = self._capacities[chunk.fingerprint] = _Known(kept, self._group.value_bits, of_phases)
        return known.of_phases

    def _compare_unknown(self, fingerprint: int) -> None:
        """Compare a plan that this rank does not know with those of the others. Ranks that reduce what they
        reduced in the last step send slots.

        Raises:
            DesyncError: The others know their plan, or it is another one. They find that in their slots.
        """
        group, slots_of_others = self._group, self._expected()
        if not slots_of_others:
            group.exchange.agree(fingerprint)
            return
        unknown = fingerprint ^ (1 << 61)  # far from all that differ by steps
        sent = slots_of_others[0].send_empty(group.device, 0, unknown)
        group.exchange.await_device("exchange of sizes")
        try:
            group.exchange.checked_sizes(sent.headers().tolist(), unknown)
        except DesyncError:
            fail(slots_of_others[1:], group.device)
            raise

    # -- finished ---

    def finish(self) -> None:
        """Check the pending exchanges.

        Raises:
            DesyncError: A rank failed, or exchanges other tensors.
            PayloadError: A message arrived damaged.
        """
        pending, self._pending, self._kept = self._pending, [], 0.0
        if not pending:
            return
        chunks = [chunk for exchange in pending for chunk in exchange.chunks]
        stats = [
            part
            for chunk in chunks
            for sent in chunk.sent
            for each in sent.written
            for part in each.encoded.stats
        ]
        heads = [sent.heads for chunk in chunks for sent in chunk.sent]
        names = [each.name for exchange in pending for each in exchange.plan.tensors]
        which = " to ".join(dict.fromkeys([*names[:1], *names[-1:]]))
        what = f"exchange of messages of {len(names)} tensors, {which},"
        with self._group.exchange.guard(what):  # here the host waits, not where it sends
            lost_ranks.await_device(self._group.device, self._group.exchange.peers.group)
            words = iter(read_figures(stats, heads))
        with self._group.recorded(self._cls) as exchange_record:
            for exchange in pending:
                for chunk in exchange.chunks:
                    for sent in chunk.sent:
                        self._check(chunk.plan, sent, next(words))
                        self._group.account(sent.written, exchange_record)
                    self._group.give_back(chunk.writers)
                self._finished(exchange.plan)

    def _check(self, plan: ReductionPlan, sent: SentPhase, words: Sequence[int]) -> None:
        """Check the messages of a phase, as the first words of their slots say."""
        assert sent.slots is not None
        assert sent.capacities is not None
        heads = [words[first : first + WORDS] for first in range(0, len(words), WORDS)]
        phase, room = sent.phase, sent.slots.layout.room_from
        bounds = None if phase.follows else room
        fingerprint = self._group.at_step(plan.fingerprint)
        sizes = self._group.exchange.checked_sizes(heads, fingerprint, bounds)
        for sender, (*_, error) in enumerate(heads):
            if error:
                own, problem = self._group.rank, KERNEL_ERRORS[error]
                raise PayloadError(f"rank {own}: message from rank {sender} of the group: {problem}")
        if phase.follows:
            lacking = [r for r, (size, _, nothing, _) in enumerate(heads) if nothing or size > room[r]]
            if lacking:
                phase.complete(plan, lacking)
            sent.capacities.follow(sizes)


class _Known(NamedTuple):
    """The capacities of a chunk's slots, and what they follow from.

    Attributes:
        kept: Density and type of each tensor.
        value_bits: Bits of a value.
        of_phases: The capacities by phase.
    """

    kept: Sequence[tuple[float, torch.dtype]]
    value_bits: int
    of_phases: Sequence[AgreedCapacities]
