"""Gradients of a bucket that are available before the bucket is full.

DDP calls a communication hook when a bucket is full, with 25 MB most often. In small models that is the end
of the backward pass, and no computation is left beside which messages could travel. The layout of the buckets
is known from the last backward pass. The accumulator of a parameter reports its gradient, after DDP's own
hook of that accumulator has copied the gradient to its bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dct_plugin.data_parallel.module_hooks import ModuleHook

from .complex_parameters import entries_of

#: Entries of gradients that are worth a report.
_WORTH = 1 << 18
#: Types that are reduced in place: every other write to a bucket shows in its version.
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Bucket:
    """The layout of one of DDP's buckets, and how much of it is filled.

    Args:
        buffer: All gradients, 1-D.
        parameters: The parameters, in the order of their gradients.

    Attributes:
        views: The gradients in the buffer.
        available: How many of them, from the first on, are in the buffer.
    """

    def __init__(self, buffer: Tensor, parameters: Sequence[Tensor]) -> None:
        self.buffer = buffer
        self.parameters = list(parameters)
        self.views = buffer.split([entries_of(parameter) for parameter in parameters])
        self._starts = [view.data_ptr() for view in self.views]
        self.layout = [*self._starts, *map(id, self.parameters)]
        self.restart()

    def restart(self) -> None:
        """Begin a backward pass."""
        self._filled: set[int] = set()
        self.available = self._reported = 0
        self._version = self.buffer._version

    def note_gradients(self) -> None:
        """Note the parameters' own gradients, before DDP copies those of the buffer there."""
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

    def fill(self, position: int) -> bool:
        """Note that a gradient is available; return False if it is not in the buffer."""
        gradient, version = self.parameters[position].grad, self.buffer._version
        if gradient is None:
            return False
        # With gradient_as_bucket_view it is the parameter's own; else DDP has copied it just now.
        if gradient.data_ptr() != self._starts[position] and version == self._version:
            return False
        self._version = version
        self._filled.add(position)
        while self.available in self._filled:
            self.available += 1
        return True

    def report_due(self) -> bool:
        """Return whether enough gradients have become available since this last returned True."""
        if sum(view.numel() for view in self.views[self._reported : self.available]) < _WORTH:
            return False
        self._reported = self.available
        return True


class EarlyGradients:
    """Reports the gradients of the bucket that DDP fills next.

    Args:
        report: Called with a bucket when more of its gradients are available, on the thread of the backward
            pass.
    """

    def __init__(self, report: Callable[[Bucket], None]) -> None:
        self._report = report
        self._buckets: dict[int, Bucket] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """Number of the bucket and position in it, by the id of a parameter."""
        self._next = 0
        """Number of the bucket for which DDP calls its hook next."""
        self._active = False
        """Whether DDP synchronizes the next backward pass."""
        self._handles: list[Any] = []
        self._accumulators: list[Any] = []
        """Kept, since an accumulator lives as long as somebody refers to it."""

    def watch(self, model: DistributedDataParallel) -> None:
        """Report the gradients of ``model`` from now on.

        Only models on CPU are watched, in which each parameter's gradient comes once in a backward pass: not
        with ``static_graph`` or ``find_unused_parameters``.
        """
        unusual = (
            model.static_graph
            or model.find_unused_parameters
            or model.mixed_precision is not None
            or getattr(model, "_use_python_reducer", False)
        )
        parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        if unusual or any(parameter.device.type != "cpu" for parameter in parameters):
            return
        ours = weakref.ref(self)  # the model's hooks do not keep the state alive

        def forward_done(*_: Any) -> None:
            early = ours()
            # DDP decides in the forward pass whether it synchronizes the backward pass.
            if early is not None and torch.is_grad_enabled() and model.require_forward_param_sync:
                early.begin_pass()

        def accumulated(parameter: int, *_: Any) -> None:
            early = ours()
            if early is not None and early._active:
                early._fill(parameter)

        self._handles.append(model.register_forward_hook(ModuleHook(forward_done, model)))
        with torch.enable_grad():
            for parameter in parameters:
                accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]
                self._handles.append(accumulator.register_hook(partial(accumulated, id(parameter))))
                self._accumulators.append(accumulator)

    def unwatch(self) -> None:
        """Undo :meth:`watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()
        self._active = False

    def begin_pass(self) -> None:
        """Report the gradients of the next backward pass."""
        self._active = True
        self._next = 0
        for bucket in self._buckets.values():
            bucket.restart()

    def full(self, full: dist.GradBucket) -> Bucket:
        """Return the layout of a bucket for which DDP has called its hook."""
        number, bucket = full.index(), Bucket(full.buffer(), full.parameters())
        known = self._buckets.get(number)
        if known is not None and known.layout == bucket.layout:
            bucket = known
        else:
            self._buckets[number] = bucket
            for position, parameter in enumerate(bucket.parameters):
                self._places[id(parameter)] = number, position
        self.passed(full)
        return bucket

    def passed(self, full: dist.GradBucket) -> None:
        """Note that DDP has called its hook for a bucket."""
        number = full.index()
        self._next = number + 1
        if full.is_last():
            self._active = False
            self._buckets = {n: each for n, each in self._buckets.items() if n <= number}

    def _fill(self, parameter: int) -> None:
        number, position = self._places.get(parameter, (-1, 0))
        if number < self._next:
            return
        bucket = self._buckets[number]
        if bucket.buffer.dtype not in _TYPES or not bucket.fill(position):
            self._active = False  # DDP makes its buckets anew in this pass
        elif number == self._next and bucket.report_due():
            self._report(bucket)
