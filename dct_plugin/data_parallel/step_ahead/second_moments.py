"""Second moments of a rank's dense gradients, kept as row and column means.

Source: Shazeer and Stern, *Adafactor*, ICML 2018, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compression.feedback import ScratchBuffers
from ...kernels import Residuals
from ...kernels.displacement import SecondMoment, Squares
from ..plan import Entries
from ..step_units import StepUnit

if TYPE_CHECKING:
    from ..nodes.ranks import NodeRanks

#: Most optimizer steps by which an entry of a residual displaces a weight, if the optimizer divides by a
#: second moment. With exact moments a residual of k gradients is at most k steps long (Adam), or sqrt(k)
#: (Adagrad; both by Cauchy and Schwarz). Row and column means underestimate the moment of an entry that is
#: large in a row and a column of small ones, and owners multiply what they hold back. Without the limit
#: single entries ended runs.
LIMIT = 50.0


class Moments:
    """Second moment of one tensor's gradients as row and column means, ``outer(rows, columns) / mean(rows)``.

    Memory: ``shape[0] + numel / shape[0]`` fp32 numbers for a tensor of two or more dimensions, one for a
    vector.

    Args:
        shape: Shape of the parameter.
        memory: fp32 [2, rows + columns] zeros for the means, and for those of a step.
        missed: Optimizer steps before the first observed one. A sum (Adagrad) assumes for them the mean of
            the observed ones.
    """

    def __init__(self, shape: tuple[int, ...], memory: Tensor, *, missed: int = 0) -> None:
        self._numel, self.memory = math.prod(shape), memory
        (self.rows, self.columns), (self._step_rows, self._step_columns) = (
            each.split(sizes(shape)) for each in memory
        )
        self.steps = 0
        """Optimizer steps that went into the means."""
        self.missed = missed

    def squares(self, gradient: Tensor, first: int | None = None) -> Squares:
        """Return what adds a gradient of this step (1-D, of any floating type), see :mod:`..kernels`. The
        squares of micro-batches add up, as if these were independent.

        Args:
            gradient: See above.
            first: Its first entry, if it is a part. Other ranks add the other parts, and all sum up
                :attr:`step_squares` before the step ends.
        """
        whole = Squares(gradient, self._step_rows, self._step_columns)
        return whole if first is None else whole._replace(first=first, entries=self._numel)

    @property
    def step_squares(self) -> list[Tensor]:
        """Row and column means of the squares in this step so far."""
        return [self._step_rows, self._step_columns]

    def moment(
        self, unit: StepUnit, *, gradient_unit: float = 1.0, first: int = 0, ratio: float = 1.0
    ) -> SecondMoment:
        """Return the second moment of the entries from ``first`` on, for gradients that are ``ratio`` times
        as large. Before the first step the denominator is infinite.

        Args:
            unit: Unit of the optimizer's steps.
            gradient_unit: Factor from the observed gradients to the optimizer's.
            first, ratio: See above.
        """
        if self.steps == 0:
            return SecondMoment(self.rows, self.columns, 1.0, first, ratio, float("inf"))
        seen = self.steps / (self.steps + self.missed)
        observed = seen if unit.decay is None else 1.0 - unit.decay**self.steps
        return SecondMoment(self.rows, self.columns, observed, first, ratio, unit.eps / gradient_unit)

    def limit(self, decay: float | None) -> float:
        """Return the most optimizer steps by which an entry displaces a weight, see :data:`LIMIT`."""
        return LIMIT if decay is not None else math.sqrt(min(LIMIT, self.steps + self.missed))

    def state_dict(self) -> dict[str, Any]:
        """Return the means (fp32, copies on the CPU) and the counts of steps."""
        means = {"rows": self.rows.to("cpu", copy=True), "columns": self.columns.to("cpu", copy=True)}
        return {**means, "steps": self.steps, "missed": self.missed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; raises ``ValueError`` when the shape differs."""
        for name in ("rows", "columns"):
            mine, saved = getattr(self, name), state[name]
            if mine.shape != saved.shape:
                shapes = f"{tuple(saved.shape)}, expected {tuple(mine.shape)}"
                raise ValueError(f"{name} of the second moment: {shapes}")
            mine.copy_(saved)
        self.steps, self.missed = int(state["steps"]), int(state["missed"])


def sizes(shape: tuple[int, ...]) -> list[int]:
    """Return the numbers of rows and columns of a tensor."""
    return [int(shape[0]), math.prod(shape[1:])] if len(shape) > 1 else [1, 1]


def is_dense(tensor: Tensor) -> bool:
    """Return whether the entries of a tensor fill its memory without gaps, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def shape_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a dense tensor with its dimensions in the order of memory."""
    if tensor.is_contiguous():
        return tensor.shape
    return tuple(size for _, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True))


def _add_steps(memory: Tensor, moments: Sequence[Moments], decay: float | None) -> None:
    """Add the squares of a step to the means of ``moments``, all of which lie in ``memory``."""
    # Gradients that are not finite are ignored.
    if decay is None:
        for each in moments:
            each.memory[0].add_(each.memory[1].nan_to_num_(0.0, 0.0, 0.0))
    else:
        torch.where(memory[1].isfinite(), memory[1], memory[0], out=memory[1])
        # On a CPU one by one: the last entries of a tensor are rounded otherwise than those in the middle.
        torch._foreach_lerp_(
            [part for m in moments for part in (m.rows, m.columns)],
            [part for m in moments for part in m.step_squares],
            1.0 - decay,
        )
    for each in moments:
        each.steps += 1


class SecondMoments:
    """The second moments of a model's gradients, by name of the stream.

    Args:
        parameters: Parameters by name of the stream.
        unit_of: Returns the unit of the optimizer's steps for a parameter; None if the optimizer does not
            have it.
        node: The ranks of this rank's node, if each of them observes only a part of every gradient.
        in_memory_order: Whether gradients are in the order of their parameter's memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        unit_of: Callable[[torch.nn.Parameter], StepUnit | None],
        node: NodeRanks | None = None,
        in_memory_order: bool = False,
    ) -> None:
        self._parameters, self._unit_of, self._node = parameters, unit_of, node
        self._in_memory_order = in_memory_order
        self._moments: dict[str, Moments] = {}
        self._memory: dict[torch.device, Tensor] = {}
        """All moments of a device, fp32 [2, rows + columns of all parameters]."""
        self._parts: dict[torch.device, dict[str, Tensor]] = {}
        """The same by name."""
        self._loaded: dict[str, Any] = {}
        self._missed = 0
        self._observed: dict[str, None] = {}
        """Names of the streams whose gradients were seen since their last step, in a fixed order."""

    def observe(self, entries: Entries, kernels: Residuals, scratch: ScratchBuffers) -> None:
        """Add gradients (1-D) of this step, or this rank's parts of the node's. An optimizer that gets a
        parameter later knows nothing of earlier gradients.
        """
        jobs = []
        for name, gradient in entries:
            moments = self._moments.get(name) or self._begun(name, gradient.device)
            if moments is None:
                continue
            self._observed[name] = None
            node = self._node
            first = None if node is None else node.part(name, self._parameters[name].numel())[0]
            jobs.append(moments.squares(gradient, first))
        kernels.add_squares(jobs, scratch.take)

    def _begun(self, name: str, device: torch.device) -> Moments | None:
        """Return the moments of a stream at its first gradient; None if the optimizer does not have it."""
        parameter = self._parameters.get(name)
        if parameter is None or not parameter.numel() or self._unit_of(parameter) is None:
            return None
        moments = self.of(name)
        if moments is None:
            moments = self._moments[name] = self._make(name, device, self._missed)
        return moments

    def _make(self, name: str, device: torch.device, missed: int = 0) -> Moments:
        """Make the moments of a stream, beside those of the others on its device."""
        if device not in self._memory:
            lengths = [sum(sizes(self._shape(parameter))) for parameter in self._parameters.values()]
            memory = self._memory[device] = torch.zeros(2, sum(lengths), dtype=torch.float32, device=device)
            self._parts[device] = dict(zip(self._parameters, memory.split(lengths, dim=1), strict=True))
        shape = self._shape(self._parameters[name])
        return Moments(shape, self._parts[device][name].zero_(), missed=missed)

    def _shape(self, parameter: Tensor) -> tuple[int, ...]:
        return shape_in_memory(parameter) if self._in_memory_order else parameter.shape

    def of(self, name: str) -> Moments | None:
        """Return the moments of a stream; None before its first gradient."""
        if name in self._loaded:
            self._moments[name] = self._make(name, self._parameters[name].device)
            self._moments[name].load_state_dict(self._loaded.pop(name))
        return self._moments.get(name)

    def end_step(self, *, skipped: bool, waiting: Collection[str] = ()) -> None:
        """Close an optimizer step; a ``skipped`` one leaves no trace. The gradients of streams that are
        ``waiting`` belong to a later step of another optimizer.
        """
        ended = {name: self._moments[name] for name in self._observed if name not in waiting}
        if self._node is not None and ended and not skipped:
            self._node.sum_up([squares for moments in ended.values() for squares in moments.step_squares])
        groups: dict[tuple[torch.device, float | None], list[Moments]] = {}
        for name, moments in () if skipped else ended.items():
            unit = self._unit_of(self._parameters[name])
            decay = None if unit is None else unit.decay
            groups.setdefault((moments.memory.device, decay), []).append(moments)
        for device, decay in sorted(groups, key=lambda key: key[1] is not None):  # sums first
            _add_steps(self._memory[device], groups[device, decay], decay)
        self.forget(ended)

    def forget(self, names: Collection[str]) -> None:
        """Forget the gradients of these streams in this step."""
        if self._observed.keys() <= set(names):
            for memory in self._memory.values():
                memory[1].zero_()
            self._observed.clear()
        for name in self._observed.keys() & set(names):
            del self._observed[name]
            for squares in self._moments[name].step_squares:
                squares.zero_()

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for memory in self._memory.values():
            memory.mul_(factor * factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all moments, by name."""
        return {**self._loaded, **{name: m.state_dict() for name, m in self._moments.items()}}

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Restore :meth:`state_dict`; moments that it lacks have missed ``step`` optimizer steps."""
        self._moments.clear()
        self._observed.clear()
        self._loaded = {name: saved for name, saved in state.items() if name in self._parameters}
        self._missed = step
