"""Megatron's models and their gradient buckets: names of parameters, ranks of groups, views of gradients."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.config import DataParallelConfig
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.transport.nodes import Nodes

from ..host.startup import nodes_of

#: Attribute of a parameter: the name of its stream.
NAME = "_dct_name"


class Models:
    """The models in Megatron's ``DistributedDataParallel`` that are still in use."""

    def __init__(self) -> None:
        self.any_fp16 = False
        self._count = 0
        self._unnamed = itertools.count()
        self._models = weakref.WeakValueDictionary[int, Any]()

    def add(self, model: Any) -> None:
        """Name the parameters of a model by the order of the models and by their own names."""
        for name, parameter in model.module.named_parameters():
            setattr(parameter, NAME, f"{self._count}.{name}")
        self.any_fp16 |= bool(getattr(model.config, "fp16", False))
        self._models[self._count] = model
        self._count += 1

    def replace(self, model: Any) -> bool:
        """Forget the models that ``model`` wraps again; return whether there were any."""
        new = {id(parameter) for parameter in model.module.parameters()}
        old = [
            number
            for number, each in self._models.items()
            if any(id(parameter) in new for parameter in each.module.parameters())
        ]
        for number in old:
            del self._models[number]
        if not self._models:
            self._count = 0
        return bool(old)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._models.values()))

    def groups(self) -> Iterator[Any]:
        """Yield the bucket groups of all models."""
        for model in self:
            yield from groups_of(model)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of all models by the names of the parameters."""
        for group in self.groups():
            for bucket in group.buckets:
                yield from ((gradient.name, gradient.view) for gradient in gradients_in(bucket))

    def sizes(self) -> dict[str, int]:
        """Return the number of entries of every parameter by its name."""
        parameters = (parameter for model in self for parameter in model.module.parameters())
        return {getattr(p, NAME): p.numel() for p in parameters if hasattr(p, NAME)}

    def name_rest(self, group: Any) -> None:
        """Name the parameters of a model that was wrapped before the hooks were installed."""
        for bucket in group.buckets:
            for parameter in bucket.params_list:
                if not hasattr(parameter, NAME):
                    setattr(parameter, NAME, f"parameter {next(self._unnamed)}")


class Gradient(NamedTuple):
    """The gradient of one parameter; ``view`` is 1-D, and ``start`` is its first entry in the bucket."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    view: Tensor


def gradients_in(bucket: Any) -> list[Gradient]:
    """Return the gradients of a bucket, without the padding between them."""
    found = []
    for parameter in bucket.params_list:
        gradient = getattr(parameter, "main_grad_copy_in_grad_buffer", None)  # from 0.17
        if gradient is None:
            gradient = parameter.main_grad
        start = start_in(bucket.grad_data, gradient)
        view = bucket.grad_data[start : start + parameter.numel()]
        found.append(Gradient(getattr(parameter, NAME), parameter, start, view))
    return found


def start_in(data: Tensor, part: Tensor) -> int:
    """Return the first entry of a weight or gradient in its bucket's data; a bucket aligns its parts."""
    start = (part.data_ptr() - data.data_ptr()) // data.element_size()
    if not 0 <= start <= data.numel() - part.numel():
        raise DCTError(f"a weight or gradient of shape {tuple(part.shape)} does not lie in its bucket")
    return start


def groups_of(model: Any) -> list[Any]:
    """Return the bucket groups of a ``DistributedDataParallel``."""
    return [*model.bucket_groups, *model.expert_parallel_bucket_groups]


def ranks_of(group: Any) -> dist.ProcessGroup:
    """Return the process group over which a bucket group is reduced: that of all optimizer instances."""
    if has_instances(group):
        from megatron.core import parallel_state as ps

        if is_expert(group.buckets):
            return ps.get_expert_data_parallel_group()
        return ps.get_data_parallel_group(with_context_parallel=True)
    if group.ddp_config.use_distributed_optimizer:
        return group.intra_distributed_optimizer_instance_group
    return group.data_parallel_group


def has_instances(group: Any) -> bool:
    """Return whether several instances of the distributed optimizer share the ranks of a bucket group."""
    return bool(group.ddp_config.num_distributed_optimizer_instances > 1)


def nodes_in(
    config: DataParallelConfig, ranks: dist.ProcessGroup | None, instance: dist.ProcessGroup | None
) -> Nodes | None:
    """Return the ranks that are summed before the exchange: optimizer instances, or else nodes.

    Args:
        config: The ``data_parallel`` settings.
        ranks: Process group over which gradients are reduced; None for the default one.
        instance: The ranks of this rank's instance of the distributed optimizer; None for ``ranks``.

    Raises:
        ConfigError: ``nodes`` is set, and there are several instances.
    """
    if ranks is None or instance is None or instance.size() == ranks.size():
        return nodes_of(config, ranks)
    if config.nodes not in ("auto", 1):
        raise ConfigError(
            f"dct.data_parallel.nodes = {config.nodes}: with Megatron's num_distributed_optimizer_instances "
            f"= {ranks.size() // instance.size()} the instances are the nodes; leave it out"
        )
    every, size = dist.get_process_group_ranks(ranks), instance.size()
    instances = tuple(tuple(every[first : first + size]) for first in range(0, len(every), size))
    if tuple(dist.get_process_group_ranks(instance)) not in instances:
        raise ConfigError(
            f"rank {dist.get_rank()}: the ranks {dist.get_process_group_ranks(instance)} of an instance of "
            f"Megatron's distributed optimizer are no consecutive part of the data-parallel ranks {every}; "
            "switch dct.data_parallel off"
        )
    return Nodes(instances, dist.get_rank(), ranks)


def is_expert(buckets: Iterable[Any]) -> bool:
    """Return whether buckets hold gradients and weights of expert layers."""
    return any(not getattr(p, "allreduce", True) for bucket in buckets for p in bucket.params_list)


def unit_of_gradients(group: Any) -> float:
    """Return the factor on the gradients that reach the reducer, for residuals that go on with other ranks.

    Losses per token are divided by the tokens of all ranks later on: like one over the number of ranks.
    """
    factor = float(group.buckets[0].gradient_scaling_factor)
    return factor if group.ddp_config.average_in_collective or factor != 1.0 else 1.0 / ranks_of(group).size()


def fill_buffers(group: Any) -> None:
    """Copy gradients that lie elsewhere into the buckets, as Megatron does from 0.17 on."""
    for bucket in group.buckets:
        for parameter in bucket.params_list:  # gradients of replayed CUDA graphs (0.19)
            if (event := getattr(parameter, "_cudagraph_wgrad_ready_event", None)) is not None:
                torch.cuda.current_stream().wait_event(event)
        for parameter in getattr(bucket, "params_with_extra_main_grads", ()):
            if (copy := getattr(parameter, "main_grad_copy_in_grad_buffer", None)) is not None:
                copy.copy_(parameter.main_grad)


def finish_gathers(model: Any) -> None:
    """Wait for the parameters that ``overlap_param_gather`` would gather during the forward pass."""
    # Without the hooks nothing is gathered there: Megatron-LM takes them off around evaluation and saving.
    if not model.ddp_config.overlap_param_gather or not model.remove_forward_pre_hook_handles:
        return
    for group in groups_of(model):
        if group.param_gather_handle is not None or not group.param_gather_dispatched:
            group.start_param_sync(force_sync=True)
