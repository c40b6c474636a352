"""Entries that reach a threshold, which stays the same for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...config.methods import EntriesMethod
from ...kernels import SMALLEST_TAU, Tau
from ...stream import Encoded
from .compressor import Site
from .entries import KeptEntries


class Thresholded(KeptEntries):
    """DCT-MP (Gupta et al., KDD 2021, section 4).

    There is no residual: the next batch holds other samples. The threshold is measured on the first tensors
    of an optimizer step, all together, and stays for the whole step: activation recomputation runs a forward
    pass twice and must find the same mask again.
    """

    def __init__(self, config: EntriesMethod, site: Site) -> None:
        super().__init__(config, site)
        self.threshold = self._stream.threshold
        self._measured: Tau | None = None  # the threshold of this step
        self._poisoned = False
        self._above = self._numel = 0

    def _taus(self, encoded: Encoded, flats: Sequence[Tensor]) -> Sequence[Tau]:
        return [self._tau(encoded, flats)] * len(flats)

    def _tau(self, encoded: Encoded, flats: Sequence[Tensor]) -> Tau:
        if not encoded.numel:
            return SMALLEST_TAU
        if self._measured is None and (self.site.training or self.threshold.tau <= 0.0):
            self._measured = self._stream.propose(
                encoded, flats[0] if len(flats) == 1 else torch.cat(list(flats))
            )
        return self.threshold.tau if self._measured is None else self._measured

    def _observe(self, encoded: Encoded) -> None:
        totals = encoded.totals()
        if isinstance(self._measured, Tensor):
            self._measured = totals.tau
        self._poisoned |= totals.nonfinite
        if self.site.training:
            self._above += totals.above
            self._numel += encoded.numel

    def end_step(self) -> None:
        """The threshold may change now, unless a tensor was non-finite."""
        if self._poisoned:
            self.threshold.reject()
        elif self._measured is not None:
            self.threshold.accept(float(self._measured))
            if self._numel:
                self.threshold.observe(self._above, self._numel)
        self._measured, self._poisoned = None, False
        self._above = self._numel = 0

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self.threshold.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.threshold.load_state_dict(state["threshold"])
