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

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import AccordionConfig
from ..console import listed, logger
from .add_on import AddOn, ReducerContext
from .plan import ReductionPlan, Sparsity
from .stream_group import StreamGroup

#: Most tensors that a line of the log names.
_NAMED = 8

#: Most positions of a tensor at which gradients are accumulated; memory: 8 bytes each.
SAMPLES = 16_384
#: A learning rate below this share of what it was when the interval began has dropped. The paper's schedules
#: fall in steps, by 5 or 10; smooth ones fall at every step, and would make all of training critical.
DROP = 0.5


@dataclass
class _Layer:
    positions: Tensor
    """Sampled positions, ascending, int64, on the CPU."""
    where: Tensor
    """The same on the tensor's device."""
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


class Accordion(AddOn):
    """Less sparsity for tensors in a critical regime.

    Args:
        group: Streams and process group.
        adaptive: Sparsity of critical tensors, and the interval in optimizer steps.
        optimizer: Has the learning rates (``param_groups``); without it no drop of them is seen.
    """

    key = option = "adaptive"

    #: Relative change of the norm from which on a layer is critical.
    change = 0.5

    def __init__(self, group: StreamGroup, adaptive: AccordionConfig, optimizer: Any = None) -> None:
        self._group, self._interval, self._optimizer = group, adaptive.interval, optimizer
        self._gentle = replace(group.schedule, sparsity=adaptive.sparsity)
        self._layers: dict[str, _Layer] = {}
        self._loaded: dict[str, Any] = {}

    @classmethod
    def configured(cls, context: ReducerContext) -> Accordion:
        assert context.config.adaptive is not None
        return cls(context.group, context.config.adaptive, context.optimizer)

    def learning_rate(self) -> float:
        """Return the largest learning rate of all parameter groups; 0 without an optimizer."""
        groups = () if self._optimizer is None else self._optimizer.param_groups
        return max((float(group["lr"]) for group in groups), default=0.0)

    def critical(self, name: str) -> bool:
        """Return whether a layer is in a critical regime."""
        if name in self._layers:
            return self._layers[name].critical
        return bool(self._loaded[name]["critical"]) if name in self._loaded else True

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        if not self.critical(name):
            return otherwise
        return Sparsity(self._gentle.density(self._group.step), "critical")

    def before_reduce(self, plan: ReductionPlan) -> None:
        """Decide about the tensors whose interval is over, the same on all ranks."""
        group = self._group
        known = [each for each in plan.tensors if each.name in self._layers or each.name in self._loaded]
        layers = {each.name: self._layer(each.name, each.tensor) for each in known}
        due = {name: each for name, each in layers.items() if group.step >= each.began + self._interval}
        if not due:
            return
        squares = torch.stack([each.total.double().square().sum() for each in due.values()])
        if not plan.sums_everywhere:
            group.exchange.all_reduce(squares)
        turned = self._decide(due, squares)
        for critical, what, schedule in ((True, "in", self._gentle), (False, "out of", group.schedule)):
            names = [name for name in turned if self.critical(name) == critical]
            if names and group.rank == 0:
                count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
                logger.warning(
                    f"dct: step {group.step}: Accordion: {count} {what} a critical regime, sparsity "
                    f"{schedule.sparsity:g}: {listed(names, _NAMED)}"
                )

    def _decide(self, due: Mapping[str, _Layer], squares: Tensor) -> list[str]:
        """Begin the next interval of layers; return those that entered or left a critical regime.

        Args:
            due: Layers whose interval is over.
            squares: Squared norms of their gradients, accumulated over the interval.
        """
        norms = self._group.exchange.received(squares, "comparison of norms")
        rate, turned = self.learning_rate(), []
        for (name, layer), square in zip(due.items(), norms.tolist(), strict=True):
            norm = math.sqrt(square) if math.isfinite(square) else 0.0
            known = layer.norm > 0.0 and norm > 0.0
            changed = not known or abs(layer.norm - norm) / layer.norm >= self.change
            before, layer.critical = layer.critical, changed or rate < DROP * layer.rate
            if layer.critical != before:
                turned.append(name)
            layer.norm, layer.began, layer.rate = norm, self._group.step, rate
            layer.total.zero_()
        return turned

    def after_reduce(self, plan: ReductionPlan) -> None:
        for each in plan.tensors:
            if not each.small:
                layer, reduced = self._layer(each.name, each.tensor), each.tensor
                for part in plan.parts_held(each, self._group.rank):
                    span = slice(
                        *torch.searchsorted(layer.positions, torch.tensor(part, device="cpu")).tolist()
                    )
                    layer.pending[span] += reduced[layer.where[span]]

    def end_step(self, *, skipped: bool) -> None:
        for layer in self._layers.values():
            if not skipped:
                layer.total += layer.pending
            layer.pending.zero_()

    def rescale(self, factor: float) -> None:
        for layer in self._layers.values():
            layer.total *= factor
            layer.norm *= factor

    def _layer(self, name: str, tensor: Tensor) -> _Layer:
        layer = self._layers.get(name)
        if layer is None:
            numel = tensor.numel()
            positions = torch.arange(min(numel, SAMPLES), device="cpu")
            if numel > SAMPLES:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                positions = torch.randint(numel, (SAMPLES,), generator=generator, device="cpu").unique()
            total, pending = torch.zeros(2, positions.numel(), device=tensor.device, dtype=torch.float32)
            where, step = positions.to(tensor.device), self._group.step
            layer = _Layer(positions, where, total, pending, step, self.learning_rate())
            if (saved := self._loaded.pop(name, None)) is not None:
                layer.norm, layer.critical, layer.rate = saved["norm"], saved["critical"], saved["rate"]
                if saved["total"].shape == total.shape:
                    layer.began = saved["began"]
                    total.copy_(saved["total"])
            self._layers[name] = layer
        return layer

    def state_dict(self) -> dict[str, Any]:
        """Return accumulated gradients (fp32, copies on the CPU), norms and decisions of this rank."""
        keys = ("norm", "critical", "began", "rate")
        mine = {
            name: {"total": layer.total.to("cpu", copy=True), **{key: getattr(layer, key) for key in keys}}
            for name, layer in self._layers.items()
        }
        return {**self._loaded, **mine}

    @staticmethod
    def in_unit(state: Mapping[str, Any] | None, ratio: float) -> dict[str, Any]:
        return {
            name: {**layer, "total": layer["total"] * ratio, "norm": layer["norm"] * ratio}
            for name, layer in (state or {}).items()
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        self._layers.clear()
        self._loaded = dict(state or {})
