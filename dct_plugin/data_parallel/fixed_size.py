"""Exchanges that wait for the device once: messages in frames whose size all ranks know beforehand.

The kernels of a device write a message whose size the host does not know. So that it need not wait to learn
it, a message travels in a frame (:mod:`dct_plugin.codecs.slots`) of a size that follows from those of the
last messages of the same exchange between the same two ranks: both have seen them. Frames are opened and
added up on the device. Sizes, figures and errors of all exchanges are read in one copy when they are
finished: of reductions once in a step where the host framework says so
(:attr:`.reducer.GradientReducer.deferred`), of updates of weights before weights are used again.

A message that turns out too long for its frame was added nowhere. Weights stay as they were; who lacked a
part of a sum made NaN of it, which leaves residuals alone, and says so in its own answer. Such messages are
sent again, whole, when the exchange is finished, and what depends on them is done again, with the bits of a
message that had fit. The first time that tensors are exchanged together, sizes are, too, and with them the
proof that all ranks mean the same tensors.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.slots import FAILED, PREFIX, WORDS, slot_bytes
from ..codecs.stats import KERNEL_ERRORS, read_figures
from ..errors import PayloadError
from ..kernels import Backend
from ..metrics import Record
from ..transport import Exchange
from ..transport.bounded_table import BoundedTable
from .plan import Item, Plan, Shard
from .stream_group import Written

#: Sizes of so many messages decide over the next frame.
_REMEMBERED = 4
#: Kinds of plans in which a rank sends the same message to all.
_ALIKE = ("direct", "parameters")


class Exchanging(Protocol):
    """What is asked of a :class:`.stream_group.Member`."""

    rank: int
    world_size: int
    device: torch.device
    exchange: Exchange
    backend: Backend

    def recorded(self, cls: str) -> AbstractContextManager[Record]: ...
    def write(self, plan: Plan, writers: Sequence[MessageWriter], *, copies: int) -> list[Written]: ...
    def account(self, written: Sequence[Written], whole: Record) -> None: ...


class Updating(Exchanging, Protocol):
    """What is asked of :class:`.parameters.ParameterUpdates`."""

    def add_frame(
        self, plan: Plan, owner: int, buffer: Tensor, bounds: tuple[int, int]
    ) -> tuple[Tensor, Tensor]: ...
    def add_message(self, plan: Plan, owner: int, message: Tensor) -> None: ...


class Reducing(Exchanging, Protocol):
    """What is asked of a :class:`.reducer.GradientReducer`."""

    def prepare(self, plan: Plan, whole: Record) -> None: ...
    def totals(self, owned: Sequence[tuple[Item, Shard]]) -> list[Tensor]: ...
    def write_answers(
        self, owned: Sequence[tuple[Item, Shard]], totals: Sequence[Tensor], answer: MessageWriter
    ) -> list[Written]: ...
    def sum_into(
        self,
        messages: Sequence[Tensor],
        outs: Sequence[Tensor],
        scale: float,
        whole: Record,
        *,
        sender: int = 0,
    ) -> None: ...
    def learn(self, plan: Plan) -> None: ...


class _Sizes:
    """Of the last messages to and from every rank in one exchange of a plan."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[deque[int]] = [deque(maxlen=_REMEMBERED) for _ in range(ranks)]
        self.got: list[deque[int]] = [deque(maxlen=_REMEMBERED) for _ in range(ranks)]

    def add(self, sent: Sequence[int], got: Sequence[int]) -> None:
        for sizes, new in ((self.sent, sent), (self.got, got)):
            for series, size in zip(sizes, new, strict=True):
                series.append(size)


@dataclass
class _Leg:
    """One exchange of frames."""

    sizes: _Sizes
    writers: Sequence[MessageWriter]
    """By receiver; one and the same where everybody gets the same."""
    written: list[Written]
    rooms: list[int]
    """Bytes of the frames sent, by receiver."""
    buffer: Tensor
    """The frames received, uint8; the own one among them."""
    bounds: list[tuple[int, int]]
    wrong: Tensor
    """Of each sender's message, int32; see :meth:`~dct_plugin.kernels.Backend.sum_slots`."""

    def words(self) -> Tensor:
        """The frames' first words, int64 [ranks, WORDS]."""
        words = self.buffer.view(torch.int64)
        return torch.stack([words[begin // 8 : begin // 8 + WORDS] for begin, _ in self.bounds])

    def frame(self, sender: int) -> Tensor:
        """Where the frame of a sender is."""
        begin, end = self.bounds[sender]
        return self.buffer[begin:end]


@dataclass
class _Round:
    """An exchange under way."""

    plan: Plan
    scale: float
    writers: list[MessageWriter]
    """One for each rank, one for the answer."""
    legs: list[_Leg] = field(default_factory=list)


class _Found:
    """What is read of a leg."""

    def __init__(self, leg: _Leg, words: Sequence[int], wrong: Sequence[int]) -> None:
        self.leg = leg
        self.wrong = wrong
        self.rows = [list(words[at : at + WORDS]) for at in range(0, len(words), WORDS)]
        self.got = [size for size, *_ in self.rows]
        self.sent = [sum(stats.nbytes for _, stats in writer.parts) for writer in leg.writers]
        rooms = [end - begin for begin, end in leg.bounds]
        self.late = {r for r, size in enumerate(self.got) if size > rooms[r] - PREFIX}
        """Senders whose message did not fit."""
        self.cut = {r for r, size in enumerate(self.sent) if size > leg.rooms[r] - PREFIX}
        """Receivers that the own message did not fit for."""
        self.lacking = {r for r, row in enumerate(self.rows) if row[2]}
        """Senders whose message stands for nothing."""


_Member = TypeVar("_Member", bound=Exchanging)


class _FramedExchange(Generic[_Member]):
    """The exchanges of a member whose kernels write frames.

    Args:
        member: Whose they are.
        cls: Of the records of an exchange as a whole.
    """

    def __init__(self, member: _Member, cls: str) -> None:
        self._member = member
        self._cls = cls
        self._exchange = member.exchange
        self._kernels = member.backend
        self._sizes: BoundedTable[dict[int, _Sizes]] = BoundedTable()
        """By fingerprint: the sizes of each exchange of a plan."""
        self._pending: list[_Round] = []
        self._spare: list[list[MessageWriter]] = []

    def knows(self, plan: Plan) -> bool:
        """Whether the plan's messages have been exchanged before."""
        return self._sizes.has(plan.fingerprint)

    def learn(self, plan: Plan, leg: int, sent: Sequence[Tensor], got: Sequence[Tensor]) -> None:
        """The sizes of messages that were exchanged with their sizes."""
        if leg == 0:
            self._sizes[plan.fingerprint] = {}
        sizes = self._sizes[plan.fingerprint].setdefault(leg, _Sizes(len(got)))
        sizes.add([m.numel() for m in sent], [m.numel() for m in got])

    # -- under way ---

    def start(self, plan: Plan, scale: float, whole: Record) -> None:
        """Queue everything that the exchange takes."""
        names = {item.name for item in plan.items}
        if any(item.name in names for made in self._pending for item in made.plan.items):
            self.finish()  # a stream's next step needs to know what its last one sent
        member, ranks = self._member, self._member.world_size
        writers = (
            self._spare.pop() if self._spare else [MessageWriter(member.device) for _ in range(ranks + 1)]
        )
        made = _Round(plan, scale, writers)
        for writer in writers:
            writer.clear()
        self._prepare(plan, whole)
        alike = plan.kind in _ALIKE
        try:
            written = member.write(plan, writers, copies=ranks - 1 if alike else 1)
        except BaseException:
            self._fail(plan)
            raise
        first = self._frames(plan, 0, [writers[0]] * ranks if alike else writers[:ranks], written)
        self._send(plan, first, whole)
        made.legs.append(first)
        self._add_up(made, whole)
        self._pending.append(made)

    def _prepare(self, plan: Plan, whole: Record) -> None:
        """What comes before the plan's tensors are written."""

    def _add_up(self, made: _Round, whole: Record) -> None:
        """What is done with the first frames; an answer to them."""
        raise NotImplementedError

    def _frames(
        self,
        plan: Plan,
        leg: int,
        writers: Sequence[MessageWriter],
        written: list[Written],
        incomplete: Tensor | None = None,
    ) -> _Leg:
        """The frames of a leg, the own one in its place, those of others to come."""
        sizes = self._sizes[plan.fingerprint][leg]
        rooms = [slot_bytes(series) for series in sizes.sent]
        ends = list(itertools.accumulate((slot_bytes(series) for series in sizes.got), initial=0))
        bounds = list(itertools.pairwise(ends))
        buffer = torch.empty(ends[-1], dtype=torch.uint8, device=self._member.device)
        made = _Leg(sizes, writers, written, rooms, buffer, bounds, torch.empty(0))
        rank = self._member.rank
        self._kernels.write_slot(writers[rank], made.frame(rank), plan.fingerprint, incomplete)
        return made

    def _send(self, plan: Plan, leg: _Leg, whole: Record) -> None:
        """To every rank its frame, and from every rank the one for this."""
        rank, frames = self._member.rank, {}
        own = leg.writers[rank]
        for receiver, (writer, room) in enumerate(zip(leg.writers, leg.rooms, strict=True)):
            if receiver != rank and writer is not own:
                frames[receiver] = leg.buffer.new_empty(room)
                self._kernels.write_slot(writer, frames[receiver], plan.fingerprint)
        arriving = [leg.frame(sender) for sender in range(len(leg.bounds))]
        leaving = [frames.get(receiver, arriving[rank]) for receiver in range(len(leg.bounds))]
        with whole.timed("exchange"):
            self._exchange.transfer_into(leaving, arriving)

    def _fail(self, plan: Plan) -> None:
        """Send frames that say so to the ranks that are waiting for these. Never raises."""
        try:
            for leg in range(2 if plan.kind == "two_phase" else 1):
                sizes = self._sizes[plan.fingerprint][leg]
                leaving, arriving = (
                    [torch.zeros(slot_bytes(series), dtype=torch.uint8) for series in each]
                    for each in (sizes.sent, sizes.got)
                )
                for frame in leaving:
                    frame.view(torch.int64)[0] = FAILED
                device = self._member.device
                self._exchange.transfer_into(
                    [frame.to(device) for frame in leaving], [frame.to(device) for frame in arriving]
                )
        except Exception:  # the transport is gone as well: the others will see that
            return

    # -- finished ---

    def finish(self) -> None:
        """Wait for the exchanges under way; what did not fit is exchanged now.

        Raises:
            DesyncError: A rank failed, or reduces other tensors.
            PayloadError: A message arrived damaged.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        legs = [leg for each in pending for leg in each.legs]
        stats = [part for leg in legs for each in leg.written for part in each.encoded.stats]
        also = [table for leg in legs for table in (leg.words(), leg.wrong.to(torch.int64))]
        read = iter(read_figures(stats, also))
        with self._member.recorded(self._cls) as whole:
            for each in pending:
                self._close(each, [_Found(leg, next(read), next(read)) for leg in each.legs], whole)

    def _close(self, made: _Round, found: Sequence[_Found], whole: Record) -> None:
        """What an exchange found; what it still lacks is fetched."""
        for number, leg in enumerate(found):
            self._check(made.plan, number, leg)
        self._mend(made, found, self._again(found[0]), whole)
        for leg in found:
            leg.leg.sizes.add(leg.sent, leg.got)
            self._member.account(leg.leg.written, whole)
        self._spare.append(made.writers)

    def _mend(self, made: _Round, found: Sequence[_Found], messages: Sequence[Tensor], whole: Record) -> None:
        """Do again what depends on first ``messages`` that did not fit (none: all did), or on others."""
        raise NotImplementedError

    def _check(self, plan: Plan, number: int, found: _Found) -> None:
        exchange, ranks = self._exchange, range(self._exchange.world_size)
        here = 0 if plan.kind == "direct" else exchange.rank
        answers = number > 0 or plan.kind == "parameters"  # of owners
        bounds = [plan.bound(sender if answers else here) for sender in ranks]
        exchange.checked([row[:2] for row in found.rows], plan.fingerprint, bounds)
        for sender, error in enumerate(found.wrong):
            if error:
                raise PayloadError(
                    f"rank {exchange.rank}: message from rank {sender} of the group: {KERNEL_ERRORS[error]}"
                )

    def _again(self, found: _Found) -> list[Tensor]:
        """Send again what did not fit; the messages of all senders, if one of them did not."""
        if not found.late and not found.cut:
            return []
        leg, rank = found.leg, self._exchange.rank
        nothing = leg.buffer[:0]
        messages = [w.message if r in found.cut else nothing for r, w in enumerate(leg.writers)]
        messages[rank] = own = leg.writers[rank].message
        sizes = [size if sender in found.late else 0 for sender, size in enumerate(found.got)]
        arrived = self._exchange.transfer(messages, sizes)
        if not found.late:
            return []
        arrived[rank] = own
        return [
            arrived[sender] if sender in found.late else leg.frame(sender)[PREFIX : PREFIX + size]
            for sender, size in enumerate(found.got)
        ]


class FramedUpdates(_FramedExchange[Updating]):
    """Updates of weights, which every owner sends to all."""

    def _add_up(self, made: _Round, whole: Record) -> None:
        (leg,) = made.legs
        with whole.timed("decode"):
            found = [
                self._member.add_frame(made.plan, owner, leg.buffer, bounds)
                for owner, bounds in enumerate(leg.bounds)
            ]
        leg.wrong = torch.cat([wrong for wrong, _ in found])

    def _mend(self, made: _Round, found: Sequence[_Found], messages: Sequence[Tensor], whole: Record) -> None:
        for owner in sorted(found[0].late):
            with whole.timed("decode"):
                self._member.add_message(made.plan, owner, messages[owner])


class FramedReductions(_FramedExchange[Reducing]):
    """The reductions of a :class:`.reducer.GradientReducer`."""

    def moved(self, name: str, tensor: Tensor) -> None:
        """See :meth:`.reducer.GradientReducer.moved`."""
        for item in (item for made in self._pending for item in made.plan.items if item.name == name):
            item.tensor = tensor

    def _prepare(self, plan: Plan, whole: Record) -> None:
        self._member.prepare(plan, whole)

    def _add_up(self, made: _Round, whole: Record) -> None:
        plan, scale, member, (first,) = made.plan, made.scale, self._member, made.legs
        owned = plan.owned_by(member.rank)
        if plan.kind != "two_phase":
            outs = [item.tensor for item in plan.items] if plan.kind == "direct" else _views(owned)
            first.wrong, _ = self._add(first, first.bounds, outs, scale, whole)
            return
        totals = member.totals(owned)
        first.wrong, missing = self._add(first, first.bounds, totals, 1.0, whole)
        answer, ranks = made.writers[-1], member.world_size
        answered = member.write_answers(owned, totals, answer)
        second = self._frames(plan, 1, [answer] * ranks, answered, missing.amax())
        self._send(plan, second, whole)
        made.legs.append(second)
        wrong = []
        for owner, bound in enumerate(second.bounds):
            views = _views(plan.owned_by(owner))
            wrong.append(self._add(second, [bound], views, scale, whole)[0])
        second.wrong = torch.cat(wrong)

    def _add(
        self,
        leg: _Leg,
        bounds: Sequence[tuple[int, int]],
        outs: Sequence[Tensor],
        scale: float,
        whole: Record,
    ) -> tuple[Tensor, Tensor]:
        with whole.timed("decode"):
            return self._kernels.sum_slots(leg.buffer, bounds, outs, scale)

    def _mend(self, made: _Round, found: Sequence[_Found], messages: Sequence[Tensor], whole: Record) -> None:
        plan = made.plan
        if plan.kind == "two_phase":
            if affected := found[1].late | found[1].lacking:
                self._answer_again(made, found[1], sorted(affected), messages, whole)
        elif messages:
            direct, owned = plan.kind == "direct", plan.owned_by(self._member.rank)
            outs = [item.tensor for item in plan.items] if direct else _views(owned)
            self._sum_anew(messages, outs, made.scale, whole)

    def _close(self, made: _Round, found: Sequence[_Found], whole: Record) -> None:
        super()._close(made, found, whole)
        self._member.learn(made.plan)

    def _sum_anew(
        self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float, whole: Record, sender: int = 0
    ) -> None:
        for out in outs:
            out.zero_()
        self._member.sum_into(messages, outs, scale, whole, sender=sender)

    def _answer_again(
        self, made: _Round, found: _Found, affected: Sequence[int], messages: Sequence[Tensor], whole: Record
    ) -> None:
        """Answers of owners that lacked a message, and those that did not fit, with their sizes."""
        plan, member, leg = made.plan, self._member, found.leg
        writer, message = made.writers[-1], leg.buffer[:0]
        if member.rank in found.lacking:
            owned = plan.owned_by(member.rank)
            totals = member.totals(owned)
            self._sum_anew(messages, totals, 1.0, whole)
            writer.clear()
            leg.written = member.write_answers(owned, totals, writer)
        if member.rank in affected:
            message = writer.message
            found.sent = [message.numel()] * member.world_size
        bounds = [plan.bound(owner) for owner in range(member.world_size)]
        answers = self._exchange.all_gather(message, plan.fingerprint, bounds=bounds)
        for owner in affected:
            found.got[owner] = answers[owner].numel()
            self._sum_anew([answers[owner]], _views(plan.owned_by(owner)), made.scale, whole, sender=owner)


def _views(owned: Sequence[tuple[Item, Shard]]) -> list[Tensor]:
    return [item.view(shard) for item, shard in owned]
