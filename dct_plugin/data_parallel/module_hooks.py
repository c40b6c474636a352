"""Hooks for features that let a model's parameters hold other values during training passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

#: By module whose passes run at displaced weights, those; their ``hidden()`` is a context of the real ones.
DISPLACED: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()


@contextmanager
def weights(model: torch.nn.Module) -> Iterator[None]:
    """Give access to the real weights of ``model`` within the block, for reading and writing.

    With ``local_steps`` they are the common weights. Needed with ``"feedback": "step_ahead"`` between a
    training forward pass and the optimizer's step; see
    :mod:`dct_plugin.data_parallel.step_ahead.displaced_weights`.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if module in DISPLACED:
                stack.enter_context(DISPLACED[module].hidden())
        yield


class ModuleHook:
    """A hook that belongs to one module: pickled and copied modules carry one that does nothing.

    Args:
        function: The hook; None for one that does nothing.
        module: The hook runs for calls of this module only (shallow copies share hooks).
    """

    def __init__(
        self, function: Callable[..., None] | None = None, module: torch.nn.Module | None = None
    ) -> None:
        # Compiled code cannot change which memory a parameter has.
        self._function = None if function is None else torch.compiler.disable(function)
        self._module = module

    def __call__(self, called: torch.nn.Module, *arguments: Any) -> None:
        if self._function is not None and called is self._module:
            self._function(called, *arguments)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def around_passes(
    module: torch.nn.Module, before: Callable[[bool], None], after: Callable[[Any], None], *, first: bool
) -> list[Any]:
    """Follow the forward passes of a module; passes of its parts alone are not seen.

    Args:
        module: The module.
        before: Called before a pass: True if the pass has gradients, and so trains.
        after: Called with the output of a pass, which is None if the pass has failed.
        first: Call ``after`` before the module's other hooks of this kind.

    Returns:
        Handles that remove the hooks.
    """

    def begin(*_: Any) -> None:
        before(torch.is_grad_enabled())

    enter, leave = ModuleHook(begin, module), ModuleHook(lambda *call: after(call[-1]), module)
    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, prepend=first, always_call=True),
    ]


def unregister(shown: Any) -> None:
    """Remove what shows displaced weights from :data:`DISPLACED`."""
    for module in [module for module, each in DISPLACED.items() if each is shown]:
        del DISPLACED[module]


def remove(handles: list[Any]) -> None:
    """Remove all of these hooks, and empty the list."""
    for handle in handles:
        handle.remove()
    handles.clear()
