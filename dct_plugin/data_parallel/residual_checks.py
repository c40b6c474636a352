"""Checks of residuals: whether gradients are lost or counted twice, and by how many steps they are late.

An add-on of the reducer. Without it, delete this module and its row in :mod:`.add_ons`.

At sampled entries of each thresholded tensor, summed over the ranks:

- *Conservation*: the gradients of accepted steps equal what the optimizers got and what residuals gained. A
  step that a script made or rejected unseen breaks that, and so does a residual that is lost.
- *Delay*: the norm of the residuals divided by that of a step's gradients, in steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..console import listed, logger
from ..errors import DCTError
from .add_on import AddOn, ReducerContext
from .plan import PlannedTensor, ReductionPlan

#: Fewest entries of each tensor that are looked at, where it has so many.
SAMPLES = 64
#: Share of the gradients by which sums may differ: rounding of fp32, and of 16-bit gradients or residuals.
_EXACT, _ROUNDED = 1e-3, 3e-2
#: A tensor whose residual is longer than so many of its gradients has none now: that is no delay.
_MOST_DELAY = 1e4
#: The delays in steps at which quality was measured (docs/reliability.md#guard).
MEASURED_DELAY = 40.0


class _Sample:
    """The sampled entries of one tensor.

    Attributes:
        entered: This rank's gradients of the step that is open, fp64.
        lost: The same minus this rank's share in the sums, which residuals have to gain.
        expected, size: Sum of ``lost``, and of the magnitudes of gradients, in the accepted steps since the
            last check.
        before: Entries of the residuals at that check.
    """

    def __init__(self, tensor: PlannedTensor) -> None:
        self.at = torch.arange(0, tensor.numel, max(1, tensor.numel // SAMPLES), device=tensor.tensor.device)
        zeros = torch.zeros(len(self.at), dtype=torch.float64, device=tensor.tensor.device)
        self.entered, self.lost = zeros.clone(), zeros.clone()
        self.expected, self.size, self.before = zeros.clone(), zeros.clone(), zeros
        self.numel, self.dtype, self.is_open = tensor.numel, tensor.tensor.dtype, False

    def close(self, *, accepted: bool) -> None:
        """Close a step."""
        if accepted:
            self.expected += self.lost
            self.size += self.entered.abs()
        self.entered.zero_()
        self.lost.zero_()
        self.is_open = False


class ResidualChecks(AddOn):
    """The checks of a reducer's residuals, as ``dct.data_parallel.verify`` says.

    Args:
        context: The reducer.

    Attributes:
        delay: The delay at the last check, in steps; the median of all tensors. None before the first one.
    """

    option = "verify"

    def __init__(self, context: ReducerContext) -> None:
        self._group, self._config, self._topologies = context.group, context.config, context.topologies
        assert self._config.verify is not None
        self._verify = self._config.verify
        self._samples: dict[str, _Sample] = {}
        self._warned = False
        self.delay: float | None = None

    @classmethod
    def configured(cls, context: ReducerContext) -> ResidualChecks | None:
        config, group = context.config, context.group
        keeps = config.feedback.keeps_residual and not config.trains_alone
        # Where lengths stay on a device, sums are complete only at the end of the step.
        served = keeps and group.world_size > 1 and group.backend.lengths_on_host
        return cls(context) if served else None

    def begin_step(self) -> None:
        step, start = self._group.step + 1, self._config.dense_steps
        is_known = step <= start + 1  # after the first gradient the delay is below one step
        self._is_due = self._verify.is_due(step, start) and (self._verify.conservation or not is_known)
        self.looks = self._verify.conservation or self._is_due

    def before_reduce(self, plan: ReductionPlan) -> None:
        for tensor in plan.tensors:
            if tensor.small:
                continue
            sample = self._samples.get(tensor.name)
            if sample is None or sample.numel != tensor.numel:
                sample = self._samples[tensor.name] = _Sample(tensor)
                self._start_anew(tensor.name)  # a loaded state has residuals
            own = tensor.tensor[sample.at].double()
            sample.entered += own
            sample.lost += own
            sample.is_open = True

    def after_reduce(self, plan: ReductionPlan) -> None:
        for tensor in plan.tensors if plan.scale else ():
            if (sample := self._samples.get(tensor.name)) is None or tensor.small:
                continue
            total = tensor.tensor[sample.at].double() / plan.scale
            if plan.sums_everywhere:
                sample.lost -= total / self._group.world_size
            else:
                for start, stop in plan.parts_held(tensor, self._group.rank):
                    held = (sample.at >= start) & (sample.at < stop)
                    sample.lost -= torch.where(held, total, 0.0)

    def returned(self, name: str, flat: Tensor) -> None:
        """Note what was added to a residual, since no rank used it."""
        if self.looks and (sample := self._samples.get(name)) is not None:
            sample.lost += flat[sample.at].double()

    def undo(self, names: Collection[str], *, lost: bool) -> None:
        for name in self._samples.keys() & set(names):
            self._samples[name].close(accepted=False)
            if lost:  # on purpose, and said
                self._start_anew(name)

    def end_step(self, *, skipped: bool) -> None:
        ends = self._is_due and not skipped and self._samples
        gradients = {name: sample.entered.clone() for name, sample in self._samples.items()} if ends else {}
        for name, sample in self._samples.items():
            if sample.is_open and name not in self._group.waiting:
                sample.close(accepted=not skipped)
        if gradients:
            self._check(gradients)

    def rescale(self, factor: float) -> None:
        for sample in self._samples.values():
            for figures in (sample.entered, sample.lost, sample.expected, sample.size, sample.before):
                figures.mul_(factor)

    def load_state_dict(self, state: Any, *, step: int) -> None:
        self._samples.clear()

    def _start_anew(self, name: str) -> None:
        sample = self._samples[name]
        sample.expected.zero_()
        sample.size.zero_()
        sample.before = self._held(name) - sample.lost  # that of an open step may yet be taken back

    def _held(self, name: str) -> Tensor:
        """Return what residuals of this rank hold, as part of its own gradient and as owner of the sum."""
        sample, group = self._samples[name], self._group
        held, at = torch.zeros_like(sample.expected), sample.at
        own = group.streams.residual_of(name, "pass", group.device, committed=False)
        if own is not None:
            held += own[at]
        for shard, key in self._topologies.all_reduce.owner_residuals(name, sample.numel):
            owned = group.streams.residual_of(key, "pass", group.device, committed=False)
            if owned is not None:
                inside = (at >= shard.start) & (at < shard.stop)
                held[inside] += owned[at[inside] - shard.start]
        return held

    def _check(self, gradients: dict[str, Tensor]) -> None:
        """Compare sums over the ranks; a collective."""
        names = list(gradients)
        held = {name: self._held(name) for name in names}
        expected = [(s := self._samples[n]).expected + s.lost - (held[n] - s.before) for n in names]
        sizes = [self._samples[n].size + self._samples[n].before.abs() for n in names]
        parts = [len(self._samples[name].at) for name in names]
        flat = torch.cat([*expected, *sizes, *held.values(), *gradients.values()])
        with self._group.recorded("plugin"):
            self._group.agree("check of residuals")
            self._group.exchange.all_reduce(flat)
            rows = list(self._group.exchange.received(flat, "check of residuals").view(4, -1))
        missing, size, residual, gradient = ([part.norm().item() for part in r.split(parts)] for r in rows)
        for name in names:
            self._start_anew(name)
        pairs = zip(residual, gradient, strict=True)
        self._report_delay([r / g for r, g in pairs if r < _MOST_DELAY * g and g < float("inf")])
        if self._verify.conservation:
            self._report_missing(
                {n: m / s for n, m, s in zip(names, missing, size, strict=True) if 0 < s < float("inf")}
            )

    def _report_delay(self, ratios: list[float]) -> None:
        group = self._group
        self.delay = delay = statistics.median(ratios) if ratios else None
        if delay is None:
            return
        if group.metrics is not None:
            group.metrics.event("delay", step=group.step + 1, steps=delay)
        if delay > MEASURED_DELAY and not self._warned and not group.group_rank:
            self._warned = True
            logger.warning(
                f"dct: step {group.step + 1}: residuals hold {delay:.0f} steps' worth of gradients; measured "
                f"were up to {MEASURED_DELAY:.0f}. Lower dct.data_parallel.sparsity"
            )

    def _report_missing(self, missing: dict[str, float]) -> None:
        """Stop or warn if sums differ.

        Raises:
            DCTError: They do, with the action ``"stop"``.
        """
        is_packed = self._config.residual_dtype in ("bf16", "int8")
        wrong = [
            f"{name} ({100 * share:.2g} %)"
            for name, share in missing.items()
            if share > (_EXACT if self._samples[name].dtype == torch.float32 and not is_packed else _ROUNDED)
        ]
        if not wrong:
            return
        text = (
            f"step {self._group.step + 1}: gradients of the steps since the last check are lost or counted "
            f"twice: {listed(wrong)}. The script makes or rejects steps in a way that dct does not see"
        )
        if self._verify.action == "stop":
            raise DCTError(f"rank {self._group.group_rank}: {text}")
        if not self._group.group_rank:
            logger.warning(f"dct: {text}")
