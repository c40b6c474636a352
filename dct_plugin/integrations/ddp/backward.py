"""Backward passes under DDP: the parameters, the buckets that passes fill, and the moment before a pass adds
to gradients.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.passes import around_backward_passes, calls_of, remove
from dct_plugin.data_parallel.reducer import Overlap
from dct_plugin.errors import ConfigError

from ..host.replica_checksums import not_trained
from ..host.steps import OptimizerSteps

if TYPE_CHECKING:
    from dct_plugin.data_parallel.step_ahead.add_on import StepAhead


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as DDP reduces it; a real one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class ModelParameters:
    """The parameters of a model: their names, and those that were reduced so far.

    Args:
        named: ``model.named_parameters()``; parameters without a name are numbered when they are first
            reduced, in the same order on all ranks.

    Attributes:
        sizes: Entries of the gradients of the named parameters; None without names.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._names: dict[int, str] = {}
        self._reduced: dict[str, Tensor] = {}
        self.sizes: dict[str, int] | None = None
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self.add(named)

    def add(self, named: Iterable[tuple[str, AnyTensor]]) -> dict[str, AnyTensor]:
        """Name the parameters that have no name yet; return all of them by name."""
        found = {self._names.setdefault(id(parameter), name): parameter for name, parameter in named}
        if found:
            self.sizes = {**(self.sizes or {}), **{name: as_real(p).numel() for name, p in found.items()}}
        return found

    def attach(self, model: DistributedDataParallel) -> None:
        """Know the model; it is not kept alive."""
        self._model = weakref.ref(model)

    @property
    def attached(self) -> DistributedDataParallel | None:
        """The model; None before :meth:`attach`, and when the script has let it go."""
        return None if self._model is None else self._model()

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter that is reduced."""
        name = self._names.setdefault(id(parameter), f"parameter_{len(self._names):04d}")
        self._reduced.setdefault(name, parameter)
        return name

    def is_reduced(self, parameter: Tensor) -> bool:
        """Return whether a parameter was reduced so far."""
        return self._names.get(id(parameter)) in self._reduced

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of the parameters that were reduced so far, in the order of their reduction."""
        for name, parameter in self._reduced.items():
            if parameter.grad is not None:
                yield name, as_real(parameter.grad)

    def trainable(self) -> dict[str, Tensor]:
        """Return the parameters with gradients that DDP reduces, by name."""
        model = self.attached
        if model is None:
            return {}
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        return self.add((name, p) for name, p in named if p.requires_grad and name not in ignored)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the trainable parameters, and those that were reduced so far, in the order of their names:
        the same on all ranks.
        """
        named = {**self._reduced, **self.trainable()}
        return sorted(named.items(), key=lambda pair: pair[0])

    def common_weights(self, reducer: GradientReducer, ahead: StepAhead | None) -> list[tuple[str, Tensor]]:
        """Return the weights that all ranks hold, by name: not the displaced ones, nor those of a rank alone.

        Args:
            reducer: The reducer, which knows the common weights of local steps.
            ahead: What displaces the weights; None: nothing does.
        """
        weight = (lambda p: p.data) if ahead is None else ahead.weight
        return [(name, reducer.shared_weight(name, as_real(weight(p)))) for name, p in self.named()]

    def not_trained(self) -> list[tuple[str, Tensor]]:
        """Return the frozen parameters and the buffers."""
        model = self.attached
        return [] if model is None else not_trained(model.module, (name for name, _ in self.named()))


class Bucket:
    """The layout of a bucket that DDP has filled.

    Args:
        full: The bucket.

    Attributes:
        parameters: The parameters, in the order of their gradients.
        views: The gradients in the bucket's buffer, 1-D.
    """

    def __init__(self, full: dist.GradBucket) -> None:
        self.parameters = list(full.parameters())
        self.views = full.buffer().split([as_real(parameter).numel() for parameter in self.parameters])
        # The parameters' own gradients, before DDP copies those of the buffer there.
        gradients = [parameter.grad for parameter in self.parameters]
        self._before = [(each, 0 if each is None else each._version) for each in gradients]

    def unused(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameter and view of the gradients that DDP, which has finished, did not copy.

        Under ``find_unused_parameters`` it leaves the gradient of a parameter that no rank used in the step.
        """
        for parameter, view, (before, version) in zip(self.parameters, self.views, self._before, strict=True):
            untouched = parameter.grad is before and (before is None or before._version == version)
            # With gradient_as_bucket_view the gradient is the view.
            if untouched and (before is None or before.data_ptr() != view.data_ptr()):
                yield parameter, view


class BucketReductions:
    """Reduces the buckets of backward passes, and tells the steps when a pass begins and ends.

    Args:
        parameters: The parameters of the model.
        steps: The optimizer steps.
        agree: Called at the first bucket, with its device; returns what runs the reductions.
    """

    def __init__(
        self, parameters: ModelParameters, steps: OptimizerSteps, agree: Callable[[torch.device], Overlap]
    ) -> None:
        self._parameters, self._steps, self._agree = parameters, steps, agree
        self._handles: list[Any] = [around_backward_passes(self._before_backward)]
        self._forward: list[Any] = []
        self._overlap: Overlap | None = None
        self._adds = False
        """True if gradients were reduced since :meth:`_note_earlier`."""
        self._reduced: list[Bucket] = []
        """Buckets of this backward pass."""
        self._sparse: set[str] = set()
        """Names of parameters with sparse gradients."""

    def watch(self, model: nn.Module) -> None:
        """End the step that a gradient scaler has made before the forward passes of ``model``."""
        remove(self._forward)
        self._forward.append(calls_of(model).follow(lambda _: self._steps.end_due()))

    def unwatch(self) -> None:
        """Follow no passes any more."""
        remove(self._forward)
        remove(self._handles)

    def reduce(self, bucket: dist.GradBucket, done: Callable[[], None]) -> None:
        """Reduce a full bucket during the backward pass, then call ``done()``.

        The end of the pass waits for all reductions and raises their errors.

        Raises:
            ConfigError: This rank has no batches, and goes along with the others (``join()``).
        """
        overlap = self._begin(bucket.buffer().device)
        reducer, found = overlap.reducer, Bucket(bucket)
        names = [self._parameters.name_of(parameter) for parameter in found.parameters]
        self._steps.begin(zip(names, found.parameters, strict=True))
        self._reduced.append(found)
        entries = list(zip(names, found.views, strict=True))
        # With static_graph DDP hands over all buckets when the pass is over, and then waits for them.
        overlap.submit(
            reducer.begin(entries, scale=1.0 / reducer.group.group_size), done, last=bucket.is_last()
        )
        self._pass_ends(bucket)

    @property
    def stays_dense(self) -> bool:
        """True if DDP sums the buckets of this pass by itself."""
        reducer = None if self._overlap is None else self._overlap.reducer
        return reducer is not None and reducer.group.stays_dense and reducer.config.nonfinite_action == "pass"

    def leave(self, bucket: dist.GradBucket, *, is_sparse: bool) -> None:
        """Note a bucket that DDP all-reduces by itself; rank 0 warns once if it ``is_sparse``."""
        overlap = self._begin(bucket.buffer().device)
        named = [(self._parameters.name_of(parameter), parameter) for parameter in bucket.parameters()]
        self._steps.begin(named)
        names = {name for name, _ in named} if is_sparse else set()
        if names - self._sparse and overlap.reducer.group.group_rank == 0:
            logger.warning("dct: DDP all-reduces sparse gradients by itself: %s", ", ".join(sorted(names)))
        self._sparse |= names
        self._pass_ends(bucket)

    def wait(self) -> None:
        """Return when the results of all reductions can be used."""
        if self._overlap is not None:
            self._overlap.wait()

    def _begin(self, device: torch.device) -> Overlap:
        if self._overlap is None:
            self._overlap = self._agree(device)
        if torch._C._current_graph_task_id() < 0:  # DDP reduces zeros for a rank without inputs
            with self._overlap.reducer.exchanges.preparing():
                raise ConfigError(
                    f"rank {dist.get_rank()}: this rank has no more inputs, and "
                    "DistributedDataParallel.join() does not work with compressed gradients; give all ranks "
                    "the same number of batches (DistributedSampler, drop_last=True)"
                )
        self._steps.end_due()
        return self._overlap

    def _pass_ends(self, bucket: dist.GradBucket) -> None:
        if bucket.is_last():  # queued before DDP's own wait for the futures
            _after_backward(self._end_pass)

    def _end_pass(self) -> None:
        reduced, self._reduced = self._reduced, []
        self.wait()
        self._steps.end_pass()
        self._adds = True
        if reduced:  # after DDP's own callback, which has been queued since
            _after_backward(functools.partial(self._take_back_unused, reduced))

    def _take_back_unused(self, buckets: Sequence[Bucket]) -> None:
        """Add the gradients that no rank used back to the residuals."""
        unused = [(self._parameters.name_of(p), view) for bucket in buckets for p, view in bucket.unused()]
        if unused and self._overlap is not None:
            self._overlap.reducer.return_to_residual(unused)
            names = {name for name, _ in unused}
            for each in self._steps.gradients:
                each.leave(names)

    @contextlib.contextmanager
    def _before_backward(self, _: bool) -> Iterator[None]:
        """Have a step end or be rejected before the next backward pass adds to its gradients.

        Scripts clear gradients before the forward pass or after it, so the beginning of a backward pass
        decides.
        """
        if self._steps.awaits_optimizer and torch._C._current_graph_task_id() < 0:
            self._steps.end_or_reject()
            if self._steps.awaits_optimizer:
                self._note_earlier()
        yield

    def _note_earlier(self) -> None:
        """Keep the gradients that DDP reduced in earlier passes of this step, and reduces again with this
        pass's.
        """
        for each in self._steps.gradients:
            each.accumulate()
        if self._adds and self._overlap is not None and self._overlap.reducer.config.feedback.looks_ahead:
            self._overlap.reducer.add_ons.earlier = {
                name: each.detach().reshape(-1).clone() for name, each in self._parameters.gradients()
            }
        self._adds = False


def _after_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
