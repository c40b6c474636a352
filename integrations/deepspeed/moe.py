"""DeepSpeed's mixture of experts: tokens to experts on other ranks and back, compressed.

``MOELayer.forward`` puts tokens into slots, ``capacity`` for each expert, and exchanges all slots in two
all-to-alls (``_AllToAll``), whose backward passes are two more. While such a layer runs, ``_AllToAll`` of its
module is one that exchanges the slots that hold a token, as :class:`ExpertsConfig` says
(:meth:`~dct_plugin.model_parallel.CompressedCollectives.all_to_all`). Which slots those are, the layer's gate
has just said: a rank tells it the others once, in a bit per slot, for all four transfers.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe import sharded_moe
from torch import Tensor

from dct_plugin.codecs.quantised import pack, unpack
from dct_plugin.config import ActivationConfig, DCTConfig
from dct_plugin.metrics import Metrics, Record
from dct_plugin.model_parallel import ActivationStream, CompressedCollectives

from ..host.patches import Patches
from ..host.streams import ActivationStreams

__all__ = ["ExpertHooks"]

_PREFIX = "experts "


class ExpertHooks:
    """Compresses what the expert layers of an engine exchange.

    Args:
        engine: DeepSpeed's engine.
        config: The whole section.
        metrics: Where bytes, density and times are recorded.
    """

    def __init__(self, engine: Any, config: DCTConfig, metrics: Metrics) -> None:
        self.config = config.model_parallel.experts
        self.metrics = metrics
        self.streams = ActivationStreams(self._make, _PREFIX)
        self._kernels = config.kernels
        self._device = engine.device
        self._layers = {name: layer for name, layer in engine.module.named_modules() if _crosses(layer)}
        self._collectives: dict[tuple[int, bool], CompressedCollectives] = {}

    @staticmethod
    def wanted(engine: Any, config: DCTConfig) -> bool:
        """Whether anything is to be compressed between this engine's tokens and experts."""
        section = config.model_parallel.experts
        return section.compresses and any(map(_crosses, engine.module.modules()))

    @property
    def summary(self) -> str:
        """What is done, for people."""
        return self.config.summary

    def install(self, patches: Patches) -> None:
        """Patch the layers (these instances, not their class)."""
        for name, layer in self._layers.items():
            patches.wrap(layer, "forward", functools.partial(self._forward, name))

    def _make(self, name: str, config: ActivationConfig) -> ActivationStream:
        return ActivationStream(config, name=name, rank=dist.get_rank(), kernels=self._kernels)

    def _forward(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(*tensors: Tensor, **keywords: Any) -> Tensor:
            layer = self._layers[name]
            training = bool(layer.training)  # also without gradients: passes that are recomputed later
            self.streams.begin(training)
            if not (training or self.config.evaluation) or self.streams.step < self.config.warmup_steps:
                return original(*tensors, **keywords)
            own = _Slots(self, name)
            handle = layer.gate.register_forward_hook(own.routed)
            usual = sharded_moe._AllToAll
            sharded_moe._AllToAll = own
            try:
                return original(*tensors, **keywords)
            finally:
                sharded_moe._AllToAll = usual
                handle.remove()

        return forward

    def collectives(self, group: dist.ProcessGroup) -> CompressedCollectives:
        """Of a group of ranks with different experts."""
        training = self.streams.training
        known = self._collectives.get((id(group), training))
        if known is None:
            known = self._collectives[id(group), training] = CompressedCollectives(
                group,
                device=self._device,
                metrics=self.metrics,
                cls="experts" if training else "experts_evaluation",
            )
        return known


class _Slots:
    """Stands for ``_AllToAll`` in one forward pass of a layer: to the experts, then back from them."""

    def __init__(self, hooks: ExpertHooks, name: str) -> None:
        self._hooks, self._name = hooks, name
        self._leaving: Tensor | None = None
        self._arriving: Tensor | None = None

    def routed(self, gate: Any, inputs: Any, routing: Sequence[Any]) -> None:
        """A forward hook of the gate: which slots hold a token of this rank, bool [slots]."""
        self._leaving = _occupied(routing)

    def apply(self, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        """``[experts, capacity, hidden]`` by slots, block by block to the ranks of ``group``."""
        comm = self._hooks.collectives(group)
        assert self._leaving is not None
        if self._arriving is None:
            self._arriving = self._told(comm, self._leaving)
            return self._exchanged(comm, tensor, "dispatch", self._leaving, self._arriving)
        return self._exchanged(comm, tensor, "combine", self._arriving, self._leaving)

    def _exchanged(
        self, comm: CompressedCollectives, tensor: Tensor, way: str, leaving: Tensor, arriving: Tensor
    ) -> Tensor:
        stream = self._hooks.streams.stream(f"{_PREFIX}{self._name} {way}", self._hooks.config)
        stream.fit_groups(tensor.shape[-1])
        rows = tensor.reshape(-1, tensor.shape[-1])
        there, here = (slots.view(comm.world_size, -1).sum(dim=1).tolist() for slots in (leaving, arriving))
        self._record_empty(comm, rows, leaving, there)
        got = comm.all_to_all(rows[leaving], stream, there, here)
        out = rows.new_zeros(rows.shape)
        return out.index_copy(0, arriving.nonzero().view(-1), got).view(tensor.shape)

    def _told(self, comm: CompressedCollectives, leaving: Tensor) -> Tensor:
        """Which slots hold tokens of the group's ranks for the experts here, bool [slots]."""
        parts = leaving.view(comm.world_size, -1)
        count = parts.shape[1]
        bits = parts.new_zeros(comm.world_size, -(-count // 8) * 8, dtype=torch.uint8)
        bits[:, :count] = parts
        before = comm.exchange.sent_bytes
        fingerprint = zlib.crc32(f"slots:{self._name}:{count}".encode())
        answers = comm.exchange.all_to_all([pack(part, 1) for part in bits], fingerprint)
        self._hooks.metrics.record(Record(comm.cls, sent_bytes=comm.exchange.sent_bytes - before, tensors=0))
        return torch.cat([unpack(answer, 1)[:count] for answer in answers]).bool()

    def _record_empty(
        self, comm: CompressedCollectives, rows: Tensor, leaving: Tensor, there: Sequence[int]
    ) -> None:
        """Slots without a token, both ways: DeepSpeed would send them, too."""
        blocks = leaving.numel() // comm.world_size
        empty = sum(blocks - count for rank, count in enumerate(there) if rank != comm.rank)
        dense = empty * rows.shape[1] * rows.element_size()
        for cls in (comm.cls, f"{comm.cls}_gradient")[: 1 + self._hooks.streams.training]:
            self._hooks.metrics.record(Record(cls, dense_bytes=dense, tensors=0))


def _crosses(layer: Any) -> bool:
    return isinstance(layer, sharded_moe.MOELayer) and layer.ep_size > 1


def _occupied(routing: Sequence[Any]) -> Tensor:
    """From what a gate returns: which of the ``experts * capacity`` slots hold a token."""
    if len(routing) == 4:  # loss, weights, mask [tokens, experts, capacity], counts
        mask: Tensor = routing[2].bool().any(dim=0).view(-1)
        return mask
    _, capacity, experts, indices, locations, *_ = routing
    capacity = int(capacity)
    if not isinstance(indices, Tensor):  # a list with one tensor for each of a token's experts
        indices, locations = torch.stack(list(indices)), torch.stack(list(locations))
    indices, locations = indices.long(), locations.long()
    taken = (indices >= 0) & (locations < capacity)
    slots = torch.zeros(int(experts) * capacity, dtype=torch.bool, device=indices.device)
    slots[(indices * capacity + locations)[taken]] = True
    return slots
