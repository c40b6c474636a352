"""Copies between the host and a device that make nobody wait for more than they need."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["to_device", "to_host"]


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, through pinned memory and a stream of its own: what is queued behind the tensor
    meanwhile is not waited for.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream = _reader(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        pinned.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return pinned


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, through pinned memory: nobody waits for the copy."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@functools.cache
def _reader(where: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(where)
