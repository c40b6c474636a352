"""Backward passes under DDP: the buckets that they fill, and the moment before they add to gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dct_plugin.console import logger
from dct_plugin.data_parallel.passes import around_backward_passes, around_passes, remove
from dct_plugin.errors import ConfigError

from ...data_parallel.reducer import Overlap
from ..host.steps import OptimizerSteps
from .parameters import Bucket, ParameterNames


class BucketReductions:
    """Reduces the buckets of backward passes, and tells the steps when a pass ends.

    Args:
        names: The names of the parameters.
        steps: The optimizer steps.
        agree: Called at the first bucket, with its device; returns what runs the reductions.
    """

    def __init__(
        self, names: ParameterNames, steps: OptimizerSteps, agree: Callable[[torch.device], Overlap]
    ) -> None:
        self._names, self._steps, self._agree = names, steps, agree
        self.next_pass = NextPass(steps, self._note_earlier)
        self._overlap: Overlap | None = None
        self._adds = False
        """True if gradients were reduced since :meth:`_note_earlier`."""
        self._reduced: list[Bucket] = []
        """Buckets of this backward pass."""
        self._sparse: set[str] = set()
        """Names of parameters with sparse gradients."""

    def reduce(self, bucket: dist.GradBucket, done: Callable[[], None]) -> None:
        """Reduce a full bucket during the backward pass, then call ``done()``.

        The end of the pass waits for all reductions and raises their errors.

        Raises:
            ConfigError: This rank has no batches, and goes along with the others (``join()``).
        """
        overlap = self._begin(bucket.buffer().device)
        reducer, found = overlap.reducer, Bucket(bucket)
        names = [self._names.name_of(parameter) for parameter in found.parameters]
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

    def leave_dense(self, bucket: dist.GradBucket) -> None:
        """Note a bucket that DDP all-reduces by itself."""
        self._begin(bucket.buffer().device)
        parameters = bucket.parameters()
        self._steps.begin((self._names.name_of(parameter), parameter) for parameter in parameters)
        self._pass_ends(bucket)

    def leave_sparse(self, bucket: dist.GradBucket) -> None:
        """Note a bucket with a sparse gradient, which DDP all-reduces by itself."""
        overlap = self._begin(bucket.buffer().device)
        named = [(self._names.name_of(parameter), parameter) for parameter in bucket.parameters()]
        self._steps.begin(named)
        names = {name for name, _ in named}
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
        unused = [(self._names.name_of(p), view) for bucket in buckets for p, view in bucket.unused()]
        if unused and self._overlap is not None:
            self._overlap.reducer.return_to_residual(unused)

    def _note_earlier(self) -> None:
        """Keep the gradients that DDP reduced in earlier passes of this step, and reduces again with this
        pass's.
        """
        if self._adds and self._overlap is not None and self._overlap.reducer.config.feedback.looks_ahead:
            self._overlap.reducer.add_ons.earlier = {
                name: each.detach().reshape(-1).clone() for name, each in self._names.gradients()
            }
        self._adds = False


def _after_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


class NextPass:
    """Has a step end or be rejected before the next backward pass adds to its gradients.

    Scripts clear gradients before the forward pass or after it, so the beginning of a backward pass decides.

    Args:
        steps: The steps.
        accumulates: Called if neither is so: the pass may add to gradients that were reduced.
    """

    def __init__(self, steps: OptimizerSteps, accumulates: Callable[[], None]) -> None:
        self._steps, self._accumulates = steps, accumulates
        self._handles: list[Any] = [around_backward_passes(self._begin)]
        self._forward: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """End the step that a gradient scaler has made before the forward passes of ``model``."""
        remove(self._forward)
        self._forward.append(around_passes(model, lambda _: self._steps.end_due()))

    def unwatch(self) -> None:
        """Follow no passes any more."""
        remove(self._forward)
        remove(self._handles)

    @contextlib.contextmanager
    def _begin(self, _: bool) -> Iterator[None]:
        if self._steps.awaits_optimizer and torch._C._current_graph_task_id() < 0:
            self._steps.end_or_reject()
            if self._steps.awaits_optimizer:
                self._accumulates()
        yield
