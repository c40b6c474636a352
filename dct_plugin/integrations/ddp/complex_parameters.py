"""Complex parameters: DDP reduces their gradients as real tensors with a last dimension of two."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as DDP reduces it; a real one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def entries_of(parameter: Tensor) -> int:
    """Return the number of entries of a parameter's gradient in a bucket."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class RealView:
    """A complex parameter as a real one, with all that step-ahead needs of a parameter."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.parameter.shape, 2])

    @property
    def device(self) -> torch.device:
        return self.parameter.device

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    @property
    def _version(self) -> int:
        return self.parameter._version

    @property
    def data(self) -> Tensor:
        return torch.view_as_real(self.parameter.data)

    @data.setter
    def data(self, values: Tensor) -> None:
        self.parameter.data = torch.view_as_complex(values)

    def numel(self) -> int:
        return self.shape.numel()

    def data_ptr(self) -> int:
        return self.parameter.data_ptr()
