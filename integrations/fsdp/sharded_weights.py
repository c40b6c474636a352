"""Step-ahead under FSDP2: the shards that FSDP gathers are displaced, the optimizer's are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.errors import ConfigError

from .parameter_groups import ShardedParameter


class GatheredShard:
    """This rank's shard of a parameter as FSDP gathers it before a pass.

    It has what :class:`~dct_plugin.data_parallel.step_ahead.StepAhead` needs of a parameter. To set
    :attr:`data` changes which memory FSDP gathers from. The parameter itself, which the optimizer steps and
    ``state_dict`` saves, is the weight at all times.
    """

    def __init__(self, parameter: ShardedParameter) -> None:
        self.parameter = parameter
        self._padded: Tensor | None = None
        """Memory for a displaced shard with padding behind it."""
        self._weights: Tensor | None = None
        """The weights' own memory while another one is gathered."""
        self._displaced: Tensor | None = None
        """The shard that is gathered in place of the weights."""

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.parameter.fsdp._sharded_param_data.device
        return device

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.sharded.requires_grad)

    @property
    def _version(self) -> int:
        return int(self.parameter.sharded._local_tensor._version)

    def data_ptr(self) -> int:
        return self.data.data_ptr()

    @property
    def data(self) -> Tensor:
        if self._displaced is not None:
            return self._displaced
        flat: Tensor = self.parameter.fsdp._sharded_param_data
        return flat[: self.numel()].view(self.shape)

    @data.setter
    def data(self, shard: Tensor) -> None:
        fsdp, group = self.parameter.fsdp, self.parameter.group
        if self._weights is None:
            self._weights = fsdp._sharded_param_data
        self._displaced = shard
        if shard.data_ptr() == self._weights.data_ptr():
            fsdp._sharded_param_data, self._weights, self._displaced = self._weights, None, None
        elif self.parameter.padded_numel == self.numel():
            fsdp._sharded_param_data = shard.view(-1)
        else:
            if self._padded is None:
                self._padded = torch.zeros_like(self._weights)
            self._padded[: self.numel()].copy_(shard.reshape(-1))
            fsdp._sharded_param_data = self._padded
        # What was gathered before is of other weights. FSDP itself frees it in a backward pass.
        if group.is_unsharded and torch._C._current_graph_task_id() < 0:
            group.reshard()


def check_displaceable(parameters: list[ShardedParameter]) -> None:
    """Refuse parameters whose shards FSDP does not gather as they are.

    Raises:
        ConfigError: Names the parameter.
    """
    for each in parameters:
        if each.fsdp.offload_to_cpu and each.group.device.type != "cpu":
            problem = "is on the CPU (CPUOffloadPolicy), and its residual is not"
        elif hasattr(each.fsdp._sharded_local_tensor, "fsdp_pre_all_gather"):
            problem = "is gathered in a form of its own (fsdp_pre_all_gather)"
        else:
            continue
        raise ConfigError(
            f"dct.data_parallel.feedback = 'step_ahead': FSDP's parameter {each.name} {problem}; set "
            "feedback to 'local'"
        )


def shard_units(optimizer: Any, parameters: list[ShardedParameter]) -> Any:
    """Return a look-up of a shard's unit of the optimizer's steps.

    Raises:
        ConfigError: The optimizer has no parameter of the model, or its step is not known.
    """
    units = units_of(optimizer)
    if not any(units(each.sharded) for each in parameters):
        raise ConfigError(
            "compress_replicas: the optimizer has none of the model's sharded parameters; make it after "
            "fully_shard, which replaces them"
        )
    return lambda shard: units(shard.parameter.sharded)
