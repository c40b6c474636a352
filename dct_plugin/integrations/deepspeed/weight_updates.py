"""ZeRO-1 and 2, and bf16 with fp32 accumulation: updated weights, from the owners of their masters to all.

DeepSpeed rounds a rank's masters into its part of the flat weights, and gathers all parts
(``all_gather_dp_groups``). The gather is replaced: with thresholds the part becomes again what it was before
the optimizer's step, which all ranks know, and takes the update that all ranks add. In steps in which
everything is sent DeepSpeed gathers. Groups of expert parameters are left to DeepSpeed.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_plugin.data_parallel import Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.host_traffic import own_traffic

from ..host.patching import Function, Patches
from ..host.startup import nodes_of
from ..host.versions import Target
from .engine import EngineContext, EnginePart, is_expert, require_targets

_GATHER = "all_gather_dp_groups"
_GATHERED = (
    "groups_flat partitioned_param_groups dp_process_group start_alignment_factor allgather_bucket_size"
)


class WeightLayout(NamedTuple):
    """The attributes in which an optimizer of DeepSpeed keeps its groups.

    The flat weights of a group lie beside its parameters, in ``{parameters}_flat``.

    Attributes:
        parameters: The parameters of each group, in order.
        partitions: The ranks' parts of each group's flat weights.
    """

    parameters: str
    partitions: str


class _FlatParameter(NamedTuple):
    """A parameter in its group's flat weights."""

    name: str
    start: int
    numel: int
    shards: Sequence[Shard]


class WeightUpdates(EnginePart):
    """Updates of an engine's weights after a step, thresholded.

    Attributes:
        updates: Exchanges them.
    """

    updates: ParameterUpdates

    @abstractmethod
    def gather(self) -> None:
        """Bring all working weights to the masters, in full; a collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return self.updates.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None, *, step: int) -> None:
        """Restore :meth:`state_dict`; None starts afresh, ``step`` optimizer steps into the training."""
        self.updates.load_state_dict(state, step=step)


def swap(first: Tensor, second: Tensor) -> None:
    """Exchange the values of two vectors, with memory for a part of them."""
    for one, other in zip(first.split(1 << 20), second.split(1 << 20), strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


class UpdatedWeights(WeightUpdates):
    """The gather of updated weights of a DeepSpeed optimizer, thresholded or exact.

    Args:
        context: The engine.
        layout: Where its optimizer keeps the weights.
        name_of: Gives the name of a parameter's stream, from the index of its group and the parameter.

    Attributes:
        updates: Exchanges updates over the optimizer's data-parallel group.

    Raises:
        VersionError: This DeepSpeed gathers weights in another way.
    """

    def __init__(
        self, context: EngineContext, layout: WeightLayout, name_of: Callable[[int, Any], str]
    ) -> None:
        engine, config = context.engine, context.config
        ranks, module = engine.seq_data_parallel_group, type(engine.optimizer).__module__
        require_targets([Target(module, _GATHER, _GATHERED)])
        self.updates = ParameterUpdates(
            config.data_parallel,
            nodes_of(config.data_parallel, ranks) or ranks,
            metrics=context.metrics,
            device=engine.device,
            kernels=config.kernels,
        )
        self._optimizer, self._layout, self._module = engine.optimizer, layout, sys.modules[module]
        self._groups: dict[int, list[_FlatParameter]] = {}
        """The groups whose updates are exchanged, by index."""
        groups = zip(getattr(engine.optimizer, layout.parameters), self._flat, strict=True)
        for index, (parameters, flat) in enumerate(groups):
            if not any(is_expert(parameter) for parameter in parameters):
                self._groups[index] = [
                    self._place(name_of(index, parameter), parameter, flat)
                    for parameter in parameters
                    if parameter.numel()
                ]
        self._known: dict[int, Tensor] = {}
        """This rank's parts of the flat weights before the optimizer's step, by index of the group."""

    def install(self, patches: Patches) -> None:
        patches.intercept(self._optimizer, "step", self._step)

    def gather(self) -> None:
        if self.updates.exact:  # nothing is missing
            return
        with own_traffic():
            self._optimizer.update_lp_params()
        for index in self._groups:
            self._record_full(index)

    def _step(self, original: Function, *args: Any, **keywords: Any) -> Any:
        dtypes = [flat.dtype for flat in self._flat]
        updated = [index for index in self._groups if not self.updates.full(dtypes[index])]
        self._known = {i: self._part(i).clone() for i in updated}
        with Patches() as patches:  # for this step alone: the function is shared by all engines
            patches.intercept(self._module, _GATHER, self._gather)
            return original(*args, **keywords)

    def _gather(
        self,
        original: Function,
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[list[Tensor]],
        dp_process_group: Sequence[Any],
        **keywords: Any,
    ) -> None:
        dense = [index for index in range(len(groups_flat)) if index not in self._known]
        self._update(groups_flat)
        gathered = sum(groups_flat[index].numel() for index in dense if index in self._groups)
        own, others = ([i for i in dense if (i in self._groups) is owned] for owned in (True, False))
        with self.updates.choice.timed(gathered, whole=True):
            for indices, counted in ((own, own_traffic()), (others, nullcontext())):
                with counted:  # :meth:`_record_full` counts the first ones
                    original(
                        groups_flat=[groups_flat[i] for i in indices],
                        partitioned_param_groups=[partitioned_param_groups[i] for i in indices],
                        dp_process_group=[dp_process_group[i] for i in indices],
                        **keywords,
                    )

    @torch.no_grad()
    def _update(self, flats: Sequence[Tensor]) -> None:
        """Exchange the updates of this step."""
        entries: list[tuple[str, Tensor, Sequence[Shard]]] = []
        masters: dict[str, Tensor] = {}
        for index in self._groups.keys() - self._known.keys():
            self._record_full(index)
        for index, known in self._known.items():
            flat, part = flats[index], self._part(index)
            if self.updates.exact:
                name = f"group {index}"
                entries.append((name, flat, shards_in(0, flat.numel(), part.numel())))
                masters[name] = known
                continue
            swap(part, known)
            begin = self.updates.group.group_rank * part.numel()
            for name, start, numel, shards in self._groups[index]:
                entries.append((name, flat[start : start + numel], shards))
                for shard in shards:
                    if shard.owner == self.updates.group.group_rank:
                        offset = start - begin
                        masters[name] = known[offset + shard.start : offset + shard.stop]
        self._known.clear()
        if entries:
            self.updates.update(entries, masters.__getitem__)

    # -- where things are ---

    @property
    def _flat(self) -> list[Tensor]:
        return list(getattr(self._optimizer, f"{self._layout.parameters}_flat"))

    def _part(self, index: int) -> Tensor:
        """Return this rank's part of the flat weights of a group."""
        return getattr(self._optimizer, self._layout.partitions)[index][self.updates.group.group_rank]

    def _place(self, name: str, parameter: Any, flat: Tensor) -> _FlatParameter:
        start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
        each = flat.numel() // self.updates.group.group_size
        return _FlatParameter(name, start, parameter.numel(), shards_in(start, parameter.numel(), each))

    def _record_full(self, index: int) -> None:
        flat = self._flat[index]
        self.updates.record_full(flat.numel(), flat.element_size())
