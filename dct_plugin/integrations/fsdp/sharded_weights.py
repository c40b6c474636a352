"""Step-ahead under FSDP2: the shards that FSDP gathers are displaced, the optimizer's are not."""

from __future__ import annotations

import torch
from torch import Tensor

from dct_plugin.errors import ConfigError

from ..host.gathered_slice import GatheredSlice
from .parameter_groups import ShardedParameter


class GatheredShard(GatheredSlice):
    """This rank's shard of a parameter as FSDP gathers it before a pass.

    The parameter itself, which the optimizer steps and ``state_dict`` saves, is the weight at all times.
    """

    def __init__(self, parameter: ShardedParameter) -> None:
        super().__init__(parameter.shape)
        self.parameter = parameter
        self._weights: Tensor | None = None
        """The weights' own memory while another one is gathered."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.held.device
        return device

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.sharded.requires_grad)

    @property
    def _version(self) -> int:
        return int(self.parameter.sharded._local_tensor._version)

    @property
    def held(self) -> Tensor:
        memory: Tensor = self.parameter.fsdp._sharded_param_data
        return memory if self._weights is None else self._weights

    @property
    def weights(self) -> Tensor:
        return self.held[: self.numel()].view(self.shape)

    def show(self, memory: Tensor) -> None:
        fsdp, group, weights = self.parameter.fsdp, self.parameter.group, self.held
        fsdp._sharded_param_data = memory
        self._weights = None if memory is weights else weights
        # What was gathered before is of other weights. FSDP itself frees it in a backward pass.
        if group.is_unsharded and torch._C._current_graph_task_id() < 0:
            group._to_sharded()  # reshard() does nothing within the root's forward pass


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
