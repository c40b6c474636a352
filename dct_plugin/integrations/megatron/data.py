"""Data parallelism: gradient buckets at ``_ParamAndGradBucketGroup.start_grad_sync``.

Without the distributed optimizer a bucket's gradients are summed on all ranks, with it every rank gets
the sum of the shard it owns (:class:`~dct_plugin.data_parallel.GradientReducer`). Scaling, NaN checks
and the order of calls are those of Megatron. Without ``overlap_grad_reduce`` the host waits when all bucket
groups of a model have been reduced, not for each of them.

Reducers exist from the first iteration on: with ``"feedback": "step_ahead"`` the gradients of warm-up steps,
which Megatron reduces, are shown to them, and no pass has to make the process groups of nodes. A bucket's
thread and the main thread never work on a reducer at the same time, for Megatron waits for all reductions
before the iteration ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dct_plugin.codecs.copies import Mirror
from dct_plugin.console import logger
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.host_traffic import count_group, counted_by
from dct_plugin.policy import Training, compresses
from dct_plugin.transport.nodes import Nodes

from ..host.patching import Function, given, when_imported
from ..host.refusals import refuse_features
from ..host.replica_checksums import ReplicaChecksums
from ..host.steps import FrozenParameters, PoisonedSteps
from .buckets import (
    NAME,
    Models,
    fill_buffers,
    finish_gathers,
    gradients_in,
    has_instances,
    is_expert,
    nodes_in,
    ranks_of,
)
from .reductions import Optimizers, Reductions, step_ahead_unavailable
from .session import Hook, Session, is_first_of_stage

#: Wrappers of fully sharded models, by module.
_SHARDING = (
    ("megatron.core.distributed.torch_fully_sharded_data_parallel", "TorchFullyShardedDataParallel"),
    ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel"),
    ("megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module", "FsdpModule"),  # its version 2
)


class DataParallelHook(Hook):
    """Replaces ``start_grad_sync`` for buckets that are shared by more than one rank."""

    def __init__(self, session: Session) -> None:
        from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
        from megatron.core.optimizer import optimizer

        self.session = session
        self.config = session.config.data_parallel
        self._optimizers = Optimizers(session.patches)
        self._is_resolved = False
        self.models = Models()
        self._dense = _DenseGroups(session, self.models)
        self.reductions = session.reductions = Reductions(session, self.models, self._optimizers)
        session.ends.callback(self.reductions.close)
        self._steps = _OptimizerSteps(session, self.models)
        self._replicas: dict[dist.ProcessGroup, ReplicaChecksums] = {}
        self._frozen: list[FrozenParameters] = []
        intercept = session.patches.intercept
        intercept(param_and_grad_buffer._ParamAndGradBucketGroup, "start_grad_sync", self._start_grad_sync)
        ddp = distributed_data_parallel.DistributedDataParallel
        intercept(ddp, "__init__", self._wrap_model)
        intercept(ddp, "finish_grad_sync", self._finish_grad_sync)
        for kind in optimizer.MixedPrecisionOptimizer, optimizer.FP32Optimizer:
            intercept(kind, "prepare_grads", self._steps.prepare_grads)
        for module, name in _SHARDING:
            session.ends.callback(when_imported(module, functools.partial(_refuse, session, name)))

    def resolve(self, exact_unavailable: str | None = None) -> None:
        """Let the settings follow the optimizers, which Megatron has made by now; once.

        Args:
            exact_unavailable: See :class:`.policy.Training`.
        """
        if self._is_resolved:
            return
        self._is_resolved = True
        self._dense.count_embeddings()
        ranks, nodes = self._largest_exchange()
        training = Training(
            ranks=ranks,
            steps=getattr(self.session.megatron_args, "train_iters", None),
            step_ahead_unavailable=next(self._step_ahead_unavailable(), ""),
            optimizer_unknown_hint="make the optimizer after the hooks were installed",
            exact_unavailable=exact_unavailable,
        )
        self.session.resolve(list(self._optimizers), training, nodes)
        self.config = self.session.config.data_parallel
        for problem in self._step_ahead_unavailable() if self.config.feedback.looks_ahead else ():
            raise ConfigError(
                f"dct.data_parallel.feedback = 'step_ahead': {problem}; leave feedback out, or set it to "
                "'local'"
            )
        if dist.get_rank() == 0:
            self.session.log_active(f"Megatron, {ranks} ranks")

    def _largest_exchange(self) -> tuple[int, Nodes | None]:
        """Return the number of ranks of the largest group that reduces gradients, and its nodes."""
        groups = self.models.groups()
        largest = max(groups, key=lambda group: ranks_of(group).size(), default=None)
        if largest is None:
            return 1, None
        ranks = ranks_of(largest)
        instance = largest.intra_distributed_optimizer_instance_group if has_instances(largest) else None
        return ranks.size(), nodes_in(self.session.written.data_parallel, ranks, instance)

    def _step_ahead_unavailable(self) -> Iterator[str]:
        for model in self.models:
            yield from step_ahead_unavailable(model)
            per_token = getattr(model.config, "calculate_per_token_loss", False)
            if per_token and not all("betas" in group for group in self._optimizers.param_groups):
                yield "with calculate_per_token_loss the unit of gradients is known after the step only"

    # -- iterations -----------------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
        if not training:
            return
        self.resolve()
        self._verify()
        if self.config.feedback.looks_ahead:
            for model in self.models if self.session.step >= self.config.dense_steps else ():
                finish_gathers(model)
        for group in self.models.groups():
            if group not in self._dense:
                self.reductions.of(group)
        for each in self.reductions:
            if each.ahead is not None:
                each.ahead.displace()

    def end_step(self) -> None:
        if self._steps.is_rejected:
            self.reductions.reject()
        skipped = self._steps.overflow or self._steps.is_rejected
        self.reductions.end_step(skipped=skipped, scales=self._steps.scales)
        self._steps.end_step()
        for frozen in self._frozen:
            frozen.check()

    def state_dict(self) -> dict[str, Any]:
        return {"reducers": self.reductions.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.reductions.load_state_dict({} if state is None else state["reducers"])
        self._steps.end_step()

    def before_save(self) -> None:
        self._verify(saves=True)

    def _verify(self, *, saves: bool = False) -> None:
        """Compare the parameters of ranks that hold the same ones, when that is due; a collective."""
        step, verify = self.session.step, self.config.verify
        if verify is None or not (saves or verify.is_due(step, self.config.dense_steps)):
            return
        for model in self.models:
            finish_gathers(model)
        for ranks in dict.fromkeys(map(ranks_of, self.models.groups())):
            if ranks not in self._replicas:
                weights = functools.partial(replicated, self.models, ranks)
                self._replicas[ranks] = ReplicaChecksums(self.config, weights, ranks)
            self._replicas[ranks].check(step, saves=saves)

    # -- wrappers -------------------------------------------------------------------------------------------

    def _wrap_model(self, original: Function, ddp: Any, *arguments: Any, **keywords: Any) -> None:
        refuse_features("dct.data_parallel", given(original, "config", (ddp, *arguments), keywords))
        original(ddp, *arguments, **keywords)
        is_first = not any(True for _ in self.models)
        if self.models.replace(ddp):
            logger.warning("dct: the model is wrapped again: residuals start from zero, after a dense start")
            self.session.load_state_dict(None)
            self._is_resolved, self.session.config = False, self.session.written
            self._replicas.clear()
            self.config = self.session.config.data_parallel
        self.models.add(ddp)
        if is_first_of_stage():
            self._frozen.append(
                FrozenParameters(
                    ddp.module.named_parameters(),
                    "Megatron's DistributedDataParallel has no buckets for them, and does not train them; "
                    "make it and the optimizer anew",
                    lambda parameter: any(parameter in group.params for group in self.models.groups()),
                )
            )
        if self._steps.skips and ddp.ddp_config.check_for_nan_in_grad and is_first:
            logger.warning(
                "dct: Megatron's check_for_nan_in_grad stops the job before a step can be skipped "
                "(dct.data_parallel.nonfinite_action = 'skip'): start it with "
                "--no-check-for-nan-in-loss-and-grad"
            )

    def _finish_grad_sync(self, original: Function, *arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        for each in self.reductions:
            each.overlap.wait()

    def _start_grad_sync(self, original: Function, group: Any, *arguments: Any, **keywords: Any) -> None:
        all_reduce = bool(given(original, "force_all_reduce", (group, *arguments), keywords))
        if group in self._dense:
            with self._dense.counted(group):
                original(group, *arguments, **keywords)
            return
        if getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None:
            return  # already done: Megatron calls again at the end of the first batch
        if not self.session.is_open and self.session.pass_through:
            raise DCTError(
                "dct.data_parallel: gradients are reduced, but no iteration began: steps are those of "
                "Megatron's forward-backward functions (get_forward_backward_func); train with one, or set "
                "dct.data_parallel.enabled to false"
            )
        self.models.name_rest(group)
        if self.session.step < self.config.dense_steps and self.config.quality is None:
            if self.config.feedback.looks_ahead:
                self.reductions.show(group)
            original(group, *arguments, **keywords)
            return
        _prepare_gradients(group, all_reduce)
        # A shard has an owner in each instance: all ranks get the whole sum.
        several = has_instances(group)
        sharded = group.ddp_config.use_distributed_optimizer and not all_reduce and not several
        pending = self.reductions.reduce(group, sharded=sharded)
        # With several instances Megatron waits for a CUDA stream, and never for the handle.
        group.grad_reduce_handle = pending if group.ddp_config.overlap_grad_reduce and not several else None

    def sites(self) -> str:
        return self._dense.coverage()


class _DenseGroups:
    """The bucket groups that Megatron reduces by itself.

    Args:
        session: What the hooks share.
        models: The models whose gradients are reduced.
    """

    def __init__(self, session: Session, models: Models) -> None:
        self._session, self._models = session, models

    def __contains__(self, group: Any) -> bool:
        if ranks_of(group).size() == 1 or self._has_all:
            return True
        return is_expert(group.buckets) and not self._session.config.model_parallel.expert_gradients

    @property
    def _has_all(self) -> bool:
        return self._session.pass_through and not compresses(self._session.config.data_parallel)

    def coverage(self) -> str:
        """Return how many parameters are not in these groups, in words; empty if there are none."""
        groups = [group for group in self._models.groups() if ranks_of(group).size() > 1]
        if not groups or self._has_all:
            return ""
        dense, all_ = (
            sum(len(bucket.params_list) for group in some for bucket in group.buckets)
            for some in ([group for group in groups if group in self], groups)
        )
        return f"data_parallel on {all_ - dense} of {all_} parameters"

    def counted(self, group: Any) -> AbstractContextManager[None]:
        """Surround the reduction of one of these groups."""
        if not is_expert(group.buckets):
            return nullcontext()
        return counted_by(functools.partial(self._session.metrics.uncompressed, "gradient", "experts"))

    def count_embeddings(self) -> None:
        """Count the gradients of embeddings that the first and the last stage share."""
        from megatron.core import parallel_state as ps

        group = ps.get_embedding_group(check_initialized=False)
        if isinstance(group, dist.ProcessGroup) and not self._has_all:
            count = functools.partial(self._session.metrics.uncompressed, "gradient", "shared_weights")
            self._session.ends.callback(count_group(group, count))


class _OptimizerSteps:
    """The answers of Megatron's optimizers about the step of an iteration.

    Attributes:
        scales: The loss scale of this iteration's gradients, and of the next iteration's; None until an
            optimizer says them.
        overflow: Whether the step is skipped.
    """

    def __init__(self, session: Session, models: Models) -> None:
        self._session = session
        self._poisoned = PoisonedSteps(session.config.data_parallel, models.gradients, agree=True)
        self._mirror = Mirror()
        self.skips = self._poisoned.skips
        self._knows_optimizers = False
        self.end_step()

    def end_step(self) -> None:
        """Forget the step."""
        self.scales: tuple[float, float] | None = None
        self.overflow = self._is_asked = False
        self._is_poisoned: bool | None = None  # until an optimizer asks

    @property
    def is_rejected(self) -> bool:
        """True if no optimizer was asked to make the step, as one was before."""
        return self._knows_optimizers and not self._is_asked

    def prepare_grads(self, original: Function, optimizer: Any) -> bool:
        """Call Megatron's ``prepare_grads`` unless the step is skipped; return whether it is."""
        self._is_asked = self._knows_optimizers = True
        scaled = getattr(optimizer, "grad_scaler", None) is not None
        if self.skips and not scaled:  # a scaler looks itself
            if self._is_poisoned is None:
                self._is_poisoned = self._poisoned.found(self._session.step)
            if self._is_poisoned:
                self.overflow = True
                return True
        used = float(self._mirror.of(optimizer.get_loss_scale())) if scaled else 1.0
        overflow = bool(original(optimizer))
        self.overflow |= overflow
        if scaled:
            self.scales = used, float(self._mirror.of(optimizer.get_loss_scale()))
        return overflow


def _refuse(session: Session, name: str, module: ModuleType) -> None:
    """Stop at wrappers whose gradients do not pass by here, instead of leaving them dense silently."""

    def init(*_: Any, **keywords: Any) -> None:
        raise DCTError(
            f"dct.data_parallel does not work with Megatron's {name} ({module.__name__}), which reduces "
            "gradients by itself: switch one of them off"
        )

    if wrapper := getattr(module, name, None):
        session.patches.intercept(wrapper, "__init__", init)


def _prepare_gradients(group: Any, all_reduce: bool) -> None:
    """Do what Megatron does with a bucket group before it reduces it: wait, copy, check and scale."""
    if group.grad_reduce_handle is not None:
        raise DCTError("gradient reductions of one bucket group overlap each other")
    previous = getattr(group, "previous_grad_reduce_bucket_group", None)  # from 0.19
    if previous is not None and previous.grad_reduce_handle is not None:
        previous.finish_grad_sync(force_all_reduce=all_reduce)
    fill_buffers(group)
    ddp = group.ddp_config
    if ddp.check_for_nan_in_grad or ddp.check_for_large_grads:
        group.check_grads(
            check_for_nan_or_inf=ddp.check_for_nan_in_grad, check_for_large=ddp.check_for_large_grads
        )
    for bucket in group.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor


def replicated(models: Models, ranks: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that all ranks of a group hold: the weights and their fp32 copies, and trainable
    weights that no bucket has.

    Under the distributed optimizer each rank has only a part of the copies; they are left out.
    """
    for group in models.groups():
        for bucket in group.buckets if ranks_of(group) == ranks else ():
            for name, parameter, *_ in gradients_in(bucket):
                yield name, parameter.data
                main = getattr(parameter, "main_param", None)
                if main is not None and not group.ddp_config.use_distributed_optimizer:
                    yield f"{name} (fp32 copy)", main.data
    in_buckets = {id(p) for group in models.groups() for bucket in group.buckets for p in bucket.params_list}
    for model in models:
        if any(ranks_of(group) == ranks for group in model.bucket_groups):
            for name, parameter in model.module.named_parameters():
                is_replicated = parameter.requires_grad and getattr(parameter, "allreduce", True)
                if is_replicated and id(parameter) not in in_buckets:
                    yield getattr(parameter, NAME, name), parameter.data
