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

from ...policy.optimizers import OptimizerFamily, family_of
from ..add_on import ReducerContext
from ..plan import Entries

#: Numbers of a sketch, and signs in a row; more entries begin the row elsewhere.
WIDTH, ROW = 256, 1 << 20
#: Steps between two exchanges of sketches; the first steps have one each.
SKETCH_EVERY, FIRST = 16, 4
#: Share of the norms of all gradients that outlasts an exchange of sketches.
KEPT = 0.5
#: Most entries that are encoded together.
PIECE = 1 << 20


def is_muon(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer orthogonalises the steps of a parameter group."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return family_of(names) is OptimizerFamily.MUON and group.get("use_muon", True)


def decay_of(optimizer: Any, group: Mapping[str, Any]) -> float:
    """Return the share by which a step shrinks the weights of a group, apart from their gradients."""
    names = " ".join(cls.__name__.lower() for cls in type(optimizer).__mro__)
    decoupled = group.get("decoupled_weight_decay") or "adamw" in names or "muon" in names
    decoupled = decoupled or bool(getattr(optimizer, "adam_w_mode", getattr(optimizer, "adamw_mode", False)))
    return float(group["lr"]) * float(group.get("weight_decay", 0.0)) if decoupled else 0.0


class Sketches:
    """Count sketches: a sum of tensors has the sum of their sketches, and nearly the norm of its own one."""

    def __init__(self, device: torch.device) -> None:
        signs = torch.randint(0, 2, (2 * ROW,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        self._signs = (2 * signs - 1).to(device)

    def of(self, flat: Tensor, turn: int) -> Tensor:
        """Return the sketch of a tensor [n], fp32 [min(n, 256)]; ``turn`` varies the signs."""
        if flat.numel() <= WIDTH:
            return flat.to(torch.float32)
        out = torch.zeros(WIDTH, device=flat.device)
        for number, part in enumerate(flat.split(ROW)):
            first = (31 * turn + number) * 7919 % ROW
            signed = part.to(torch.float32) * self._signs[first : first + part.numel()]
            whole = signed.numel() // WIDTH * WIDTH
            out += signed[:whole].view(-1, WIDTH).sum(0)
            out[: signed.numel() - whole] += signed[whole:]
        return out


class StepFactors:
    """The factor of a rank's steps for each tensor, the same on all ranks.

    Args:
        context: The reducer.
        sizes: Entries of the tensors by name.
        groups: The optimizer and the parameter group of each tensor.
    """

    def __init__(
        self, context: ReducerContext, sizes: Mapping[str, int], groups: Mapping[str, tuple[Any, Any]]
    ) -> None:
        self._group, self._sketches = context.group, Sketches(context.group.device)
        widths = [min(WIDTH, numel) for numel in sizes.values()]
        device = context.group.device
        self._flat = torch.zeros(sum(widths) + len(widths), device=device)
        *parts, self._squares = self._flat.split([*widths, len(widths)])
        self._parts = dict(zip(sizes, parts, strict=True))
        self._of_steps = {name for name, (optimizer, group) in groups.items() if is_muon(optimizer, group)}
        memories = [self._memory(name, *groups.get(name, (None, {}))) for name in sizes]
        self._memory_of = torch.tensor(memories, device=device)
        is_seen = [name not in self._of_steps for name in sizes]
        self._are_gradients = torch.tensor(is_seen, device=device)
        self.saved = {name: torch.zeros(len(widths), device=device) for name in ("own", "mean")}
        """Squared norms: the mean of the ranks' own ones, and that of the mean; fp32 [tensors] each. The same
        of all gradients together, of the last steps: fp32 [2].
        """
        self.saved["all"] = torch.zeros(2, device=device)
        self.ratio = 1.0
        """The norm of the mean gradient over that of the ranks' own ones, all tensors together."""

    def _memory(self, name: str, optimizer: Any, group: Mapping[str, Any]) -> float:
        """Return the share of the optimizer's statistic that outlasts a step."""
        if name in self._of_steps:
            return float(group.get("momentum", 0.95))
        return float(group.get("betas", (0.9, 0.999))[1])

    @staticmethod
    def is_due(step: int) -> bool:
        """Return whether sketches are exchanged in a step."""
        return step < FIRST or step % SKETCH_EVERY == 0

    def see(self, entries: Sequence[tuple[str, Tensor]], step: int, *, steps: bool) -> None:
        """Sketch gradients, or with ``steps`` the optimizer's steps, of the tensors whose factor is of these.

        Args:
            entries: Name and tensor, any shape and floating type.
            step: Number of the step.
            steps: Whether the tensors are steps.
        """
        for name, flat in entries:
            if name in self._parts and (name in self._of_steps) == steps:
                self._parts[name].copy_(self._sketches.of(flat.detach().reshape(-1), step))

    def exchange(self, step: int) -> None:
        """Take over what was seen since the last call; a collective."""
        group, ranks = self._group, self._group.world_size
        self._squares.copy_(self._norms())  # of sketches, too: then errors of both norms cancel
        with group.recorded("gradient_local"):
            group.exchange.all_reduce(self._flat)
        sums = self._norms()
        found = {"own": self._squares / ranks, "mean": sums / ranks**2}
        kept = self._memory_of ** (1 if step < FIRST else min(step, SKETCH_EVERY))
        usable = torch.isfinite(self._squares) & torch.isfinite(sums)
        for name, now in found.items():
            saved = self.saved[name]
            saved.copy_(torch.where(usable, kept * saved + (1 - kept) * now, saved))
        together = torch.stack([now[self._are_gradients & usable].sum() for now in found.values()])
        together /= together.max().clamp(min=torch.finfo(torch.float32).tiny)
        self.saved["all"].mul_(KEPT).add_(together)
        self._flat.zero_()
        self.read()

    def read(self) -> None:
        """Take over what is saved."""
        own, mean = self.saved["all"].tolist()
        self.ratio = min(1.0, math.sqrt(mean / own)) if own else 1.0

    def _norms(self) -> Tensor:
        return torch.stack([each.square().sum() for each in self._parts.values()])

    def values(self) -> list[float]:
        """Return the factors, 1 to the number of ranks."""
        ratio = self.saved["own"] / self.saved["mean"].clamp(min=torch.finfo(torch.float32).tiny)
        return ratio.sqrt().clamp(1.0, float(self._group.world_size)).tolist()


class UnsentUpdates:
    """The progress of a rank that the others have not got.

    Args:
        context: The reducer.
        common: The common weights by name, 1-D parts of ``flat`` in this order; fp32.
        flat: All common weights, 1-D.
        groups: The optimizer and the parameter group of each tensor.
    """

    def __init__(
        self,
        context: ReducerContext,
        common: Mapping[str, Tensor],
        flat: Tensor,
        groups: Mapping[str, tuple[Any, Any]],
    ) -> None:
        self._group, self._topologies = context.group, context.topologies
        self._common, self._flat_common = common, flat
        self._flat = torch.zeros_like(flat)
        self._unsent = self._flat.split([each.numel() for each in common.values()])
        self._turns = round(1.0 / context.config.density)
        self.factors = StepFactors(context, {n: each.numel() for n, each in common.items()}, groups)
        self._factors = [1.0] * len(common)
        self.clips = True
        """False if gradients of several passes of a step were reduced: they are not shortened."""
        self._sent: list[tuple[int, int, Tensor]] = []
        for turn in range(self._turns):
            for start, stop in self._pieces(turn):
                if not self._group.is_small("", stop - start):
                    stream = self._group.streams.named(_name(start, stop))
                    stream.use_residual_memory(self._flat[start:stop])

    def _pieces(self, turn: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the entries that cross in a turn."""
        numel = self._flat.numel()
        share = math.ceil(numel / self._turns / WIDTH) * WIDTH
        for start in range(turn * share, min(numel, (turn + 1) * share), PIECE):
            yield start, min(numel, (turn + 1) * share, start + PIECE)

    def show(self, weights: Sequence[Tensor]) -> None:
        """Let ``weights``, in the order of the names, be the common ones plus the unsent progress."""
        torch._foreach_copy_(list(weights), torch._foreach_add(list(self._common.values()), self._unsent))

    def take_step(self, weights: Sequence[Tensor], decays: Sequence[float], step: int) -> None:
        """Add the optimizer's step to the unsent progress; the decay of the weights acts on the common ones.

        Args:
            weights: Those after the step, 1-D.
            decays: The share by which each tensor has decayed.
            step: Number of the step.
        """
        common = list(self._common.values())
        before = torch._foreach_add(common, self._unsent)
        made = torch._foreach_sub(list(weights), before)
        if any(decays):
            torch._foreach_add_(made, torch._foreach_mul(before, list(decays)))
            torch._foreach_mul_(common, [1.0 - decay for decay in decays])
        if self.factors.is_due(step):
            self.factors.see(list(zip(self._common, made, strict=True)), step, steps=True)
            self.factors.exchange(step)
            self._factors = self.factors.values()
        torch._foreach_mul_(made, self._factors)
        torch._foreach_add_(self._unsent, made)

    def entries(self, step: int | None) -> Entries:
        """Return what crosses in a step, or with None all that is unsent, by name; :meth:`take_over` expects
        the mean there.
        """
        if step is None:
            self._take_back_answers()
        self._sent, turns = [], range(self._turns) if step is None else [step % self._turns]
        for start, stop in (bounds for turn in turns for bounds in self._pieces(turn)):
            part = self._flat[start:stop]
            self._sent.append((start, stop, part.clone()))
            part.zero_()  # what is not sent returns as the stream's residual
        return [(_name(start, stop), sent) for start, stop, sent in self._sent]

    def take_over(self) -> None:
        """Move the common weights by the mean of what was sent."""
        for start, stop, mean in self._sent:
            self._flat_common[start:stop] += mean
        self._sent = []

    def _take_back_answers(self) -> None:
        """Make what this rank owes the others as the owner of sums a part of its own progress."""
        for start, stop in (each for turn in range(self._turns) for each in self._pieces(turn)):
            owned = self._topologies.all_reduce.owner_residuals(_name(start, stop), stop - start)
            for shard, name in owned:
                stream = self._group.streams.get(name)
                if stream is not None and stream.residual is not None:
                    self._flat[start + shard.start : start + shard.stop] += stream.residual.current
                    stream.residual.clear()

    def restore(self) -> None:
        """Take over the factors of a loaded state."""
        self.factors.read()
        if self.factors.saved["mean"].any():
            self._factors = self.factors.values()


def _name(start: int, stop: int) -> str:
    """Return the name of the stream of a part of the progress (:func:`dct_plugin.checkpoint.known_to`)."""
    return f"updates {start}:{stop}"
