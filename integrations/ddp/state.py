"""The hook and its state. Everything but the hook itself comes from :mod:`..host`: this is how small a host
integration can be.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dct_plugin import checkpoint
from dct_plugin.codecs.copies import Mirror
from dct_plugin.config import DataParallelConfig, DCTConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.local import LocalUpdates, Weight
from dct_plugin.data_parallel.parameters import refuse
from dct_plugin.data_parallel.reducer import Reduction
from dct_plugin.data_parallel.step_ahead import StepAhead, units_of
from dct_plugin.errors import ConfigError, DesyncError
from dct_plugin.metrics import Metrics, Record
from dct_plugin.thresholds import Threshold

from ..host import lost_peers, reducer_files, startup
from ..host.nonfinite import PoisonedSteps
from ..host.patches import Patches
from ..host.replicas import Replicas
from ..host.reporting import Reporting
from ..host.steps import StepHooks
from ..host.worker import ReductionHandle, ReductionStream, ReductionWorker, group_of_own, one_core_each
from .early_gradients import Arrivals, Bucket

__all__ = ["DCTState", "Owed", "dct_hook"]


class DCTState:
    """State of :func:`dct_hook`: the reducer, and which stream each parameter belongs to.

    Streams follow parameters, so residuals survive the bucket rebuild after DDP's first step.

    Args:
        config: The configuration, its ``data_parallel`` settings, or a mapping with the keys of the ``dct``
            section.
        process_group: The group that DDP averages over; None for the default one.
        named_parameters: ``model.named_parameters()``, to name streams in messages and saved states; without
            it they are numbered in the order in which DDP first reduces them (the same on every rank).
        metrics: Where to record; None makes one from the configuration, and rank 0 prints its summary when
            the process ends.
        scaler: The gradient scaler of mixed precision: residuals follow its scale, and a step that it skips
            is taken back. A step is over when the next one's gradients come.
        optimizer: The model's, whose learning rate ``adaptive: "accordion"`` follows; with
            ``nonfinite_action: "skip"`` its steps on gradients that are not finite change nothing. Not needed
            for that with a ``scaler``, which skips them itself.
        time_limit: Seconds in which the other ranks must reach their first bucket.

    Raises:
        ConfigError: The configuration is wrong, or asks for an ``optimizer``.

    Example:
        >>> state = DCTState({"data_parallel": {"sparsity": 0.99}})
        >>> ddp_model.register_comm_hook(state, dct_hook)
    """

    def __init__(
        self,
        config: DCTConfig | DataParallelConfig | Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        metrics: Metrics | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        time_limit: float = startup.TIME_LIMIT,
    ) -> None:
        if isinstance(config, DataParallelConfig):
            config = DCTConfig(data_parallel=config)
        self.config = DCTConfig.parse({} if config is None else config, rank=dist.get_rank())
        if self.config.data_parallel.parameters.enabled:
            raise refuse("torch DistributedDataParallel")
        self.process_group, self.scaler, self.time_limit = process_group, scaler, time_limit
        self._scale = Mirror()
        if scaler is not None:
            Patches().wrap(scaler, "update", self._followed)
        self._optimizers = [] if optimizer is None else [optimizer]
        self._poisoned = PoisonedSteps(self.config.data_parallel, self._gradients, agree=False)
        if self._poisoned.skips and scaler is None:
            if optimizer is None:
                raise ConfigError(
                    "dct.data_parallel.nonfinite_action = 'skip' needs DCTState(..., optimizer=optimizer)"
                )
            optimizer.register_step_pre_hook(self._before_step)
        if metrics is None:
            rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
            metrics = Metrics(self.config.metrics, rank=rank, world_size=world_size)
            Reporting(metrics)
        self.metrics, self.steps = metrics, StepHooks([], metrics)
        named = dict(named_parameters)
        self._names: dict[int, str] = {id(parameter): name for name, parameter in named.items()}
        self._parameters: dict[str, Tensor] = {}  # that came by, for the comparison of replicas
        self._ahead: StepAhead | None = None
        self.sizes = {name: parameter.numel() for name, parameter in named.items()} or None
        """Entries of the parameters; None without ``named_parameters``."""
        self._reducer: GradientReducer | None = None
        self._local: LocalUpdates | None = None
        self._loaded = reducer_files.FRESH
        self._agreed = self._backward_done = False
        self._worker: ReductionWorker | None = None
        self._stream: ReductionStream | None = None
        self._pending: list[ReductionHandle] = []
        self._open: tuple[Reduction, Callable[[], None]] | None = None
        self._handed_over: list[_HandedOver] = []
        self._arrivals = Arrivals(self._begin)
        self._begun: dict[Bucket, Reduction] = {}

    def reducer(self, device: torch.device) -> GradientReducer:
        """The reducer, made when the first bucket tells the device."""
        if self._reducer is None:
            self._reducer = GradientReducer(
                self.config.data_parallel,
                self.process_group,
                metrics=self.metrics,
                device=device,
                kernels=self.config.kernels,
                transactional=self.scaler is not None,
            )
            if self._reducer.adaptive is not None:
                self._reducer.adaptive.follow(*self._optimizers)
            self.steps.members = [self._reducer]
            self.steps.replicas = Replicas(self.config.data_parallel, self._weights, self.process_group)
            self._restore(self._reducer)
        return self._reducer

    def step_ahead(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Needed by ``error_feedback: "step_ahead"``: train ``model`` (which DDP wraps) at displaced weights.

        Streams that ``named_parameters`` did not name get their names from ``model``.

        Raises:
            ConfigError: The step of this ``optimizer`` is not known.
        """
        units = units_of(optimizer)
        named = [(self._names.setdefault(id(p), name), p) for name, p in model.named_parameters()]
        self._ahead = self.reducer(named[0][1].device).step_ahead(named, units)
        self._ahead.attach(model, optimizer)
        # With a scaler it is known only now what became of the last step.
        model.register_forward_pre_hook(_StepEnd(self), prepend=True)

    def local(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Needed by ``update: "local"``: ``optimizer`` steps each rank's own weights of ``model`` (which DDP
        wraps), and their changes are exchanged in its ``step``, which every rank must call equally often.

        Streams that ``named_parameters`` did not name get their names from ``model``.

        Raises:
            ConfigError: The configuration does not ask for it, there is a gradient scaler, or ``optimizer``
                does not hold all of the model's weights on this rank.
        """
        key, rank = "dct.data_parallel.update = 'local'", dist.get_rank()
        named = {self._names.setdefault(id(p), name): p for name, p in model.named_parameters()}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
        problem = ""
        if self.scaler is not None:
            problem = "a gradient scaler skips steps on single ranks, while the others wait for their changes"
        elif any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            # By name: importing its module compiles scripts, for seconds.
            problem = "ZeroRedundancyOptimizer has a part of the weights on each rank, and all are needed"
        elif missing:
            problem = f"the optimizer does not have {', '.join(missing[:3])}: ranks would drift apart there"
        if problem:
            raise ConfigError(f"rank {rank}: {key}: {problem}; set update to 'shared'")
        ours = {id(parameter): name for name, parameter in named.items()}
        self._parameters.update({name: p for name, p in named.items() if p.requires_grad})

        def weights() -> Iterator[Weight]:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in ours:
                        yield Weight(ours[id(parameter)], parameter, parameter)

        device = next(iter(named.values())).device
        self._local = local = self.reducer(device).local_updates(weights, optimizer)
        local.attach(model)

        def stepped(*_: Any) -> None:
            local.end_step()
            self.steps.end()

        optimizer.register_step_pre_hook(lambda *_: local.show_local())
        optimizer.register_step_post_hook(stepped)

    def averages(self) -> bool:
        """Whether gradients are averaged; with ``update: "local"`` only in warm-up."""
        return self._local is None or not self._local.active

    def name_of(self, parameter: Tensor) -> str:
        """Name of the parameter's stream."""
        name = self._names.setdefault(id(parameter), f"parameter_{len(self._names):04d}")
        self._parameters.setdefault(name, parameter)
        return name

    def _weights(self) -> list[tuple[str, Tensor]]:
        found = [(name, self._parameters[name]) for name in sorted(self._parameters)]
        return [(name, p.data if self._ahead is None else self._ahead.weight(p)) for name, p in found]

    def begin_bucket(self, device: torch.device) -> GradientReducer:
        """A bucket is about to be reduced; see :func:`dct_hook` for the errors."""
        if not self._agreed:
            hint = "its model has no dct_hook (register_comm_hook), or it is far behind"
            agreement = startup.join("ddp", group=self.process_group, limit=self.time_limit, hint=hint)
            with startup.reported(agreement):
                made = self.reducer(device)
            facts = {
                "optimizer steps so far": made.step,
                "step_ahead() called": made.looks_ahead,
                "local() called": self._local is not None,
            }
            agreement.confirm(startup.facts_of(self.config, facts))
            if device.type == "cpu" and not one_core_each(self.process_group):
                own = group_of_own(self.process_group)
                if own is not None:
                    made.exchange.group, self._worker = own, ReductionWorker("dct gradients")
                    weakref.finalize(self, self._worker.stop)
            elif device.type == "cuda":
                self._stream = ReductionStream(device)
            made.deferred = True  # until the end of the backward pass
            steps = self.steps
            lost_peers.watch(lambda: steps.step)
            self._agreed = True
        self._end_step()
        self.steps.begin()
        return self.reducer(device)

    def follow(self, model: DistributedDataParallel) -> None:
        """Begin reductions before their buckets are full, where that is possible; ``register_comm_hook`` of
        the ``model`` calls this when it is given :func:`dct_hook` or another hook with this state.
        """
        self._arrivals.follow(model)

    def leave(self) -> None:
        """Begin reductions when buckets are full: for whoever gives one model several states in turn."""
        self._arrivals.leave()

    def reduce(self, bucket: dist.GradBucket, done: Callable[[], None]) -> None:
        """Reduce a full bucket and call ``done()``.

        That happens beside the backward pass: on CPU in a thread, on CUDA on a stream of its own. Where
        every rank has just one core, messages leave within the pass, and are collected with the next bucket
        or at its end. The pass raises the errors of all its reductions at its end.
        """
        reducer = self.begin_bucket(bucket.buffer().device)
        # Of a rank without inputs DDP reduces zeros, so that the other ranks go on (``join()``).
        joined = torch._C._current_graph_task_id() < 0
        if joined:
            self._refuse_join(reducer)
        found = self._arrivals.full(bucket)
        if not self.averages():
            done()
            return
        if not joined:
            for parameter, view in zip(found.parameters, found.views, strict=True):
                self._handed_over.append(_HandedOver.of(self.name_of(parameter), parameter, view))
        reduction = self._begun.pop(found, None) or self._reduction(reducer, found)
        if self._begun:  # what DDP does with a bucket that it has been seen to fill
            raise DesyncError(f"rank {dist.get_rank()}: DDP made its buckets anew during a backward pass")
        if self._worker is not None:
            handle = self._worker.submit(reduction.finish)
            handle.when_done(done)
            self._pending.append(handle)
        elif self._stream is not None:
            with self._stream.behind():
                reduction.finish()
                done()  # a future takes down the stream that it is set on
        else:
            self._advance(reduction, len(found.views))
            self._open = reduction, done
        if bucket.is_last():
            # With static_graph DDP waits for its futures in the callback that fills the buckets.
            self._finish_open()
            if joined:
                self._end_backward()
            else:  # queued before DDP's own wait for the futures
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _refuse_join(self, reducer: GradientReducer) -> None:
        """Stop where a rank without inputs cannot go along with the others, and tell them.

        Raises:
            ConfigError: Names the setting.
        """
        settings = self.config.data_parallel
        if self.scaler is not None:
            problem = "a GradScaler: this rank does not see how the others change their loss scale"
        elif self._poisoned.skips:
            problem = "nonfinite_action = 'skip': this rank does not see which steps the others skip"
        elif settings.verify_every:
            problem = "verify_every: this rank's weights stay behind until all ranks have joined"
        elif settings.error_feedback == "step_ahead":
            problem = "error_feedback = 'step_ahead': this rank makes no optimizer steps"
        else:
            return
        reducer.exchange.abort()
        raise ConfigError(
            f"rank {dist.get_rank()}: this rank has no more inputs, and DistributedDataParallel.join() does "
            f"not work with {problem}; give all ranks the same number of batches (DistributedSampler, "
            "drop_last=True), or leave that setting out"
        )

    def _begin(self, bucket: Bucket) -> None:
        """More of a bucket's gradients are there: reduce those beside the rest of the backward pass."""
        if not self._agreed or not self.averages():
            return
        if bucket not in self._begun:
            self._begun[bucket] = self._reduction(self.begin_bucket(bucket.buffer.device), bucket)
        self._advance(self._begun[bucket], bucket.there)

    def _advance(self, reduction: Reduction, there: int) -> None:
        if (worker := self._worker) is not None:
            self._pending.append(worker.submit(partial(reduction.advance, there, worker.idle)))
        elif self._reducer is not None:
            reduction.advance(there, lambda: False)
            self._reducer.exchange.pump()

    def _reduction(self, reducer: GradientReducer, bucket: Bucket) -> Reduction:
        self._finish_open()  # one after the other
        names = map(self.name_of, bucket.parameters)
        return reducer.begin(list(zip(names, bucket.views, strict=True)), scale=1.0 / reducer.world_size)

    def _end_backward(self) -> None:
        handed_over, self._handed_over = self._handed_over, []
        self._wait()
        self._backward_done = self._local is None  # or the optimizer counts steps
        # With a scaler, or where steps may be skipped, it is known only later what becomes of this one.
        if self.scaler is None and not self._poisoned.skips:
            self._end_step()
        if not handed_over:
            return
        # Behind DDP's own callback, which has been queued since.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._take_back(handed_over))

    def _take_back(self, handed_over: list[_HandedOver]) -> None:
        """Under ``find_unused_parameters`` DDP leaves the gradient of a parameter that no rank used in the
        step as it was: what was to arrive there is still owed.
        """
        dropped = [(each.name, each.view) for each in handed_over if each.dropped()]
        if self._reducer is not None and dropped:
            self._reducer.take_back(dropped)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Decide what becomes of the step that ``optimizer`` is about to make."""
        if self._reducer is None or not self._backward_done:
            return
        skipped = self._poisoned.found(self.steps.step)
        if skipped:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # torch's optimizers leave such parameters and their states alone
        self._end_step(skipped)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Of the parameters that came by: the same on all ranks."""
        found = ((name, parameter.grad) for name, parameter in self._parameters.items())
        return ((name, gradient) for name, gradient in found if gradient is not None)

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for handle in pending:
            handle.wait()
        self._finish_open()
        if self._reducer is not None:
            with contextlib.nullcontext() if self._stream is None else self._stream.behind():
                self._reducer.finish()
        if self._stream is not None:
            self._stream.join()

    def _finish_open(self) -> None:
        """The reduction that was begun within the backward pass; its messages have had time to travel."""
        if self._open is not None:
            (reduction, done), self._open = self._open, None
            reduction.finish()
            done()

    def _end_step(self, skipped: bool = False) -> None:
        if self._reducer is not None and self._backward_done:
            self._backward_done = False
            if self._worker is not None:
                self.metrics.record(Record("gradient", tensors=0, hidden_ms=self._worker.hidden_ms()))
            scale = self._loss_scale()
            # A scaler lowers its scale when, and only when, it has skipped a step.
            skipped |= scale is not None and scale < self._reducer.loss_scale
            self.steps.end(skipped=skipped, loss_scale=scale)

    def _loss_scale(self) -> float | None:
        if self.scaler is None:
            return None
        scale = self.scaler._get_scale_async()
        return float(self.scaler.get_scale() if scale is None else self._scale.of(scale))

    def _followed(self, update: Callable[..., None]) -> Callable[..., None]:
        """The scale is on its way to the host from when the scaler has decided on it, not only when the next
        backward pass asks for it: by then a device has a forward pass to do before it would answer.
        """

        def updated(*arguments: Any, **keywords: Any) -> None:
            update(*arguments, **keywords)
            assert self.scaler is not None
            scale = self.scaler._get_scale_async()
            if scale is not None:
                self._scale.begin(scale)

        return updated

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the configuration alone: ``torch.save`` of a model takes along what is registered with it,
        and neither process groups nor other ranks' residuals can be saved there. See :meth:`save`.
        """
        return DCTConfig.parse, (self.config,)

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank, between two steps; save one per rank."""
        self._wait()
        self._end_step()
        return {"reducer": self._loaded if self._reducer is None else self._reducer.state_dict()}

    def mean(self, tensor: Tensor) -> Tensor:
        """Over the ranks, on CPU; a collective."""
        nccl = dist.get_backend(self.process_group) == "nccl"
        total = tensor.to("cuda" if nccl else "cpu", copy=True)
        dist.all_reduce(total, group=self.process_group)
        return total.div_(dist.get_world_size(self.process_group)).cpu()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same rank."""
        self._wait()
        self._loaded = state["reducer"] or reducer_files.FRESH
        self._backward_done = False
        if self._reducer is not None:
            self._restore(self._reducer)

    def _restore(self, reducer: GradientReducer) -> None:
        reducer.load_state_dict(self._loaded, loss_scale=self._loss_scale())
        self.steps.step = reducer.step

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write one file per rank; a collective, see :func:`.host.reducer_files.save` for the errors."""
        reducer_files.save(
            folder,
            lambda: self.state_dict()["reducer"],
            group=self.process_group,
            configuration=self.config.fingerprint(),
        )

    def load(self, folder: str | os.PathLike[str]) -> bool:
        """Restore :meth:`save`, also of another number of ranks; see :func:`.host.rank_files.load`. Returns
        False, and residuals are zero, if a rank has no file; the log says why.
        """
        state = reducer_files.load(folder, group=self.process_group, sizes=self.sizes)
        self.load_state_dict({"reducer": state})
        return state is not None


class _StepEnd:
    """Forward hook of a model: what became of the last step is known when the next one begins."""

    def __init__(self, state: DCTState | None = None) -> None:
        self._state = state

    def __call__(self, model: torch.nn.Module, *_: Any) -> None:
        if self._state is not None and model.training:
            self._state._end_step()

    def __reduce__(self) -> tuple[Any, ...]:
        return _StepEnd, ()


class _HandedOver(NamedTuple):
    """A gradient in DDP's bucket, and what the parameter's own was before DDP copies it there."""

    name: str
    parameter: Tensor
    view: Tensor
    before: Tensor | None
    version: int

    @classmethod
    def of(cls, name: str, parameter: Tensor, view: Tensor) -> _HandedOver:
        gradient = parameter.grad
        return cls(name, parameter, view, gradient, 0 if gradient is None else gradient._version)

    def dropped(self) -> bool:
        """Whether DDP, which has finished, did not copy it."""
        if self.before is None:
            return self.parameter.grad is None
        untouched = self.parameter.grad is self.before and self.before._version == self.version
        return untouched and self.before.data_ptr() != self.view.data_ptr()  # gradient_as_bucket_view


class Owed:
    """What a :class:`DCTState` owes to the model, for ``torch.distributed.checkpoint``.

    ``dcp.save({"model": ..., "dct": Owed(state)}, checkpoint_id=folder)``, and ``dcp.load`` in the same way:
    the mean of the ranks' residuals, the same on all ranks, so that any number of ranks can load it. Like
    these, both methods are collectives. Thresholds are measured anew. A run that is to go on bitwise, every
    rank with residuals of its own, takes :meth:`DCTState.save`.

    Args:
        state: Made with ``named_parameters``.

    Raises:
        ConfigError: The state does not know the parameters' names.
    """

    def __init__(self, state: DCTState) -> None:
        if state.sizes is None:
            raise ConfigError("Owed(state) needs DCTState(..., named_parameters=model.named_parameters())")
        self._state = state
        small = state.config.data_parallel.min_numel
        self._sizes = {name: numel for name, numel in state.sizes.items() if numel >= small}

    def state_dict(self) -> dict[str, Any]:
        """Residuals by parameter, fp32 [numel], and what they go with."""
        own = self._state.state_dict()["reducer"]
        content = checkpoint.content_of(own, rank=0, world_size=1, unit=1.0)
        streams = checkpoint.reshard([content])["streams"]
        residuals = {}
        for name, numel in self._sizes.items():
            found = streams[name]["residual"] if name in streams else torch.zeros(numel)
            residuals[name] = self._state.mean(found)
        return {"step": own["step"], "loss_scale": own["loss_scale"], "residuals": residuals}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        fresh = {"threshold": Threshold().state_dict(), "velocity": None, "shape": None}
        streams = {name: {**fresh, "residual": residual} for name, residual in saved["residuals"].items()}
        state = {"step": saved["step"], "loss_scale": saved["loss_scale"], "streams": streams}
        self._state.load_state_dict({"reducer": state})


def dct_hook(state: DCTState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook for ``torch.nn.parallel.DistributedDataParallel``.

    Communicates, per parameter of the bucket, the entries of gradient plus residual that reach the
    parameter's threshold, and returns the bucket's buffer (1-D, type and size unchanged) holding their
    average over the ranks. With local updates gradients stay each rank's own, see :meth:`DCTState.local`.

    Args:
        state: Made once per model.
        bucket: What DDP hands over.

    Raises:
        DesyncError: Ranks have other settings, no hook, or are out of step.
        TypeError: The bucket holds sparse gradients (``nn.Embedding(sparse=True)``).
        ConfigError: torch hands over single gradients, or the settings do not work with ``join()``.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp = 'python_reducer' hands single gradients to a communication "
            "hook, and dct_hook reduces buckets; set it to 'ddp_optimizer' before the model is wrapped"
        )
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise TypeError("dct_hook reduces dense gradients; use nn.Embedding(sparse=False) with it")
    future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
    state.reduce(bucket, lambda: future.set_result(buffer))
    return future


def _followed(register: Callable[..., None]) -> Callable[..., None]:
    """``register_comm_hook`` that introduces a model to the state of its hook."""

    def registered(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        register(model, state, hook)
        if isinstance(state, DCTState):
            state.follow(model)

    return registered


Patches().wrap(DistributedDataParallel, "register_comm_hook", _followed)

# DDP checks the annotations of a hook as objects, not as the strings they are in this file.
dct_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})
