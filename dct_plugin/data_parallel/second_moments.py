"""Second moments of a rank's dense gradients, kept as row and column means.

Source: Shazeer and Stern, *Adafactor*, ICML 2018, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..feedback import ScratchBuffers
from .node_ranks import NodeRanks

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
        device: Device of its gradients.
        missed: Optimizer steps before the first observed one. A sum (Adagrad) assumes for them the mean of
            the observed ones.
    """

    def __init__(self, shape: torch.Size | tuple[int, ...], device: torch.device, *, missed: int = 0) -> None:
        rows = int(shape[0]) if len(shape) > 1 else 1
        columns = math.prod(shape[1:]) if len(shape) > 1 else 1
        self._matrix = (rows, columns if len(shape) > 1 else -1)
        self._numel = math.prod(shape)
        self.rows = torch.zeros(rows, dtype=torch.float32, device=device)
        self.columns = torch.zeros(columns, dtype=torch.float32, device=device)
        self._step_rows, self._step_columns = torch.zeros_like(self.rows), torch.zeros_like(self.columns)
        self.steps = 0
        """Optimizer steps that went into the means."""
        self.missed = missed

    def add(self, gradient: Tensor, scratch: Tensor | None = None) -> None:
        """Add a gradient of this step. The squares of micro-batches add up, as if these were independent.

        Args:
            gradient: 1-D, of any floating type.
            scratch: fp32 of the same shape, to overwrite; without it memory is allocated.
        """
        scratch = torch.empty_like(gradient, dtype=torch.float32) if scratch is None else scratch
        squares = scratch.copy_(gradient).square_().view(self._matrix)
        if self.columns.numel() == 1:
            self._step_rows.add_(squares.mean())
            return
        self._step_rows.add_(squares.mean(1))
        self._step_columns.add_(squares.mean(0))

    def add_part(self, part: Tensor, first: int) -> None:
        """Add a part of a gradient that begins at entry ``first``. Other ranks add the other parts, and all
        sum up :attr:`step_squares` before the step ends.
        """
        squares = part.float().square()
        if self.columns.numel() == 1:
            self._step_rows.add_(squares.sum() / self._numel)
            return
        rows, inside = self._rows_of(first, part.numel())
        whole = squares.new_zeros(rows.stop - rows.start, self.columns.numel())
        whole.view(-1)[inside] = squares
        self._step_rows[rows].add_(whole.mean(1))
        self._step_columns.add_(whole.sum(0) / self.rows.numel())

    @property
    def step_squares(self) -> list[Tensor]:
        """Row and column means of the squares in this step so far."""
        return [self._step_rows, self._step_columns]

    def _rows_of(self, first: int, numel: int) -> tuple[slice, slice]:
        """Return the rows that hold ``numel`` entries from ``first`` on, and where these lie in the rows."""
        columns = self.columns.numel()
        start = first // columns
        rows = slice(start, -(-(first + numel) // columns))
        return rows, slice(first - start * columns, first - start * columns + numel)

    def end_step(self, *, skipped: bool, decay: float | None) -> None:
        """Close a step: exponential means with ``decay`` (Adam's second beta), or sums if None (Adagrad)."""
        if not skipped:
            for mean, squares in ((self.rows, self._step_rows), (self.columns, self._step_columns)):
                # Gradients that are not finite are ignored.
                if decay is None:
                    mean.add_(squares.nan_to_num_(0.0, 0.0, 0.0))
                else:
                    mean.lerp_(torch.where(squares.isfinite(), squares, mean), 1.0 - decay)
            self.steps += 1
        self._step_rows.zero_()
        self._step_columns.zero_()

    def denominator(
        self, out: Tensor, *, decay: float | None, eps: float, first: int = 0, ratio: float = 1.0
    ) -> Tensor:
        """Set ``out`` (fp32, 1-D) to ``ratio * sqrt(second moment) + eps`` of the entries from ``first`` on.
        Before the first step it is infinite.
        """
        if self.steps == 0:
            return out.fill_(float("inf"))
        observed = self.steps / (self.steps + self.missed) if decay is None else 1.0 - decay**self.steps
        tiny = torch.finfo(torch.float32).tiny
        eps = max(eps, tiny)  # 0 / 0 is to be 0
        if self.columns.numel() == 1:
            return out.copy_((self.rows[0] / observed).sqrt().mul(ratio).add(eps))
        rows = (self.rows / self.rows.mean().clamp_min(tiny) / observed).sqrt().mul(ratio)
        if out.numel() == self._numel:
            torch.mul(rows[:, None], self.columns.sqrt()[None, :], out=out.view(self._matrix))
        else:
            held, inside = self._rows_of(first, out.numel())
            out.copy_((rows[held, None] * self.columns.sqrt()[None, :]).view(-1)[inside])
        return out.add_(eps)

    def limit(self, decay: float | None) -> float:
        """Return the most optimizer steps by which an entry displaces a weight, see :data:`LIMIT`."""
        return LIMIT if decay is not None else math.sqrt(min(LIMIT, self.steps + self.missed))

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for mean in (self.rows, self.columns, self._step_rows, self._step_columns):
            mean.mul_(factor * factor)

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


class MomentsPart(NamedTuple):
    """The second moments of a part of a tensor, for gradients that are ``ratio`` times as large.

    Attributes:
        moments: The moments of the tensor, from the gradients that this rank observed.
        first: The part's first entry.
        ratio: Size of the optimizer's gradients relative to the observed ones.
    """

    moments: Moments
    first: int = 0
    ratio: float = 1.0

    def denominator(self, out: Tensor, *, decay: float | None, eps: float) -> Tensor:
        """See :meth:`Moments.denominator`."""
        return self.moments.denominator(out, decay=decay, eps=eps, first=self.first, ratio=self.ratio)

    def limit(self, decay: float | None) -> float:
        """See :meth:`Moments.limit`."""
        return self.moments.limit(decay)


class SecondMoments:
    """The second moments of a model's gradients, by name of the stream.

    Args:
        parameters: Parameters by name of the stream.
        decay_of: Returns the decay of a parameter's second moment; None: it is a sum.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        decay_of: Callable[[torch.nn.Parameter], float | None],
    ) -> None:
        self._parameters, self._decay_of = parameters, decay_of
        self.node: NodeRanks | None = None
        """The ranks of this rank's node, if each of them observes only a part of every gradient."""
        self._moments: dict[str, Moments] = {}
        self._loaded: dict[str, Any] = {}
        self._missed = 0

    def observe(self, name: str, gradient: Tensor, scratch: ScratchBuffers) -> None:
        """Add a gradient (1-D) of this step, or this rank's part of the node's."""
        parameter = self._parameters.get(name)
        if parameter is None or not parameter.numel():
            return
        moments = self.of(name)
        if moments is None:
            moments = self._moments[name] = Moments(parameter.shape, gradient.device, missed=self._missed)
        if self.node is None:
            moments.add(gradient, scratch.take("step", gradient))
        else:
            moments.add_part(gradient, self.node.part(name, parameter.numel())[0])

    def of(self, name: str) -> Moments | None:
        """Return the moments of a stream; None before its first gradient."""
        if name in self._loaded:
            parameter = self._parameters[name]
            self._moments[name] = Moments(parameter.shape, parameter.device)
            self._moments[name].load_state_dict(self._loaded.pop(name))
        return self._moments.get(name)

    def end_step(self, *, skipped: bool) -> None:
        """Close an optimizer step; a ``skipped`` one leaves no trace."""
        if self.node is not None and self._moments and not skipped:
            self.node.sum_up(
                [squares for moments in self._moments.values() for squares in moments.step_squares]
            )
        for name, moments in self._moments.items():
            moments.end_step(skipped=skipped, decay=self._decay_of(self._parameters[name]))

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradients' unit (loss scale)."""
        for moments in self._moments.values():
            moments.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all moments, by name."""
        return {**self._loaded, **{name: m.state_dict() for name, m in self._moments.items()}}

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Restore :meth:`state_dict`; moments that it lacks have missed ``step`` optimizer steps."""
        self._moments.clear()
        self._loaded = {name: saved for name, saved in state.items() if name in self._parameters}
        self._missed = step
