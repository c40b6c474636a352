"""The model of the data-parallel workloads: square layers, four or more, with as many parameters as asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAYERS = 4
#: Samples per rank: about as much computation as four layers of a small transformer would be.
BATCH = 128


def width_of(parameters: float, layers: int = LAYERS) -> int:
    """Width of the layers for so many million parameters."""
    return round(math.sqrt(parameters * 1e6 / layers))


def perceptron(width: int, count: int = LAYERS) -> nn.Sequential:
    """The same weights on every rank and in every call."""
    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())]
    for layer in layers[::2]:  # with torch's own weights the gradients of many layers vanish
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers, nn.Linear(width, 1))


def batch(width: int, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    """A rank's own samples and targets, fp32 [samples, width] and [samples, 1]: a task that can be learnt."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(samples, width, generator=generator)
    return x, x[:, :8].sum(1, keepdim=True)


@contextmanager
def apart(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore the weights afterwards: steps that send nothing let them drift apart."""
    kept = [(parameter, parameter.detach().clone()) for parameter in parameters]
    yield
    with torch.no_grad():
        for parameter, before in kept:
            parameter.copy_(before)
