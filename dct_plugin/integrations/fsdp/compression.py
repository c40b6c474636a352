"""``compress_replicas``: from the models and optimizers of a training to its reducers and steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.step_units import StepUnit, units_of
from dct_plugin.errors import ConfigError, DesyncError
from dct_plugin.policy import Training

from ..host.attachment import PlainTraining
from ..host.patching import Patches
from ..host.replica_checksums import not_trained
from . import saved_residuals
from .attachment import FSDPAttachment, Groups
from .parameter_groups import (
    GatheredShard,
    ShardedParameter,
    check_displaceable,
    has_replicas,
    late_module,
    parameter_groups,
    replicated_groups,
    unsharded_parameters,
)


class ReplicaGroup(dist.ProcessGroup):
    """The replicas of one of FSDP's parameter groups: its all-reduce exchanges compressed messages.

    FSDP all-reduces one flat tensor per parameter group: the shards of the parameters that have a gradient in
    this pass, one behind the other, each padded to the same size on all ranks.

    Args:
        replicas: torch's own process group of the replicas.
        parameters: All parameters of FSDP's group.
        reducer: Sums over ``replicas``.
        owner: The attachment.

    Attributes:
        expected: Parameters of the reduction that runs now.
        divided_by: What FSDP divides the result of the all-reduce by.
        averages: Whether FSDP asks for the average of the replicas, as it then does of the shards.
    """

    def __init__(
        self,
        replicas: dist.ProcessGroup,
        parameters: Sequence[ShardedParameter],
        reducer: GradientReducer,
        owner: ReplicaCompression,
    ) -> None:
        super().__init__(replicas.rank(), replicas.size())  # type: ignore[call-arg]
        self.replicas, self.parameters, self.reducer = replicas, list(parameters), reducer
        self._owner = owner
        self._by_id = {id(each.fsdp): each for each in parameters}
        self._failure: Exception | None = None
        self.expected: list[ShardedParameter] = []
        self.divided_by, self.averages = 1.0, True

    @contextmanager
    def expecting(self, fsdp_parameters: Iterable[Any]) -> Iterator[None]:
        """Surround FSDP's reduction of these parameters.

        Raises:
            ConfigError: FSDP asks for another operation than a sum or an average.
            DesyncError: The tensor is not of these parameters; or see
                :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        self.expected = [self._by_id[id(each)] for each in fsdp_parameters]
        yield
        self.expected = []
        if self._failure is not None:
            raise self._failure

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Done:  # type: ignore[override]
        """Replace the tensor by the thresholded sum, or average, over the replicas.

        :meth:`expecting` raises the errors: torch's function for an all-reduce would raise another one, since
        it does not know this group.
        """
        try:
            self._reduce(tensors[0], options)
        except Exception as error:
            self._failure = error
        return _Done()

    def _reduce(self, flat: Tensor, options: Any) -> None:
        self.averages = options.reduceOp == dist.ReduceOp.AVG
        if not self.averages and options.reduceOp != dist.ReduceOp.SUM:
            raise ConfigError(
                f"rank {dist.get_rank()}: compress_replicas: FSDP asks for {options.reduceOp} over the "
                "replicas; sum and average are supported"
            )
        entries, offset = [], 0
        for each in self.expected:
            if each.shape.numel():
                entries.append((each.name, flat[offset : offset + each.shape.numel()]))
            offset += each.padded_numel
        if offset != flat.numel():
            raise DesyncError(
                f"rank {dist.get_rank()}: FSDP all-reduces {flat.numel()} entries, and the parameters with "
                f"gradients have {offset}"
            )
        self._owner._begin_exchange(self, self.expected)
        if entries:
            self.reducer.begin(entries, scale=1.0 / self.size() if self.averages else 1.0).finish()

    @property
    def unit(self) -> float:
        """Unit of the tensors, where that of the optimizer's gradients is 1."""
        return self.divided_by / (1 if self.averages else self.size())


class _Done:
    """The handle of an exchange that has ended."""

    def wait(self, *arguments: Any) -> bool:
        return True


class ReductionSeam:
    """Tells process groups which parameters FSDP is about to all-reduce, and by what it divides the sum.

    One for the process. While a model is compressed, it wraps two functions of torch's, which pass through
    for all other groups.
    """

    def __init__(self) -> None:
        self._patches, self._models = Patches(), 0

    def leave(self) -> None:
        """Note that a model is compressed no longer."""
        self._models -= 1
        if not self._models:
            self._patches.undo()

    def enter(self) -> None:
        """Note that one more model is compressed."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

        self._models += 1
        if self._models > 1:
            return
        self._patches.intercept(_fsdp_param_group, "foreach_reduce", self._reduce)
        self._patches.intercept(_fsdp_collectives, "_get_gradient_divide_factors", self._factors)

    def _reduce(self, original: Any, fsdp_params: Any, *arguments: Any, **keywords: Any) -> Any:
        group = self._ours(arguments, keywords)
        if group is None:
            return original(fsdp_params, *arguments, **keywords)
        with group.expecting(fsdp_params):
            return original(fsdp_params, *arguments, **keywords)

    def _factors(self, original: Any, *arguments: Any, **keywords: Any) -> Any:
        factors = original(*arguments, **keywords)
        group = self._ours(arguments, keywords)
        if group is not None:
            group.divided_by = float(factors[1] or 1.0)
        return factors

    def _ours(self, arguments: Any, keywords: Any) -> Any:
        found = (each for each in (*arguments, *keywords.values()) if isinstance(each, ReplicaGroup))
        return next(found, None)


#: The seam of this process.
SEAM = ReductionSeam()


def is_compressed(model: nn.Module) -> bool:
    """Return whether :func:`compress_replicas` was called for a model."""
    meshes = [group.mesh_info for group in parameter_groups(model) if has_replicas(group)]
    return any(isinstance(mesh.replicate_process_group, ReplicaGroup) for mesh in meshes)


class ReplicaCompression(FSDPAttachment):
    """Exchange of thresholded gradients between the replicas of an FSDP2 model, in place of FSDP's
    all-reduce.

    Make it with :func:`compress_replicas`. The model's modules were passed to ``fully_shard`` with a mesh of
    two dimensions, of which the first counts the replicas, or to the ``replicate`` of
    ``torch.distributed._composable.replicate_with_fsdp``. Arguments are those of :class:`.FSDPAttachment`.
    """

    framework = "FSDP2"
    hint = "its model was not passed to compress_replicas, or it is far behind"
    call = "compress_replicas"
    find_groups = staticmethod(replicated_groups)

    def _decide(self, groups: Groups, training: Training) -> None:
        self._unsharded = unsharded_parameters(self._model)
        ranks = groups[0][0].mesh_info.replicate_process_group.size()
        self.resolve(self._optimizers, replace(training, ranks=ranks))

    def _connect_all(self, groups: Groups) -> None:
        SEAM.enter()
        self.ends.callback(SEAM.leave)
        self.groups = [self._connect(group, parameters) for group, parameters in groups]

    def _change_passes(self) -> None:
        """Displace the model's weights or train its own ones."""
        if self.config.data_parallel.feedback.looks_ahead:
            self._step_ahead()
        if self.config.data_parallel.local_steps is None:
            self._watch_loading(self._model, lambda: ((each.name, each.local()) for each in self.parameters))
        else:
            self._local_steps()

    # -- made once ---

    def _connect(self, group: Any, parameters: list[ShardedParameter]) -> ReplicaGroup:
        """Let FSDP's parameter group call a process group of ours."""
        replicas = group.mesh_info.replicate_process_group
        ranks = tuple(dist.get_process_group_ranks(replicas))
        if ranks not in self._reducers:
            self._make_reducer(
                replicas,
                None,
                group.device,
                lambda: self._replicated(ranks),
                lambda: not_trained(self._model, (name for name, _ in self._replicated(ranks))),
            )
        own = ReplicaGroup(replicas, parameters, self._reducers[ranks], self)
        # FSDP's modules share these objects, and each parameter group needs its own.
        self.ends.callback(setattr, group, "mesh_info", group.mesh_info)
        group.mesh_info = copy.copy(group.mesh_info)
        group.mesh_info.replicate_process_group = own
        return own

    def _replicated(self, ranks: tuple[int, ...]) -> list[tuple[str, Tensor]]:
        """Return the weights of which some ranks hold replicas."""
        reducer = self._reducers[ranks]
        sharded = [
            (each.name, reducer.shared_weight(each.name, each.local())) for each in self._held_by(reducer)
        ]
        return sharded + [(name, each.detach()) for name, each in self._unsharded if each.requires_grad]

    def _step_ahead(self) -> None:
        """Displace the shards that FSDP gathers in training passes."""
        units = units_of(*self._optimizers)

        def unit_of(shard: Any) -> StepUnit | None:
            return units(shard.parameter.sharded)

        for reducer in self._reducers.values():
            parameters = self._held_by(reducer)
            check_displaceable(parameters, "feedback = 'step_ahead'", "set feedback to 'local'")
            shards: Any = [(each.name, GatheredShard(each)) for each in parameters]
            ahead = reducer.add_ons.step_ahead.prepare(shards, unit_of)
            ahead.attach(self._model, *self._optimizers)
            self.ends.callback(ahead.detach)
        self._read_first()

    def _read_first(self) -> None:
        """Have FSDP read the parameters before their shards are replaced, as it does in its first pass."""
        root: Any = next(m for m in self._model.modules() if hasattr(m, "_get_fsdp_state"))
        state = root._get_fsdp_state()
        self._before_forward(self._model, state._lazy_init)

        def forget_event() -> None:
            """Have gathers wait for the displaced shards, which are written behind the user's event."""
            state._state_ctx.post_optim_event = None

        self._before_forward(self._model, forget_event)

    def _local_steps(self) -> None:
        """Train each replica's own shards; evaluation and saved models see the common ones."""
        meshes = [group.mesh_info for group in parameter_groups(self._model)]
        shards = {mesh.shard_process_group for mesh in meshes if hasattr(mesh, "shard_process_group")}
        self._optimizer_steps.decide_in(sorted(shards, key=lambda group: group.size()))
        by_name = {each.name: each for each in self.parameters}
        for reducer in self._reducers.values():
            own = {p.name: p for p in self._held_by(reducer) if p.sharded.requires_grad}
            local = reducer.add_ons.local_steps
            if local is not None:
                check_displaceable(list(own.values()), "local_steps", "leave it out")
                local.attach(
                    self._model,
                    {name: GatheredShard(each) for name, each in own.items()},
                    self._optimizers,
                    {name: each.sharded for name, each in own.items()},
                    lambda name, weights: saved_residuals.as_dtensor(by_name[name], weights),
                )
                self.ends.callback(local.detach)
        self._read_first()

    def _held_by(self, reducer: GradientReducer) -> list[ShardedParameter]:
        """Return the parameters that a reducer reduces and this rank has a shard of."""
        own = [p for group in self.groups if group.reducer is reducer for p in group.parameters]
        return [each for each in own if each.shape.numel()]

    # -- a backward pass ---

    def _active(self, group: ReplicaGroup) -> str:
        for each in filter(has_replicas, parameter_groups(self._model)):
            if not isinstance(each.mesh_info.replicate_process_group, ReplicaGroup):
                raise late_module(each, self.call)
        count = sum(1 for _ in parameter_groups(self._model))
        return f"FSDP2, {group.size()} replicas, {len(self.groups)} of {count} parameter groups"

    def _before_reduction(self, group: ReplicaGroup) -> None:
        """Tell the reducer what the coming gradients are multiplied by: FSDP's factors, the loss scale."""
        reducer, unit = group.reducer, group.unit * (self._optimizer_steps.loss_scale() or 1.0)
        if reducer.group.loss_scale == unit:
            return
        if reducer in self._reduced:
            raise ConfigError(
                f"rank {dist.get_rank()}: compress_replicas: FSDP scales gradients differently in parameter "
                f"groups of one model ({group.parameters[0].name}: {unit:g}, others "
                f"{reducer.group.loss_scale:g}); give all of them the same reduce_dtype and divide factor"
            )
        reducer.rescale(unit)


def compress_replicas(
    model: nn.Module, config: DCTConfig | Mapping[str, Any] | None = None, **options: Any
) -> ReplicaCompression | PlainTraining:
    """Return a :class:`ReplicaCompression` with these arguments. If the section is switched off, the model
    stays as it is.
    """
    return ReplicaCompression.made(model, config, **options)
