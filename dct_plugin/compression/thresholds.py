"""Thresholds: how tau is found, and how long it lives.

DCT (Gupta et al., KDD 2021, section 3) ranks ``|G|`` once per life-span and reuses the threshold in between.
Taken literally that goes wrong under error feedback: a threshold measured on an empty residual lets several
times the wanted share pass for good, and none at all once gradients shrink. The selection pass counts what it
keeps for free, so here the life-span is an upper limit: the threshold is measured again after 1, 2, 4, 8, ...
steps and whenever the realised density leaves a band. In between it follows a small sample: about a tenth of
the positions, at a fixed cost per tensor. (Steering tau by the realised density alone costs nothing and was
tried: residuals of steadily drifting gradients then fire in bursts, from nothing to the capacity limit and
back.)
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..kernels.job import SMALLEST_TAU

if TYPE_CHECKING:
    from torch import Tensor

    from ..config import ExpertSettings
    from ..kernels import Selection
    from ..kernels.job import Tau

#: Below this many random positions the sampled quantile is off by more than about 4 % (1 sigma) at 1 %
#: density.
MIN_SAMPLES = 65_536
#: Samples that tau follows between measurements: off by about 11 % (1 sigma) in a step, right on average.
TRACKING_SAMPLES = 8_192

#: Realised density, as multiples of the target, outside which tau is measured at the next step.
_GRADIENT_BAND = (0.5, 2.0)
_ACTIVATION_BAND = (0.8, 1.25)
_ANY_DENSITY = (0.0, math.inf)
#: Steps after which the threshold of activations is measured again at the latest.
_ACTIVATION_LIFESPAN = 100


def sample_size(density: float, *, tracking: bool = False) -> int:
    """Random positions that find the quantile of ``density`` within about 7 % (``tracking``: 11 %)."""
    least, entries = (TRACKING_SAMPLES, 80.0) if tracking else (MIN_SAMPLES, 1000.0)
    return max(least, math.ceil(entries / density))


@dataclass
class Threshold:
    """Threshold of one tensor stream.

    A step is :meth:`propose`, :meth:`accept` and :meth:`observe`. A proposal that is not accepted leaves no
    trace: the threshold of a tensor that turned out to be non-finite stays bitwise what it was.

    Args:
        mode: ``"sample"`` (random positions, and a small sample between measurements), ``"topk"`` (k-th
            largest magnitude) or ``"fixed"`` (random positions; unchanged until the next measurement).
        lifespan: Steps after which the threshold is measured again at the latest (paper: L).
        band: ``(low, high)`` multiples of the wanted density; outside, it is measured again at the next step.
        seed: Seed of the random positions; differs per stream and rank.
    """

    mode: str = "sample"
    lifespan: int = 1000
    band: tuple[float, float] = _GRADIENT_BAND
    seed: int = 0

    tau: float = 0.0
    """Current threshold; 0 until the first measurement."""
    step: int = 0
    """Completed steps of the stream."""
    age: int = 0
    """Steps since the last measurement."""
    refreshes: int = 0
    """Measurements so far."""
    density: float = 0.0
    """Density that tau was last measured for."""
    out_of_band: bool = False
    _proposed: tuple[Tau, float, bool] | None = field(default=None, repr=False, compare=False)
    """Threshold and density of the coming step, and whether it was measured."""

    @classmethod
    def of_gradients(cls, name: str, rank: int, settings: ExpertSettings) -> Threshold:
        """The threshold of a stream of gradients; its random positions depend on name and rank only."""
        band = _ANY_DENSITY if settings.threshold == "fixed" else _GRADIENT_BAND
        return cls(settings.threshold, settings.threshold_lifespan, band, _seed_of(name, rank))

    @classmethod
    def of_activations(cls, name: str, rank: int) -> Threshold:
        """The threshold of a stream of activations; its random positions depend on name and rank only."""
        return cls(lifespan=_ACTIVATION_LIFESPAN, band=_ACTIVATION_BAND, seed=_seed_of(name, rank))

    def due(self, density: float) -> bool:
        """Return whether the threshold has to be measured before a step that keeps a share of ``density``."""
        return (
            self.tau <= 0.0
            or self.out_of_band
            or self.age >= self.lifespan
            or density != self.density
            or (self.step & (self.step - 1)) == 0  # steps 0, 1, 2, 4, 8, ...: the residual is still filling
        )

    def propose(
        self, kernels: Selection, grad: Tensor, residual: Tensor | None, density: float
    ) -> tuple[Tau, bool]:
        """The threshold of the coming step, at which about a share of ``density`` of ``|grad + residual|``
        passes, and whether it was measured anew; it stays on the device if the kernels leave it there.

        Args:
            kernels: Backend of the tensors' device.
            grad: 1-D, fp32/bf16/fp16.
            residual: 1-D fp32 of the same length, or None.
            density: In (0, 1).
        """
        tau: Tau = self.tau
        measured = self.due(density)
        if measured and self.mode == "topk":
            tau = kernels.exact_threshold(grad, residual, wanted(density, grad.numel()))
        elif measured or self.mode == "sample":
            seed = (self.seed + 0x9E3779B9 * (self.step + 1)) & 0x7FFFFFFF
            samples = sample_size(density, tracking=not measured)
            tau = kernels.sample_threshold(grad, residual, density, samples, seed)
        self._proposed = tau, density, measured
        return tau, measured

    def accept(self, applied: float) -> None:
        """The proposed threshold, on the host ``applied``, is the current one from now on."""
        if self._proposed is None:
            return
        tau, self.density, measured = self._proposed
        self.tau = tau if isinstance(tau, float) else applied
        self._proposed = None
        if measured:
            self.age = 0
            self.refreshes += 1
            self.out_of_band = False

    def reject(self) -> None:
        """Forget the proposed threshold."""
        self._proposed = None

    def observe(self, above: int, numel: int) -> None:
        """Close a step in which ``above`` of ``numel`` entries reached tau (before any capacity limit)."""
        self.step += 1
        self.age += 1
        target = wanted(self.density, numel)
        ratio = above / target
        # The band is widened by counting noise, or a tensor of which 40 entries are wanted would refresh for
        # ever.
        slack = 2.0 / math.sqrt(target)
        # Nothing else can pass the smallest threshold: most entries of this gradient are zero.
        too_few = ratio < self.band[0] - slack and self.tau > SMALLEST_TAU
        self.out_of_band = too_few or ratio > self.band[1] + slack

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradient's unit (loss scale)."""
        self.tau *= factor

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on bitwise."""
        return {key: getattr(self, key) for key in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for key in self._STATE:
            setattr(self, key, state[key])
        self._proposed = None

    _STATE = ("tau", "step", "age", "refreshes", "density", "out_of_band")


def _seed_of(name: str, rank: int) -> int:
    return zlib.crc32(f"{name}/{rank}".encode())


def wanted(density: float, numel: int) -> int:
    """Number of entries to keep of ``numel``: at least one, so that every tensor makes progress."""
    return max(1, round(density * numel))
