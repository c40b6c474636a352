"""The parameters of a model under DDP: their names, complex ones as real ones, and their buckets."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dct_plugin.data_parallel import GradientReducer

from ..host.replica_checksums import not_trained

if TYPE_CHECKING:
    from dct_plugin.data_parallel.step_ahead.add_on import StepAhead


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as DDP reduces it; a real one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def entries_of(parameter: Tensor) -> int:
    """Return the number of entries of a parameter's gradient in a bucket."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class ParameterNames:
    """Names of a model's parameters, and the parameters that were reduced so far.

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
        self.add(named)

    def add(self, named: Iterable[tuple[str, AnyTensor]]) -> dict[str, AnyTensor]:
        """Name the parameters that have no name yet; return all of them by name."""
        found = {self._names.setdefault(id(parameter), name): parameter for name, parameter in named}
        if found:
            self.sizes = {**(self.sizes or {}), **{name: entries_of(p) for name, p in found.items()}}
        return found

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter that is reduced."""
        name = self._names.setdefault(id(parameter), f"parameter_{len(self._names):04d}")
        self._reduced.setdefault(name, parameter)
        return name

    def is_reduced(self, parameter: Tensor) -> bool:
        """Return whether a parameter was reduced so far."""
        return self._names.get(id(parameter)) in self._reduced

    def reduced(self) -> list[tuple[str, Tensor]]:
        """Return the parameters that were reduced so far, in the order of their names: the same on all
        ranks.
        """
        return sorted(self._reduced.items(), key=lambda item: item[0])

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of the parameters that were reduced so far, in the order of their reduction."""
        for name, parameter in self._reduced.items():
            if parameter.grad is not None:
                yield name, as_real(parameter.grad)


class AttachedModel:
    """The model whose gradients are reduced, once it is attached; it is not kept alive.

    Args:
        names: The names of its parameters.
    """

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._model: weakref.ref[DistributedDataParallel] | None = None

    def attach(self, model: DistributedDataParallel) -> None:
        """Follow a model."""
        self._model = weakref.ref(model)

    @property
    def attached(self) -> DistributedDataParallel | None:
        """The model; None before :meth:`attach`, and when the script has let it go."""
        return None if self._model is None else self._model()

    def trainable(self) -> dict[str, Tensor]:
        """Return the parameters with gradients that DDP reduces, by name."""
        model = self.attached
        if model is None:
            return {}
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        return self._names.add((name, p) for name, p in named if p.requires_grad and name not in ignored)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the trainable parameters, and those that were reduced so far, in the order of their names:
        the same on all ranks.
        """
        named = {**dict(self._names.reduced()), **self.trainable()}
        return sorted(named.items(), key=lambda pair: pair[0])

    def common_weights(
        self, reducer: GradientReducer | None, ahead: StepAhead | None
    ) -> list[tuple[str, Tensor]]:
        """Return the weights that all ranks hold, by name: not the displaced ones, nor those of a rank alone.

        Args:
            reducer: The reducer, which knows the common weights of local steps.
            ahead: What displaces the weights; None: nothing does.
        """
        weight = (lambda p: p.data) if ahead is None else ahead.weight
        named = [(name, as_real(weight(parameter))) for name, parameter in self.named()]
        return named if reducer is None else [(n, reducer.shared_weight(n, own)) for n, own in named]

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
        self.views = full.buffer().split([entries_of(parameter) for parameter in self.parameters])
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
