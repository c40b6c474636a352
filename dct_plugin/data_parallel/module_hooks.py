"""Hooks for features that let a model's parameters hold other values during training passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.swa_utils import AveragedModel

#: By module whose passes run at displaced weights, those; their ``hidden()`` is a context of the real ones.
DISPLACED: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()

_update_parameters = AveragedModel.update_parameters


@contextmanager
def weights(model: torch.nn.Module) -> Iterator[None]:
    """Give access to the real weights of ``model`` within the block, for reading and writing.

    It may be a part of the attached model, or contain it.
    With ``local_steps`` they are the common weights. Needed with ``"feedback": "step_ahead"`` between a
    training forward pass and the end of its backward pass; see
    :mod:`dct_plugin.data_parallel.step_ahead.displaced_weights`.
    """
    modules = set(model.modules())
    with ExitStack() as stack:
        for attached, shown in list(DISPLACED.items()):
            if not modules.isdisjoint(attached.modules()):
                stack.enter_context(shown.hidden())
        yield


@functools.wraps(_update_parameters)
def _average_weights(self: AveragedModel, model: torch.nn.Module) -> None:
    with weights(model):
        _update_parameters(self, model)


def register(module: torch.nn.Module, shown: Any) -> None:
    """Note what shows other values in the parameters of a module: :func:`weights` hides them, and
    ``AveragedModel.update_parameters`` reads the real weights.
    """
    DISPLACED[module] = shown
    AveragedModel.update_parameters = _average_weights  # type: ignore[method-assign]


def unregister(shown: Any) -> None:
    """Undo :func:`register`."""
    for module in [module for module, each in DISPLACED.items() if each is shown]:
        del DISPLACED[module]
    if not DISPLACED:
        AveragedModel.update_parameters = _update_parameters  # type: ignore[method-assign]


class ModuleHook:
    """A hook that belongs to one module: pickled and copied modules carry one that does nothing, and that
    loads where this package is not installed.

    Args:
        function: The hook.
        module: The hook runs for calls of this module only (shallow copies share hooks).
    """

    def __init__(self, function: Callable[..., None], module: torch.nn.Module) -> None:
        self._function, self._module = function, module

    def __call__(self, called: torch.nn.Module, *arguments: Any) -> None:
        if called is self._module:
            self._function(called, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def remove(handles: list[Any]) -> None:
    """Remove all of these hooks, and empty the list."""
    for handle in handles:
        handle.remove()
    handles.clear()
