"""The communication hook and its state."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dct_plugin.checkpoint import FRESH, StateFiles, mean_residuals
from dct_plugin.compression.stream import fresh_state
from dct_plugin.config import DataParallelConfig, DCTConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.reducer import Overlap
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.errors import ConfigError
from dct_plugin.host_traffic import counted_by
from dct_plugin.policy import Training
from dct_plugin.transport.nodes import Nodes, layout_of

from ..host import startup
from ..host.attachment import PlainTraining, switched_off
from ..host.optimizer_attachment import OptimizerAttachment
from ..host.settings import optimizers_of
from ..host.startup import nodes_of
from ..host.steps import FrozenParameters
from .backward import BucketReductions, ModelParameters

if TYPE_CHECKING:
    from dct_plugin.data_parallel.step_ahead.add_on import StepAhead

#: Seconds in which all ranks begin a save that needs all of them.
_SAVE_LIMIT = 10.0
_PYTHON_REDUCER = (
    "torch._dynamo.config.optimize_ddp = 'python_reducer' has DistributedDataParallel reduce single "
    "gradients: set it to 'ddp_optimizer' before the model is wrapped"
)
#: What :class:`DistributedDataParallel` does beside its hook, with the reason for a refusal.
_REFUSED: tuple[tuple[Callable[[Any], object], str], ...] = (
    (lambda model: getattr(model, "_use_python_reducer", False), _PYTHON_REDUCER),
    (
        lambda model: getattr(model, "_delay_all_reduce_params", ()),
        "DistributedDataParallel(delay_all_reduce_named_params=...) does not wait for the all-reduce of "
        "these parameters, and the ranks drift apart: leave it out",
    ),
    (
        lambda model: any(hasattr(each, "_in_backward_optimizers") for each in model.parameters()),
        "_apply_optimizer_in_backward has DistributedDataParallel make the optimizer's steps in a hook, and "
        "it takes one hook: call optimizer.step() after the backward pass",
    ),
)


class DCTState(OptimizerAttachment):
    """State of :func:`dct_hook`: the reducer, and the stream of each parameter.

    Streams belong to parameters, so residuals survive the bucket rebuild after DDP's first step.

    Args:
        config: The configuration, its ``data_parallel`` settings, or a mapping with the keys of the ``dct``
            section.
        process_group: The group that DDP averages over; None for that of the model that is registered.
        named_parameters: ``model.named_parameters()``, to name streams in messages and saved states. Without
            it :meth:`register` takes the names of its model.
        scaler: The gradient scaler of mixed precision. Residuals follow its scale, and a step that it skips
            is taken back. A step ends when the gradients of the next one come.
        optimizer: The model's optimizer, a wrapper of it, or a list of its optimizers, which ``feedback`` and
            ``adaptive: "accordion"`` follow. Its steps are counted. Without it the steps of an optimizer of
            torch that uses the gradients are counted, or backward passes if there is none. With
            ``nonfinite_action: "skip"`` its steps on gradients that are not finite change nothing (a
            ``scaler`` skips them itself), and gradients that are cleared without ``optimizer.step()`` leave
            residuals as they were.
        total_steps: Optimizer steps of the run, to which the start adapts; None if not known.
        time_limit: Seconds in which the other ranks must reach their first bucket; None: as long as the
            process group waits.

    Raises:
        ConfigError: The configuration is wrong, or needs an ``optimizer``.

    The process group may be made later, but before :meth:`register`.

    Example:
        >>> DCTState({"data_parallel": {"sparsity": 0.99}}, optimizer=optimizer).register(ddp_model)
    """

    framework = "torch DDP"
    hint = "its model has no dct_hook (register_comm_hook), or it is far behind"
    call = "DCTState"
    remedy = "make it from model.parameters()"
    sharded = False

    def __init__(
        self,
        config: DCTConfig | DataParallelConfig | Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        total_steps: int | None = None,
        time_limit: float | None = None,
    ) -> None:
        if isinstance(config, DataParallelConfig):
            config = DCTConfig(data_parallel=config)
        self.parameters = ModelParameters(named_parameters)
        super().__init__(config, optimizer, scaler, self.parameters.gradients)
        self.process_group, self.time_limit = process_group, time_limit
        self.fallback_hook: Callable[[dist.GradBucket], torch.futures.Future[Tensor]] | None = None
        """Reduces buckets in place of this state, if it is switched off or closed."""
        self.ends.callback(fall_back, weakref.ref(self))
        self._total_steps, self._resolved = total_steps, False
        self._optimizer_steps.follow(self._optimizers)
        self._buckets = BucketReductions(self.parameters, self._optimizer_steps, self._agree)
        self.ends.callback(self._buckets.unwatch)
        self._loaded = FRESH
        self._topic, self._coverage = "ddp", ""
        self._reducer: GradientReducer | None = None
        self._ahead: StepAhead | None = None
        if reason := switched_off(self.written):
            PlainTraining(self.written, reason)
            self.close()

    # -- the model ---

    def register(self, model: DistributedDataParallel) -> DCTState:
        """Reduce the gradients of ``model`` through this state.

        With an ``optimizer`` no other call is needed. ``model.register_comm_hook(state, dct_hook)`` instead
        does not know the parameters' names.

        Raises:
            ConfigError: The configuration does not work with this model and optimizer.
        """
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(f"DCTState.register: {type(model).__name__} is no DistributedDataParallel")
        if faults := [why for has, why in _REFUSED if has(model)]:
            raise ConfigError(f"DCTState.register: {faults[0]}")
        if self.process_group is None and model.process_group is not dist.group.WORLD:
            self.process_group = model.process_group
        try:
            self._check(model)
            self.parameters.attach(model)
            reduce_through_hook(model, self)
            finalizer = weakref.finalize(model, self.close)
            finalizer.atexit = False
            self.ends.callback(finalizer.detach)
            if self._reducer is not None:  # step_ahead was called before
                self._change_passes(model, self._reducer)
            elif self.config.data_parallel.local_steps is not None:  # from the first pass on
                self.reducer(model.device)
            if self.applied.inside > 1:
                self.make_process_groups(
                    lambda: self.reducer(model.device).group, topic="ddp", group=self.process_group
                )
        except BaseException:
            self.close()
            raise
        return self

    def _check(self, model: DistributedDataParallel) -> None:
        """Decide the settings, and check that the optimizers are the model's."""
        self.note(model.module)
        self.parameters.add(model.module.named_parameters())
        self._decide()
        reduced = {n: p for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore}
        own = set(map(id, reduced.values()))
        coverage = startup.coverage(model.module, model.module.parameters(), lambda p: id(p) in own)
        self._coverage = f"{coverage}, "
        if self.config.data_parallel.feedback.looks_ahead:
            units_of(*self._optimizers)
        self._check_optimizers(model.module, reduced)
        if self._is_first:
            self.steps.frozen = FrozenParameters(
                model.module.named_parameters(),
                "torch DDP does not reduce their gradients, and the ranks drift apart; make "
                "DistributedDataParallel(model) anew and call dct_plugin.attach again",
                self.parameters.is_reduced,
            )

    def _change_passes(self, model: DistributedDataParallel, reducer: GradientReducer) -> None:
        """Displace the weights of a model in its passes, or train its own ones."""
        self._buckets.watch(model.module)
        settings = self.config.data_parallel
        if self._optimizers and settings.feedback.looks_ahead and self._ahead is None:
            self._displace(model.module, reducer)
        if settings.local_steps is None:
            self._watch_loading(model.module, lambda: self.parameters.common_weights(reducer, self._ahead))
        else:
            named = self.parameters.trainable()
            if (local := reducer.add_ons.local_steps) is not None:
                local.attach(model.module, named, self._optimizers)
                self._buckets.watch(model.module)  # before an evaluation shows the common weights
                self.ends.callback(local.detach)
                # DDP would send the first rank's buffers in every forward pass.
                self.ends.callback(setattr, model, "broadcast_buffers", model.broadcast_buffers)
                model.broadcast_buffers = False

    def step_ahead(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> None:
        """Train ``model`` (which DDP wraps) at displaced weights, as ``"feedback": "step_ahead"`` needs.

        :meth:`register` calls it if the state has the optimizer.

        Raises:
            ConfigError: The step of this ``optimizer`` is not known, or ``feedback`` is another one.
        """
        model, optimizers = getattr(model, "module", model), optimizers_of(optimizer, "DCTState.step_ahead")
        if not self._optimizers:
            self._optimizer_steps.follow(optimizers)
        self._optimizers, before = optimizers, self._ahead
        self.note(model)
        self._decide()
        reducer = self.reducer(next(model.parameters()).device)
        if self._ahead is before:  # else the passes of a registered model are displaced by that call
            self._displace(model, reducer)

    def _displace(self, model: torch.nn.Module, reducer: GradientReducer) -> None:
        named, units = self.parameters.add(model.named_parameters()), units_of(*self._optimizers)
        if self._ahead is not None:
            self._ahead.detach()
        displaced = [(name, each) for name, each in named.items() if not each.is_complex()]
        # Buckets have the strides of the parameters when DDP made them: at its start, or after a first pass.
        is_late = not getattr(model, "find_unused_parameters", False)
        self._ahead = reducer.add_ons.step_ahead.prepare(displaced, units, in_memory_order=is_late)
        self._ahead.attach(model, *self._optimizers)
        self.ends.callback(self._ahead.detach)
        self._buckets.watch(model)  # before weights are displaced

    def reducer(self, device: torch.device) -> GradientReducer:
        """Return the reducer for gradients on ``device``. The first call makes it, and changes the passes of
        the registered model: the first bucket makes that call, or a state that is loaded before.
        """
        if self._reducer is None:
            parameters = self.parameters
            self._reducer = self._make_reducer(
                self.process_group,
                self._nodes(),
                device,
                lambda: parameters.common_weights(self.reducer(device), self._ahead),
                parameters.not_trained,
            )
            self.load_state_dict({"reducer": self._loaded})
            if (attached := parameters.attached) is not None:
                self._change_passes(attached, self._reducer)
        return self._reducer

    @property
    def reducers(self) -> Iterable[GradientReducer]:
        if (model := self.parameters.attached) is not None:
            self.reducer(model.device)
        return super().reducers

    def weights(self) -> Iterable[Tensor]:
        return self.parameters.trainable().values()

    # -- the start ---

    def all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a full bucket; the end of the backward pass waits for it and raises its errors. A bucket
        with a sparse gradient is left to DDP's own all-reduce, and so are all where that is faster.
        """
        buffer = bucket.buffer()
        is_sparse = buffer.layout is not torch.strided
        if is_sparse or self._buckets.stays_dense:
            self._buckets.leave(bucket, is_sparse=is_sparse)
            why = "sparse" if is_sparse else "faster"
            with counted_by(functools.partial(self.metrics.uncompressed, "gradient", why)):
                return averaged(self.process_group, bucket)
        future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        self._buckets.reduce(bucket, lambda: future.set_result(buffer))
        return future

    def _agree(self, device: torch.device) -> Overlap:
        def prepare() -> str:
            self._decide("register_comm_hook does not tell the model, DCTState.register does")
            reducer = self.reducer(device)
            if self.config.data_parallel.feedback.looks_ahead and self._ahead is None:
                raise ConfigError(
                    "dct.data_parallel.feedback = 'step_ahead' needs the model and its optimizer: call "
                    "dct_plugin.attach(model, optimizer, section) in place of DCTState, or "
                    "state.step_ahead(model, optimizer) before the first step"
                )
            return f"{self.framework}, {self._coverage}{reducer.group.group_size} ranks"

        self._topic = self.agree(prepare, topic="ddp", group=self.process_group, facts=self._facts)
        return Overlap(self.reducer(device))

    def _decide(self, step_ahead_unavailable: str = "") -> None:
        """Let the settings follow the optimizer, once; the argument says why step-ahead cannot be had."""
        passes = self.written.data_parallel.nonfinite_action == "pass"
        has_scaler = self._optimizer_steps.scaler is not None
        self._require_optimizer("nonfinite_action = 'skip'", unless=passes or has_scaler)
        if self._resolved:
            return
        self._resolved = True
        ranks = dist.get_world_size(self.process_group) if dist.is_initialized() else 1
        training = Training(
            ranks=ranks,
            steps=self._total_steps,
            step_ahead_unavailable=step_ahead_unavailable,
            optimizer_unknown_hint="dct_plugin.attach(model, optimizer) takes what suits it",
        )
        self.resolve(self._optimizers, training, self._nodes() if ranks > 1 else None)

    def _nodes(self) -> Nodes | None:
        settings = self.written.data_parallel
        return nodes_of(settings, self.process_group, limit=self.time_limit, hint=self.hint)

    # -- saved states ---

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, thresholds and counters of this rank, between two steps; save one per rank."""
        self._buckets.wait()
        self._optimizer_steps.end_or_reject()
        return {"reducer": self._loaded if self._reducer is None else self._reducer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same rank."""
        self._buckets.wait()
        self._loaded = state["reducer"] or FRESH
        self._optimizer_steps.forget()
        model = self.parameters.attached
        if self._reducer is None and self._loaded is not FRESH and model is not None:
            self.reducer(model.device)  # the next pass is displaced by what was not sent
        elif self._reducer is not None:
            scale = self._optimizer_steps.loss_scale() or 1.0  # not the saved one: the scaler may be gone
            self._reducer.load_state_dict(self._loaded, loss_scale=scale)
            self.steps.step = self._reducer.group.step

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write one file per rank; a collective, see :class:`dct_plugin.checkpoint.StateFiles`."""
        self._files().save(folder, lambda: self.state_dict()["reducer"])

    def save_alone(self, folder: str | os.PathLike[str]) -> None:
        """Write this rank's file without waiting for another rank; :meth:`load` compares the files.

        Residuals of ranks that do not call it are not saved. With a gradient scaler a step ends here. If that
        needs the other ranks (``nodes``, ``quality``), all ranks must call it.

        Raises:
            DesyncError: Another rank that is needed did not call it within seconds.
        """
        reducer = self._reducer
        if self._optimizer_steps.due and reducer is not None:
            settings = self.config.data_parallel
            if reducer.group.node is not None or settings.quality or settings.trains_alone:
                startup.join(
                    f"{self._topic}/save {self.steps.step}",
                    group=self.process_group,
                    limit=_SAVE_LIMIT,
                    hint="accelerator.save_state was called on some ranks alone: with a gradient scaler and "
                    "nodes or quality call it on all ranks",
                ).confirm({})
            self._optimizer_steps.end_due(alone=True)
        self._files().save_alone(folder, self.state_dict()["reducer"], self._topic)

    def load(self, folder: str | os.PathLike[str]) -> bool:
        """Restore :meth:`save`, also of another number of ranks; see
        :meth:`dct_plugin.checkpoint.StateFiles.load`. Return False, with residuals of zero, if a rank has no
        file; the log says why.
        """
        state = self._files(layout_of(self._nodes())).load(folder)
        self.load_state_dict({"reducer": state})
        return state is not None

    def _files(self, layout: Sequence[Sequence[int]] = ()) -> StateFiles:
        """Return the files of the ranks; only to read them needs ``layout``."""
        return StateFiles(
            dist.get_rank(self.process_group),
            dist.get_world_size(self.process_group),
            configuration=self.config.fingerprint(),
            sizes=self.parameters.sizes,
            layout=layout,
            group=self.process_group,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a state of the same configuration, for a model to be registered with.

        ``torch.save`` and ``copy.deepcopy`` of a model take along what is registered with it. Process groups
        and other ranks' residuals cannot be saved there: see :meth:`save`.
        """
        return DCTState, (self.config,)


def reduce_through_hook(model: DistributedDataParallel, state: DCTState) -> None:
    """Register the hook; DDP takes one and keeps it, so an earlier state of ours calls this one.

    Raises:
        ConfigError: The model has another hook.
    """
    hooks = model._comm_hooks
    earlier = [other for _, other in hooks if isinstance(other, DCTState)]
    try:
        model.register_comm_hook(state, dct_hook)
    except RuntimeError as error:  # but a copied model has none, though it lists that of the original
        hooks.pop()
        if not earlier:
            name = getattr(hooks[0][0], "__name__", hooks[0][0]) if hooks else "one of torch's own"
            raise ConfigError(
                f"dct_plugin.attach: the model has a communication hook already ({name}), and "
                "DistributedDataParallel takes one: leave that hook out, or this call"
            ) from error
        earlier[-1].fallback_hook = functools.partial(dct_hook, state)


def fall_back(closed: Callable[[], DCTState | None]) -> None:
    """Let DDP average the buckets of a state that is closed, unless another state reduces them."""
    if (state := closed()) is not None and state.fallback_hook is None:
        state.fallback_hook = functools.partial(averaged, state.process_group)


def averaged(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks as DDP does without a hook, with the same bits.

    torch's ``allreduce_hook`` divides, which takes 8 % of a step on a CPU; DDP multiplies by the reciprocal.
    """
    buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    averages: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averages


def dct_hook(state: DCTState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook for ``torch.nn.parallel.DistributedDataParallel``.

    Communicates, per parameter of the bucket, the entries of gradient plus residual that reach the
    parameter's threshold, and returns the bucket's buffer (1-D, type and size unchanged) holding their
    average over the ranks. Sparse gradients (``nn.Embedding(sparse=True)``) are left to DDP's own all-reduce.

    Args:
        state: Made once per model.
        bucket: The bucket of DDP.

    Raises:
        DesyncError: Ranks have other settings, no hook, or are out of step.
        ConfigError: torch hands over single gradients, or a rank has no more batches (``join()``).
    """
    if not isinstance(bucket, dist.GradBucket):
        raise ConfigError(
            "dct_hook reduces buckets of DistributedDataParallel, and was handed a single gradient. For a "
            "model under FSDP, dct_plugin.attach(model, optimizer, section) says what there is. "
            f"{_PYTHON_REDUCER}"
        )
    if state.leaves:
        state.close_if_done()
    if state.fallback_hook is not None:
        return state.fallback_hook(bucket)
    return state.all_reduce(bucket)


# DDP checks the annotations of a hook as objects, not as the strings they are in this file.
dct_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})


class AveragedResiduals:
    """The mean of the ranks' residuals, which any number of ranks can load.

    ``dcp.save({"model": ..., "dct": AveragedResiduals(state)}, checkpoint_id=folder)``, and ``dcp.load`` in
    the same way. Both methods are collectives. Thresholds are measured anew after loading. A run that must
    continue bitwise, each rank with its own residuals, uses :meth:`.state.DCTState.save`.

    Args:
        state: The state; it knows the parameters' names.

    Raises:
        ConfigError: The state does not know the names.
    """

    def __init__(self, state: DCTState) -> None:
        sizes = state.parameters.sizes
        if sizes is None:
            raise ConfigError(
                "AveragedResiduals(state) needs DCTState(..., named_parameters=model.named_parameters())"
            )
        self._state = state
        small = state.config.data_parallel.min_numel
        self._sizes = {name: numel for name, numel in sizes.items() if numel >= small}

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by parameter, fp32 [numel], with the step and the loss scale."""
        own = self._state.state_dict()["reducer"]
        residuals = mean_residuals(own, self._sizes, self._state.process_group)
        return {"step": own["step"], "loss_scale": own["loss_scale"], "residuals": residuals}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        streams = {name: fresh_state(residual) for name, residual in saved["residuals"].items()}
        state = {"step": saved["step"], "loss_scale": saved["loss_scale"], "streams": streams}
        self._state.load_state_dict({"reducer": state})
