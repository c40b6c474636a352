"""Shards as DeepSpeed sees them: experts, which one rank has and updates alone.

DeepSpeed leaves gradients of parameters marked ``allreduce = False`` to the ranks of their expert group,
here the owner, and divides them by the number of ranks like all others (so
``ShardedTables(average_gradients=False)``). It looks for such parameters in models that contain an ``MoE``
module, and saves them, one file per expert, by a name that :class:`Experts` gives them on the way out and
takes away on the way in. Every rank counts as one expert, whatever the number of its tables. For ZeRO stages
0 and 1.
"""

from __future__ import annotations

from typing import Any

from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from dct_plugin.embedding import EmbeddingExchange, TableShard

#: Where DeepSpeed's checkpoints look for the first (here: only) expert of a rank.
_MARK = "deepspeed_moe.experts.deepspeed_experts.0."


class Experts(MoE):
    """A model with sharded parts, for ``deepspeed.initialize``.

    Parameters of :class:`~dct_plugin.embedding.tables.TableShard` modules, and all that are already marked
    ``allreduce = False``, become expert parameters. Of ``MoE`` nothing but the name is used.
    """

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.model = model
        self.num_experts = self.ep_size = dist.get_world_size()
        self.num_local_experts = 1
        self.expert_group_name = f"ep_size_{self.ep_size}"
        shards = [module for module in model.modules() if isinstance(module, TableShard)]
        for shard in shards:
            shard.weight.allreduce = False  # type: ignore[attr-defined]
        for parameter in model.parameters():
            if not getattr(parameter, "allreduce", True):
                parameter.group_name = self.expert_group_name  # type: ignore[attr-defined]
        self.register_state_dict_post_hook(_mark)
        self.register_load_state_dict_pre_hook(_unmark)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by the engine: one expert-parallel group of all ranks."""
        if self.expert_group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(
                self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
            )

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def follow(self, optimizer: Any) -> None:
        """Sharded tables count the steps of ``optimizer``, ``engine.optimizer`` as a rule; call it once.

        Steps that fp16's loss scaler skips are not counted.
        """
        for module in self.model.modules():
            if isinstance(module, EmbeddingExchange):
                module.follow(optimizer)

    def expert_keys(self) -> set[str]:
        """Names in the state that belong to this rank alone: expert parameters, and buffers beside them."""
        keys = {name for name, p in self.named_parameters() if not getattr(p, "allreduce", True)}
        for name, module in self.named_modules():
            if isinstance(module, TableShard):
                keys |= {f"{name}.{buffer}" for buffer, _ in module.named_buffers()}
        return keys


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(module, Experts)
    for key in module.expert_keys():
        if prefix + key in state:
            state[prefix + _MARK + key] = state.pop(prefix + key)


def _unmark(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    # DeepSpeed names what a module at the root has with a dot in front.
    for start in {prefix + _MARK, "." + prefix + _MARK}:
        for key in [key for key in state if key.startswith(start)]:
            state[prefix + key.removeprefix(start)] = state.pop(key)
