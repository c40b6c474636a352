"""``compress_replicas``: from the models and optimizers of a training to its reducers and steps."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.step_units import StepUnit, units_of_all
from dct_plugin.errors import ConfigError
from dct_plugin.metrics import Metrics
from dct_plugin.policy import Training
from dct_plugin.transport import lost_ranks

from ..host import attachments
from ..host.attachment import PlainTraining, switched_off
from ..host.optimizer_attachment import OptimizerAttachment
from ..host.replica_checksums import not_trained
from . import saved_residuals
from .parameter_groups import (
    GatheredShard,
    ShardedParameter,
    check_displaceable,
    check_torch,
    follow_methods,
    has_replicas,
    parameter_groups,
    replicated_groups,
    unsharded_parameters,
)
from .replica_group import SEAM, ReplicaGroup


def is_compressed(model: nn.Module) -> bool:
    """Return whether :func:`compress_replicas` was called for a model."""
    meshes = [group.mesh_info for group in parameter_groups(model) if has_replicas(group)]
    return any(isinstance(mesh.replicate_process_group, ReplicaGroup) for mesh in meshes)


class ReplicaCompression(OptimizerAttachment):
    """Exchange of thresholded gradients between the replicas of an FSDP2 model, in place of FSDP's
    all-reduce.

    Make it with :func:`compress_replicas` on every rank, after the last ``fully_shard`` or ``replicate`` and
    before the first step. It is a ``Stateful`` of ``torch.distributed.checkpoint``.

    Args:
        model: The model; modules of it were passed to ``fully_shard`` with a mesh of two dimensions, of which
            the first counts the replicas, or to the ``replicate`` of
            ``torch.distributed._composable.replicate_with_fsdp``.
        config: The configuration, or a mapping with the keys of the ``dct`` section.
        optimizer: The model's optimizer or a list of them, made after ``fully_shard``. Its steps are counted;
            without it a step ends with every backward pass that reduces gradients. With
            ``nonfinite_action: "skip"`` gradients that are cleared without ``optimizer.step()`` leave
            residuals as they were.
        scaler: The gradient scaler of fp16.
        total_steps: Optimizer steps of the run, if known: the dense start becomes a share of it.
        metrics: The metrics to record in; None makes them from the configuration, and rank 0 prints their
            summary when the process ends.
        time_limit: Seconds in which the other replicas must reach their first reduction; None: as long as the
            process group waits.

    Raises:
        ConfigError: The model has no replicas or is not one of FSDP2's, or a setting does not work with it.
        VersionError: The installed torch is not supported.
    """

    framework = "FSDP2"
    hint = "its model was not passed to compress_replicas, or it is far behind"

    def __init__(
        self,
        model: nn.Module,
        config: DCTConfig | Mapping[str, Any] | None = None,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        total_steps: int | None = None,
        metrics: Metrics | None = None,
        time_limit: float | None = None,
    ) -> None:
        check_torch()
        super().__init__(config, optimizer, scaler, self._gradients, call="compress_replicas", sharded=True)
        self._model, self._time_limit = model, time_limit
        self._agreed: set[GradientReducer] = set()
        self._reduced: set[GradientReducer] = set()
        """Reducers that have reduced gradients of this step."""
        self._pass = -1
        """The backward pass of the last exchange."""
        try:
            groups = replicated_groups(model)
            self._decide(groups, total_steps)
            self.metrics = metrics or self.report(dist.get_rank(), self.applied.compressors)
            self._connect_all(groups)
            self._change_passes()
        except BaseException:
            self.close()
            raise

    def _decide(self, groups: Sequence[tuple[Any, list[ShardedParameter]]], total_steps: int | None) -> None:
        """Decide the settings, and check that they and the optimizers fit the model."""
        self.ends.callback(attachments.note(self._model, self))
        self._unsharded = unsharded_parameters(self._model)
        training = Training(
            ranks=groups[0][0].mesh_info.replicate_process_group.size(),
            steps=total_steps,
            optimizer_unknown_hint="compress_replicas(..., optimizer=optimizer) takes what suits it",
        )
        self.resolve(self._optimizers, training)
        self._check_settings()
        self._check_optimizers(
            self._model,
            {each.name: each.sharded for _, parameters in groups for each in parameters},
            call="compress_replicas",
            remedy="make it after fully_shard, which replaces the parameters",
            warns=dist.get_rank() == 0,
        )

    def _check_settings(self) -> None:
        """Refuse settings that need an optimizer.

        Raises:
            ConfigError: Names the setting.
        """
        settings = self.config.data_parallel
        for key, needed in (
            ("feedback = 'step_ahead'", settings.feedback.looks_ahead),
            ("nonfinite_action = 'skip'", settings.nonfinite_action == "skip"),
        ):
            if needed and not self._optimizers:
                raise ConfigError(
                    f"dct.data_parallel.{key} needs compress_replicas(model, config, optimizer=optimizer)"
                )

    def _connect_all(self, groups: Sequence[tuple[Any, list[ShardedParameter]]]) -> None:
        SEAM.enter()
        self.ends.callback(SEAM.leave)
        self.groups = [self._connect(group, parameters) for group, parameters in groups]

    def _change_passes(self) -> None:
        """Follow the passes of the model, and displace its weights or train its own ones."""
        self._before_forward(self._model, _refuse_compiled_autograd)
        self._before_forward(self._model, self.close_if_done)
        if self.config.data_parallel.feedback.looks_ahead:
            self._step_ahead()
        if self.config.data_parallel.local_steps is None:
            self._watch_loading(self._model, lambda: ((each.name, each.local()) for each in self.parameters))
        else:
            self._local_steps()
        self._optimizer_steps.follow(self._optimizers)
        # Whether a scaler skipped the last step is known at the next pass, without waiting for a device; and
        # to be known before weights are displaced.
        self._before_forward(self._model, self._optimizer_steps.end_due)
        self.ends.callback(follow_methods(self._model))

    @property
    def parameters(self) -> Iterator[ShardedParameter]:
        """The parameters whose gradients are compressed."""
        return (parameter for group in self.groups for parameter in group.parameters)

    def weights(self) -> Iterable[Tensor]:
        return (parameter.local() for parameter in self.parameters)

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
        own = ReplicaGroup(replicas, parameters, self._reducers[ranks], self._before_exchange)
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
        units = units_of_all(self._optimizers)

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

    def _before_exchange(self, group: ReplicaGroup) -> bool:
        _refuse_compiled_autograd()
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            self._optimizer_steps.end_or_reject()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        if not self.steps.open:
            self._reduced.clear()
        if group.reducer not in self._agreed:
            self._agree(group)
            self._agreed.add(group.reducer)
        self._follow_unit(group)
        self._reduced.add(group.reducer)
        self._optimizer_steps.begin((each.name, each.sharded) for each in group.expected)
        return current >= 0

    def _end_pass(self) -> None:
        """Complete the sums, with one wait for the device, behind all of FSDP's reductions."""
        for reducer in self._reducers.values():
            reducer.finish()
        self._optimizer_steps.end_pass()

    def _agree(self, group: ReplicaGroup) -> None:
        def prepare() -> str:
            for each in filter(has_replicas, parameter_groups(self._model)):
                if not isinstance(each.mesh_info.replicate_process_group, ReplicaGroup):
                    module = each._module_fqn or type(each.modules[0]).__name__
                    raise ConfigError(
                        f"rank {dist.get_rank()}: module {module} was passed to fully_shard after "
                        "compress_replicas; call compress_replicas after the last fully_shard"
                    )
            if dist.get_rank() or self._agreed:
                return ""
            count = sum(1 for _ in parameter_groups(self._model))
            return f"FSDP2, {group.size()} replicas, {len(self.groups)} of {count} parameter groups"

        def facts() -> dict[str, Any]:
            return {"optimizer steps so far": group.reducer.step, "optimizer given": bool(self._optimizers)}

        self.agree(prepare, topic="fsdp", group=group.replicas, limit=self._time_limit, facts=facts)

    def _follow_unit(self, group: ReplicaGroup) -> None:
        """Tell the reducer what the coming gradients are multiplied by: FSDP's factors, the loss scale."""
        reducer, unit = group.reducer, group.unit * (self._optimizer_steps.loss_scale() or 1.0)
        if reducer.loss_scale == unit:
            return
        if reducer in self._reduced:
            raise ConfigError(
                f"rank {dist.get_rank()}: compress_replicas: FSDP scales gradients differently in parameter "
                f"groups of one model ({group.parameters[0].name}: {unit:g}, others {reducer.loss_scale:g}); "
                "give all of them the same reduce_dtype and divide factor"
            )
        reducer.rescale(unit)

    # -- a step ---

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for each in self.parameters:
            if each.sharded.grad is not None and each.shape.numel():
                yield each.name, each.sharded.grad.to_local()

    # -- saved states ---

    def state_dict(self) -> dict[str, Any]:
        """Return residuals as DTensors, and this rank's thresholds and counters, between two steps; a
        collective, which ``torch.distributed.checkpoint.save`` calls.
        """
        self._optimizer_steps.end_or_reject()
        return saved_residuals.state_of(self.groups, self.steps.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; ``torch.distributed.checkpoint.load`` calls it."""
        saved_residuals.restore(self.groups, state)
        self._restored()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write residuals to a separate checkpoint, for :meth:`load`; a collective of all ranks."""
        import torch.distributed.checkpoint as dcp

        with lost_ranks.reported("save of residuals", step=self.steps.step):
            dcp.save({"dct": self}, checkpoint_id=folder)

    def load(self, folder: str | os.PathLike[str], key: str = "dct") -> bool:
        """Restore residuals from a checkpoint of ``torch.distributed.checkpoint``, also of another mesh.

        On the same mesh training continues bitwise. On another one every replica gets the mean of the
        residuals, and thresholds are measured anew. A collective of all ranks.

        Args:
            folder: The ``checkpoint_id`` of the save.
            key: Key of this object in the state that was saved.

        Returns:
            False, with residuals of zero, if the checkpoint has none; the log says so.
        """
        found = saved_residuals.load(folder, key, self.groups)
        self._restored()
        return found

    def _restored(self) -> None:
        self._optimizer_steps.forget()
        self.steps.step = self.groups[0].reducer.step


def compress_replicas(
    model: nn.Module, config: DCTConfig | Mapping[str, Any] | None = None, **options: Any
) -> ReplicaCompression | PlainTraining:
    """Return a :class:`ReplicaCompression` with these arguments. If the section is switched off, the model
    stays as it is.
    """
    written = DCTConfig.given(config, rank=dist.get_rank())
    if reason := switched_off(written):
        attachments.take_off(model)
        return PlainTraining(written, reason)
    return ReplicaCompression(model, written, **options)


def _refuse_compiled_autograd() -> None:
    """Refuse compiled autograd, under which FSDP2 trains other weights without the plugin, too.

    Raises:
        ConfigError: Names it.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(module, "compiled_autograd_enabled", False):
        raise ConfigError(
            f"rank {dist.get_rank()}: compress_replicas: under torch's compiled autograd FSDP2 does not "
            "train as without it; switch it off (torch._dynamo.config.compiled_autograd = False)"
        )
