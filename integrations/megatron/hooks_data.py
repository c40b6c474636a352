"""Data parallelism: gradient buckets at ``_ParamAndGradBucketGroup.start_grad_sync``.

Without the distributed optimizer a bucket's gradients are summed on all ranks, with it every rank gets
the sum of the shard it owns (:class:`~dct_plugin.data_parallel.GradientReducer`). Scaling, NaN checks
and the order of calls are those of Megatron. With ``overlap_grad_reduce`` the reduction runs where
Megatron would start it, inside the backward pass, and is finished when that call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.errors import DCTError

from .hooks import Session

_NAME = "_dct_name"


class DataParallelHook:
    """Replaces ``start_grad_sync`` for buckets that are shared by more than one rank."""

    def __init__(self, session: Session) -> None:
        from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
        from megatron.core.optimizer import optimizer

        self.session = session
        self.config = session.config.data_parallel
        self.experts = session.config.model_parallel.expert_gradients
        self.reducers: dict[int, GradientReducer] = {}
        self._transactional = False
        self._models = 0
        self._unnamed = 0
        self._scale: tuple[float, float] | None = (
            None  # loss scale of this iteration's gradients, and of the next's
        )
        self._overflow = False
        patches = session.patches
        patches.wrap(
            param_and_grad_buffer._ParamAndGradBucketGroup, "start_grad_sync", self._make_start_grad_sync
        )
        patches.wrap(distributed_data_parallel.DistributedDataParallel, "__init__", self._make_ddp_init)
        patches.wrap(optimizer.MixedPrecisionOptimizer, "prepare_grads", self._make_prepare_grads)

    # -- iterations -----------------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
        pass

    def settle(self) -> None:
        for reducer in self.reducers.values():
            if self._scale is not None and reducer.step == 0:
                reducer.loss_scale = self._scale[0]
            if self._overflow:
                reducer.rollback()
            else:
                reducer.commit()
            if self._scale is not None:
                reducer.set_loss_scale(self._scale[1])
            reducer.step += 1
        self._overflow = False

    # -- wrappers -------------------------------------------------------------------------------------------

    def _make_ddp_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(ddp: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
            original(ddp, config, *arguments, **keywords)
            self._transactional |= bool(getattr(config, "fp16", False))
            for name, parameter in ddp.module.named_parameters():
                setattr(parameter, _NAME, f"{self._models}.{name}")
            self._models += 1

        return init

    def _make_prepare_grads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_grads(optimizer: Any) -> bool:
            scaled = getattr(optimizer, "grad_scaler", None) is not None
            scale = float(optimizer.get_loss_scale()) if scaled else 1.0
            overflow = bool(original(optimizer))
            self._overflow |= overflow
            if scaled:
                self._scale = (scale, float(optimizer.get_loss_scale()))
            return overflow

        return prepare_grads

    def _make_start_grad_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start_grad_sync(group: Any, *arguments: Any, **keywords: Any) -> None:
            all_reduce = bool(arguments[0] if arguments else keywords.get("force_all_reduce", False))
            sharded = group.ddp_config.use_distributed_optimizer and not all_reduce
            ranks = (
                group.intra_distributed_optimizer_instance_group
                if group.ddp_config.use_distributed_optimizer
                else group.data_parallel_group
            )
            if self._left_alone(group, ranks):
                original(group, *arguments, **keywords)
                return
            if getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None:
                return  # already done: Megatron calls again at the end of the first batch
            if group.grad_reduce_handle is not None:
                raise DCTError("gradient reductions of one bucket group overlap each other")
            ddp = group.ddp_config
            if ddp.check_for_nan_in_grad or getattr(ddp, "check_for_large_grads", False):
                group.check_grads(
                    check_for_nan_or_inf=ddp.check_for_nan_in_grad,
                    check_for_large=getattr(ddp, "check_for_large_grads", False),
                )
            for bucket in group.buckets:
                if bucket.gradient_scaling_factor != 1.0:
                    bucket.grad_data *= bucket.gradient_scaling_factor
            self._reduce(group, ranks, sharded)
            group.grad_reduce_handle = _DONE if ddp.overlap_grad_reduce else None

        return start_grad_sync

    def _left_alone(self, group: Any, ranks: dist.ProcessGroup) -> bool:
        if ranks.size() == 1 or self.session.step < self.config.warmup_steps:
            return True
        if self.config.sparsity == 0 and self.session.pass_through:
            return True
        if getattr(group.ddp_config, "num_distributed_optimizer_instances", 1) > 1:
            raise DCTError(
                "dct.data_parallel does not work with Megatron's num_distributed_optimizer_instances > 1: "
                "gradients are reduced over two groups in turn"
            )
        expert = any(
            not getattr(p, "allreduce", True) for bucket in group.buckets for p in bucket.params_list
        )
        return expert and not self.experts

    # -- reduction ------------------------------------------------------------------------------------------

    def _reduce(self, group: Any, ranks: dist.ProcessGroup, sharded: bool) -> None:
        reducer = self._reducer(ranks, group.buckets[0].grad_data.device)
        scale = 1.0 / ranks.size() if group.ddp_config.average_in_collective else 1.0
        views = [
            (name, start, view, bucket)
            for bucket in group.buckets
            for name, start, view in self._views(bucket)
        ]
        if not sharded:
            reducer.all_reduce([(name, view) for name, _, view, _ in views], scale=scale)
            return
        reducer.reduce_scatter(
            [
                (name, view, _shards(start, view.numel(), bucket.grad_data.numel() // ranks.size()))
                for name, start, view, bucket in views
            ],
            scale=scale,
        )

    def _reducer(self, ranks: dist.ProcessGroup, device: torch.device) -> GradientReducer:
        reducer = self.reducers.get(id(ranks))
        if reducer is None:
            reducer = GradientReducer(
                self.session.config,
                ranks,
                metrics=self.session.metrics,
                device=device,
                transactional=self._transactional,
            )
            reducer.step = self.session.step
            self.reducers[id(ranks)] = reducer
        return reducer

    def _views(self, bucket: Any) -> list[tuple[str, int, Tensor]]:
        """``(name, first entry in the bucket, 1-D view)`` of the bucket's gradients, without padding."""
        data = bucket.grad_data
        found = []
        for parameter in bucket.params_list:
            start = (parameter.main_grad.data_ptr() - data.data_ptr()) // data.element_size()
            stop = start + parameter.numel()
            if not 0 <= start <= stop <= data.numel():
                raise DCTError(f"gradient of shape {tuple(parameter.shape)} does not lie in its bucket")
            if not hasattr(parameter, _NAME):  # wrapped before the hooks were installed
                setattr(parameter, _NAME, f"parameter {self._unnamed}")
                self._unnamed += 1
            found.append((getattr(parameter, _NAME), start, data[start:stop]))
        return found


def _shards(start: int, numel: int, each: int) -> list[Shard]:
    """Parts of a gradient by owner: rank ``r`` owns entries ``[r * each, (r + 1) * each)`` of the bucket."""
    return [
        Shard(owner, max(start, owner * each) - start, min(start + numel, (owner + 1) * each) - start)
        for owner in range(start // each, (start + numel - 1) // each + 1)
    ]


class _Done:
    """Handle of a reduction that is over when it is handed out."""

    def wait(self, *arguments: Any) -> None:
        """Nothing is left to do."""


_DONE = _Done()
