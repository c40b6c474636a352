"""When a model's weights are used, saved or loaded: hooks for what shows other weights in training passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def watch(
    module: torch.nn.Module,
    *,
    before_pass: Callable[[bool], None],
    before_saving: Callable[[], None],
    before_loading: Callable[[], None],
) -> list[Any]:
    """Have ``module`` announce what is about to be done with its weights; copies of it do not.

    Args:
        module: Called for forward passes; passes of its parts alone are not announced.
        before_pass: Of a forward pass; told whether it trains (training mode, gradients enabled).
        before_saving: Of ``state_dict`` of the module or a part of it.
        before_loading: The same of ``load_state_dict``.

    Returns:
        Handles that remove the hooks.
    """

    def forward(called: torch.nn.Module, _: Any) -> None:
        if called is module:
            before_pass(called.training and torch.is_grad_enabled())

    handles: list[Any] = [module.register_forward_pre_hook(forward, prepend=True)]
    for part in module.modules():

        def save(called: torch.nn.Module, *_: Any, own: torch.nn.Module = part) -> None:
            if called is own:
                before_saving()

        def load(called: torch.nn.Module, *_: Any, own: torch.nn.Module = part) -> None:
            if called is own:
                before_loading()

        handles += [
            part.register_state_dict_pre_hook(save),
            part._register_load_state_dict_pre_hook(load, with_module=True),
        ]
    return handles
