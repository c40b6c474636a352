"""The reducers of Megatron's gradients: one for each process group over which buckets are reduced.

With ``overlap_grad_reduce`` a bucket's reduction starts where Megatron would start it, inside the backward
pass; :class:`~dct_plugin.data_parallel.reducer.Overlap` says where it runs. Every rank has the buckets ready
in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dct_plugin import checkpoint
from dct_plugin.console import log_once
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.data_parallel.reducer import Overlap
from dct_plugin.data_parallel.step_units import StepUnit, units_of
from dct_plugin.errors import ConfigError

from ..host.patching import Function, Patches
from .buckets import (
    NAME,
    Models,
    fill_buffers,
    gradients_in,
    has_instances,
    is_expert,
    nodes_in,
    ranks_of,
    unit_of_gradients,
)
from .session import Session

if TYPE_CHECKING:
    from dct_plugin.data_parallel.step_ahead.add_on import StepAhead

_GROUPS, _LOOK_UP = "_dct_groups", "_dct_unit_of"


class Optimizers:
    """The units of Megatron's optimizers, which replace the parameters in their groups by main parameters
    or by the shards that a rank owns; which ones were there is noted before.
    """

    def __init__(self, patches: Patches) -> None:
        from megatron.core.optimizer.optimizer import MegatronOptimizer

        self._optimizers = weakref.WeakValueDictionary[int, Any]()
        """By identity, in the order in which they were made."""
        patches.intercept(MegatronOptimizer, "__init__", self._init)

    def unit_of(self, parameter: torch.nn.Parameter) -> StepUnit | None:
        """Return the settings of the parameter's group as they are now; None: no optimizer has it.

        Raises:
            ConfigError: The unit of an optimizer's steps is not known.
        """
        for optimizer in reversed(list(self)):  # the last one, of a model set up again
            if not hasattr(optimizer, _LOOK_UP):
                setattr(optimizer, _LOOK_UP, units_of(optimizer, groups=getattr(optimizer, _GROUPS)))
            unit: StepUnit | None = getattr(optimizer, _LOOK_UP)(parameter)
            if unit is not None:
                return unit
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._optimizers.values()))

    @property
    def param_groups(self) -> list[Any]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    def _init(
        self, original: Function, wrapper: Any, optimizer: Any, *arguments: Any, **keywords: Any
    ) -> None:
        if optimizer is not None:  # None: this rank has nothing to train
            setattr(wrapper, _GROUPS, [list(group["params"]) for group in optimizer.param_groups])
            self._optimizers[id(wrapper)] = wrapper
        original(wrapper, optimizer, *arguments, **keywords)


def step_ahead_unavailable(model: Any) -> Iterator[str]:
    """Yield why the weights of a model cannot be displaced."""
    if model.config.cuda_graph_impl not in (None, "none"):
        yield "CUDA graphs (Megatron's cuda_graph_impl) keep the addresses of weights"
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and (
            parameter.dtype not in kinds or type(parameter.data) is not torch.Tensor
        ):
            yield (
                f"{name} is a {type(parameter.data).__name__} of {parameter.dtype}; weights must be fp32, "
                "bf16 or fp16 (no fp8_param_gather)"
            )


@dataclass
class Reduction:
    """The reducer of one process group.

    Attributes:
        name: ``dense`` or ``expert``; a second group of one kind is ``dense 1`` and so on.
        unit: Factor on the gradients that reach the reducer.
    """

    name: str
    unit: float
    reducer: GradientReducer
    overlap: Overlap
    ahead: StepAhead | None = None


class Reductions:
    """Makes a reducer at the first use of a process group, and reduces bucket groups.

    Args:
        session: What the hooks share.
        models: The models whose gradients are reduced.
        optimizers: The optimizers of these models.
    """

    def __init__(self, session: Session, models: Models, optimizers: Optimizers) -> None:
        self.session, self.models = session, models
        self._optimizers = optimizers
        # By the groups themselves: the id of one that was destroyed may be given to another.
        self._by_ranks: dict[dist.ProcessGroup, Reduction] = {}
        self._loaded: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Reduction]:
        return iter(self._by_ranks.values())

    def of(self, group: Any) -> Reduction:
        """Return the reduction of a bucket group; all ranks of the group make it at the same time."""
        ranks = ranks_of(group)
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = self._make(group, ranks)
        return self._by_ranks[ranks]

    def reduce(self, group: Any, *, sharded: bool) -> Overlap:
        """Sum a bucket group over its ranks; with ``sharded`` every rank gets its shard only. Return what
        waits for the sums.
        """
        reduction = self.of(group)
        reducer, size = reduction.reducer, ranks_of(group).size()
        scale = 1.0 / size if group.ddp_config.average_in_collective else 1.0
        gradients = [
            (gradient, bucket.grad_data.numel() // size)
            for bucket in group.buckets
            for gradient in gradients_in(bucket)
        ]
        if sharded:
            parts = [(g.name, g.view, shards_in(g.start, g.view.numel(), each)) for g, each in gradients]
            work = reducer.begin_scatter(parts, scale=scale)
        else:
            views = [(gradient.name, gradient.view) for gradient, _ in gradients]
            work = reducer.begin(views, scale=scale)
        reduction.overlap.submit(work)
        return reduction.overlap

    def show(self, group: Any) -> None:
        """Show step-ahead the gradients of a warm-up step, which Megatron is about to reduce."""
        fill_buffers(group)
        reducer = self.of(group).reducer
        for bucket in group.buckets:
            factor = bucket.gradient_scaling_factor
            for gradient in gradients_in(bucket):
                view = gradient.view if factor == 1.0 else gradient.view * factor
                shown = [(gradient.name, view)]
                reducer.add_ons.before_compression(
                    reducer.group.node.means(shown) if reducer.group.node else shown
                )

    def end_step(self, *, skipped: bool, scales: tuple[float, float] | None) -> None:
        """Close an iteration; ``scales`` are the loss scales of this iteration and of the next one, None if
        no optimizer said them.
        """
        used, coming = scales or (None, None)
        for each in self:
            each.reducer.end_step(skipped=skipped, loss_scale=coming, reduced_at=used)

    def reject(self) -> None:
        """Prepare to close an iteration whose gradients no optimizer used: :meth:`end_step` takes it back
        where there is a second residual, which there is from now on.
        """
        for each in self:
            streams = each.reducer.group.streams
            if streams and not streams.transactional:
                each.reducer.undo(self.models.sizes(), lost=True)
                if each.reducer.group.group_rank == 0:
                    log_once(
                        f"dct: step {self.session.step}: its gradients were cleared without "
                        "optimizer.step(): what earlier steps had left unsent is set to zero, once. From now "
                        "on a second residual keeps residuals as they were before such a batch"
                    )
            streams.arm()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the reducers, by name, with their units."""
        own = {each.name: {"unit": each.unit, "state": each.reducer.state_dict()} for each in self}
        return {**self._loaded, **own}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Keep the states for the reducers, which are made again when their units are known."""
        self.close()
        self._loaded = dict(states)

    def close(self) -> None:
        """Forget the reducers."""
        for each in self:
            if each.ahead is not None:
                each.ahead.detach()
        self._by_ranks.clear()

    def _make(self, group: Any, ranks: dist.ProcessGroup) -> Reduction:
        kind = "expert" if is_expert(group.buckets) else "dense"
        same = sum(other.name.split()[0] == kind for other in self)
        name = f"{kind} {same}" if same else kind
        instance = group.intra_distributed_optimizer_instance_group if has_instances(group) else None
        reducer = GradientReducer(
            self.session.config.data_parallel,
            nodes_in(self.session.config.data_parallel, ranks, instance) or ranks,
            metrics=self.session.metrics,
            device=group.buckets[0].grad_data.device,
            kernels=self.session.config.kernels,
            transactional=self.models.any_fp16,
            optimizer=self._optimizers,
            step=self.session.step,
        )
        if reducer.group.nodes is not None:
            self.session.make_process_groups(lambda: reducer.group, topic="megatron nodes", group=ranks)
        if reducer.group.group_rank == 0:
            log_once(
                f"dct: gradients, {name}: {reducer.config.summary}, {reducer.group.world_size} ranks or nodes"
            )
        overlap = Overlap(reducer, wanted=group.ddp_config.overlap_grad_reduce)
        unit, saved = unit_of_gradients(group), self._loaded.pop(name, None)
        if saved is not None:
            state = checkpoint.in_unit(saved["state"], unit / saved["unit"])
            reducer.load_state_dict(state, loss_scale=None if self.models.any_fp16 else 1.0)
        made = Reduction(name, unit, reducer, overlap)
        if self.session.config.data_parallel.feedback.looks_ahead:
            made.ahead = self._step_ahead(reducer, group)
        return made

    def _step_ahead(self, reducer: GradientReducer, group: Any) -> StepAhead:
        """Return step-ahead for all parameters whose gradients the group's ranks reduce."""
        ranks, optimizers = ranks_of(group), self._optimizers
        parameters = [
            (getattr(parameter, NAME), parameter)
            for other in self.models.groups()
            if ranks_of(other) == ranks
            for bucket in other.buckets
            for parameter in bucket.params_list
            # Gradients of these are summed over the tensor-parallel ranks later on.
            if not getattr(parameter, "sequence_parallel", False)
        ]
        if not any(optimizers.unit_of(parameter) is not None for _, parameter in parameters):
            raise ConfigError(
                "dct.data_parallel.feedback = 'step_ahead': no optimizer of Megatron's holds the model's "
                "parameters; make model and optimizer after the hooks were installed, or set it to 'local'"
            )
        summed = 1.0 if group.ddp_config.average_in_collective else 1.0 / ranks.size()
        return reducer.add_ons.step_ahead.prepare(
            parameters, optimizers.unit_of, unit=summed, pending_of=self.session.pending_of
        )
