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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError
from ..feedback import Rooms
from .displaced_weights import DisplacedWeights
from .module_hooks import register_hooks
from .plan import Shard

#: Optimizer steps between two measurements of the coefficients, positions of each tensor that go into one,
#: and what older measurements weigh beside a new one.
INTERVAL = 10
SAMPLES = 256
MEMORY = 0.8

#: Steps' worth of gradients that an entry of a residual is believed to hold at most, if the optimizer divides
#: by a second moment: with an exact one, k gradients are k root mean squares at most, and the square root of
#: k roots of a sum (Cauchy and Schwarz). Row and column means underestimate the moment of an entry that is
#: large where its row and column are not, and an owner's displacement is the number of ranks times the
#: mean's: single entries ended runs.
LIMIT = 50.0

#: How often at most an owner counts what it has not sent of updated weights. The ranks' mean asks for the
#: number of ranks, but what single ranks are displaced by disturbs their gradients in second order: in
#: proportion to that number.
MOST_TIMES = 4


class Moments:
    """Second moment of one tensor's gradients as row and column means, ``outer(rows, columns) / mean(rows)``.

    Memory: ``shape[0] + numel / shape[0]`` fp32 numbers for a tensor of two or more dimensions, one for a
    vector.

    Args:
        shape: Of the parameter.
        device: Where its gradients live.
        missed: Optimizer steps that were made before; a sum (Adagrad) counts them as what it has seen since.
    """

    def __init__(self, shape: torch.Size | tuple[int, ...], device: torch.device, *, missed: int = 0) -> None:
        rows = int(shape[0]) if len(shape) > 1 else 1
        columns = math.prod(shape[1:]) if len(shape) > 1 else 1
        self._matrix = (rows, columns if len(shape) > 1 else -1)
        self.rows = torch.zeros(rows, dtype=torch.float32, device=device)
        self.columns = torch.zeros(columns, dtype=torch.float32, device=device)
        self._seen_rows, self._seen_columns = torch.zeros_like(self.rows), torch.zeros_like(self.columns)
        self.steps = 0
        """Optimizer steps that went into the means."""
        self.missed = missed

    def add(self, gradient: Tensor, room: Tensor | None = None) -> None:
        """A gradient of this step (1-D, any floating type); micro-batches add up as independent ones.

        ``room``, fp32 of the same shape, is overwritten; without it memory is allocated.
        """
        room = torch.empty_like(gradient, dtype=torch.float32) if room is None else room
        squares = room.copy_(gradient).square_().view(self._matrix)
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
        sees = self.steps / (self.steps + self.missed) if decay is None else 1.0 - decay**self.steps
        tiny = torch.finfo(torch.float32).tiny
        eps = max(eps, tiny)  # nothing over nothing is nothing
        if self.columns.numel() == 1:
            return out.copy_((self.rows[0] / sees).sqrt().add(eps))
        rows = (self.rows / self.rows.mean().clamp_min(tiny) / sees).sqrt()
        torch.mul(rows[:, None], self.columns.sqrt()[None, :], out=out.view(self._matrix))
        return out.add_(eps)

    def limit(self, decay: float | None) -> float:
        """How many root mean squares a residual is believed to be, see :data:`LIMIT`."""
        return LIMIT if decay is not None else math.sqrt(min(LIMIT, self.steps + self.missed))

    def means(self) -> Tensor:
        """Row and column means one behind the other, fp32, a copy."""
        return torch.cat([self.rows, self.columns])

    def replace(self, means: Tensor) -> None:
        """Take over what :meth:`means` gives."""
        self.rows.copy_(means[: self.rows.numel()])
        self.columns.copy_(means[self.rows.numel() :])

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for mean in (self.rows, self.columns, self._seen_rows, self._seen_columns):
            mean.mul_(factor * factor)

    def state_dict(self) -> dict[str, Any]:
        """Means (fp32, copies on the CPU) and counts of steps."""
        means = {"rows": self.rows.to("cpu", copy=True), "columns": self.columns.to("cpu", copy=True)}
        return {**means, "steps": self.steps, "missed": self.missed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; raises ``ValueError`` when the shape differs."""
        for name in ("rows", "columns"):
            mine, saved = getattr(self, name), state[name]
            if mine.shape != saved.shape:
                raise ValueError(
                    f"{name} of the second moment: {tuple(saved.shape)}, expected {tuple(mine.shape)}"
                )
            mine.copy_(saved)
        self.steps, self.missed = int(state["steps"]), int(state["missed"])


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
                f"dct.data_parallel.feedback = 'step_ahead': the step of {name} is not known; known "
                f"are {', '.join(KNOWN)}; give it a method step_unit(group), or set feedback to 'local'"
            )
        unit = rule(group)
        return replace(unit, lr=-unit.lr) if group.get("maximize") else unit


def _adam(group: Mapping[str, Any]) -> StepUnit:
    return StepUnit(float(group["lr"]), True, float(group["betas"][1]), float(group["eps"]))


def _rmsprop(group: Mapping[str, Any]) -> StepUnit:
    lr = float(group["lr"]) / (1.0 - float(group.get("momentum", 0.0)))
    return StepUnit(lr, True, float(group["alpha"]), float(group["eps"]))


def _adagrad(group: Mapping[str, Any]) -> StepUnit:
    # What the sum starts with lies beside its root like eps, within a factor of sqrt(2).
    start = math.sqrt(float(group.get("initial_accumulator_value", 0.0)))
    return StepUnit(float(group["lr"]), True, None, float(group["eps"]) + start)


def _sgd(group: Mapping[str, Any]) -> StepUnit:
    momentum = float(group.get("momentum", 0.0))
    damped = 1.0 - float(group.get("dampening", 0.0)) if momentum else 1.0
    return StepUnit(float(group["lr"]) * damped / (1.0 - momentum))


_BY_NAME: dict[str, Callable[[Mapping[str, Any]], StepUnit]] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "NAdam"), _adam),
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
    "SGD": _sgd,
}
#: Optimizers whose step in units of a gradient is known, by class name.
KNOWN = tuple(_BY_NAME)
_RULES = {name.lower(): rule for name, rule in _BY_NAME.items()}


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
    weight: Tensor,
    residual: Tensor | None,
    moments: Moments | None,
    unit: StepUnit,
    *,
    coefficient: float,
    gradient_unit: float = 1.0,
    pending: tuple[Shard, Tensor] | None = None,
    times: int = 1,
    out: Tensor,
    rooms: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``weight - the optimizer's step with coefficient * residual + times * pending`` into ``out``; bitwise
    ``weight`` where both are zero. With a second moment no entry's step is longer than :meth:`Moments.limit`
    times the coefficient and the learning rate.

    Args:
        weight: Any shape and floating type, contiguous.
        residual: fp32 [numel], in the unit of the stream's gradients; None for none.
        moments: Of the stream's gradients; needed for preconditioned units.
        unit: Of the optimizer.
        coefficient: Share of the residual.
        gradient_unit: Factor from the stream's gradients to the optimizer's (one over the loss scale).
        pending: A part of the weights, and what is to be added to it, fp32.
        times: How often ``pending`` counts.
        out: Like ``weight``.
        rooms: For weights of 2 bytes, two of fp32 [numel] to overwrite; without them memory is allocated.
    """
    flat, target = weight.view(-1), out.view(-1)
    # In fp32: scaled residuals can be too large for fp16.
    exact = target.dtype == torch.float32
    if exact:
        step = target
    else:
        step = torch.empty_like(flat, dtype=torch.float32) if rooms is None else rooms[0]
    if residual is None:
        step.zero_()
    elif unit.preconditioned:
        assert moments is not None
        moments.denominator(step, decay=unit.decay, eps=unit.eps / gradient_unit)
        most = moments.limit(unit.decay)
        torch.div(residual, step, out=step).clamp_(-most, most).mul_(-unit.lr * coefficient)
    else:
        torch.mul(residual, -unit.lr * coefficient * gradient_unit, out=step)
    if pending is not None:
        shard, part = pending
        step[shard.start : shard.stop].add_(part, alpha=times)
    if exact or rooms is None:
        torch.add(step, flat, out=target)
    else:
        target.copy_(step.add_(rooms[1].copy_(flat)))
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
        residual_of: The residual of a stream as it is now (fp32 [numel]), None if it keeps none; read before
            the next call.
        held_back_of: For a stream and its number of entries: parts of the ranks' *sum* that this rank owes
            to all of them, and their residuals (fp32), each read before the next.
        pending_of: For a stream: the part of its weights that this rank owns, and what it has not sent to
            anyone of their updates (fp32, in their unit, read before the next call); None for nothing.
        world_size: Ranks whose gradients are averaged.
        coefficient: Of the displacement, in (0, 1]; None: measured.
        gradient_unit: Factor from a stream's gradients to the optimizer's.

    What a rank holds back as the owner of a part of the sum (two-phase exchange) only it knows, and it
    displaces by the whole of it: that is the number of ranks times what is owed to the mean, so that the mean
    of the ranks' displacements, and with it, to first order, of their gradients, is as if all had known it.
    The same goes for updates of weights that it has not sent (thresholded parameters): the number of ranks,
    or :data:`MOST_TIMES`, times what its masters are ahead of the working weights.

    Parameters that are not contiguous (``channels_last``) are not displaced: hosts differ in the order in
    which they lay out their gradients.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        unit_of: Callable[[torch.nn.Parameter], StepUnit | None],
        residual_of: Callable[[str], Tensor | None],
        held_back_of: Callable[[str, int], Iterable[tuple[Shard, Tensor]]] = lambda *_: (),
        pending_of: Callable[[str], tuple[Shard, Tensor] | None] = lambda _: None,
        *,
        world_size: int,
        coefficient: float | None = None,
        gradient_unit: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._parameters = dict(parameters)
        self._unit_of, self._residual_of, self._gradient_unit = unit_of, residual_of, gradient_unit
        self._held_back_of, self._pending_of = held_back_of, pending_of
        self._world_size = world_size
        self._fixed = coefficient
        self._first_guess = 0.5 + 0.5 / world_size
        self._moments: dict[str, Moments] = {}
        self._products: dict[str, tuple[float, float]] = {}
        self._measured: dict[str, tuple[float, float]] = {}  # in this step, which may yet be taken back
        self._shared: dict[str, Tensor] = {}  # likewise
        self._loaded: dict[str, Any] = {}
        self._buffers: dict[str, Tensor] = {}
        self._rooms = Rooms()
        self._displaced = DisplacedWeights()
        self._saving = 0
        self._missed = 0
        self._handles: list[Any] = []

    # -- where passes run ---

    def attach(self, module: torch.nn.Module, optimizer: Any = None) -> None:
        """Displace in ``module``'s training forward passes, until the end of their backward passes; saving,
        loading, evaluation and the steps of ``optimizer`` see the weights.

        Args:
            module: Called for forward passes; passes of its parts alone are not displaced.
            optimizer: Of torch; None if the host calls :meth:`restore` before its steps.
        """
        self._displaced.register(module)
        self._handles += register_hooks(
            module,
            before_pass=lambda trains: self.displace() if trains else self.restore(),
            after_pass=self._after_forward,
            before_saving=self._before_saving,
            after_saving=self._after_saving,
            before_loading=self.forget,
        )
        if hasattr(optimizer, "register_step_pre_hook"):
            self._handles += [
                optimizer.register_step_pre_hook(lambda *_: self.restore()),
                optimizer.register_step_post_hook(lambda *_: self.forget()),
            ]

    def detach(self) -> None:
        """Undo :meth:`attach`; the parameters' data are the weights."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def displace(self) -> None:
        """Let the parameters' data be the displaced weights; computed once per optimizer step.

        Raises:
            DCTError: A parameter was written while it held displaced weights.
        """
        if self._displaced.shown and self._displaced.fresh:
            self._displaced.check()
            return
        self._saving = 0
        self.restore()
        if not self._displaced.fresh or self._displaced.outdated:
            self._compute()
        self._displaced.show()

    def restore(self) -> None:
        """Let the parameters' data be the weights again.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        if self._displaced.shown:
            self._displaced.restore()

    def weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's weight, also while its data are the displaced ones."""
        return self._displaced.weight(parameter)

    def forget(self) -> None:
        """The weights change: :meth:`restore` them, and compute displaced ones anew when next asked."""
        self.restore()
        self._displaced.fresh = False

    def _before_saving(self) -> None:
        # Also called for every part of what is saved; the first one may find displaced weights.
        if self._displaced.shown or self._saving:
            self._saving += 1
            self.restore()

    def _after_saving(self) -> None:
        if self._saving:
            self._saving -= 1
            if not self._saving:
                self._displaced.show()

    def _after_forward(self, output: Any) -> None:
        # Hooks of the output, not of the parameters: re-entrant activation checkpointing runs backward passes
        # inside the backward pass, which must not end it.
        if self._displaced.shown:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._when_backward_ends)

    def _when_backward_ends(self, _: Tensor) -> None:
        # No waiting for a device in every step.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: self._displaced.restore(thorough=False)
        )

    def _compute(self) -> None:
        self._displaced.begin()
        for name, parameter in self._parameters.items():
            unit, weight = self._unit_of(parameter), parameter.data
            if not parameter.requires_grad or unit is None or not weight.is_contiguous():
                continue
            (residual, share), pending = self._owed(name, weight.numel()), self._pending_of(name)
            if residual is None and pending is None:
                continue
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != weight.shape or buffer.dtype != weight.dtype:
                buffer = self._buffers[name] = torch.empty_like(weight)
            rooms = None
            if weight.element_size() < 4:
                rooms = self._rooms.take("step", weight), self._rooms.take("weight", weight)
            displaced(
                weight,
                residual,
                self._moments_of(name),
                unit,
                coefficient=share,
                gradient_unit=self._gradient_unit(),
                pending=pending,
                times=min(self._world_size, MOST_TIMES),
                out=buffer,
                rooms=rooms,
            )
            self._displaced.add(name, parameter, buffer)

    def _owed(self, name: str, numel: int) -> tuple[Tensor | None, float]:
        """What this rank owes of a parameter's gradients, and the share of it that counts."""
        residual = self._residual_of(name)
        if residual is None or self._moments_of(name) is None or residual.numel() != numel:
            return None, 0.0
        share = self.coefficient(name)
        owed = None  # with what is held back
        for shard, part in self._held_back_of(name, numel):
            if owed is None:
                owed = torch.mul(residual, share, out=self._rooms.take("owed", residual))
            owed[shard.start : shard.stop].add_(part)
        return (residual, share) if owed is None else (owed, 1.0)

    # -- what the reducer tells ---

    def observe(self, name: str, gradient: Tensor) -> None:
        """A gradient of this rank is about to be reduced (1-D, in the stream's unit)."""
        parameter = self._parameters.get(name)
        if parameter is None or not parameter.numel():
            return
        moments = self._moments_of(name)
        if moments is None:
            moments = Moments(parameter.shape, gradient.device, missed=self._missed)
            self._moments[name] = moments
        moments.add(gradient, self._rooms.take("step", gradient))

    def _moments_of(self, name: str) -> Moments | None:
        if name in self._loaded:
            parameter = self._parameters[name]
            self._moments[name] = Moments(parameter.shape, parameter.device)
            self._moments[name].load_state_dict(self._loaded.pop(name))
        return self._moments.get(name)

    def end_step(self, *, skipped: bool) -> None:
        """An optimizer step is over; a ``skipped`` one leaves no trace."""
        self._displaced.fresh = False
        if not skipped:
            for name, (own, mixed) in self._measured.items():
                before = self._products.get(name, (0.0, 0.0))
                self._products[name] = (MEMORY * before[0] + own, MEMORY * before[1] + mixed)
            for name, means in self._shared.items():
                self._moments[name].replace(means)
        self._measured.clear()
        self._shared.clear()
        for name, moments in self._moments.items():
            unit = self._unit_of(self._parameters[name])
            moments.end_step(skipped=skipped, decay=None if unit is None else unit.decay)

    def moments_of(self, names: Iterable[str]) -> Tensor:
        """Means of the second moments of those of ``names`` that have them, fp32, 1-D."""
        found = [m.means() for name in names if (m := self._moments_of(name)) is not None]
        return torch.cat(found) if found else torch.empty(0)

    def share_moments(self, names: Iterable[str], means: Tensor) -> None:
        """Go on from ``means``, the mean over the ranks of :meth:`moments_of`, when the step is over.

        With error averaging: a rank gets residuals where it may have seen no gradient, and what it would
        divide them by is almost nothing.
        """
        known = [name for name in names if self._moments_of(name) is not None]
        sizes = [self._moments[name].means().numel() for name in known]
        self._shared.update(zip(known, means.split(sizes), strict=True))

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

    def sampled(self, names: Iterable[str], step: int) -> list[str]:
        """Those of ``names`` that are to be measured in this step and were not yet (micro-batches); the same
        on all ranks.
        """
        if self._fixed is not None or step % INTERVAL:
            return []
        return [name for name in names if name in self._parameters and name not in self._measured]

    def samples(self, names: Sequence[str], step: int, device: torch.device) -> Tensor:
        """Residuals at random positions, the same on all ranks: fp32 [len(names) * :data:`SAMPLES`]."""
        rows = []
        for name in names:
            residual = self._residual_of(name)
            if residual is None or not residual.numel():
                rows.append(torch.zeros(SAMPLES, device=device))
                continue
            seed = zlib.crc32(f"{name}:{step}".encode())
            where = torch.randint(residual.numel(), (SAMPLES,), generator=torch.Generator().manual_seed(seed))
            rows.append(residual[where.to(device)])
        return torch.cat(rows)

    def learn(self, names: Sequence[str], own: Tensor, mean: Tensor) -> None:
        """Take in what :meth:`samples` gave here and what it gave on average over the ranks; it counts when
        the step is over.
        """
        own, mean = own.view(-1, SAMPLES).double(), mean.view(-1, SAMPLES).double()
        squares, mixed = (own * own).sum(1).tolist(), (own * mean).sum(1).tolist()
        for name, square, product in zip(names, squares, mixed, strict=True):
            finite = math.isfinite(square) and math.isfinite(product)
            self._measured[name] = (square, product) if finite else (0.0, 0.0)

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Second moments and what the coefficients come from, of this rank."""
        moments = {**self._loaded, **{name: m.state_dict() for name, m in self._moments.items()}}
        return {"moments": moments, "products": dict(self._products)}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int = 0) -> None:
        """Restore :meth:`state_dict`; None starts afresh, ``step`` optimizer steps into the training."""
        self.forget()
        self._moments.clear()
        self._measured.clear()
        self._shared.clear()
        saved = state or {"moments": {}, "products": {}}
        self._loaded = {name: m for name, m in saved["moments"].items() if name in self._parameters}
        self._products = {name: (own, mixed) for name, (own, mixed) in saved["products"].items()}
        self._missed = step


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a forward pass returned: nested containers, and attributes of objects."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not callable(leaf):
            slots = [name for kind in type(leaf).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
            values = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, n, None) for n in slots)]
            yield from (tensor for tensor in tree_leaves(values) if isinstance(tensor, Tensor))


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
