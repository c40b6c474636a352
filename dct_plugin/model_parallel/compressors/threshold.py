"""Entries that reach a threshold, which stays the same for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...codecs.payload import HEADER_NBYTES, dense_payload_nbytes
from ...codecs.values import VALUE_GROUP, ValueDtype, value_nbytes
from ...compression.stream import Encoded, add_at, as_flat, encode_at, values_nbytes, wire_dtype
from ...config.model_parallel import ThresholdMethod
from ...kernels.backend import mask_of
from ...kernels.job import SMALLEST_TAU, Tau
from .compressor import NUMBER_NBYTES, GradientMessages, Site, Written
from .payloads import Whole, without_padding

#: Room of a message of fixed size, as a multiple of the target density: that is what crosses. Entries that do
#: not fit are dropped like entries below the threshold.
CAPACITY = 1.0


class Thresholded(Whole[ThresholdMethod]):
    """DCT-MP (Gupta et al., KDD 2021, section 4).

    There is no residual: the next batch holds other samples. The threshold is measured on the first tensors
    of an optimizer step, all together, and stays for the whole step: activation recomputation runs a forward
    pass twice and must find the same mask again.

    Entries cross with their positions, and gradients come back as values there: both ends keep the payload
    for its positions; ``site.answer`` says how the values are written. A tensor with a non-finite entry
    arrives as NaN, and so does its gradient.
    """

    def __init__(self, config: ThresholdMethod, site: Site, name: str = "") -> None:
        super().__init__(config, site, name)
        self.threshold = self._stream.threshold
        self._measured: Tau | None = None  # the threshold of this step
        self._poisoned = False
        self._above = self._numel = 0

    @property
    def density(self) -> float:
        return self.config.density

    def value_type(self, dtype: torch.dtype) -> ValueDtype:
        return wire_dtype(dtype, self.config.value_dtype)

    def entries(self, numel: int, value_dtype: ValueDtype) -> int:
        """Return the most entries of a message about ``numel``: all, or as many as a message of fixed size
        has room for, headers included.
        """
        if not self.site.fixed_size:
            return numel
        room = int(CAPACITY * self.density * numel)
        itemsize = value_nbytes(VALUE_GROUP, value_dtype) / VALUE_GROUP
        header = int(-(-(NUMBER_NBYTES + HEADER_NBYTES) // itemsize))
        return max(1, min(numel, max(room // 2, room - header)))

    def encode(self, parts: Sequence[Tensor]) -> Written:
        written = super().encode(parts)
        return written._replace(kept=list(written.messages))

    def decode(self, message: Tensor, out: Tensor, peer: int) -> Tensor:
        super().decode(message, out, peer)
        return without_padding(message)

    def _tau(self, encoded: Encoded, flats: Sequence[Tensor]) -> Tau:
        if not encoded.numel:
            return SMALLEST_TAU
        if self._measured is not None:
            return self._measured
        if not self.site.training and self.threshold.tau > 0.0:
            return self.threshold.tau
        tau = self._stream.propose(encoded, flats[0] if len(flats) == 1 else torch.cat(list(flats)))
        if self.site.training:
            self._measured = tau
        return tau

    def _observe(self, encoded: Encoded) -> None:
        totals = encoded.totals()
        if isinstance(self._measured, Tensor):
            self._measured = totals.tau
        if self.site.training:
            self._poisoned |= totals.nonfinite
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


class Answers(GradientMessages):
    """Gradients at the positions of the forward messages, which both ends have kept."""

    compressor: Thresholded

    def __init__(self, compressor: Thresholded) -> None:
        super().__init__(compressor)
        self.size_is_known = True

    def nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Tensor | None = None) -> int:
        compressor, code = self.compressor, self._code(dtype)
        if kept is not None:
            return values_nbytes(kept, code)
        entries = compressor.entries(shape.numel(), compressor.value_type(dtype))
        return dense_payload_nbytes(entries, code)

    def encode(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Encoded]:
        flat = as_flat(gradient)
        kernels = self.compressor.backend(flat.device)
        message, stats = encode_at(kernels, flat, kept, self._code(gradient.dtype))
        return message, Encoded([stats], flat.numel(), self.compressor.density)

    def decode(self, message: Tensor, kept: Tensor, out: Tensor, peer: int = 0) -> None:
        add_at(self.compressor.backend(out.device), without_padding(message), out, kept)

    def pull_back(self, gradient: Tensor, kept: Tensor) -> Tensor:
        mask = mask_of(self.compressor.backend(gradient.device), kept, gradient.numel())
        return gradient * mask.view(gradient.shape)

    def _code(self, dtype: torch.dtype) -> ValueDtype:
        return wire_dtype(dtype, self.compressor.site.answer.value_dtype)
