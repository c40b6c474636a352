"""Step-ahead error feedback: the gradient is taken where the weights will be once the residual has arrived.

Source: Xu, Huo, Huang, *Step-Ahead Error Feedback for Distributed Training with Compressed Gradient*, AAAI
2021. Under error feedback a rank takes its gradient at weights that lack what it still owes, up to a hundred
steps' worth at 99 % sparsity. Adam and momentum pay for that delay. So forward and backward run at

    w - coefficient * (the step that the optimizer would make with this rank's residual)

while the optimizer, checkpoints and evaluation keep ``w``. The step is in the optimizer's own units: for the
Adam family ``lr * E / (sqrt(D) + eps)`` with D the second moment of this rank's *dense* gradients, kept as
row and column means (Adafactor, Shazeer and Stern, ICML 2018, section 3); for SGD ``lr * E / (1 - mu)`` with
momentum mu. D must not come from the optimizer's own state: that one sees thresholded gradients, and with it
training diverged.

Both E and D are in the unit of the gradients that reach the stream (loss scale, division by the number of
ranks), so that their ratio has none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError

#: Optimizer steps between two measurements of the coefficients, positions of each tensor that go into one,
#: and what older measurements weigh beside a new one.
INTERVAL = 10
SAMPLES = 256
MEMORY = 0.8


class Moments:
    """Second moment of one tensor's gradients as row and column means, ``outer(rows, columns) / mean(rows)``.

    Memory: ``shape[0] + numel / shape[0]`` fp32 numbers for a tensor of two or more dimensions, one for a
    vector.

    Args:
        shape: Of the parameter.
        device: Where its gradients live.
    """

    def __init__(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> None:
        self._matrix = (int(shape[0]), -1) if len(shape) > 1 else (1, -1)
        columns = torch.Size(shape).numel() // self._matrix[0] if len(shape) > 1 else 1
        self.rows = torch.zeros(self._matrix[0], dtype=torch.float32, device=device)
        self.columns = torch.zeros(columns, dtype=torch.float32, device=device)
        self._seen_rows, self._seen_columns = torch.zeros_like(self.rows), torch.zeros_like(self.columns)
        self.steps = 0
        """Optimizer steps that went into the means."""

    def add(self, gradient: Tensor) -> None:
        """A gradient of this step (1-D, any floating type); micro-batches add up as independent ones."""
        squares = gradient.view(self._matrix).to(torch.float32).square()
        if self.columns.numel() == 1:
            self._seen_rows.add_(squares.mean())
            return
        self._seen_rows.add_(squares.mean(1))
        self._seen_columns.add_(squares.mean(0))

    def end_step(self, *, skipped: bool, decay: float | None) -> None:
        """Close a step: exponential means with ``decay`` (Adam's second beta), or sums if None (Adagrad)."""
        if not skipped:
            for mean, seen in ((self.rows, self._seen_rows), (self.columns, self._seen_columns)):
                # Gradients that are not finite teach nothing.
                if decay is None:
                    mean.add_(seen.nan_to_num_(0.0, 0.0, 0.0))
                else:
                    mean.lerp_(torch.where(seen.isfinite(), seen, mean), 1.0 - decay)
            self.steps += 1
        self._seen_rows.zero_()
        self._seen_columns.zero_()

    def denominator(self, out: Tensor, *, decay: float | None, eps: float) -> Tensor:
        """``sqrt(second moment) + eps`` of every entry into ``out`` (fp32, 1-D); infinite before a step."""
        if self.steps == 0:
            return out.fill_(float("inf"))
        correction = 1.0 if decay is None else 1.0 - decay**self.steps
        if self.columns.numel() == 1:
            return out.copy_((self.rows[0] / correction).sqrt().add(eps))
        mean = self.rows.mean().clamp_min(torch.finfo(torch.float32).tiny)
        rows, columns = (self.rows / (mean * correction)).sqrt(), self.columns.sqrt()
        torch.mul(rows[:, None], columns[None, :], out=out.view(self._matrix))
        return out.add_(eps)

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for mean in (self.rows, self.columns, self._seen_rows, self._seen_columns):
            mean.mul_(factor * factor)

    def state_dict(self) -> dict[str, Any]:
        """Means (fp32, CPU) and the count of steps."""
        return {"rows": self.rows.cpu(), "columns": self.columns.cpu(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; raises ``ValueError`` when the shape differs."""
        for name in ("rows", "columns"):
            mine, saved = getattr(self, name), state[name]
            if mine.shape != saved.shape:
                raise ValueError(
                    f"{name} of the second moment: {tuple(saved.shape)}, expected {tuple(mine.shape)}"
                )
            mine.copy_(saved)
        self.steps = int(state["steps"])


@dataclass(frozen=True)
class StepUnit:
    """What an optimizer makes of a gradient: ``lr * g``, over ``sqrt(second moment) + eps`` if it has one.

    Attributes:
        lr: Learning rate times what momentum makes of one gradient in the long run.
        preconditioned: Whether the step is divided by the root of a second moment.
        decay: Of the second moment; None: it is a sum (Adagrad).
        eps: Beside the root, in the optimizer's unit of gradients.
    """

    lr: float
    preconditioned: bool = False
    decay: float | None = None
    eps: float = 0.0

    @classmethod
    def of(cls, optimizer: Any, group: Mapping[str, Any]) -> StepUnit:
        """Of a parameter group, as its settings are now (schedulers change them).

        Raises:
            ConfigError: The unit of this optimizer's steps is not known.
        """
        if hasattr(optimizer, "step_unit"):  # it says so itself
            own: StepUnit = optimizer.step_unit(group)
            return own
        name = type(optimizer).__name__
        rule = _RULES.get(name.lower())
        if rule is None:
            raise ConfigError(
                f"dct.data_parallel.error_feedback = 'step_ahead': the step of {name} is not known; known "
                f"are {', '.join(KNOWN)}; set error_feedback to 'local'"
            )
        return rule(group)


def _adam(group: Mapping[str, Any]) -> StepUnit:
    return StepUnit(float(group["lr"]), True, float(group["betas"][1]), float(group["eps"]))


def _rmsprop(group: Mapping[str, Any]) -> StepUnit:
    lr = float(group["lr"]) / (1.0 - float(group.get("momentum", 0.0)))
    return StepUnit(lr, True, float(group["alpha"]), float(group["eps"]))


def _adagrad(group: Mapping[str, Any]) -> StepUnit:
    return StepUnit(float(group["lr"]), True, None, float(group["eps"]))


def _sgd(group: Mapping[str, Any]) -> StepUnit:
    momentum = float(group.get("momentum", 0.0))
    damped = 1.0 - float(group.get("dampening", 0.0)) if momentum else 1.0
    return StepUnit(float(group["lr"]) * damped / (1.0 - momentum))


#: Optimizers whose step in units of a gradient is known, by class name.
KNOWN = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "NAdam", "RMSprop", "Adagrad", "SGD")
_RULES: dict[str, Callable[[Mapping[str, Any]], StepUnit]] = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam", "nadam"), _adam),
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "sgd": _sgd,
}


def units_of(
    optimizer: Any, parameters: Sequence[Sequence[torch.nn.Parameter]] | None = None
) -> Callable[[torch.nn.Parameter], StepUnit | None]:
    """A look-up of a parameter's unit, which reads the settings of its group anew at every call.

    Args:
        optimizer: With ``param_groups`` as in torch; a wrapper has the optimizer proper as its ``optimizer``.
        parameters: Of each group, where the groups hold something else (flat or sharded master weights).

    Raises:
        ConfigError: The unit of this optimizer's steps is not known.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for group in optimizer.param_groups:  # refused now rather than in a forward pass
        StepUnit.of(inner, group)
    if parameters is None:
        parameters = [group["params"] for group in optimizer.param_groups]
    group_of = {id(parameter): i for i, group in enumerate(parameters) for parameter in group}

    def unit_of(parameter: torch.nn.Parameter) -> StepUnit | None:
        index = group_of.get(id(parameter))
        return None if index is None else StepUnit.of(inner, optimizer.param_groups[index])

    return unit_of


def displaced(
    weight: Tensor, residual: Tensor, moments: Moments | None, unit: StepUnit, *, factor: float, out: Tensor
) -> Tensor:
    """``weight - the optimizer's step with factor * residual`` into ``out``.

    Args:
        weight: Any shape and floating type, contiguous.
        residual: fp32 [numel], in the unit of the stream's gradients.
        moments: Of the stream's gradients; needed for preconditioned units.
        unit: Of the optimizer.
        factor: The coefficient; for units without a second moment also from the stream's unit of gradients
            to the optimizer's.
        out: Like ``weight``.
    """
    flat, target = weight.reshape(-1), out.view(-1)
    if not unit.preconditioned:
        torch.add(flat, residual.to(flat.dtype), alpha=-unit.lr * factor, out=target)
        return out
    assert moments is not None
    room = target if target.dtype == torch.float32 else torch.empty_like(residual)
    moments.denominator(room, decay=unit.decay, eps=unit.eps)
    torch.div(residual, room, out=room).mul_(-unit.lr * factor).add_(flat)
    if room is not target:
        target.copy_(room)
    return out


class StepAhead:
    """Runs a model's forward and backward passes at displaced weights; all else sees the weights themselves.

    Displaced weights lie in buffers of their own, the size of the thresholded parameters, and a parameter's
    ``data`` points there from a training forward pass to the end of its backward pass. Nothing is added to
    the weights and nothing has to be subtracted from them, so that ranks stay bitwise equal.

    How much of its residual a rank should expect to arrive differs from tensor to tensor: the residuals of
    several ranks share their drift, while their noise cancels out. The best linear predictor of the ranks'
    mean residual from the own one, ``<own, mean> / <own, own>``, is measured at random positions every
    :data:`INTERVAL` steps.

    Args:
        parameters: ``(name of the stream, parameter)``; streams that keep no residual are never displaced.
        unit_of: The optimizer's settings for a parameter, None if it does not have it; asked anew at every
            step, since schedulers change them.
        residual_of: The residual of a stream as it is now (fp32 [numel]), None if it keeps none.
        world_size: Ranks whose gradients are averaged.
        coefficient: Of the displacement, in (0, 1]; None: measured.
        gradient_unit: Factor from a stream's gradients to the optimizer's, for units without second moment.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        unit_of: Callable[[torch.nn.Parameter], StepUnit | None],
        residual_of: Callable[[str], Tensor | None],
        *,
        world_size: int,
        coefficient: float | None = None,
        gradient_unit: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._parameters = dict(parameters)
        self._unit_of, self._residual_of, self._gradient_unit = unit_of, residual_of, gradient_unit
        self._fixed = coefficient
        self._first_guess = 0.5 + 0.5 / world_size
        self._moments: dict[str, Moments] = {}
        self._products: dict[str, tuple[float, float]] = {}
        self._loaded: dict[str, Any] = {}
        self._buffers: dict[str, Tensor] = {}
        self._displaced: set[str] = set()  # whose buffer holds the displaced weights of this step
        self._originals: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._fresh = False

    # -- where passes run ---

    def attach(self, module: torch.nn.Module) -> None:
        """Displace in ``module``'s training forward passes, until the end of their backward passes."""
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward)
        module.register_state_dict_pre_hook(lambda *_: self.restore())

    def displace(self) -> None:
        """Let the parameters' data be the displaced weights; computed once per optimizer step."""
        if self._originals:
            return
        if not self._fresh:
            self._compute()
        for name in self._displaced:
            parameter = self._parameters[name]
            self._originals.append((parameter, parameter.data))
            parameter.data = self._buffers[name]

    def restore(self) -> None:
        """Let the parameters' data be the weights again."""
        for parameter, weight in self._originals:
            parameter.data = weight
        self._originals.clear()

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.displace()
        else:
            self.restore()

    def _after_forward(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if not self._originals:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._when_backward_ends)

    def _when_backward_ends(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.restore)

    def _compute(self) -> None:
        self._fresh = True
        self._displaced.clear()
        for name, parameter in self._parameters.items():
            residual = self._residual_of(name)
            if residual is None or not parameter.requires_grad:
                continue
            if (moments := self._moments.get(name)) is None and name in self._loaded:
                moments = self._moments_of(name, residual.device)
            if moments is None:
                continue
            weight = parameter.data
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != weight.shape or buffer.dtype != weight.dtype:
                buffer = self._buffers[name] = torch.empty_like(weight, memory_format=torch.contiguous_format)
            unit = self._unit_of(parameter)
            if unit is None:
                continue
            factor = self.coefficient(name) * (1.0 if unit.preconditioned else self._gradient_unit())
            displaced(weight, residual, moments, unit, factor=factor, out=buffer)
            self._displaced.add(name)

    # -- what the reducer tells ---

    def observe(self, name: str, gradient: Tensor) -> None:
        """A gradient of this rank is about to be reduced (1-D, in the stream's unit)."""
        if name in self._parameters:
            self._moments_of(name, gradient.device).add(gradient)

    def _moments_of(self, name: str, device: torch.device) -> Moments:
        """Made at their first use, with what was loaded for them."""
        moments = self._moments.get(name)
        if moments is None:
            moments = self._moments[name] = Moments(self._parameters[name].shape, device)
            if name in self._loaded:
                moments.load_state_dict(self._loaded.pop(name))
        return moments

    def end_step(self, *, skipped: bool) -> None:
        """An optimizer step is over."""
        self._fresh = False
        for name, moments in self._moments.items():
            unit = self._unit_of(self._parameters[name])
            moments.end_step(skipped=skipped, decay=None if unit is None else unit.decay)

    def rescale(self, factor: float) -> None:
        """The unit of the gradients changed (loss scale)."""
        for moments in self._moments.values():
            moments.rescale(factor)
        self._products = {
            name: (own * factor * factor, mixed * factor * factor)
            for name, (own, mixed) in self._products.items()
        }

    # -- the coefficient ---

    def coefficient(self, name: str) -> float:
        """Share of the own residual by which a parameter is displaced."""
        if self._fixed is not None:
            return self._fixed
        own, mixed = self._products.get(name, (0.0, 0.0))
        return min(max(mixed / own, 0.0), 1.0) if own > 0.0 else self._first_guess

    def wants_samples(self, step: int) -> bool:
        """Whether the coefficients are to be measured in this step; the same on all ranks."""
        return self._fixed is None and step % INTERVAL == 0

    def samples(self, names: Sequence[str], step: int) -> Tensor:
        """Residuals at random positions, the same on all ranks: fp32 [len(names) * :data:`SAMPLES`]."""
        rows = []
        for name in names:
            residual = self._residual_of(name)
            if residual is None or not residual.numel():
                rows.append(torch.zeros(SAMPLES))
                continue
            seed = zlib.crc32(f"{name}:{step}".encode())
            where = torch.randint(residual.numel(), (SAMPLES,), generator=torch.Generator().manual_seed(seed))
            rows.append(residual[where.to(residual.device)])
        return torch.cat(rows)

    def learn(self, names: Sequence[str], own: Tensor, mean: Tensor) -> None:
        """Take in what :meth:`samples` gave here and what it gave on average over the ranks."""
        own, mean = own.view(-1, SAMPLES).double(), mean.view(-1, SAMPLES).double()
        squares, mixed = (own * own).sum(1).tolist(), (own * mean).sum(1).tolist()
        for name, square, product in zip(names, squares, mixed, strict=True):
            if math.isfinite(square) and math.isfinite(product):
                before = self._products.get(name, (0.0, 0.0))
                self._products[name] = (MEMORY * before[0] + square, MEMORY * before[1] + product)

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Second moments and what the coefficients come from, of this rank."""
        moments = {**self._loaded, **{name: m.state_dict() for name, m in self._moments.items()}}
        return {"moments": moments, "products": dict(self._products)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore :meth:`state_dict`; None starts afresh."""
        self.restore()
        self._fresh = False
        self._moments.clear()
        self._loaded = dict(state["moments"]) if state else {}
        self._products = (
            {name: (own, mixed) for name, (own, mixed) in state["products"].items()} if state else {}
        )
