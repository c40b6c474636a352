"""Which gradients of a bucket are there before the bucket is full.

DDP calls a communication hook when a bucket is full, with 25 MB most often. Of small models that is at the
end of the backward pass, and nothing is left to hide messages behind. Where the gradients of a bucket will be
is known from the last backward pass, and when one of them is there, its parameter's accumulator tells: behind
DDP's own hook of it, which puts the gradient in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Arrivals", "Bucket"]

#: Entries of gradients that are worth telling of.
_WORTH = 1 << 18
#: Types that are reduced in place: what else is written to a bucket shows in its version.
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Bucket:
    """One of DDP's buckets, as it was in the last backward pass.

    Args:
        buffer: All gradients, 1-D.
        parameters: In the order of their gradients.

    Attributes:
        views: The gradients in the buffer.
        there: How many of them, from the first on, are there.
    """

    def __init__(self, buffer: Tensor, parameters: Sequence[Tensor]) -> None:
        self.buffer = buffer
        self.parameters = list(parameters)
        self.views = buffer.split([parameter.numel() for parameter in parameters])
        self._starts = [view.data_ptr() for view in self.views]
        self._arrived: set[int] = set()
        self.there = self._told = 0
        self.version = buffer._version

    def same_as(self, other: Bucket) -> bool:
        """Whether both are the same parameters' gradients at the same place."""
        return self._starts == other._starts and list(map(id, self.parameters)) == list(
            map(id, other.parameters)
        )

    def restart(self) -> None:
        """A backward pass is over, or about to begin."""
        self._arrived.clear()
        self.there = self._told = 0
        self.version = self.buffer._version

    def arrive(self, position: int) -> bool:
        """A gradient is said to be there; whether it is."""
        gradient, version = self.parameters[position].grad, self.buffer._version
        if gradient is None:
            return False
        # With gradient_as_bucket_view it is the parameter's own; else it has been copied just now.
        if gradient.data_ptr() != self._starts[position] and version == self.version:
            return False
        self.version = version
        self._arrived.add(position)
        while self.there in self._arrived:
            self.there += 1
        return True

    def worth_telling(self) -> bool:
        """Whether so many more are there since the last time that it was."""
        if sum(view.numel() for view in self.views[self._told : self.there]) < _WORTH:
            return False
        self._told = self.there
        return True


class _ForwardEnd:
    """Forward hook of a model: DDP decides in the forward pass whether it synchronizes the backward pass. A
    class, so that a model with it can be pickled; what is loaded awaits nothing.
    """

    def __init__(self, arrivals: Callable[[], Arrivals | None] = lambda: None) -> None:
        self._arrivals = arrivals

    def __call__(self, model: nn.Module, *_: Any) -> None:
        # Without gradients DDP decides nothing.
        if torch.is_grad_enabled() and model.require_forward_param_sync:
            arrivals = self._arrivals()
            if arrivals is not None:
                arrivals.await_gradients()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardEnd, ()


class Arrivals:
    """Tells a hook what of the bucket that DDP fills next is there.

    Only of models that DDP synchronizes in the plain way: each parameter's gradient comes once in a backward
    pass (no ``static_graph``, no ``find_unused_parameters``), and on CPU, where a thread can do something
    with it.

    Args:
        tell: Called with a bucket when more of its gradients are there, on the thread of the backward pass.
    """

    def __init__(self, tell: Callable[[Bucket], None]) -> None:
        self._tell = tell
        self._buckets: dict[int, Bucket] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """Of a parameter, by its id: number of its bucket, position there."""
        self._next = 0
        """Number of the bucket that DDP will call its hook with next."""
        self._awaited = False
        """Whether DDP synchronizes the next backward pass."""
        self._handles: list[Any] = []
        self._accumulators: list[Any] = []
        """They live as long as somebody holds them."""

    def follow(self, model: DistributedDataParallel) -> None:
        """Look at the gradients of a model whose hook is about to be registered; behind DDP's own hooks of
        them, which it has registered when it was made.
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

        def accumulated(index: int, *_: Any) -> None:
            arrivals = ours()
            if arrivals is not None and arrivals._awaited:
                arrivals._accumulated(index)

        self._handles.append(model.register_forward_hook(_ForwardEnd(ours)))
        with torch.enable_grad():
            for parameter in parameters:
                accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]
                self._handles.append(accumulator.register_hook(partial(accumulated, id(parameter))))
                self._accumulators.append(accumulator)

    def leave(self) -> None:
        """No longer look at the gradients of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()
        self._awaited = False

    def await_gradients(self) -> None:
        """The next backward pass is synchronized."""
        self._awaited = True
        self._next = 0
        for bucket in self._buckets.values():
            bucket.restart()

    def full(self, bucket: dist.GradBucket) -> Bucket:
        """DDP has called its hook with a bucket: how that looks now."""
        number, found = bucket.index(), Bucket(bucket.buffer(), bucket.parameters())
        known = self._buckets.get(number)
        if known is not None and known.same_as(found):
            found = known
        else:
            self._buckets[number] = found
            for position, parameter in enumerate(found.parameters):
                self._places[id(parameter)] = number, position
        self._next = number + 1
        if bucket.is_last():
            self._awaited = False
            self._buckets = {n: each for n, each in self._buckets.items() if n <= number}
        return found

    def _accumulated(self, index: int) -> None:
        number, position = self._places.get(index, (-1, 0))
        if number < self._next:
            return
        bucket = self._buckets[number]
        if bucket.buffer.dtype not in _TYPES or not bucket.arrive(position):
            self._awaited = False  # buckets are made anew in this pass
        elif number == self._next and bucket.worth_telling():
            self._tell(bucket)
