"""Updates of weights under the distributed optimizer: ``_ParamAndGradBucketGroup.start_param_sync``.

Megatron copies the masters that a rank owns into its part of the parameter buffers, and gathers these. Here
the copy is left out or taken back, so that the buffers keep what all ranks know, and the gather is replaced;
in the steps in which everything is sent both are Megatron's own. With ``overlap_param_gather`` updates travel
where Megatron would start to gather, in the order in which the forward pass asks for them, and are there when
the call returns.

For fp32 weights Megatron's masters are the parameter buffer itself; they get memory of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel import Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.errors import ConfigError
from dct_plugin.host_traffic import own_traffic

from ..host.patching import Function
from ..host.refusals import ALL_CHANGE, ANOTHER_FORM, WHOLE_OPTIMIZER, features
from ..host.startup import nodes_of
from .buckets import NAME, groups_of, is_expert, start_in
from .session import Hook, Session

#: Attribute of a bucket: the :class:`_Owner` of its weights.
_OWNER = "_dct_owner"


@dataclass
class _Owner:
    """A distributed optimizer whose updates are thresholded."""

    updates: ParameterUpdates
    masters: dict[torch.nn.Parameter, Tensor]
    """This rank's shards."""
    fp32: list[tuple[torch.nn.Parameter, Tensor, Any]]
    """Those of them that Megatron kept in the parameter buffer, with their range in the parameter."""
    starts: dict[torch.nn.Parameter, int]
    """Offsets of parameters in their buckets."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of its buckets in exact updates, the same on all ranks, by identity."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """This rank's part of each bucket before the step, by name of the bucket, for exact updates."""
    waiting: set[int] = field(default_factory=set)
    """Identities of the buckets whose update has not been sent yet."""
    sparse: bool = False
    """True if the last step's update is thresholded."""

    def read_fp32(self) -> None:
        """Copy weights that were set from outside into the fp32 masters."""
        for parameter, master, owned in self.fp32:
            master.data.copy_(parameter.data.view(-1)[owned.start : owned.end])


class ParameterHook(Hook):
    """Replaces the parameter gathers of distributed optimizers; those of expert layers stay Megatron's.

    Args:
        session: What the hooks share.
        resolve: Completes the session's configuration, once there is an optimizer; is told why exact
            updates cannot be had (empty: they can).
    """

    def __init__(self, session: Session, resolve: Callable[[str], None]) -> None:
        from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        self.session, self._resolve = session, resolve
        session.pending_of = self._pending_of
        self._owners = weakref.WeakKeyDictionary[Any, _Owner]()
        """Each optimizer's owner; they stand in the order in which they were made."""
        self._loaded: dict[str, Any] = {}
        patches = session.patches
        self._copy = DistributedOptimizer._copy_main_params_to_model_params
        self._gather = param_and_grad_buffer._ParamAndGradBucketGroup.start_param_sync
        bucket_group = param_and_grad_buffer._ParamAndGradBucketGroup
        patches.intercept(distributed_data_parallel.DistributedDataParallel, "__init__", self._wrap_model)
        patches.intercept(DistributedOptimizer, "__init__", self._make_optimizer)
        patches.intercept(DistributedOptimizer, "_copy_main_params_to_model_params", self._copy_masters)
        patches.intercept(bucket_group, "start_param_sync", self._start_param_sync)

    @torch.no_grad()
    def before_save(self) -> None:
        """Bring all weights to the masters, in full; a collective, between two iterations."""
        for optimizer, owner in self._owners.items():
            self._copy_in_full(owner, optimizer)
            for model in optimizer.model_chunks:
                for group in groups_of(model):
                    if self._owner_of(group) is owner:
                        self._gather(group, force_sync=True)

    def state_dict(self) -> dict[str, Any]:
        own = {str(i): owner.updates.state_dict() for i, owner in enumerate(self._owners.values())}
        return {"parameters": {**self._loaded, **own}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        saved = (state or {}).get("parameters", {})
        for i, owner in enumerate(self._owners.values()):
            owner.updates.load_state_dict(saved.get(str(i)), step=self.session.step)
        self._loaded = dict(saved)

    def _pending_of(self, name: str) -> tuple[Shard, Tensor] | None:
        found = (owner.updates.pending_of(name) for owner in self._owners.values())
        return next((pending for pending in found if pending is not None), None)

    # -- wrappers ---

    def _wrap_model(self, original: Function, ddp: Any, *arguments: Any, **keywords: Any) -> None:
        original(ddp, *arguments, **keywords)
        written = self.session.written.data_parallel.parameters is not None
        if (
            written
            and not ddp.ddp_config.use_distributed_optimizer
            and any(group.data_parallel_group.size() > 1 for group in groups_of(ddp))
        ):
            raise _refusal("Megatron without the distributed optimizer", WHOLE_OPTIMIZER)

    def _make_optimizer(self, original: Function, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        original(optimizer, *arguments, **keywords)
        if optimizer.is_stub_optimizer or getattr(optimizer, "data_parallel_group", None) is None:
            return
        buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
        if optimizer.data_parallel_group.size() > 1 and not is_expert(buckets):
            self._adopt(optimizer, buckets)

    def _copy_masters(self, original: Function, optimizer: Any) -> None:
        owner = self._owners.get(optimizer)
        if owner is None:
            original(optimizer)
            return
        buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
        owner.updates.group.step = self.session.step
        if all(owner.updates.full(bucket.param_data.dtype) for bucket in buckets):
            self._copy_in_full(owner, optimizer)
            return
        owner.sparse, owner.waiting = True, {id(bucket) for bucket in buckets}
        if owner.updates.exact:
            self._copy_exactly(owner, optimizer, buckets)

    def _start_param_sync(self, original: Function, group: Any, force_sync: bool = False) -> None:
        owner = self._owner_of(group)
        if owner is None:
            original(group, force_sync=force_sync)
            return
        if not owner.sparse:
            weights = sum(bucket.param_data.numel() for bucket in group.buckets)
            # :meth:`_copy_in_full` has counted these bytes.
            with owner.updates.choice.timed(weights, whole=True) as measured, own_traffic():
                original(group, force_sync=force_sync or measured)
            return
        self._update(owner, [bucket for bucket in group.buckets if id(bucket) in owner.waiting])
        group.param_gather_handle, group.param_gather_dispatched = None, True

    # -- inside ---

    def _adopt(self, optimizer: Any, buckets: list[Any]) -> None:
        written = self.session.written.data_parallel.parameters
        reasons = [*_unsupported(optimizer, buckets, exact=written in (None, "exact"))]
        if reasons and written is not None:
            raise _refusal(*reasons[0])
        unavailable = ": ".join(reasons[0]) if reasons and written is None else ""
        self._resolve(unavailable)
        if unavailable or self.session.config.data_parallel.parameters is None:
            return
        models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
        shards = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        pairs = [pair for group in zip(models, shards, strict=True) for pair in zip(*group, strict=True)]
        ranks = optimizer.data_parallel_group
        updates = ParameterUpdates(
            self.session.config.data_parallel,
            nodes_of(self.session.config.data_parallel, ranks) or ranks,
            metrics=self.session.metrics,
            device=buckets[0].param_data.device,
            kernels=self.session.config.kernels,
            step=self.session.step,
        )
        if updates.group.nodes is not None:
            self.session.make_process_groups(lambda: updates.group, topic="megatron nodes", group=ranks)
        owner = _Owner(
            updates,
            masters=dict(pairs),
            starts={p: start_in(bucket.param_data, p) for bucket in buckets for p in bucket.params_list},
            names={id(bucket): f"bucket {number}" for number, bucket in enumerate(buckets)},
            fp32=[
                (model, shard, optimizer._get_model_param_range_map(model)["param"])
                for model, shard in pairs
                if model.dtype == torch.float32
            ],
        )
        for _, shard, _ in owner.fp32:
            shard.data = shard.data.clone()
        updates.load_state_dict(self._loaded.get(str(len(self._owners))), step=self.session.step)
        self._owners[optimizer] = owner
        parameters = [parameter for bucket in buckets for parameter in bucket.params_list]
        for i, parameter in enumerate(parameters):
            if not hasattr(parameter, NAME):  # wrapped before the hooks were installed
                setattr(parameter, NAME, f"optimizer {len(self._owners)} parameter {i}")
        # The first and the last pipeline stage have these in common, and cut them in different places.
        shared = (p for p in parameters if getattr(p, "shared_embedding", False))
        updates.whole = frozenset(getattr(p, NAME) for p in shared)
        for bucket in buckets:
            setattr(bucket, _OWNER, owner)
        for chunk in optimizer.model_chunks:
            chunk.module.register_load_state_dict_post_hook(lambda *_: owner.read_fp32())

    def _owner_of(self, group: Any) -> _Owner | None:
        return getattr(group.buckets[0], _OWNER, None) if group.buckets else None

    @torch.no_grad()
    def _copy_exactly(self, owner: _Owner, optimizer: Any, buckets: list[Any]) -> None:
        """Copy the masters as Megatron does, and keep what this rank's parts were before."""
        rank, size = owner.updates.group.group_rank, owner.updates.group.group_size
        for bucket in buckets:
            flat = bucket.param_data.view(-1)
            part = flat[rank * (flat.numel() // size) :][: flat.numel() // size]
            if owner.names[id(bucket)] not in owner.before:  # else ranks lack what an earlier step changed
                owner.before[owner.names[id(bucket)]] = part.clone()
        self._copy(optimizer)

    def _copy_in_full(self, owner: _Owner, optimizer: Any) -> None:
        owner.sparse = False
        owner.before.clear()
        self._copy(optimizer)
        for bucket in [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]:
            owner.updates.record_full(bucket.param_data.numel(), bucket.param_data.element_size())

    @torch.no_grad()
    def _update(self, owner: _Owner, buckets: list[Any]) -> None:
        entries, masters = [], {}
        for bucket in buckets:
            each = bucket.param_data.numel() // owner.updates.group.group_size
            if owner.updates.exact:
                name, flat = owner.names[id(bucket)], bucket.param_data.view(-1)
                entries.append((name, flat, shards_in(0, flat.numel(), each)))
                masters[name] = owner.before.pop(name)
                continue
            for parameter in bucket.params_list:
                name, start, numel = getattr(parameter, NAME), owner.starts[parameter], parameter.numel()
                working = bucket.param_data.view(-1)[start : start + numel]
                entries.append((name, working, shards_in(start, numel, each)))
                if parameter in owner.masters:
                    masters[name] = owner.masters[parameter].data.view(-1)
        if entries:
            owner.updates.update(entries, masters.__getitem__)
        owner.waiting -= {id(bucket) for bucket in buckets}


def _unsupported(optimizer: Any, buckets: list[Any], *, exact: bool) -> Iterator[tuple[str, str]]:
    """Yield the settings under which weights are gathered in another form, and why updates cannot be."""
    for holder in optimizer.config, optimizer.ddp_config:
        for name, why in features("dct.data_parallel.parameters", holder):
            yield f"Megatron's {name}", why
    kinds = {None if bucket.param_data is None else bucket.param_data.dtype for bucket in buckets}
    if kinds - {torch.float32, torch.bfloat16, torch.float16}:
        yield "Megatron's fp8 parameters", ANOTHER_FORM
    if exact and torch.float32 in kinds:
        yield "Megatron in fp32", f"'exact' is for bf16 and fp16: {ALL_CHANGE}"


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(f"dct.data_parallel.parameters: {what}: {why}; leave it out")
