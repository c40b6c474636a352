"""FSDP2's parameter groups in torch 2.6 and later: what is read and replaced in torch lies here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dct_plugin.console import listed, logger
from dct_plugin.data_parallel.passes import calls_of
from dct_plugin.errors import ConfigError

from ..host import versions
from ..host.gathered_slice import GatheredSlice
from ..host.versions import Target, VersionRange, unsupported

SUPPORTED = VersionRange("2.6.0", "2.16.0")
_REMEDY = "install one of these, or train without compress_replicas"
_FSDP = "torch.distributed.fsdp._fully_shard"
_PART = "the all-reduce of HSDP"

#: The same in 2.6.0, 2.13.0 and 2.15.0.
TARGETS = (
    Target(f"{_FSDP}._fsdp_param_group", "foreach_reduce", "fsdp_params unsharded_grads", _PART),
    Target(
        f"{_FSDP}._fsdp_collectives",
        "_get_gradient_divide_factors",
        "reduce_scatter_group all_reduce_group reduce_dtype",
        _PART,
    ),
    Target(f"{_FSDP}._fully_shard", "FSDPModule._get_fsdp_state", "self", _PART),
    Target(f"{_FSDP}._fsdp_state", "FSDPState._lazy_init", "self", _PART),
    Target(f"{_FSDP}._fsdp_param_group", "FSDPParamGroup._to_sharded", "self", _PART),
)
#: Parts of names that wrappers (``torch.compile``, activation checkpointing) put in.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def check_torch() -> None:
    """Check torch's version and the functions that are wrapped.

    Raises:
        VersionError: The installed torch is not supported.
    """
    found = f"torch {torch.__version__}"
    if torch.__version__ not in SUPPORTED:
        raise unsupported(found, SUPPORTED, _REMEDY)
    versions.require(TARGETS, found, SUPPORTED, _REMEDY)


class ShardedParameter:
    """A parameter of FSDP's, by the name that it has in the model.

    Args:
        name: Its name.
        parameter: FSDP's own object (``FSDPParam``).
        group: FSDP's parameter group that it belongs to.
    """

    def __init__(self, name: str, parameter: Any, group: Any) -> None:
        self.name, self.fsdp, self.group = name, parameter, group

    @property
    def sharded(self) -> Any:
        """The DTensor that the optimizer has."""
        return self.fsdp.sharded_param

    @property
    def shape(self) -> torch.Size:
        """Shape of this rank's shard, without padding."""
        return self.fsdp.sharded_size

    @property
    def padded_numel(self) -> int:
        """Entries of a shard with padding: the same on all ranks."""
        return int(self.fsdp.padded_sharded_param_size.numel())

    def local(self) -> Tensor:
        """Return this rank's shard."""
        return self.sharded.to_local().detach()

    def shard(self) -> Tensor:
        """Return this rank's shard, 1-D, with padding."""
        data: Tensor = self.fsdp._sharded_param_data
        return data

    def version(self) -> tuple[int, ...]:
        """Return memory and versions of the shard, which are others after it has changed."""
        sharded, local = self.sharded, self.sharded._local_tensor
        return local.data_ptr(), local._version, sharded._version


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's parameter groups of a model.

    Raises:
        ConfigError: The model is not one of FSDP2's; says what to do.
    """
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ConfigError(
            f"{_rank()}: dct_plugin.fsdp: the model is wrapped in FullyShardedDataParallel (FSDP1), which "
            "is not supported; use fully_shard(module, mesh=mesh)"
        )
    states = dict.fromkeys(m._get_fsdp_state() for m in modules if isinstance(m, FSDPModule))
    if not states:
        problem = (
            "no module of the model was passed to fully_shard or replicate; call it before dct_plugin.attach"
        )
        if isinstance(model, DistributedDataParallel) or hasattr(model, "_ddp_weakref"):
            problem = "DistributedDataParallel trains the model; use dct_plugin.DCTState(...).register(model)"
        raise ConfigError(f"{_rank()}: dct_plugin.fsdp: {problem}")
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.10
            groups = [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)


def has_replicas(group: Any) -> bool:
    """Return whether a parameter group has a replica dimension."""
    return hasattr(group.mesh_info, "replicate_process_group")


def follow_methods(model: nn.Module) -> Callable[[], None]:
    """Let what follows the calls of a model follow its methods that were passed to
    ``register_fsdp_forward_method``, too; the returned function ends it.
    """
    if not hasattr(model, "_get_fsdp_state"):
        return lambda: None
    get_state: Any = model._get_fsdp_state
    state = get_state()
    without_gradients: list[contextlib.ExitStack] = []
    before, after = state._pre_forward, state._post_forward

    def pre_forward(*arguments: Any) -> Any:
        entered = calls_of(model).enter()
        if torch.is_grad_enabled():
            entered.close()  # a method that fails does not call post_forward
        else:
            without_gradients.append(entered)
        return before(*arguments)

    def post_forward(*arguments: Any) -> Any:
        try:
            return after(*arguments)
        finally:
            if without_gradients and not torch.is_grad_enabled():
                without_gradients.pop().close()

    # FSDP's own hooks have the methods of the class; those of the state are called around methods alone.
    state._pre_forward, state._post_forward = pre_forward, post_forward

    def undo() -> None:
        del state._pre_forward, state._post_forward

    return undo


def unsharded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that FSDP was told to ignore, by name; between two steps."""
    sharded = {id(each.sharded_param) for group in parameter_groups(model) for each in group.fsdp_params}
    return [
        (_plain(name), each)
        for name, each in model.named_parameters()
        if id(each) not in sharded and not isinstance(each, DTensor)
    ]


def named_groups(model: nn.Module) -> list[tuple[Any, list[ShardedParameter]]]:
    """Return FSDP's parameter groups, and their parameters; between two steps.

    Raises:
        ConfigError: The model does not show a parameter; says what to do.
    """
    groups = list(parameter_groups(model))
    for group in groups:
        group._to_sharded()  # an evaluation leaves the root's gathered
    names = {id(p): _plain(name) for name, p in model.named_parameters(remove_duplicate=False)}
    for group in groups:
        _follow_replaced_parameters(group)
    return [
        (group, [ShardedParameter(_name(names, each), each, group) for each in group.fsdp_params])
        for group in groups
    ]


def _follow_replaced_parameters(group: Any) -> None:
    """Show FSDP the parameters that a loader put in the place of its own (``from_pretrained`` of
    transformers); FSDP itself looks before the first pass.
    """
    for each in group.fsdp_params:
        held = getattr(each._module_info.module, each._module_info.param_name, None)
        if isinstance(held, DTensor) and held is not each.sharded_param:
            each.reset_sharded_param()


def replicated_groups(model: nn.Module) -> list[tuple[Any, list[ShardedParameter]]]:
    """Return FSDP's parameter groups with a replica dimension, and their parameters; between two steps.

    Raises:
        ConfigError: There are none, or one is complex; says what to do.
    """
    groups = named_groups(model)
    replicated = [(group, parameters) for group, parameters in groups if has_replicas(group)]
    if not replicated:
        ranks = dist.get_world_size()
        raise ConfigError(
            f"{_rank()}: compress_replicas: every parameter is sharded over all ranks of a mesh "
            "of one dimension, so that there are no replicas between which gradients are all-reduced. Call "
            "compress_shards, or pass fully_shard a mesh of two dimensions, nodes and ranks in a node: "
            f"init_device_mesh(device_type, (nodes, {ranks} // nodes), mesh_dim_names=('replicate', 'shard'))"
        )
    for each in (each for _, parameters in replicated for each in parameters):
        if each.sharded.is_complex():
            raise ConfigError(
                f"{_rank()}: compress_replicas: parameter {each.name} is complex, which is not supported; "
                "hold it as a real tensor, and use torch.view_as_complex in the forward pass"
            )
    rest = [p.name for group, parameters in groups if not has_replicas(group) for p in parameters]
    if rest and dist.get_rank() == 0:
        what = f"{len(rest)} parameters have no replicas, and FSDP reduces their gradients by itself"
        logger.warning(f"dct: {what}: {listed(rest)}")
    return replicated


def sharded_groups(model: nn.Module) -> list[tuple[Any, list[ShardedParameter]]]:
    """Return FSDP's parameter groups of one mesh without a replica dimension, and their parameters; between
    two steps.

    Raises:
        VersionError: torch has no seam for its collectives (before 2.9).
        ConfigError: Names the module whose collectives cannot be replaced, and what to do.
    """
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        found = f"torch {torch.__version__}"
        remedy = "install one of these, or shard over a mesh of two dimensions (nodes, ranks in a node)"
        raise unsupported(found, VersionRange("2.9.0", "2.16.0"), remedy)
    groups = named_groups(model)
    meshes = {tuple(dist.get_process_group_ranks(g.mesh_info.shard_process_group)) for g, _ in groups}
    for group, parameters in groups:
        each = parameters[0]
        if sum(other.modules == group.modules for other, _ in groups) > 1 or len(meshes) > 1:
            problem = "has several meshes; shard all of it over one"
        elif (kind := type(group._all_gather_comm).__name__) != "DefaultAllGather":
            problem = f"has collectives of its own ({kind}: symmetric memory, custom); leave that out"
        elif any(hasattr(p.fsdp._sharded_local_tensor, "fsdp_pre_all_gather") for p in parameters):
            problem = "gathers a form of its own (fsdp_pre_all_gather: float8); gather bf16"
        elif len({p.fsdp.mp_policy.param_dtype for p in parameters}) > 1:
            problem = "is gathered in several types (param_dtype_override_fn); gather it in one"
        elif any(p.sharded.is_complex() for p in parameters):
            problem = "is complex; hold it as a real tensor"
        else:
            continue
        raise ConfigError(f"{_rank()}: compress_shards: the module of parameter {each.name} {problem}")
    return groups


def _plain(name: str) -> str:
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _name(names: dict[int, str], parameter: Any) -> str:
    name = names.get(id(parameter.sharded_param))
    if name is None:
        raise ConfigError(
            f"{_rank()}: dct_plugin.fsdp: FSDP has a parameter "
            f"({parameter._module_info.param_name}) that the model does not show; call dct_plugin.attach "
            "between two steps, with the model that was passed to fully_shard"
        )
    return name


def late_module(group: Any, call: str) -> ConfigError:
    """Return the error for a parameter group that came after ``call``."""
    module = group._module_fqn or type(group.modules[0]).__name__
    return ConfigError(
        f"{_rank()}: module {module} was passed to fully_shard after {call}; call {call} after the last "
        "fully_shard"
    )


def refuse_compiled_autograd(call: str) -> None:
    """Refuse compiled autograd, under which FSDP2 trains other weights without the plugin, too.

    Raises:
        ConfigError: Names it.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(module, "compiled_autograd_enabled", False):
        raise ConfigError(
            f"{_rank()}: {call}: under torch's compiled autograd FSDP2 does not train as without it; switch "
            "it off (torch._dynamo.config.compiled_autograd = False)"
        )


def _rank() -> str:
    return f"rank {dist.get_rank()}"


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
        return self.held.device

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


def check_displaceable(parameters: list[ShardedParameter], option: str, remedy: str) -> None:
    """Refuse parameters whose shards FSDP does not gather as they are.

    Args:
        parameters: Those that other weights are to be gathered for.
        option, remedy: The option of ``dct.data_parallel`` that needs it, and what to do without.

    Raises:
        ConfigError: Names the parameter.
    """
    for each in parameters:
        if each.fsdp.offload_to_cpu and each.group.device.type != "cpu":
            problem = "is on the CPU (CPUOffloadPolicy)"
        elif hasattr(each.fsdp._sharded_local_tensor, "fsdp_pre_all_gather"):
            problem = "is gathered in a form of its own (fsdp_pre_all_gather)"
        else:
            continue
        raise ConfigError(f"dct.data_parallel.{option}: FSDP's parameter {each.name} {problem}; {remedy}")
