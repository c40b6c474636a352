"""DeepSpeed's mixture of experts: tokens to experts on other ranks and back, compressed.

``MOELayer.forward`` puts tokens into slots, ``capacity`` for each expert, and exchanges all slots in two
all-to-alls (``_AllToAll``), whose backward passes are two more. While such a layer runs, ``_AllToAll`` of its
module is one that exchanges the slots that hold a token, as :class:`ExpertsConfig` says
(:meth:`~dct_plugin.model_parallel.CompressedCollectives.all_to_all`). The layer's gate has just said which
slots those are: a rank tells the others once, in a bit per slot, for all four transfers.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe import sharded_moe
from torch import Tensor

from dct_plugin.codecs.quantised import pack, unpack
from dct_plugin.config import DCTConfig
from dct_plugin.metrics import Record
from dct_plugin.model_parallel import CompressedCollectives

from ..host.activation_streams import ActivationStreams
from ..host.patching import Function, Patches
from ..host.versions import Target
from .engine import EngineContext
from .path import ActivationPath

_PREFIX = "experts "


class ExpertPath(ActivationPath):
    """The exchange of tokens by the expert layers of an engine, compressed."""

    name = "experts"
    targets = (
        Target("deepspeed.moe.sharded_moe", "MOELayer.forward", "self input"),
        Target("deepspeed.moe.sharded_moe", "_AllToAll.forward", "ctx group input"),
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.config = context.config.model_parallel.experts
        self.streams = ActivationStreams(context.config.kernels)
        modules = self.engine.module.named_modules()
        self._layers = {name: each for name, each in modules if _is_distributed(each)}
        self._collectives: dict[tuple[int, str], CompressedCollectives] = {}

    @classmethod
    def applies(cls, engine: Any, config: DCTConfig) -> bool:
        return any(map(_is_distributed, engine.module.modules()))

    def describe(self) -> str:
        return self.config.summary

    def install(self, patches: Patches) -> None:
        for name, layer in self._layers.items():
            patches.intercept(layer, "forward", functools.partial(self._forward, name))

    def _forward(self, name: str, original: Function, *tensors: Tensor, **keywords: Any) -> Any:
        layer = self._layers[name]
        training = bool(layer.training)  # also without gradients: passes that are recomputed later
        self.streams.begin(training)
        if not (training or self.config.evaluation) or self.streams.step < self.config.warmup_steps:
            return original(*tensors, **keywords)
        exchange = _SlotExchange(self, name)
        with layer.gate.register_forward_hook(exchange.record_routing), Patches() as patches:
            patches.replace(sharded_moe, "_AllToAll", exchange)
            return original(*tensors, **keywords)

    def collectives(self, group: dist.ProcessGroup) -> CompressedCollectives:
        """Return the collectives of a group of ranks with different experts."""
        key = id(group), "experts" if self.streams.training else "experts_evaluation"
        if key not in self._collectives:
            self._collectives[key] = CompressedCollectives(
                group, device=self.engine.device, metrics=self.metrics, cls=key[1]
            )
        return self._collectives[key]


class _SlotExchange:
    """A replacement of ``_AllToAll`` in one forward pass of a layer: to the experts, then back from them."""

    def __init__(self, path: ExpertPath, name: str) -> None:
        self._path, self._name = path, name
        self._own: Tensor | None = None
        """Slots that hold a token of this rank, bool [slots]."""
        self._others: Tensor | None = None
        """Slots that hold a token for the experts of this rank, bool [slots]."""

    def record_routing(self, gate: Any, inputs: Any, routing: Sequence[Any]) -> None:
        """Note which slots hold a token of this rank; a forward hook of the gate."""
        self._own = _occupied(routing)

    def apply(self, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        """Exchange ``[experts, capacity, hidden]`` by slots, block by block with the ranks of ``group``."""
        comm = self._path.collectives(group)
        assert self._own is not None
        if self._others is None:
            self._others = self._exchange_slots(comm, self._own)
            return self._exchange(comm, tensor, "dispatch", self._own, self._others)
        return self._exchange(comm, tensor, "combine", self._others, self._own)

    def _exchange(
        self, comm: CompressedCollectives, tensor: Tensor, direction: str, sent: Tensor, received: Tensor
    ) -> Tensor:
        name, width = f"{_PREFIX}{self._name} {direction}", tensor.shape[-1]
        stream = self._path.streams.stream(name, self._path.config, dist.get_rank)
        stream.fit_groups(width)
        rows = tensor.reshape(-1, width)
        sent_counts, received_counts = (
            slots.view(comm.world_size, -1).sum(dim=1).tolist() for slots in (sent, received)
        )
        # The bytes of slots without a token, in both passes: DeepSpeed would send them, too.
        block = sent.numel() // comm.world_size
        empty = sum(block - count for rank, count in enumerate(sent_counts) if rank != comm.rank)
        for cls in (comm.cls, f"{comm.cls}_gradient")[: 1 + self._path.streams.training]:
            self._path.metrics.record(Record(cls, dense_bytes=empty * width * rows.element_size()))
        tokens = comm.all_to_all(rows[sent], stream, sent_counts, received_counts)
        out = rows.new_zeros(rows.shape)
        return out.index_copy(0, received.nonzero().view(-1), tokens).view(tensor.shape)

    def _exchange_slots(self, comm: CompressedCollectives, own: Tensor) -> Tensor:
        """Return which slots hold tokens of the group's ranks for the experts of this rank, bool [slots]."""
        parts = own.view(comm.world_size, -1)
        count = parts.shape[1]
        bits = parts.new_zeros(comm.world_size, -(-count // 8) * 8, dtype=torch.uint8)
        bits[:, :count] = parts
        before, _ = comm.exchange.counters()
        fingerprint = zlib.crc32(f"slots:{self._name}:{count}".encode())
        answers = comm.exchange.all_to_all([pack(part, 1) for part in bits], fingerprint)
        self._path.metrics.record(Record(comm.cls, sent_bytes=comm.exchange.counters()[0] - before))
        return torch.cat([unpack(answer, 1)[:count] for answer in answers]).bool()


def _is_distributed(layer: Any) -> bool:
    """Return whether it is a layer whose experts lie on several ranks."""
    return isinstance(layer, sharded_moe.MOELayer) and layer.ep_size > 1


def _occupied(routing: Sequence[Any]) -> Tensor:
    """Return which of the ``experts * capacity`` slots hold a token, from what a gate returns."""
    if len(routing) == 4:  # loss, weights, mask [tokens, experts, capacity], counts
        return routing[2].bool().any(dim=0).view(-1)
    _, capacity, experts, indices, locations, *_ = routing
    capacity = int(capacity)
    if not isinstance(indices, Tensor):  # a list with one tensor for each of a token's experts
        indices, locations = torch.stack(list(indices)), torch.stack(list(locations))
    indices, locations = indices.long(), locations.long()
    taken = (indices >= 0) & (locations < capacity)
    slots = torch.zeros(int(experts) * capacity, dtype=torch.bool, device=indices.device)
    slots[(indices * capacity + locations)[taken]] = True
    return slots
