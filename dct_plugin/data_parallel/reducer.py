"""The reducer: gradients of a data-parallel group, summed through compressed messages."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checkpoint
from ..codecs.copies import to_host
from ..codecs.message import MessageWriter
from ..codecs.values import ValueDtype
from ..config import DataParallelConfig, KernelConfig, LocalUpdatesFeedback
from ..errors import ConfigError
from ..feedback import unpacked
from ..kernels import GRAD_DTYPES
from ..kernels.reference import has_overflow, overflow_flags
from ..metrics import Metrics, Record
from ..stream import Compressor, Encoded, as_flat, encode_all
from ..transport.bounded_table import BoundedTable
from .accordion import Accordion
from .averaging import ErrorAveraging
from .fixed_size import FramedReductions
from .local import LocalUpdates, Weight
from .pipelined import Pieces
from .plan import Change, Item, Plan, Shard, shards_of
from .step_ahead import StepAhead, StepUnit
from .stream_group import Member, Written

logger = logging.getLogger("dct_plugin")

#: Tensors that a line of the log names.
_NAMED = 8


class GradientReducer(Member):
    """Sums gradients over a data-parallel group through compressed messages.

    Every method that takes entries is a collective: all ranks of the group call it in the same order with
    tensors of the same names and sizes; a rank that is out of step or fails makes the others raise
    :class:`~dct_plugin.errors.DesyncError`.

    Args:
        config: The ``data_parallel`` settings.
        group: Process group (gloo or nccl), None for the default one.
        metrics: Where bytes, density and times are recorded.
        device: Device of the gradients.
        kernels: Which kernels run; the defaults when None.
        transactional: Take skipped steps back, for host frameworks under fp16 loss scaling; so it is with
            ``nonfinite_action: "skip"``.
        step: Optimizer steps so far, for a reducer that is made while the training runs.
        loss_scale: What the host multiplies into the gradients.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        group: dist.ProcessGroup | None = None,
        *,
        metrics: Metrics | None = None,
        device: torch.device | str = "cpu",
        kernels: KernelConfig | None = None,
        transactional: bool = False,
        step: int = 0,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(
            config,
            group,
            metrics=metrics,
            device=device,
            kernels=kernels,
            transactional=transactional or config.nonfinite_action == "skip",
            step=step,
        )
        self.config = config
        adaptive = config.adaptive
        gentle = config.sparsity if adaptive is None else adaptive.sparsity
        self._gentle = replace(self.schedule, sparsity=gentle)
        self.adaptive = None if adaptive is None else Accordion(adaptive.interval)
        """Decides which tensors take the lower sparsity; hosts tell it their learning rate."""
        every = config.expert.error_averaging
        self._averaging = None if every is None else ErrorAveraging(self, every)
        self.loss_scale = loss_scale
        self.spare_writers: list[list[MessageWriter]] = []
        """To every rank, for pieces of plans."""
        self._scratch = torch.empty(0, dtype=torch.float32, device=self.device)
        self._paid: set[str] = set()
        self._ahead: StepAhead | None = None
        self._loaded_ahead: dict[str, Any] | None = None
        self._framed = FramedReductions(self, "gradient") if self.frames else None
        self._agreed: BoundedTable[None] = BoundedTable()
        """Fingerprints of what all ranks were found to sum densely."""
        self._suspects: list[tuple[list[str], Tensor]] = []
        """Names of tensors that were summed densely, and flags of those that are not finite."""
        self.deferred = False
        """Set by a host that calls :meth:`finish` before it uses what was reduced: then devices are waited
        for there, not in every reduction.
        """
        self._local: LocalUpdates | None = None
        self._loaded_local: dict[str, Any] | None = None

    def step_ahead(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        unit_of: Callable[[torch.nn.Parameter], StepUnit | None],
        *,
        unit: float = 1.0,
        pending_of: Callable[[str], tuple[Shard, Tensor] | None] = lambda _: None,
    ) -> StepAhead:
        """What ``"feedback": "step_ahead"`` needs to know of the host; to be called before the first
        reduction.

        Args:
            parameters: ``(name in the entries, parameter)``.
            unit_of: The optimizer's settings for a parameter as they are now; None for others.
            unit: Of a stream's gradients besides the loss scale, where that of the optimizer's is 1: when the
                sum over the ranks becomes the gradient by a factor, one over that factor and over the number
                of ranks.
            pending_of: See :class:`.step_ahead.StepAhead`; where updates of the weights are thresholded.

        Returns:
            To be attached to the model, or asked to displace and restore its weights.
        """
        self._ahead = StepAhead(
            parameters,
            unit_of,
            self._residual_of,
            self._held_back_of,
            pending_of,
            world_size=self.world_size,
            coefficient=self.config.expert.step_ahead_coefficient,
            gradient_unit=lambda: 1.0 / (unit * self.loss_scale),
        )
        self._ahead.load_state_dict(self._loaded_ahead, step=self.step)
        return self._ahead

    def local_updates(
        self, weights: Callable[[], Iterable[Weight]], optimizer: torch.optim.Optimizer
    ) -> LocalUpdates:
        """What the feedback ``local_updates`` needs to know of the host; call it before the first reduction.

        Args:
            weights: What the optimizer has now.
            optimizer: The one that steps, not a wrapper of it.

        Returns:
            To be attached to the model, and told of the optimizer's steps.

        Raises:
            ConfigError: The configuration does not ask for it, or the weights cannot be exchanged.
        """
        feedback = self.config.feedback
        if not isinstance(feedback, LocalUpdatesFeedback):
            raise ConfigError(
                f"local updates need dct.data_parallel.feedback = 'local_updates', it is '{feedback.label()}'"
            )
        self._local = LocalUpdates(
            weights,
            optimizer,
            self.exchange_changes,
            lambda: self.step,
            first=self.config.warmup_steps,
            every=feedback.every,
            alone=self.world_size == 1,
        )
        self._local.load_state_dict(self._loaded_local)
        return self._local

    # -- collectives ---

    def all_reduce(self, entries: Sequence[tuple[str, Tensor]], *, scale: float = 1.0) -> None:
        """Replace every tensor by ``scale`` times its thresholded sum over the ranks, bitwise the same on
        all.

        Args:
            entries: ``(name, tensor)``; 1-D contiguous tensors of a floating-point type, changed in place. An
                entry that is not finite anywhere comes back as NaN on every rank.
            scale: For an average, one over the world size.

        Raises:
            DesyncError: A rank failed or reduces other tensors.
            PayloadError: A message arrived damaged.
        """
        self.begin(entries, scale=scale).finish()

    def begin(self, entries: Sequence[tuple[str, Tensor]], *, scale: float = 1.0) -> Reduction:
        """:meth:`all_reduce` of tensors that get their gradients one after the other; one at a time."""
        return Reduction(self, entries, scale)

    def finish(self) -> None:
        """What was reduced is there when this returns, whatever :attr:`deferred` says; a collective.

        Raises:
            DesyncError, PayloadError: See :meth:`all_reduce`.
        """
        if self._framed is not None:
            self._framed.finish()

    def moved(self, name: str, tensor: Tensor) -> None:
        """The host has copied a tensor that it reduces since the last :meth:`finish`, as it was, to
        ``tensor``, and uses it there: what :meth:`finish` has to put right it puts right there.
        """
        if self._framed is not None:
            self._framed.moved(name, tensor)

    def exchange_changes(self, changes: Sequence[Change]) -> None:
        """Average what the ranks send of the changes of their weights, bitwise the same on all.

        The feedback is ``local_updates``; the rest is left to each rank.

        Raises:
            DesyncError, PayloadError: See :meth:`all_reduce`.
        """
        more = {change.name: change for change in changes}
        entries = [(change.name, change.tensor) for change in changes]
        with self.recorded("gradient") as whole:
            self._all_reduce(entries, 1.0 / self.world_size, whole, more)
        self.finish()

    def _all_reduce(
        self,
        entries: Sequence[tuple[str, Tensor]],
        scale: float,
        whole: Record,
        changes: Mapping[str, Change] | None = None,
    ) -> None:
        self._reduce(self.plan_all_reduce(entries, changes), scale, whole)

    def plan_all_reduce(
        self, entries: Sequence[tuple[str, Tensor]], changes: Mapping[str, Change] | None = None
    ) -> Plan:
        """What :meth:`all_reduce` moves where."""
        if self._direct():
            return self._plan("direct", [(n, t, [Shard(0, 0, t.numel())]) for n, t in entries], changes)
        shards = [(n, t, self._shards(n, t.numel())) for n, t in entries]
        return self._plan("two_phase", shards, changes)

    def _reduce(self, plan: Plan, scale: float, whole: Record) -> None:
        framed = self._framed
        if framed is not None and all(item.tensor.dtype in GRAD_DTYPES for item in plan.items):
            if framed.knows(plan):
                framed.start(plan, scale, whole)
                return
            framed.finish()
        self.prepare(plan, whole)
        Pieces(self, plan, scale, whole).finish()
        self.learn(plan)

    def reduce_scatter(
        self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]], *, scale: float = 1.0
    ) -> None:
        """Give every owner ``scale`` times the thresholded sum of its shards (ZeRO-1/2).

        Args:
            entries: ``(name, tensor, shards)``; the shards cover the 1-D contiguous tensor once. The owner's
                shards are changed in place; the rest of the tensor is left unspecified.
            scale: For an average, one over the world size.

        Raises:
            DesyncError: A rank failed or reduces other tensors.
            PayloadError: A message arrived damaged.
            ValueError: The shards of a tensor do not cover it.
        """
        with self.recorded("gradient") as whole:
            self.look([(name, tensor) for name, tensor, _ in entries])
            if self._reduced_dense([(name, tensor) for name, tensor, _ in entries], scale, whole):
                return
            self._reduce(self._plan("reduce_scatter", entries), scale, whole)
        if not self.deferred:
            self.finish()

    # -- steps ---

    def take_back(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """No rank used what :meth:`all_reduce` left in these tensors: it is owed again."""
        for name, tensor in entries:
            stream = self.streams.get(name)
            if stream is not None and stream.residual is not None:
                stream.residual.add(as_flat(tensor))

    def end_step(
        self, *, skipped: bool = False, loss_scale: float | None = None, reduced_at: float | None = None
    ) -> None:
        """An optimizer step is over; warm-up counts it, also a skipped one.

        Args:
            skipped: The optimizer did not use the gradients reduced since the last step: residuals and
                thresholds are bitwise what they were then. Without ``transactional`` they stay as they
                are: what was sent in the step is lost with it.
            loss_scale: The coming gradients are multiplied by it; residuals and thresholds follow (exact for
                powers of 2). None: as before.
            reduced_at: Loss scale of the gradients reduced in this step, for hosts that learn it only now.
        """
        self.finish()
        self._name_suspects()
        if reduced_at is not None:
            self.loss_scale = reduced_at
        members: list[Compressor | StepAhead | Accordion] = [*self.streams.values()]
        members += [part for part in (self._ahead, self.adaptive) if part is not None]
        for member in members:
            member.end_step(skipped=skipped and self._transactional)
            if loss_scale is not None and loss_scale != self.loss_scale:
                member.rescale(loss_scale / self.loss_scale)
        if self._averaging is not None:
            self._averaging.end_step()
        if not skipped:
            for name in self._paid:
                self._loaded.pop(name)
        self._paid.clear()
        if skipped and self.config.nonfinite_action == "skip":
            self._nonfinite_reported = False  # the next one may be another rank's and parameter's
        if loss_scale is not None:
            ratio = loss_scale / self.loss_scale
            self._loaded = dict(checkpoint.in_unit({"streams": self._loaded}, ratio)["streams"])
            self.loss_scale = loss_scale
        self.step += 1

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank (each rank has its own)."""
        streams = self._streams_state()
        ahead = self._loaded_ahead if self._ahead is None else self._ahead.state_dict()
        state = {"step": self.step, "loss_scale": self.loss_scale, "streams": streams, "ahead": ahead}
        if self.adaptive is not None:
            state["adaptive"] = self.adaptive.state_dict()
        if self.config.feedback.steps_locally:
            state["local"] = self._loaded_local if self._local is None else self._local.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], *, loss_scale: float | None = None) -> None:
        """Restore :meth:`state_dict`; streams get their state when they are next used, unknown ones start
        afresh.

        Args:
            state: Of this rank.
            loss_scale: That of the coming gradients; None: the saved one.
        """
        self.finish()
        self._paid.clear()  # of the state that goes
        scale = state["loss_scale"] if loss_scale is None else loss_scale
        self.step, self.loss_scale = state["step"], scale
        self.streams.clear()
        state = checkpoint.in_unit(state, scale / state["loss_scale"])
        # Streams of gradients know nothing of changes of weights, nor the other way round.
        same = ("local" in state) == (self.config.feedback.steps_locally)
        self._loaded = dict(state["streams"]) if same else {}
        self._loaded_ahead = state.get("ahead")
        if self._ahead is not None:
            self._ahead.load_state_dict(self._loaded_ahead, step=self.step)
        if self.adaptive is not None:
            self.adaptive.load_state_dict(state.get("adaptive"))
        self._loaded_local = state.get("local")
        if self._local is not None:
            self._local.load_state_dict(self._loaded_local)

    # -- looking ahead ---

    @property
    def looks_ahead(self) -> bool:
        """Whether :meth:`step_ahead` was called."""
        return self._ahead is not None

    def _residual_of(self, name: str, use: str = "own") -> Tensor | None:
        """To be read before the next one of the same ``use``, whose memory it may share."""
        stream = self.streams.get(name)
        if stream is not None:
            return None if stream.residual is None else stream.residual.show(self._rooms, use)
        saved = self._loaded[name]["residual"] if name in self._loaded else None
        return None if saved is None else unpacked(saved).to(self.device)

    def _held_back_of(self, name: str, numel: int) -> Iterator[tuple[Shard, Tensor]]:
        """What this rank, as an owner (two-phase exchange), has not sent back yet, one after the other."""
        if not self._direct():
            for shard in self._shards(name, numel):
                residual = self._residual_of(f"{name}[{shard.start}:{shard.stop}]", "part")
                if residual is not None:
                    yield shard, residual

    def look(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """Show step-ahead gradients (see :meth:`all_reduce`) that the host reduces by itself.

        Raises:
            ConfigError: The configuration asks for step-ahead, and :meth:`step_ahead` was not called; or for
                local updates, and :meth:`local_updates` was not.
        """
        if self._local is None and self.config.feedback.steps_locally:
            raise ConfigError(
                "dct.data_parallel.feedback = 'local_updates': this host has not said which weights and "
                "which optimizer are meant (GradientReducer.local_updates); set it to 'local'"
            )
        if self._ahead is None:
            if self.config.feedback.looks_ahead:
                raise ConfigError(
                    "dct.data_parallel.feedback = 'step_ahead': this host has not said which "
                    "parameters and which optimizer are meant (GradientReducer.step_ahead); set it to 'local'"
                )
        elif self.world_size > 1:
            for name, tensor in entries:
                if not self._small(tensor.numel()):
                    self._ahead.observe(name, tensor)

    def learn(self, plan: Plan) -> None:
        """From what was sent and what came of it."""
        if self.adaptive is not None:
            for item in plan.items:
                if not item.small:
                    scattered = plan.kind == "reduce_scatter"
                    held = [(s.start, s.stop) for s in item.shards if not scattered or s.owner == self.rank]
                    self.adaptive.observe(item.name, item.tensor, held, self.step)
        if self._ahead is not None and plan.sampled:
            own = self._ahead.samples(plan.sampled, self.step, self.device)
            mean = own.clone()
            self.exchange.all_reduce(mean)
            self._ahead.learn(plan.sampled, own, mean / self.world_size)

    # -- planning ---

    def _direct(self) -> bool:
        if self.config.exchange == "auto":
            # A rank sends P-1 messages directly, 2(P-1)/P in two phases: the same bytes for two ranks, one
            # round fewer. What owners hold back costs step-ahead quality (measured: docs/quality.md).
            return self.world_size <= (4 if self.config.feedback.looks_ahead else 2)
        return self.config.exchange == "direct"

    def _small(self, numel: int) -> bool:
        return numel < self.config.min_numel

    def _shards(self, name: str, numel: int) -> list[Shard]:
        return shards_of(name, numel, self.world_size, whole=self._small(numel))

    def _plan(
        self,
        kind: str,
        entries: Sequence[tuple[str, Tensor, Sequence[Shard]]],
        changes: Mapping[str, Change] | None = None,
    ) -> Plan:
        with self.exchange.preparing(announced=self._framed is None):
            items = [Item(n, t, list(shards), self._small(t.numel())) for n, t, shards in entries]
            if changes is not None:
                for item in items:
                    item.left, item.entry_bytes = changes[item.name].left, changes[item.name].entry_bytes
            ahead = self._ahead
            sampled = ahead.sampled((i.name for i in items if not i.small), self.step) if ahead else []
            return Plan(kind, items, sampled, self._framed is not None)

    def _judge(self, plan: Plan) -> None:
        """Which of the plan's tensors are in a critical regime, where that is due."""
        if self.adaptive is None:
            return
        if due := self.adaptive.due(((item.name, item.tensor) for item in plan.items), self.step):
            squares = self.adaptive.squares(due)
            if plan.kind == "reduce_scatter":  # elsewhere every rank has the whole
                self.exchange.all_reduce(squares)
            turned = self.adaptive.decide(due, squares, self.step)
            if self.rank == 0:
                self._tell(self.adaptive, turned)

    def _tell(self, adaptive: Accordion, turned: Sequence[str]) -> None:
        """One line for the tensors that entered a critical regime, one for those that left it."""
        for critical, what, sparsity in (
            (True, "in", self._gentle.sparsity),
            (False, "out of", self.config.sparsity),
        ):
            if names := [name for name in turned if adaptive.critical(name) == critical]:
                logger.warning(
                    "dct: step %d: Accordion: %d tensor%s %s a critical regime, sparsity %g: %s",
                    self.step,
                    len(names),
                    "" if len(names) == 1 else "s",
                    what,
                    sparsity,
                    ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else ""),
                )

    # -- sending ---

    def _reduced_dense(self, entries: Sequence[tuple[str, Tensor]], scale: float, whole: Record) -> bool:
        """Warm-up steps and single ranks: sum as the host framework would. Returns whether that was done."""
        if self.world_size > 1 and self.step >= self.config.warmup_steps:
            return False
        if self.world_size == 1:
            self._pay(entries)
        else:
            self._sum_dense(entries, whole)
        if scale != 1.0:
            for _, tensor in entries:
                tensor.mul_(scale)
        return True

    def _sum_dense(self, entries: Sequence[tuple[str, Tensor]], whole: Record) -> None:
        # A rank whose warm-up is over would wait in another collective for ever.
        plan = self._plan("dense", [(n, t, [Shard(0, 0, t.numel())]) for n, t in entries])
        if self._framed is None:
            self.exchange.agree(plan.fingerprint)
        elif not self._agreed.has(
            plan.fingerprint
        ):  # a device would be waited for: once, on the step as well
            self.exchange.agree((plan.fingerprint + self.step) % (1 << 63))
            self._agreed[plan.fingerprint] = None
        for dtype in dict.fromkeys(tensor.dtype for _, tensor in entries):
            same = [tensor for _, tensor in entries if tensor.dtype == dtype]
            flat = torch.cat(same)
            with whole.timed("exchange"):
                size = self.exchange.all_reduce(flat)
            self._record(Record("gradient_warmup", size, size, flat.numel()), whole)
            if self._framed is not None and not self._nonfinite_reported:
                names = [name for name, tensor in entries if tensor.dtype == dtype]
                self._suspects.append((names, overflow_flags(same)))
            elif not self._nonfinite_reported and has_overflow(flat):
                poisoned = (name for name, t in entries if t.dtype == dtype and has_overflow(t))
                if (name := next(poisoned, None)) is not None:  # the sum may be poisoned by others alone
                    self._report_nonfinite(name)
            for tensor, reduced in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(reduced)

    def _name_suspects(self) -> None:
        """Say which gradient of a warm-up step is not finite, if one is."""
        suspects, self._suspects = self._suspects, []
        if suspects:
            names = [name for names, _ in suspects for name in names]
            flags = to_host(torch.cat([flags for _, flags in suspects])).tolist()
            if (name := next(itertools.compress(names, flags), None)) is not None:
                self._report_nonfinite(name)

    def _pay(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """A single rank thresholds nothing: what a checkpoint of several still owes is paid at once."""
        for name, tensor in entries:
            saved = self._loaded.get(name)
            if saved is not None and saved["residual"] is not None and name not in self._paid:
                tensor += unpacked(saved["residual"]).to(tensor)
                self._paid.add(name)

    @property
    def in_parts(self) -> bool:
        """Whether nothing is exchanged that takes all tensors of a reduction at once."""
        steady = self._framed is None and self.adaptive is None and self._averaging is None
        return steady and self.world_size > 1 and self.step >= self.config.warmup_steps

    def prepare(self, plan: Plan, whole: Record) -> None:
        """What is exchanged besides, before the plan's tensors are: Accordion, averaged residuals."""
        self._judge(plan)
        if self._averaging is not None:
            large = ((item.name, item.tensor.numel()) for item in plan.items if not item.small)
            averaged = self._averaging.average(large, whole)
            if self._ahead is not None and averaged:
                moments = self._ahead.moments_of(averaged)
                self.exchange.all_reduce(moments)
                self._ahead.share_moments(averaged, moments / self.world_size)

    def write(self, plan: Plan, writers: Sequence[MessageWriter], *, copies: int) -> list[Written]:
        """Payloads of this rank's tensors into the messages, which are empty, of their owners; each payload
        leaves this rank ``copies`` times.
        """
        factor = (self.world_size - 1) / self.world_size * (2 if plan.kind == "direct" else 1)
        with self.backend.batched():
            return [self._write_item(plan, item, writers, factor, copies) for item in plan.items]

    def _write_item(
        self, plan: Plan, item: Item, writers: Sequence[MessageWriter], factor: float, copies: int
    ) -> Written:
        grad, stream = as_flat(item.tensor), None
        parts = [(shard.start, shard.stop, writers[shard.owner]) for shard in item.shards]
        if item.small:
            stats = [
                encode_all(self.backend, grad[start:stop], writer, clear=True).stats[0]
                for start, stop, writer in parts
            ]
            encoded = Encoded(stats, grad.numel())
            if item.left is not None:
                item.left.zero_()
        else:
            stream = self.stream(item.name)
            encoded = stream.encode(grad, parts, self.density(item), clear=True, left=item.left)
        if grad.data_ptr() != item.tensor.data_ptr():
            item.tensor.zero_()
        return Written(
            item.name,
            "gradient_small" if item.small else "gradient",
            encoded,
            stream,
            factor * item.tensor.numel() * item.entry_bytes,
            [copies if plan.kind == "direct" or shard.owner != self.rank else 0 for shard in item.shards],
            "critical" if self._gently(item) and not item.small else "",
        )

    def write_answers(
        self, owned: Sequence[tuple[Item, Shard]], totals: Sequence[Tensor], answer: MessageWriter
    ) -> list[Written]:
        """What an owner sends back: the sums, thresholded once more with the owner's own residuals; zeros are
        left in ``totals``.
        """
        with self.backend.batched():
            return [
                self._write_answer(item, shard, total, answer)
                for (item, shard), total in zip(owned, totals, strict=True)
            ]

    def _write_answer(self, item: Item, shard: Shard, total: Tensor, answer: MessageWriter) -> Written:
        density, stream = min(1.0, self.density(item) * self.config.server_density), None
        if item.small:
            encoded = encode_all(self.backend, total, answer, ValueDtype.FP32, clear=True)
        else:
            stream = self.stream(f"{item.name}[{shard.start}:{shard.stop}]")
            encoded = stream.encode(total, [(0, total.numel(), answer)], density, clear=True)
        receivers = self.world_size - 1
        return Written(
            None,
            "gradient_small" if item.small else "gradient_answer",
            encoded,
            stream,
            receivers * total.numel() * item.entry_bytes,
            [receivers],
        )

    def density(self, item: Item) -> float:
        """Share of a tensor's entries that this step sends."""
        return (self._gentle if self._gently(item) else self.schedule).density(self.step)

    def _gently(self, item: Item) -> bool:
        return self.adaptive is not None and self.adaptive.critical(item.name)

    # -- receiving ---

    def received(
        self, piece: Plan, sent: Sequence[Tensor], arrived: Sequence[Tensor], *, answers: bool
    ) -> None:
        """A piece's messages were exchanged with their sizes."""
        if self._framed is not None:
            self._framed.learn(piece, int(answers), sent, arrived)

    def sum_into(
        self,
        messages: Sequence[Tensor],
        outs: Sequence[Tensor],
        scale: float,
        whole: Record,
        *,
        sender: int = 0,
    ) -> None:
        """:meth:`sum_messages` for tensors of any floating-point type."""
        with whole.timed("decode"):
            # What the kernels do not write themselves (fp64) is added up beside.
            into = [
                out if out.dtype in GRAD_DTYPES else torch.zeros_like(out, dtype=torch.float32)
                for out in outs
            ]
            self.sum_messages(messages, into, scale, sender=sender)
            for out, total in zip(outs, into, strict=True):
                if total is not out:
                    out.copy_(total)

    def totals(self, owned: Sequence[tuple[Item, Shard]]) -> list[Tensor]:
        """fp32 zeros for the sums of shards, taken from memory in which whoever uses it leaves zeros."""
        bounds = list(itertools.accumulate((shard.stop - shard.start for _, shard in owned), initial=0))
        if self._scratch.numel() < bounds[-1]:
            self._scratch = torch.zeros(bounds[-1], dtype=torch.float32, device=self.device)
        return [self._scratch[start:stop] for start, stop in itertools.pairwise(bounds)]


class Reduction:
    """An :meth:`~GradientReducer.all_reduce` of tensors that get their gradients one after the other: what
    is there can be on its way before the last have come. A collective, like that, of all calls together:
    ranks may call :meth:`advance` when and as often as they like.

    Args:
        reducer: Of the tensors.
        entries, scale: As of :meth:`~GradientReducer.all_reduce`.
    """

    def __init__(self, reducer: GradientReducer, entries: Sequence[tuple[str, Tensor]], scale: float) -> None:
        self._reducer = reducer
        self._entries = entries
        self._scale = scale
        self._whole = Record("gradient", tensors=0)
        self._plan: Plan | None = None
        self._pieces: Pieces | None = None
        self._looked = 0

    def advance(self, there: int, idle: Callable[[], bool]) -> None:
        """The first ``there`` tensors have their gradients: send what can be sent, and add up what comes as
        long as the caller is ``idle()``.

        Raises:
            DesyncError, PayloadError: As :meth:`~GradientReducer.all_reduce`.
        """
        reducer = self._reducer
        if not reducer.in_parts:
            return
        with reducer.recording(self._whole):
            pieces = self._begun()
            with reducer.exchange.preparing(posts=pieces.owed):
                self._look(there)
                pieces.post(there)
            while pieces.collectable and idle():
                pieces.collect()

    def finish(self) -> None:
        """All tensors have their gradients; returns when they hold the sums.

        Raises:
            DesyncError, PayloadError: As :meth:`~GradientReducer.all_reduce`.
        """
        reducer, whole = self._reducer, self._whole
        with reducer.recording(whole):
            if self._pieces is not None and self._plan is not None:
                with reducer.exchange.preparing(posts=self._pieces.owed):
                    self._look(len(self._entries))
                self._pieces.finish()
                reducer.learn(self._plan)
            else:
                self._look(len(self._entries))
                if not reducer._reduced_dense(self._entries, self._scale, whole):
                    reducer._all_reduce(self._entries, self._scale, whole)
        if reducer.metrics is not None:
            reducer.metrics.record(whole)
        if not reducer.deferred:
            reducer.finish()

    def _look(self, there: int) -> None:
        """Before gradients are thresholded, and cleared."""
        if there > self._looked or not self._entries:
            self._reducer.look(self._entries[self._looked : there])
            self._looked = there

    def _begun(self) -> Pieces:
        if self._pieces is None:
            self._plan = self._reducer.plan_all_reduce(self._entries)
            self._pieces = Pieces(self._reducer, self._plan, self._scale, self._whole)
        return self._pieces
