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

    Needed with ``"feedback": "step_ahead"`` between a training forward pass and the optimizer's step; see
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


def register_hooks(
    module: torch.nn.Module,
    *,
    before_pass: Callable[[bool], None],
    before_saving: Callable[[], None],
    before_loading: Callable[[], None],
    after_saving: Callable[[], None] = lambda: None,
    after_pass: Callable[[Any], None] = lambda _: None,
) -> list[Any]:
    """Call functions when the weights of ``module`` are about to be used, saved or loaded.

    Args:
        module: Called for forward passes; passes of its parts alone are not announced.
        before_pass: Called before a forward pass; is told whether the pass trains (training mode, gradients
            enabled).
        before_saving, after_saving: Called around ``state_dict`` of the module or of a part of it, also for
            every part of what is saved.
        before_loading: Called before ``load_state_dict`` of the module or of a part of it.
        after_pass: Called after a forward pass, before other hooks; is told its output, None if it failed.

    Returns:
        Handles that remove the hooks.
    """

    def forward(called: torch.nn.Module, _: Any) -> None:
        before_pass(called.training and torch.is_grad_enabled())

    handles: list[Any] = [
        module.register_forward_pre_hook(ModuleHook(forward, module), prepend=True),
        module.register_forward_hook(
            ModuleHook(lambda _, __, output: after_pass(output), module), prepend=True, always_call=True
        ),
    ]
    for part in module.modules():
        save, saved, load = (
            ModuleHook(lambda *_, function=function: function(), part)
            for function in (before_saving, after_saving, before_loading)
        )
        handles += [
            part.register_state_dict_pre_hook(save),
            part.register_state_dict_post_hook(saved),
            part._register_load_state_dict_pre_hook(load, with_module=True),
        ]
    return handles
