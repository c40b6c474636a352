"""Exchange of updates: the unsent progress of a rank, and the lengths of its optimizer's steps.

Each rank makes its own optimizer's step on its own gradient, and trains at the common weights plus its unsent
progress. In each step another part of the progress crosses, or all of it, with error feedback.

The mean of the ranks' steps is shorter than the step for the mean gradient. A factor per tensor repairs that:
under Adam the norm of a rank's gradient over the norm of the mean gradient, under Muon the same of steps,
since one orthogonal matrix is longer than the mean of different ones. A count sketch of 256 numbers
(Charikar, Chen and Farach-Colton, 2002, section 3) gives the norm of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compression.feedback import PackedResidual
from ..add_on import ReducerContext
from ..passes import remove
from ..plan import Entries
from ..stream_group import StreamGroup
from .outer_step import OuterStep
from .training import Optimizers, TrainedWeights, decay_of, is_muon, memory_of

#: Numbers of a sketch, and signs in a row; more entries begin the row elsewhere.
WIDTH, ROW = 256, 1 << 20
#: Exchanges of progress from one of sketches to the next; the first ones have one each.
SKETCH_EVERY, FIRST = 16, 4
#: Share of the norms of all gradients that outlasts an exchange of sketches.
KEPT = 0.5
#: Most entries that are encoded together.
PIECE = 1 << 20


def sketch(flat: Tensor, turn: int, signs: Tensor) -> Tensor:
    """Return the count sketch of a tensor [n], fp32 [min(n, 256)].

    A sum of tensors has the sum of their sketches, and nearly the norm of its own one.

    Args:
        flat: The tensor.
        turn: Varies the signs.
        signs: 1 or -1 at random, int8 [2**21].
    """
    if flat.numel() <= WIDTH:
        return flat.to(torch.float32)
    out = torch.zeros(WIDTH, device=flat.device, dtype=torch.float32)
    for number, part in enumerate(flat.split(ROW)):
        first = (31 * turn + number) * 7919 % ROW
        signed = part.to(torch.float32) * signs[first : first + part.numel()]
        whole = signed.numel() // WIDTH * WIDTH
        out += signed[:whole].view(-1, WIDTH).sum(0)
        out[: signed.numel() - whole] += signed[whole:]
    return out


def is_due(number: int) -> bool:
    """Return whether sketches cross in an exchange of progress."""
    return number < FIRST or number % SKETCH_EVERY == 0


class StepFactors:
    """The factor of a rank's steps for each tensor, the same on all ranks.

    Args:
        group: The ranks.
        sizes: Entries of the tensors by name.
        optimizers: Those that train the tensors.
    """

    def __init__(self, group: StreamGroup, sizes: Mapping[str, int], optimizers: Optimizers) -> None:
        self._group, device, groups = group, group.device, optimizers.groups
        signs = torch.randint(
            0, 2, (2 * ROW,), generator=torch.Generator().manual_seed(0), dtype=torch.int8, device="cpu"
        )
        self._signs, widths = (2 * signs - 1).to(device), [min(WIDTH, numel) for numel in sizes.values()]
        self._flat = torch.zeros(sum(widths) + len(widths), device=device, dtype=torch.float32)
        *parts, self._squares = self._flat.split([*widths, len(widths)])
        self._parts = dict(zip(sizes, parts, strict=True))
        self._of_steps = {name for name, (optimizer, group) in groups.items() if is_muon(optimizer, group)}
        memories = [memory_of(*groups.get(name, (None, {}))) for name in sizes]
        self._memory_of = torch.tensor(memories, dtype=torch.float32, device=device)
        self._are_gradients = torch.tensor([name not in self._of_steps for name in sizes], device=device)
        self.saved = {
            name: torch.zeros(len(widths), device=device, dtype=torch.float32) for name in ("own", "mean")
        }
        """Squared norms: the mean of the ranks' own ones, and that of the mean; fp32 [tensors] each. The same
        of all gradients together, of the last steps: fp32 [2].
        """
        self.saved["all"] = torch.zeros(2, device=device, dtype=torch.float32)
        self.ratio = 1.0
        """The norm of the mean gradient over that of the ranks' own ones, all tensors together."""

    def see(self, entries: Mapping[str, Tensor], number: int, *, steps: bool) -> None:
        """Sketch gradients, or with ``steps`` the optimizer's steps, of the tensors whose factor is of these.

        Args:
            entries: The tensors by name, of any shape and floating type.
            number: Number of the exchange of progress.
            steps: Whether the tensors are steps.
        """
        for name, flat in entries.items():
            if name in self._parts and (name in self._of_steps) == steps:
                self._parts[name].copy_(sketch(flat.detach().reshape(-1), number, self._signs))

    def exchange(self, number: int) -> list[float]:
        """Take over what was seen since the last call, and return the factors; a collective.

        Args:
            number: Number of the exchange of progress.
        """
        group, ranks = self._group, self._group.world_size
        self._squares.copy_(self._norms())  # of sketches, too: then errors of both norms cancel
        with group.recorded("gradient_local"):
            group.exchange.all_reduce(self._flat)
        sums = self._norms()
        found = {"own": self._squares / ranks, "mean": sums / ranks**2}
        kept = self._memory_of ** (1 if number < FIRST else min(number, SKETCH_EVERY))
        usable = torch.isfinite(self._squares) & torch.isfinite(sums)
        for name, now in found.items():
            saved = self.saved[name]
            saved.copy_(torch.where(usable, kept * saved + (1 - kept) * now, saved))
        together = torch.stack([now[self._are_gradients & usable].sum() for now in found.values()])
        together /= together.max().clamp(min=torch.finfo(torch.float32).tiny)
        self.saved["all"].mul_(KEPT).add_(together)
        self._flat.zero_()
        return self.values()

    def values(self) -> list[float]:
        """Take over what is saved; return the factors, 1 to the number of ranks."""
        own, mean = self.saved["all"].tolist()
        self.ratio = min(1.0, math.sqrt(mean / own)) if own else 1.0
        ratio = self.saved["own"] / self.saved["mean"].clamp(min=torch.finfo(torch.float32).tiny)
        return ratio.sqrt().clamp(1.0, float(self._group.world_size)).tolist()

    def _norms(self) -> Tensor:
        return torch.stack([each.square().sum() for each in self._parts.values()])


class UnsentUpdates(OuterStep):
    """The progress of a rank that the others have not got; a part of it crosses in each step.

    No outer optimizer moves the common weights. From the backward pass to the optimizer's step gradients are
    shortened: they have about the norm of the mean gradient, by which scripts clip.

    Attributes:
        factors: Those of the steps. They see gradients as the optimizer does: clipped, and without a loss
            scale.
        shortened: The factor of gradients that no optimizer has used, by name.
        shortens: False if gradients of several passes of a step were reduced: these have no factor.
    """

    option = "exchange_of"
    keeps_unsent = True
    lost = "with the mean of what was not sent, and new states of the optimizer where it has none"

    def __init__(self, context: ReducerContext, weights: TrainedWeights, optimizers: Optimizers) -> None:
        self._group, self._topologies, self._weights = context.group, context.topologies, weights
        self._optimizers, self.exchanges = optimizers, torch.zeros(2, dtype=torch.int64, device="cpu")
        self.buffers_every, self.delay, self._share = SKETCH_EVERY, 0, context.config.density
        self._flat = torch.zeros_like(weights.flat)
        sizes = {name: each.numel() for name, each in weights.common.items()}
        self._unsent = self._flat.split(list(sizes.values()))
        self._turns = round(1.0 / context.config.density)
        self.factors = StepFactors(context.group, sizes, optimizers)
        self.saved, self._factors = {"factors": self.factors.saved}, [1.0] * len(sizes)
        self.shortened: dict[str, float] = {}
        self.shortens = True
        self._decays: dict[str, float] = {}
        self._shown: Tensor | None = None
        """Norms of this rank's weights as they were shown, fp32 [tensors]; None after the first optimizer of
        a step has begun.
        """
        self._sent: list[tuple[int, int, Tensor]] = []
        self._packed: dict[int, PackedResidual] = {}
        """Parts of the unsent progress by their first entry, between exchanges, if not kept in fp32."""
        for start, stop in self._pieces(range(self._turns)):  # streams save it, also where it crosses dense
            stream, part = self._group.streams.named(_name(start, stop)), self._flat[start:stop]
            if context.config.residual_dtype in ("bf16", "int8"):
                stream.residual = None  # of weights that other ones have replaced
                kept = stream.prepared_residual(part.numel(), part.device)
                assert isinstance(kept, PackedResidual)
                self._packed[start] = kept
            else:
                stream.use_residual_memory(part)
        torchs = [each for each in optimizers.all if isinstance(each, torch.optim.Optimizer)]
        hook = torch.compiler.disable(self._before_step)  # the optimizer's step may be compiled
        self._handles = [each.register_step_pre_hook(hook) for each in torchs]

    def _pieces(self, turns: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the entries that cross in turns."""
        numel = self._flat.numel()
        share = math.ceil(numel / self._turns / WIDTH) * WIDTH
        for turn in turns:
            for start in range(turn * share, min(numel, (turn + 1) * share), PIECE):
                yield start, min(numel, (turn + 1) * share, start + PIECE)

    @property
    def share(self) -> float:
        return self._share

    def restore(self) -> None:
        self._factors = self.factors.values()
        self._show()

    def shorten(self, names: Sequence[str]) -> float:
        self.shortens &= self.shortened.keys().isdisjoint(names)
        ratio = self.factors.ratio if self.shortens else 1.0
        self.shortened |= dict.fromkeys(names, ratio)
        return ratio

    def end_step(self) -> None:
        self.shortened = {n: ratio for n, ratio in self.shortened.items() if n in self._group.waiting}

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._keep_writes()
        skips = bool(getattr(optimizer, "found_inf", None))  # a fused optimizer, by itself
        for group, gradients in self._optimizers.used(optimizer):
            for name, gradient in gradients.items():
                if (ratio := self.shortened.pop(name, 1.0)) != 1.0:
                    gradient.div_(ratio)
            if not skips:
                self._decays |= dict.fromkeys(gradients, decay_of(optimizer, group))
            if is_due(self.number):
                self.factors.see(gradients, self.number, steps=False)

    def close(self) -> None:
        remove(self._handles)

    def _unpack(self) -> None:
        """Have the unsent progress in fp32, if it is kept in another type, until the weights are shown."""
        if self._packed:
            self._flat.untyped_storage().resize_(self._flat.nbytes)
        for start, kept in self._packed.items():
            part = self._flat[start : start + kept.numel]
            part.copy_(kept.show(self._group.streams.scratch, "pass"))

    def _pack(self) -> None:
        """Keep the unsent progress that was changed in fp32."""
        for start, kept in self._packed.items():
            kept.end(self._flat[start : start + kept.numel], self.number)

    def _show(self) -> None:
        """Let the weights be the common ones plus the unsent progress."""
        common = list(self._weights.common.values())
        self._unpack()
        torch._foreach_copy_(self._weights.own(), torch._foreach_add(common, self._unsent))
        if self._packed:
            self._flat.untyped_storage().resize_(0)
        self._shown = self._norms()

    def _norms(self) -> Tensor:
        return torch.stack(torch._foreach_norm(self._weights.own()))

    def _keep_writes(self) -> None:
        """Add what a script wrote since the weights were shown to the unsent progress: it has no factor."""
        shown, self._shown = self._shown, None
        if shown is not None and not torch.equal(shown, self._norms()):
            written = torch._foreach_sub(self._weights.own(), list(self._weights.common.values()))
            self._unpack()
            torch._foreach_copy_(self._unsent, written)
            self._pack()

    def _take_step(self) -> None:
        """Add the optimizer's step to the unsent progress. Weight decay acts on the common weights."""
        decays = [self._decays.pop(name, 0.0) for name in self._weights.common]
        common = list(self._weights.common.values())
        before = torch._foreach_add(common, self._unsent)
        torch._foreach_sub_(made := self._weights.own(), before)  # until they are shown again
        if any(decays):
            torch._foreach_add_(made, torch._foreach_mul(before, decays))
            torch._foreach_mul_(common, [1.0 - decay for decay in decays])
        if is_due(self.number):
            self.factors.see(dict(zip(self._weights.common, made, strict=True)), self.number, steps=True)
            self._factors = self.factors.exchange(self.number)
        torch._foreach_mul_(made, self._factors)
        torch._foreach_add_(self._unsent, made)

    def entries(self, *, last: bool) -> Entries:
        self._unpack()
        self._take_step()
        if last:
            self._take_back_answers()
        for start, stop in self._pieces(range(self._turns) if last else [self.number % self._turns]):
            part = self._flat[start:stop]
            self._sent.append((start, stop, part.clone()))
            part.zero_()  # what is not sent returns as the stream's residual
        self._pack()
        return [(_name(start, stop), sent) for start, stop, sent in self._sent]

    def follow(self) -> None:
        """Do nothing: the weights of a rank follow at once."""

    def take_over(self) -> None:
        for start, stop, mean in self._sent:
            self._weights.flat[start:stop] += mean
        self._sent = []
        self._show()

    def _take_back_answers(self) -> None:
        """Make what this rank owes the others as the owner of sums a part of its own progress."""
        for start, stop in self._pieces(range(self._turns)):
            owned = self._topologies.all_reduce.owner_residuals(_name(start, stop), stop - start)
            for shard, name in owned:
                stream = self._group.streams.get(name)
                if stream is not None and stream.residual is not None:
                    self._flat[start + shard.start : start + shard.stop] += stream.residual.current
                    stream.residual.clear()


def _name(start: int, stop: int) -> str:
    """Return the name of the stream of a part of the progress (:func:`dct_plugin.checkpoint.known_to`)."""
    return f"updates {start}:{stop}"
