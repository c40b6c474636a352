"""Data parallelism: gradient buckets at ``_ParamAndGradBucketGroup.start_grad_sync``.

Without the distributed optimizer a bucket's gradients are summed on all ranks, with it every rank gets
the sum of the shard it owns (:class:`~dct_plugin.data_parallel.GradientReducer`). Scaling, NaN checks
and the order of calls are those of Megatron.

With ``overlap_grad_reduce`` a bucket's reduction starts where Megatron would start it, inside the backward
pass. On CPU it runs beside that pass: one thread per group works on the buckets in the order in which they
became ready, which is the same on all ranks, over a process group that nothing else uses. On CUDA it is
queued on a stream of its own by Megatron's own thread, as Megatron's own overlapped reductions are, and
waited for in ``finish_grad_sync``. Without it the host waits when all bucket groups of a model have been
reduced, not for each of them. A second thread would launch NCCL kernels in between those of tensor and
pipeline parallelism, in an order that differs from rank to rank, and kernels of several communicators that
wait for each other in different orders can hang (with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks
for, they are in one queue).

With ``error_feedback: "step_ahead"`` reducers exist from the first iteration on, since warm-up gradients,
which Megatron reduces, are shown to them: a bucket's thread and the main thread never work on them at the
same time, for Megatron waits for all reductions before the iteration ends.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin import checkpoint
from dct_plugin.codecs.copies import Mirror
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.data_parallel.step_ahead import StepAhead
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.metrics import Record

from ..host.nonfinite import PoisonedSteps
from ..host.replicas import Replicas
from ..host.worker import ReductionHandle, ReductionStream, ReductionWorker, group_of_own
from . import step_ahead
from .session import Hook, Session

logger = logging.getLogger("dct_plugin")

#: Attribute of a parameter: the name of its stream.
NAME = "_dct_name"
#: Wrappers of fully sharded models, by module.
_SHARDING = (
    ("megatron.core.distributed.torch_fully_sharded_data_parallel", "TorchFullyShardedDataParallel"),
    ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel"),
)


@dataclass
class _Reduction:
    """How the gradients of one process group are reduced."""

    name: str
    """``dense`` or ``expert``; that of a second group of one kind is ``dense 1`` and so on."""
    unit: float
    reducer: GradientReducer
    worker: ReductionWorker | None
    stream: ReductionStream | None
    scale_known: bool
    """Whether the reducer has been given the loss scale of the gradients that come to it."""
    ahead: StepAhead | None = None


class _Queued(ReductionHandle):
    """What Megatron waits for of a reduction that runs on a stream. The first one of a step waits for all."""

    def __init__(self, reduction: _Reduction) -> None:
        super().__init__()
        self._reduction = reduction

    def wait(self, *arguments: Any) -> None:
        """Return when the sums are there for what the current stream gets from now on."""
        stream = self._reduction.stream
        assert stream is not None
        with stream.behind():
            self._reduction.reducer.finish()
        stream.join()


class DataParallelHook(Hook):
    """Replaces ``start_grad_sync`` for buckets that are shared by more than one rank."""

    def __init__(self, session: Session) -> None:
        from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
        from megatron.core.optimizer import optimizer

        self.session = session
        self.config = session.config.data_parallel
        if self.config.update == "local":
            raise ConfigError(
                "dct.data_parallel.update = 'local' does not work with Megatron, whose optimizer clips and "
                "steps as one over all ranks (the distributed one has a part of the weights on each); set it "
                "to 'shared'"
            )
        self.experts = session.config.model_parallel.expert_gradients
        # By the groups themselves: the id of one that was destroyed may be given to another.
        self._reductions: dict[dist.ProcessGroup, _Reduction] = {}
        self._loaded: dict[str, Any] = {}
        self._transactional = False
        self._models = 0
        self._unnamed = 0
        self._scale: tuple[float, float] | None = None
        self._mirror = Mirror()
        """Loss scale of this iteration's gradients, and of the next's."""
        self._overflow = False
        self._poisoned = PoisonedSteps(self.config, self._gradients, agree=True)
        self._skips: bool | None = None
        """Whether this iteration's step is skipped; None until an optimizer asks."""
        self._verified = 0
        patches = session.patches
        ahead, adaptive = self.config.error_feedback == "step_ahead", self.config.adaptive != "off"
        noted = step_ahead.Optimizers(patches) if ahead or adaptive else None
        self._optimizers = noted if ahead else None
        self._followed = noted if adaptive else None
        self._ddp: list[weakref.ref[Any]] = []
        patches.wrap(
            param_and_grad_buffer._ParamAndGradBucketGroup, "start_grad_sync", self._make_start_grad_sync
        )
        ddp = distributed_data_parallel.DistributedDataParallel
        patches.wrap(ddp, "__init__", self._make_ddp_init)
        patches.wrap(ddp, "finish_grad_sync", self._make_finish_grad_sync)
        for kind in optimizer.MixedPrecisionOptimizer, optimizer.FP32Optimizer:
            patches.wrap(kind, "prepare_grads", self._make_prepare_grads)
        for module, name in _SHARDING:
            session.when_imported(module, functools.partial(self._refuse, name))

    def _refuse(self, name: str, module: ModuleType) -> None:
        """Stop at wrappers whose gradients do not pass by here, instead of leaving them dense silently."""
        wrapper = getattr(module, name, None)
        if wrapper is None:
            return

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(*arguments: Any, **keywords: Any) -> None:
                raise DCTError(
                    f"dct.data_parallel does not work with Megatron's {name} ({module.__name__}), which "
                    "reduces gradients by itself: switch one of them off"
                )

            return init

        self.session.patches.wrap(wrapper, "__init__", make)

    # -- iterations -----------------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
        if training:
            self._verify(self.session.step)
        if self._optimizers is None or not training:
            return
        for model in self._alive():
            if self.session.step >= self.config.warmup_steps:
                step_ahead.finish_gathers(model)
            for group in step_ahead.groups_of(model):
                if not self._left_alone(group, ranks := _ranks_of(group)):
                    self._reduction(group, ranks)
        for each in self._reductions.values():
            if each.ahead is not None:
                each.ahead.displace()

    def end_iteration(self) -> None:
        for each in self._reductions.values():
            if each.ahead is not None:
                each.ahead.restore()

    def end_step(self) -> None:
        used, coming = self._scale or (None, None)
        for each in self._reductions.values():
            late = None if each.scale_known else used
            if each.worker is not None:
                self.session.metrics.record(Record("gradient", tensors=0, hidden_ms=each.worker.hidden_ms()))
            each.reducer.end_step(skipped=self._overflow, loss_scale=coming, reduced_at=late)
            each.scale_known |= used is not None
        self._overflow, self._skips = False, None

    def state_dict(self) -> dict[str, Any]:
        own = {
            each.name: {"unit": each.unit, "state": each.reducer.state_dict()}
            for each in self._reductions.values()
        }
        return {"reducers": {**self._loaded, **own}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.close()  # reducers are made again at their next reduction, when their units are known
        self._loaded = dict(state["reducers"]) if state is not None else {}
        self._scale, self._overflow, self._skips = None, False, None
        self._verified = self.session.step

    def sizes(self) -> dict[str, int]:
        parameters = (p for model in self._alive() for p in model.module.parameters())
        return {getattr(p, NAME): p.numel() for p in parameters if hasattr(p, NAME)}

    def close(self) -> None:
        for each in self._reductions.values():
            if each.worker is not None:
                each.worker.stop()
        self._reductions.clear()

    # -- wrappers -------------------------------------------------------------------------------------------

    def _make_ddp_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(ddp: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
            original(ddp, config, *arguments, **keywords)
            if self._poisoned.skips and ddp.ddp_config.check_for_nan_in_grad and not self._models:
                logger.warning(
                    "dct: Megatron's check_for_nan_in_grad stops the job before a step can be skipped "
                    "(dct.data_parallel.nonfinite_action = 'skip'): start it with "
                    "--no-check-for-nan-in-loss-and-grad"
                )
            self._transactional |= bool(getattr(config, "fp16", False))
            for name, parameter in ddp.module.named_parameters():
                setattr(parameter, NAME, f"{self._models}.{name}")
            self._models += 1
            self._ddp.append(weakref.ref(ddp))

        return init

    def _make_finish_grad_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finish_grad_sync(*arguments: Any, **keywords: Any) -> None:
            original(*arguments, **keywords)
            for each in self._reductions.values():
                if each.worker is None and each.stream is None:
                    each.reducer.finish()

        return finish_grad_sync

    def _make_prepare_grads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_grads(optimizer: Any) -> bool:
            scaled = getattr(optimizer, "grad_scaler", None) is not None
            if self._poisoned.skips and not scaled:  # a scaler looks itself
                if self._skips is None:
                    self._skips = self._poisoned.found(self.session.step)
                if self._skips:
                    self._overflow = True
                    return True
            scale = float(self._mirror.of(optimizer.get_loss_scale())) if scaled else 1.0
            overflow = bool(original(optimizer))
            self._overflow |= overflow
            if scaled:
                self._scale = (scale, float(self._mirror.of(optimizer.get_loss_scale())))
            return overflow

        return prepare_grads

    def _make_start_grad_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start_grad_sync(group: Any, *arguments: Any, **keywords: Any) -> None:
            all_reduce = bool(arguments[0] if arguments else keywords.get("force_all_reduce", False))
            sharded = group.ddp_config.use_distributed_optimizer and not all_reduce
            ranks = _ranks_of(group)
            if self._left_alone(group, ranks):
                original(group, *arguments, **keywords)
                return
            if getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None:
                return  # already done: Megatron calls again at the end of the first batch
            if self.session.step < self.config.warmup_steps:
                if self._optimizers is not None:
                    self._show(group, ranks)
                original(group, *arguments, **keywords)
                return
            if group.grad_reduce_handle is not None:
                raise DCTError("gradient reductions of one bucket group overlap each other")
            previous = getattr(group, "previous_grad_reduce_bucket_group", None)  # from 0.19
            if previous is not None and previous.grad_reduce_handle is not None:
                previous.finish_grad_sync(force_all_reduce=all_reduce)
            _fill_buffers(group)
            ddp = group.ddp_config
            if ddp.check_for_nan_in_grad or getattr(ddp, "check_for_large_grads", False):
                group.check_grads(
                    check_for_nan_or_inf=ddp.check_for_nan_in_grad,
                    check_for_large=getattr(ddp, "check_for_large_grads", False),
                )
            for bucket in group.buckets:
                if bucket.gradient_scaling_factor != 1.0:
                    bucket.grad_data *= bucket.gradient_scaling_factor
            group.grad_reduce_handle = self._reduce(group, ranks, sharded)

        return start_grad_sync

    def _left_alone(self, group: Any, ranks: dist.ProcessGroup) -> bool:
        if ranks.size() == 1 or (self.config.sparsity == 0 and self.session.pass_through):
            return True
        if getattr(group.ddp_config, "num_distributed_optimizer_instances", 1) > 1:
            raise DCTError(
                "dct.data_parallel does not work with Megatron's num_distributed_optimizer_instances > 1: "
                "gradients are reduced over two groups in turn"
            )
        return is_expert(group.buckets) and not self.experts

    def _groups(self) -> Iterator[Any]:
        """Bucket groups of all models."""
        for model in self._alive():
            yield from step_ahead.groups_of(model)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._groups():
            for bucket in group.buckets:
                yield from ((name, view) for name, _, view in self._views(bucket))

    # -- equal replicas ---

    def _verify(self, step: int) -> None:
        """Compare the parameters of ranks that hold the same ones, when that is due; a collective."""
        if step == self._verified:
            return
        self._verified = step
        if not self.config.verify_every or step % self.config.verify_every:
            return
        for model in self._alive():
            step_ahead.finish_gathers(model)
        for ranks in dict.fromkeys(_ranks_of(group) for group in self._groups()):
            if ranks.size() > 1:
                Replicas(self.config, functools.partial(self._replicated, ranks), ranks).check(step)

    def _replicated(self, ranks: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
        """What every rank of a group holds: the weights, and what they are rounded from, unless each rank has
        a part of that.
        """
        for group in self._groups():
            for bucket in group.buckets if _ranks_of(group) == ranks else ():
                for (name, *_), parameter in zip(self._views(bucket), bucket.params_list, strict=True):
                    yield name, parameter.data
                    main = getattr(parameter, "main_param", None)
                    if main is not None and not group.ddp_config.use_distributed_optimizer:
                        yield f"{name} (fp32 copy)", main.data

    # -- step-ahead -----------------------------------------------------------------------------------------

    def _alive(self) -> Iterator[Any]:
        """Megatron's models that are still in use."""
        self._ddp = [reference for reference in self._ddp if reference() is not None]
        return (model for reference in self._ddp if (model := reference()) is not None)

    def _show(self, group: Any, ranks: dist.ProcessGroup) -> None:
        """Gradients that Megatron is about to reduce, to step-ahead."""
        _fill_buffers(group)
        reducer = self._reduction(group, ranks).reducer
        for bucket in group.buckets:
            factor = bucket.gradient_scaling_factor
            for key, _, view in self._views(bucket):
                reducer.look([(key, view if factor == 1.0 else view * factor)])

    def _look_ahead(self, reducer: GradientReducer, group: Any, ranks: dist.ProcessGroup) -> StepAhead:
        """Step-ahead for all parameters whose gradients a process group reduces."""
        assert self._optimizers is not None
        unit_of, per_token, parameters = self._optimizers.unit_of, False, []
        key = "dct.data_parallel.error_feedback = 'step_ahead'"
        for model in self._alive():
            same = [other for other in step_ahead.groups_of(model) if _ranks_of(other) == ranks]
            if same:
                step_ahead.refuse(model)
                per_token |= bool(getattr(model.config, "calculate_per_token_loss", False))
            parameters += [
                (getattr(parameter, NAME), parameter)
                for other in same
                for bucket in other.buckets
                for parameter in bucket.params_list
                # Gradients of these are summed over the tensor-parallel ranks later on.
                if not getattr(parameter, "sequence_parallel", False)
            ]
        units = [unit for _, parameter in parameters if (unit := unit_of(parameter)) is not None]
        if not units:
            raise ConfigError(
                f"{key}: no optimizer of Megatron's holds the model's parameters; make model and optimizer "
                "after the hooks were installed, or set it to 'local'"
            )
        if per_token and not all(unit.preconditioned for unit in units):
            raise ConfigError(
                f"{key}: with calculate_per_token_loss the optimizer must be Adam: the unit of gradients "
                "is known after the step only; set it to 'local'"
            )
        summed = 1.0 if group.ddp_config.average_in_collective else 1.0 / ranks.size()
        return reducer.step_ahead(parameters, unit_of, unit=summed, pending_of=self.session.pending_of)

    # -- reduction ------------------------------------------------------------------------------------------

    def _reduce(self, group: Any, ranks: dist.ProcessGroup, sharded: bool) -> ReductionHandle | None:
        """Reduce a bucket group; what Megatron is to wait for, if it asked for overlap."""
        reduction = self._reduction(group, ranks)
        reducer = reduction.reducer
        scale = 1.0 / ranks.size() if group.ddp_config.average_in_collective else 1.0
        views = [
            (key, start, view, bucket) for bucket in group.buckets for key, start, view in self._views(bucket)
        ]

        def work() -> None:
            if not sharded:
                reducer.all_reduce([(key, view) for key, _, view, _ in views], scale=scale)
                return
            reducer.reduce_scatter(
                [
                    (key, view, shards_in(start, view.numel(), bucket.grad_data.numel() // ranks.size()))
                    for key, start, view, bucket in views
                ],
                scale=scale,
            )

        if reduction.worker is not None:
            return reduction.worker.submit(work)
        if reduction.stream is None:
            work()
            return ReductionHandle() if group.ddp_config.overlap_grad_reduce else None
        with reduction.stream.behind():
            work()
        return _Queued(reduction)

    def _reduction(self, group: Any, ranks: dist.ProcessGroup) -> _Reduction:
        """That of a bucket group; it is made at the first use, by all ranks of the group."""
        if (known := self._reductions.get(ranks)) is not None:
            return known
        kind = "expert" if is_expert(group.buckets) else "dense"
        same = sum(other.name.split()[0] == kind for other in self._reductions.values())
        name = f"{kind} {same}" if same else kind
        device = group.buckets[0].grad_data.device
        exchange_over, worker, stream = ranks, None, None
        if group.ddp_config.overlap_grad_reduce:
            own = group_of_own(ranks) if device.type == "cpu" else None
            if own is not None:
                exchange_over, worker = own, ReductionWorker(f"dct gradients {name}")
            elif device.type == "cuda":
                stream = ReductionStream(device)
        reducer = GradientReducer(
            self.session.config.data_parallel,
            exchange_over,
            metrics=self.session.metrics,
            device=device,
            kernels=self.session.config.kernels,
            transactional=self._transactional,
            step=self.session.step,
        )
        if reducer.adaptive is not None and self._followed is not None:
            reducer.adaptive.follow(self._followed)
        unit, saved = _unit(group, ranks), self._loaded.pop(name, None)
        if saved is not None:
            reducer.load_state_dict(checkpoint.in_unit(saved["state"], unit / saved["unit"]))
        reducer.deferred = worker is None
        made = _Reduction(name, unit, reducer, worker, stream, scale_known=saved is not None)
        if self._optimizers is not None:
            made.ahead = self._look_ahead(reducer, group, ranks)
        self._reductions[ranks] = made
        return made

    def _views(self, bucket: Any) -> list[tuple[str, int, Tensor]]:
        """``(name, first entry in the bucket, 1-D view)`` of the bucket's gradients, without padding."""
        data = bucket.grad_data
        found = []
        for parameter in bucket.params_list:
            gradient = getattr(parameter, "main_grad_copy_in_grad_buffer", None)  # from 0.17
            if gradient is None:
                gradient = parameter.main_grad
            start = (gradient.data_ptr() - data.data_ptr()) // data.element_size()
            stop = start + parameter.numel()
            if not 0 <= start <= stop <= data.numel():
                raise DCTError(f"gradient of shape {tuple(parameter.shape)} does not lie in its bucket")
            if not hasattr(parameter, NAME):  # wrapped before the hooks were installed
                setattr(parameter, NAME, f"parameter {self._unnamed}")
                self._unnamed += 1
            found.append((getattr(parameter, NAME), start, data[start:stop]))
        return found


def _ranks_of(group: Any) -> dist.ProcessGroup:
    """The ranks over which a bucket group is reduced."""
    if group.ddp_config.use_distributed_optimizer:
        return group.intra_distributed_optimizer_instance_group
    return group.data_parallel_group


def is_expert(buckets: Iterable[Any]) -> bool:
    """Whether buckets hold gradients and weights of expert layers."""
    return any(not getattr(p, "allreduce", True) for bucket in buckets for p in bucket.params_list)


def _unit(group: Any, ranks: dist.ProcessGroup) -> float:
    """Factor on the gradients that reach the reducer, for residuals that go on with other ranks.

    Losses per token are divided by the tokens of all ranks later on: like one over the number of ranks.
    """
    factor = float(group.buckets[0].gradient_scaling_factor)
    return factor if group.ddp_config.average_in_collective or factor != 1.0 else 1.0 / ranks.size()


def _fill_buffers(group: Any) -> None:
    """What Megatron does before it looks at the buckets: from 0.17 on gradients may lie elsewhere."""
    for bucket in group.buckets:
        for parameter in bucket.params_list:  # gradients of replayed CUDA graphs (0.19)
            if (event := getattr(parameter, "_cudagraph_wgrad_ready_event", None)) is not None:
                torch.cuda.current_stream().wait_event(event)
        for parameter in getattr(bucket, "params_with_extra_main_grads", ()):
            if (copy := getattr(parameter, "main_grad_copy_in_grad_buffer", None)) is not None:
                copy.copy_(parameter.main_grad)
