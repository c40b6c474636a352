"""Buffers under local steps, such as the statistics of batch normalization: the ranks' mean is taken over."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checksums import checksum
from ..plan import Entries
from ..stream_group import StreamGroup


class AveragedBuffers:
    """The floating buffers of a module that change in training; they cross in the messages of the progress.

    A buffer that has changed on any rank crosses from the next exchange on; before the first exchange the
    ranks agree on them. Masks and other constants never cross.

    Args:
        group: The ranks.
        module: It has the buffers.
    """

    def __init__(self, group: StreamGroup, module: torch.nn.Module) -> None:
        self._group, self._module = group, weakref.ref(module)
        self._sums: dict[str, Tensor] = {}
        """Checksums of the buffers after the last exchange."""
        self._changing: list[str] | None = None
        """Names of the buffers that cross; None before the first exchange."""
        self._sent: list[Tensor] = []

    def all(self) -> dict[str, Tensor]:
        """Return all floating buffers by name; modules may replace them."""
        named = () if (module := self._module()) is None else module.named_buffers()
        return {name: buffer for name, buffer in named if buffer.is_floating_point()}

    def note(self) -> None:
        """Note what the buffers are, to find those that change; forget an exchange that is under way."""
        self._sent = []
        self._sums = {name: checksum(buffer) for name, buffer in self.all().items()}

    def entries(self) -> Entries:
        """Return what this rank brings into the exchange, by name: flags of buffers that have changed, and
        the buffers that cross as one tensor (fp32), in parts that are sent dense.
        """
        buffers = self.all()
        if not buffers:
            return []
        sums = ((checksum(each), self._sums.get(name)) for name, each in buffers.items())
        flags = torch.stack([(now != before if before is not None else now == now) for now, before in sums])
        flags = flags.to(self._group.device, torch.float32)
        if self._changing is None:
            with self._group.recorded("gradient_local"):
                everyones = self._group.exchange.all_gather(flags.to(torch.uint8), len(buffers))
            self._changing = self._flagged(torch.stack(everyones).amax(0))
        values = [buffers[name].detach().to(self._group.device, torch.float32) for name in self._changing]
        flat = torch.cat([flags, *(value.reshape(-1) for value in values)])
        self._sent = list(flat.split(max(1, self._group.settings.min_numel - 1)))
        return [(f"buffers {number}", part) for number, part in enumerate(self._sent)]

    def take_over(self) -> None:
        """Take over the mean of what the ranks brought."""
        if not self._sent or self._changing is None:
            return
        buffers, mean = self.all(), torch.cat(self._sent)
        self._sent = []
        crossed = [buffers[name] for name in self._changing]
        parts = mean[len(buffers) :].split([each.numel() for each in crossed])
        for buffer, part in zip(crossed, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
        self._changing = list(dict.fromkeys([*self._changing, *self._flagged(mean[: len(buffers)])]))
        self.note()

    def _flagged(self, flags: Tensor) -> list[str]:
        return [name for name, flag in zip(self.all(), flags.tolist(), strict=True) if flag > 0]


def average(group: StreamGroup, tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their mean over the ranks, in one collective for each type."""
    with group.recorded("gradient_local"):
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            same = [each for each in tensors if each.dtype == dtype]
            flat = torch.cat([each.detach().reshape(-1) for each in same])
            group.exchange.all_reduce(flat)
            flat.div_(group.world_size)
            for each, mean in zip(same, flat.split([each.numel() for each in same]), strict=True):
                each.detach().copy_(mean.view(each.shape))
