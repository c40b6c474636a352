"""ZeRO-3 without hpZ: copies of the weights that the gathers of all passes read.

DeepSpeed gathers every parameter from all ranks in each forward and backward pass of each micro-batch. Here a
rank keeps what its node needs of them (:mod:`..host.node_copies`): the first pass after a step brings the
copies up to date, in one exchange of what changed, and nothing else crosses between nodes. With one rank per
node the copies are in int8, 1.02 bytes per parameter and rank.

What is gathered for itself (``GatheredParameters``, checkpoints, persistent parameters) comes from the
partitions of the owners, which are always exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.errors import ConfigError
from dct_plugin.metrics import format_bytes

from ..host.node_copies import COPIES
from ..host.patching import Function, Patches, given
from .engine import EngineContext, is_expert
from .weight_updates import WeightUpdates


class _Partition:
    """This rank's partition of a parameter, as copies of it take it.

    Args:
        parameter: The parameter.
        owner: Counts the changes of the weights.
    """

    def __init__(self, parameter: Any, owner: ResidentCopies) -> None:
        self.parameter, self._owner = parameter, owner
        self.padded_numel = int(parameter.ds_tensor.numel())
        self._numel = min(self.padded_numel, max(0, parameter.ds_numel - owner.rank * self.padded_numel))

    def shard(self) -> Tensor:
        """Return the partition, 1-D, without padding, in which DeepSpeed leaves anything."""
        return self.parameter.ds_tensor.detach()[: self._numel]

    def version(self) -> tuple[int, ...]:
        """Return a number that is another one after the weights may have changed."""
        return (self._owner.changes,)


class _Gathered:
    """The handle that DeepSpeed waits for.

    Args:
        parameters: Those whose weights are there already.
        others: DeepSpeed's handle of the others; None if there are none.
    """

    def __init__(self, parameters: Sequence[Any], others: Any) -> None:
        self._parameters, self._others = parameters, others

    def wait(self, handle_dependency: bool = True) -> None:
        """Let DeepSpeed use the parameters."""
        parameters, others = self._parameters, self._others
        self._parameters, self._others = (), None  # each parameter is waited for, maybe after its release
        for parameter in parameters:
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        if others is not None:
            others.wait(handle_dependency=handle_dependency)


class ResidentCopies(WeightUpdates):
    """The copies of an engine's weights.

    Args:
        context: The engine.
        reducer: Sums its gradients.

    Attributes:
        rank: This rank's position among those that have the partitions.
        changes: Number of times that the weights may have changed.

    Raises:
        ConfigError: Exact copies are asked for where every rank is a node.
    """

    def __init__(self, context: EngineContext, reducer: GradientReducer) -> None:
        settings, engine = context.config.data_parallel, context.engine
        self._all = [p for p in engine.module.parameters() if not is_expert(p)]
        copied = [p for p in self._all if not p.ds_persist and p.ds_numel]
        self.rank, self.changes = reducer.group.group_rank, 0
        if settings.parameters == "exact" and reducer.group.nodes is None:
            raise ConfigError(
                f"rank {engine.global_rank}: dct.data_parallel.parameters = 'exact' under ZeRO stage 3: "
                "every rank is a node, and an exact copy of all weights takes 2 bytes each; write 'int8' "
                "(1.02 bytes), take ZeRO stage 2, or leave it out"
            )
        dtype = next((p.ds_tensor.dtype for p in copied), torch.bfloat16)
        self.copies = COPIES[settings.parameters](settings, reducer, dtype, counts_steps=False)
        self.updates = self.copies.updates
        self._places = {id(p): self.copies.add([_Partition(p, self)]) for p in copied}
        self._ranks = reducer.group.group_size
        self._copied: set[int] = set()
        """Parameters (by id) that were gathered from the copies last."""
        if engine.global_rank == 0:
            kept = format_bytes(self.copies.nbytes())
            logger.warning(f"dct: ZeRO stage 3 gathers from copies of the weights: {kept} on a rank")

    def install(self, patches: Patches) -> None:
        for parameter in self._all:  # a pass gathers several by the call of one, whichever that is
            patches.intercept(parameter, "all_gather_coalesced", self._gather_coalesced)
            patches.intercept(parameter, "all_gather", functools.partial(self._gather_exact, parameter))
            patches.intercept(parameter, "partition", self._partition)

    def after_step(self) -> None:
        self.changes += 1

    def gather(self) -> None:
        """Look again at the weights in the next pass: they may have been loaded."""
        self.changes += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"copies": self.copies.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, *, step: int) -> None:
        super().load_state_dict(state, step=step)
        self.copies.load_state_dict((state or {}).get("copies") or {})
        self.changes += 1

    @torch.no_grad()
    def _gather_coalesced(
        self, original: Function, params: Any, safe_mode: bool = False, quantize: bool = False
    ) -> Any:
        """Give parameters their weights from the copies, where DeepSpeed gathers for a pass."""
        asked, outputs = sorted(params, key=lambda each: each.ds_id), []
        parameters = [each for each in asked if id(each) in self._places and not quantize]
        rest = [each for each in asked if id(each) not in self._places or quantize]
        others = original(rest, safe_mode=safe_mode, quantize=quantize) if rest else None
        for each in parameters:
            each.ds_status = ZeroParamStatus.INFLIGHT
            outputs.append(each.ds_tensor.new_empty(self._ranks * each.ds_tensor.numel()))
        if parameters:
            self.copies.gather("parameters", [self._places[id(each)] for each in parameters], outputs)
        for each, output in zip(parameters, outputs, strict=True):
            each.data = output[: each.ds_numel].view(each.ds_shape)
        self._copied |= {id(each) for each in parameters}
        return _Gathered(parameters, others)

    def _gather_exact(
        self, parameter: Any, original: Function, param_list: Any = None, **keywords: Any
    ) -> Any:
        """Gather from the owners' partitions, also what a pass has left gathered."""
        parameters = [parameter] if param_list is None else list(param_list)
        for each in parameters:
            if id(each) in self._copied and each.ds_status is ZeroParamStatus.AVAILABLE:
                each.partition([each])
        self._copied -= {id(each) for each in parameters}
        return original(parameters, **keywords)

    def _partition(self, original: Function, *args: Any, **keywords: Any) -> Any:
        if given(original, "has_been_updated", args, keywords):  # written in GatheredParameters
            self.changes += 1
        return original(*args, **keywords)
