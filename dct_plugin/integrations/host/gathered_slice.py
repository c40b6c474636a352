"""A rank's slice of a parameter, as a host gathers it before a pass: step-ahead displaces it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class GatheredSlice(ABC):
    """A slice with all that :class:`~dct_plugin.data_parallel.step_ahead.add_on.StepAhead` needs.

    To set :attr:`data` changes which memory the host gathers from. The weights stay where they are. A host's
    class adds ``device``, ``requires_grad`` and ``_version``.

    Args:
        shape: Shape of the slice, or of the parameter.
    """

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self._displaced: Tensor | None = None
        """The slice that is gathered in place of the weights."""
        self._padded: Tensor | None = None
        """Memory for a displaced slice with padding behind it."""

    @property
    @abstractmethod
    def held(self) -> Tensor:
        """The memory of the weights, 1-D, with padding."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """The weights in it, without padding."""

    @abstractmethod
    def show(self, memory: Tensor) -> None:
        """Let the host gather from this memory, 1-D, with padding."""

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def data(self) -> Tensor:
        return self.weights if self._displaced is None else self._displaced

    @data.setter
    def data(self, slice_: Tensor) -> None:
        held = self.held
        self._displaced = None if slice_.data_ptr() == held.data_ptr() else slice_
        if self._displaced is None:
            self.show(held)
        elif slice_.numel() == held.numel():
            self.show(slice_.view(-1))
        else:
            if self._padded is None:
                self._padded = torch.zeros_like(held)
            self._padded[: slice_.numel()].copy_(slice_.reshape(-1))
            self.show(self._padded)
