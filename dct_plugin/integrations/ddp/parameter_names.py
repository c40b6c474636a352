"""Names of parameters, which are the names of their streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor

from .complex_parameters import as_real, entries_of

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
