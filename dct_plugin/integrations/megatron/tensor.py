"""Tensor parallelism: partial sums of row-parallel layers and, by option, inputs of column-parallel ones.

With sequence parallelism the reduce-scatter of a row-parallel layer's partial sums becomes an all-to-all
of compressed chunks, whose gradients return compressed; without it the all-reduce becomes an all-gather of
compressed contributions, and backward needs no communication, as in Megatron. ``gather`` adds the all-gather
in front of column-parallel layers. Every layer has a compressor of its own, whose state changes between
iterations only, so that recomputation sends the same. Embeddings, output layers, experts and layers outside
transformer layers are left to Megatron; what crosses there, and what goes back to the inputs of
column-parallel layers, is counted by reason.

Where this helps: with thresholds a sparse all-gather of contributions, for ``t`` ranks, ``e`` bytes per
entry and density ``d``, receives ``(t - 1) d N (e + index)`` bytes against ``2 (t - 1) / t N e`` of a ring
all-reduce, so it wins only below about ``d = 2 / t``; all-to-all and all-gather of the sequence-parallel form
shrink for any ``t``.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.host_traffic import count_group
from dct_plugin.model_parallel import ActivationStream, CompressedCollectives

from ..host.patching import Function
from ..host.refusals import refuse_features
from .engine import EngineLinears, exchanged, is_engine_linear
from .session import Hook, Session

_SITE = "_dct_site"
_PREFIX = "layer "


class _Site(NamedTuple):
    """One parallel linear layer inside a transformer layer."""

    name: str
    dense: bool
    sums: bool
    """True for a row-parallel layer, whose partial sums are compressed."""


class TensorHook(Hook):
    """Reroutes the collectives that :class:`RowParallelLinear` and :class:`ColumnParallelLinear` use."""

    def __init__(self, session: Session) -> None:
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer import transformer_layer

        self.session, self.config = session, session.config.model_parallel.tensor
        self._sites: list[_Site] = []
        self._linears = (layers.RowParallelLinear, layers.ColumnParallelLinear)
        self._engine: EngineLinears | None = None
        self._current: _Site | None = None
        self._in_linear = False
        self._others: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Parallel linears that have run and are no sites."""
        self._counted: set[dist.ProcessGroup] = set()
        self._collectives: dict[dist.ProcessGroup, CompressedCollectives] = {}
        # The layers themselves: the id of one that is gone may be given to another.
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        patches = session.patches
        patches.intercept(transformer_layer.TransformerLayer, "forward", self._layer_forward)
        for linear in self._linears:
            patches.intercept(linear, "forward", self._linear_forward)

    # -- layers --------------------------------------------------------------------------------------------

    def _layer_forward(self, original: Function, layer: Any, *arguments: Any, **keywords: Any) -> Any:
        if layer not in self._seen:
            self._seen.add(layer)
            self._register(layer)
        return original(layer, *arguments, **keywords)

    def _register(self, layer: Any) -> None:
        """Number the parallel linears of a transformer layer; once, before its first forward pass."""
        where = f"dct.model_parallel.tensor, layer {layer.layer_number}"
        refuse_features("dct.model_parallel.tensor", layer.config, where)
        number, count = int(layer.layer_number), int(layer.config.num_layers)
        outside = number <= self.config.skip_first_layers or number > count - self.config.skip_last_layers
        for name, module in layer.named_modules():
            if mode := self._mode(module, f"{where}: {name}"):
                label = f"{_PREFIX}{number} {name}"
                if same := sum(site.name.split(" #")[0] == label for site in self._sites):
                    label += f" #{same}"  # layers for multi-token prediction count from 1 again
                site = _Site(label, outside, mode == "row")
                setattr(module, _SITE, site)
                self._sites.append(site)

    def _mode(self, module: torch.nn.Module, where: str) -> str | None:
        """Return ``"row"`` or ``"column"`` for a parallel linear that is a site."""
        if isinstance(module, self._linears):
            row = isinstance(module, self._linears[0])
            return None if getattr(module, "is_expert", False) else "row" if row else "column"
        if not is_engine_linear(module):
            return None
        if self._engine is None:
            enter, route = self._linear_forward, self._route
            self._engine = EngineLinears(self.session.patches, enter, route, gather=self.config.gather)
        return self._engine.mode(module, where)

    def _linear_forward(
        self, original: Function, linear: Any, input_: Tensor, *arguments: Any, **keywords: Any
    ) -> Any:
        group = getattr(linear, "tp_group", None)
        if isinstance(group, dist.ProcessGroup) and group not in self._counted:
            self._counted.add(group)
            self.session.ends.callback(count_group(group, self._count))
        previous = self._current, self._in_linear
        self._current, self._in_linear = getattr(linear, _SITE, None), True
        if self._current is None:
            self._others.add(linear)

        def run(input_: Tensor) -> Any:
            return original(linear, input_, *arguments, **keywords)

        exchanges = isinstance(linear, self._linears) and not linear.explicit_expert_comm
        try:
            return self._rerouted(run, linear, input_) if exchanges else run(input_)
        finally:
            self._current, self._in_linear = previous

    def _rerouted(self, run: Function, linear: Any, input_: Tensor) -> Any:
        """Run a linear of Megatron's as one of an expert, whose tokens are exchanged outside."""
        is_row = isinstance(linear, self._linears[0])
        route = self._route(linear.tp_group, input_.device)
        if route is None or not (is_row or (self.config.gather and linear.sequence_parallel)):
            return run(input_)
        alone = {"explicit_expert_comm": True, "skip_bias_add": is_row or linear.skip_bias_add}
        output, bias = exchanged(route, linear, input_, run, alone, is_row=is_row)
        if linear.skip_bias_add or bias is None:
            return output, bias
        return output + bias, None

    def sites(self) -> str:
        active = [s for s in self._sites if not s.dense and (self.config.gather or s.sums)]
        return f"tensor on {len(active)} of {len(self._sites) + len(self._others)} parallel linear layers"

    def _count(self, nbytes: float) -> None:
        """Count what Megatron sends by itself between tensor-parallel ranks, after the start."""
        if not self.session.training or not self.session.is_active(self.config):
            return
        if self._in_linear:
            site = self._current
            reason = "other_layers" if site is None else "skipped_layers" if site.dense else "inputs"
        else:
            in_backward = torch._C._current_graph_task_id() >= 0
            reason = "input_gradients" if in_backward else "other_tensors"
        self.session.metrics.uncompressed("tensor", reason, nbytes)

    # -- collectives ----------------------------------------------------------------------------------------

    def _route(
        self, ranks: dist.ProcessGroup, device: torch.device
    ) -> tuple[CompressedCollectives, ActivationStream] | None:
        """Return the collectives and the stream of the running layer, None where it is left to Megatron."""
        site = self._current
        if site is None or site.dense or ranks.size() == 1 or not self.session.is_active(self.config):
            return None
        if ranks not in self._collectives:
            made = CompressedCollectives(ranks, device=device, metrics=self.session.metrics, cls="tensor")
            self._collectives[ranks] = made
        return self._collectives[ranks], self.session.streams.stream(site.name, self.config, dist.get_rank)
