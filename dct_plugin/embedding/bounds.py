"""Thresholds and error bounds of one rank's tables: found from the data, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from ..codecs.copies import Mirror, to_device, to_host
from ..compression.stream import as_flat, backend_beside
from ..config import EmbeddingChannelConfig, KernelConfig
from ..console import logger
from ..kernels import Backend
from ..kernels.embedding import FloatArray
from ..kernels.job import SMALLEST_TAU

#: Weight of the old threshold at a measurement.
_SMOOTHING = 0.9
#: Number of training forward passes without an optimizer step after which a warning says that steps are not
#: counted: more than gradient accumulation and recomputation take together.
_FORGOTTEN = 256


@dataclass(frozen=True)
class Limits:
    """The limits that apply in one forward pass, and in the backward pass that answers it.

    Attributes:
        threshold: Entries below tau do not cross.
        bound: Error bound; None: nothing is quantised.
        gradients: Gradients are quantised.
    """

    threshold: bool
    bound: float | None
    gradients: bool


class TableLimits(nn.Module):
    """Thresholds and error bounds of one rank's tables.

    Thresholds change with optimizer steps, which :meth:`end_step` counts; all forward passes of a step
    (gradient accumulation, activation recomputation) find the same ones. They are measured on the first
    training pass of a step.

    Args:
        config: ``dct.embedding``.
        tables: Tables of this rank.
        name: Name in messages.
        kernels: ``dct.kernels``; the defaults when None.

    Attributes:
        tau: fp32 [tables], 0: no threshold yet.
        steps: int64 scalar, optimizer steps so far.
    """

    def __init__(
        self, config: EmbeddingChannelConfig, *, tables: int, name: str, kernels: KernelConfig | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.tables = tables
        self.name = name
        self._kernels = kernels
        self._backends: dict[torch.device, Backend] = {}
        self._measured = False  # in this step
        self._passes = 0  # forward passes in training since the last step
        self._mirror = Mirror()
        self.tau: Tensor
        self.steps: Tensor
        self.register_buffer("tau", torch.zeros(tables))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def backend(self, device: torch.device) -> Backend:
        """Return the kernels for tensors on ``device``."""
        if device not in self._backends:
            self._backends[device] = backend_beside(self._kernels, device)
        return self._backends[device]

    # -- optimizer steps ---

    def end_step(self) -> None:
        """Count an optimizer step; thresholds may change."""
        self.steps += 1
        self.restart_step()

    def restart_step(self) -> None:
        """Forget that the current step was measured (after a checkpoint was loaded)."""
        self._measured, self._passes = False, 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        known = self.tau
        super()._apply(fn, recurse)
        if self.tau.dtype is not known.dtype:  # thresholds stay in fp32
            self.tau = known.to(self.tau.device)
        return self

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state, prefix, *arguments)
        self.restart_step()

    def follow(self, optimizer: Any) -> RemovableHandle:
        """Call :meth:`end_step` after every ``optimizer.step()`` that follows a forward pass in training.

        Several calls of ``step()`` without a forward pass between them are one step: ZeRO stages 1 and 2 call
        it once per parameter group. A step that a loss scaler skips does not reach the optimizer and is not
        counted.

        Args:
            optimizer: A torch optimizer, or a wrapper that has it as ``.optimizer``, as DeepSpeed's have.

        Returns:
            A handle whose ``remove()`` ends it.

        Raises:
            TypeError: No torch optimizer is found.
        """
        inner = optimizer
        while not isinstance(inner, torch.optim.Optimizer):
            inner = getattr(inner, "optimizer", None)
            if inner is None:
                raise TypeError(f"{self.name}: follow() takes a torch optimizer, got {optimizer!r}")
        return inner.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if self._passes:
            self.end_step()

    def _count_pass(self) -> None:
        self._passes += 1
        config = self.config
        if self._passes == _FORGOTTEN and config.enabled and config.sparsity > 0:
            logger.warning(
                f"dct: {self.name}: {self._passes} forward passes in training without an optimizer step; "
                "thresholds stand still. Call follow(optimizer) once, or end_step() after every step."
            )

    # -- what applies now ---

    def known_tau(self) -> npt.NDArray[Any]:
        """Return the thresholds on the host; a device is read only after they were written."""
        return self._mirror.of(self.tau).numpy()

    def limits(self) -> Limits:
        """Return the limits of the coming forward pass."""
        config = self.config
        applied = config.enabled and (self.training or config.evaluation)
        bound = config.error_bound if applied else None
        gradients = config.enabled and config.gradient_bound is not None
        return Limits(applied and config.sparsity > 0, bound, gradients)

    def bounds(self, limits: Limits) -> FloatArray:
        """Return the absolute error bounds of the own tables, float64 [tables], on the host.

        Under a threshold a table's bound is at most tau: what is kept is never rounded to zero, so that zeros
        are the mask.
        """
        bounds: FloatArray = np.full(self.tables, limits.bound or 0.0)
        if limits.threshold:
            tau = self.known_tau().astype(np.float64)
            bounds = np.where(tau > 0, np.minimum(bounds, tau), bounds)
        return bounds

    def mask(self, x: Tensor, tables: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return the entries of ``x`` that reach the threshold, bool [rows, dim].

        Args:
            x: [sum of rows, dim], the rows of the tables one after the other.
            tables: Own tables, local numbers.
            rows: Rows of each.
        """
        at = torch.tensor(tables, dtype=torch.int64, device=x.device)
        counts = torch.tensor(rows, dtype=torch.int64, device=x.device)
        tau = self.tau[at].repeat_interleave(counts).unsqueeze(1)
        return x.abs().to(torch.float32) >= tau.clamp(min=SMALLEST_TAU)

    # -- measuring ---

    def measure(
        self, blocks: Sequence[Tensor], tables: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
    ) -> None:
        """Find thresholds from the vectors of a training pass; the first one of a step counts.

        Args:
            blocks: Per destination, [rows, dim].
            tables, rows: Per destination: own tables, and rows of each of them.
        """
        self._count_pass()
        if self._measured or not self.config.enabled:
            return
        self._measured = True
        if not self.config.sparsity:
            return
        flats: dict[int, list[Tensor]] = {}
        for block, numbers, counts in zip(blocks, tables, rows, strict=True):
            for table, part in zip(numbers, block.split(list(counts)), strict=True):
                if part.numel():
                    flats.setdefault(table, []).append(part.reshape(-1))
        self._update_thresholds({table: torch.cat(parts) for table, parts in flats.items()})

    def _update_thresholds(self, flats: dict[int, Tensor]) -> None:
        """Find thresholds from the entries of tables, by their numbers; a device is read once for all."""
        if not flats:
            return
        backend = self.backend(next(iter(flats.values())).device)
        density = 1.0 - self.config.sparsity
        with backend.batched():
            measured = [
                backend.exact_threshold(as_flat(flat), None, max(1, round(density * flat.numel())))
                for flat in flats.values()
            ]
        found = [tau for tau in measured if not isinstance(tau, Tensor)]
        if not found:
            found = to_host(torch.stack([tau for tau in measured if isinstance(tau, Tensor)])).tolist()
        taus = self.known_tau().tolist()
        for number, tau in zip(flats, found, strict=True):
            if math.isfinite(tau):
                weight = _SMOOTHING if taus[number] > 0 else 0.0
                taus[number] = max(weight * taus[number] + (1.0 - weight) * tau, SMALLEST_TAU)
        self.tau.copy_(to_device(torch.tensor(taus, dtype=torch.float32, device="cpu"), self.tau.device))
