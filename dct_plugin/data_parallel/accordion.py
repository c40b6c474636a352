"""Accordion: gentle thresholds while a layer's gradients change, strong ones while they do not.

Source: Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, *Adaptive Gradient Communication via Critical
Learning Regime Identification*, MLSys 2021, algorithm 1. Every interval the norm of a layer's gradient,
accumulated over the interval, is compared with that of the interval before:

    | ||G_before|| - ||G|| | / ||G_before|| >= change      the layer is in a critical regime

So it is in the first interval, when a norm is zero, and when the learning rate drops. What is accumulated is
the *reduced* gradient, which the optimizer sees, at up to :data:`SAMPLES` positions of a tensor: the same on
every rank that holds them, so that ranks decide alike.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..metrics import Record
from ..schedules import SparsitySchedule
from .add_on import AddOn, ReducerContext
from .plan import ReductionPlan
from .stream_group import Sparsity, StreamGroup

logger = logging.getLogger("dct_plugin")

#: Most tensors that a line of the log names.
_NAMED = 8

#: Most positions of a tensor at which gradients are accumulated; memory: 8 bytes each.
SAMPLES = 16_384
#: A learning rate below this share of what it was when the interval began has dropped. The paper's schedules
#: fall in steps, by 5 or 10; smooth ones fall at every step, and would make all of training critical.
DROP = 0.5


@dataclass
class _Layer:
    where: Tensor
    """Sampled positions, ascending, int64."""
    total: Tensor
    """Sums of the reduced gradients at these positions; zero where another rank owns the entry."""
    pending: Tensor
    """Those of this step, which may yet be taken back."""
    began: int
    rate: float
    """Learning rate when the interval began."""
    norm: float = 0.0
    """Norm of the interval before; 0: there was none."""
    critical: bool = True
    spans: dict[tuple[int, int], slice] = field(default_factory=dict)
    """Which of the sampled positions lie in a part of the tensor."""


class CriticalRegimes:
    """Decides which layers are in a critical regime.

    Args:
        interval: Optimizer steps.
        change: Relative change of the norm from which on a layer is critical.
        optimizer: Has the learning rates (``param_groups``); without it no drop of them is seen.
    """

    def __init__(self, interval: int, change: float = 0.5, optimizer: Any = None) -> None:
        self.interval, self.change, self._optimizer = interval, change, optimizer
        self._layers: dict[str, _Layer] = {}
        self._loaded: dict[str, Any] = {}

    def learning_rate(self) -> float:
        """Return the largest learning rate of all parameter groups; 0 without an optimizer."""
        groups = () if self._optimizer is None else self._optimizer.param_groups
        return max((float(group["lr"]) for group in groups), default=0.0)

    def critical(self, name: str) -> bool:
        """Return whether a layer is in a critical regime."""
        if name in self._layers:
            return self._layers[name].critical
        return bool(self._loaded[name]["critical"]) if name in self._loaded else True

    def observe(self, name: str, reduced: Tensor, parts: Sequence[tuple[int, int]], step: int) -> None:
        """Add a reduced gradient.

        Args:
            name: Name of the tensor.
            reduced: 1-D, any floating type; its entries ``[start, stop)`` of each part are reduced.
            parts: Bounds of the parts that this rank holds; may be empty.
            step: Optimizer steps so far.
        """
        layer = self._layer(name, reduced, step)
        for part in parts:
            if part not in layer.spans:  # once: it waits for the device
                first, last = (int(torch.searchsorted(layer.where, bound)) for bound in part)
                layer.spans[part] = slice(first, last)
            span = layer.spans[part]
            layer.pending[span] += reduced[layer.where[span]]

    def due(self, tensors: Iterable[tuple[str, Tensor]], step: int) -> list[str]:
        """Return the names of those tensors whose interval is over; the same on all ranks."""
        known = [(n, self._layer(n, t, step)) for n, t in tensors if n in self._layers or n in self._loaded]
        return [name for name, layer in known if step >= layer.began + self.interval]

    def squares(self, names: Sequence[str]) -> Tensor:
        """Return the squared norms of this rank's part of accumulated gradients, fp64 [len(names)]."""
        return torch.stack([self._layers[name].total.double().square().sum() for name in names])

    def decide(self, names: Sequence[str], squares: Tensor, step: int) -> list[str]:
        """Begin the next interval of tensors; return those that entered or left a critical regime.

        Args:
            names: What :meth:`due` returned.
            squares: What :meth:`squares` returned, summed over the ranks that share the tensors.
            step: Optimizer steps so far.
        """
        rate, turned = self.learning_rate(), []
        for name, square in zip(names, squares.tolist(), strict=True):
            layer, norm = self._layers[name], math.sqrt(square) if math.isfinite(square) else 0.0
            known = layer.norm > 0.0 and norm > 0.0
            changed = not known or abs(layer.norm - norm) / layer.norm >= self.change
            before, layer.critical = layer.critical, changed or rate < DROP * layer.rate
            if layer.critical != before:
                turned.append(name)
            layer.norm, layer.began, layer.rate = norm, step, rate
            layer.total.zero_()
        return turned

    def end_step(self, *, skipped: bool) -> None:
        """Close an optimizer step; a ``skipped`` one leaves no trace."""
        for layer in self._layers.values():
            if not skipped:
                layer.total += layer.pending
            layer.pending.zero_()

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for layer in self._layers.values():
            layer.total *= factor
            layer.pending *= factor
            layer.norm *= factor

    def _layer(self, name: str, tensor: Tensor, step: int) -> _Layer:
        layer = self._layers.get(name)
        if layer is None:
            numel = tensor.numel()
            where = torch.arange(min(numel, SAMPLES))
            if numel > SAMPLES:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                where = torch.randint(numel, (SAMPLES,), generator=generator).unique()
            where = where.to(tensor.device)
            total = torch.zeros(where.numel(), device=tensor.device)
            layer = _Layer(where, total, torch.zeros_like(total), step, self.learning_rate())
            saved = self._loaded.pop(name, None)
            if saved is not None:
                layer.norm, layer.critical, layer.rate = saved["norm"], saved["critical"], saved["rate"]
                if saved["total"].shape == total.shape:
                    layer.began = saved["began"]
                    total.copy_(saved["total"])
            self._layers[name] = layer
        return layer

    def state_dict(self) -> dict[str, Any]:
        """Return accumulated gradients (fp32, copies on the CPU), norms and decisions of this rank."""
        mine = {
            name: {
                "total": layer.total.to("cpu", copy=True),
                "norm": layer.norm,
                "critical": layer.critical,
                "began": layer.began,
                "rate": layer.rate,
            }
            for name, layer in self._layers.items()
        }
        return {**self._loaded, **mine}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore :meth:`state_dict`; None starts afresh."""
        self._layers.clear()
        self._loaded = dict(state or {})


class Accordion(AddOn):
    """Less sparsity for tensors in a critical regime.

    Args:
        group: Streams and process group.
        regimes: Decides which tensors are critical.
        gentle: Sparsity of critical tensors.
        steady: Sparsity of the others.
    """

    missing = "Accordion needs dct.data_parallel.adaptive = 'accordion'"
    key = "adaptive"

    def __init__(
        self, group: StreamGroup, regimes: CriticalRegimes, gentle: SparsitySchedule, steady: SparsitySchedule
    ) -> None:
        self._group, self.regimes, self._gentle, self._steady = group, regimes, gentle, steady

    @classmethod
    def configured(cls, context: ReducerContext) -> Accordion | None:
        adaptive, steady = context.config.adaptive, context.group.schedule
        if adaptive is None:
            return None
        gentle = replace(steady, sparsity=adaptive.sparsity)
        regimes = CriticalRegimes(adaptive.interval, optimizer=context.optimizer)
        return cls(context.group, regimes, gentle, steady)

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        if not self.regimes.critical(name):
            return otherwise
        return Sparsity(self._gentle.density(self._group.step), "critical")

    def before_reduce(self, plan: ReductionPlan, whole: Record) -> None:
        """Decide about the tensors whose interval is over."""
        group = self._group
        tensors = [(each.name, each.tensor) for each in plan.tensors]
        if due := self.regimes.due(tensors, group.step):
            squares = self.regimes.squares(due)
            if not plan.sums_everywhere:
                group.exchange.all_reduce(squares)
            turned = self.regimes.decide(due, squares, group.step)
            if group.rank == 0:
                self._log(turned)

    def after_reduce(self, plan: ReductionPlan) -> None:
        group = self._group
        for each in plan.tensors:
            if not each.small:
                held = plan.parts_held(each, group.rank)
                self.regimes.observe(each.name, each.tensor, held, group.step)

    def end_step(self, *, skipped: bool) -> None:
        self.regimes.end_step(skipped=skipped)

    def rescale(self, factor: float) -> None:
        self.regimes.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        return self.regimes.state_dict()

    @staticmethod
    def in_unit(state: Mapping[str, Any] | None, ratio: float) -> dict[str, Any]:
        return {
            name: {**layer, "total": layer["total"] * ratio, "norm": layer["norm"] * ratio}
            for name, layer in (state or {}).items()
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        self.regimes.load_state_dict(state)

    def _log(self, turned: Sequence[str]) -> None:
        """Write one line for the tensors that entered a critical regime, one for those that left it."""
        for critical, what, schedule in ((True, "in", self._gentle), (False, "out of", self._steady)):
            if names := [name for name in turned if self.regimes.critical(name) == critical]:
                logger.warning(
                    "dct: step %d: Accordion: %d tensor%s %s a critical regime, sparsity %g: %s",
                    self._group.step,
                    len(names),
                    "" if len(names) == 1 else "s",
                    what,
                    schedule.sparsity,
                    ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else ""),
                )
