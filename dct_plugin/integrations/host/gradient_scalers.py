"""Gradient scalers of torch: which one scales the gradients of an attached model, passed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from .patching import Function, Patches

if TYPE_CHECKING:
    from .steps import OptimizerSteps

_followers: WeakSet[OptimizerSteps] = WeakSet()
_patches = Patches()


def follow(follower: OptimizerSteps) -> None:
    """Tell the steps of all scalers of this process, until :func:`leave`."""
    if not _followers:
        for name in ("unscale_", "step"):
            _patches.intercept(torch.amp.GradScaler, name, _tell)
        _patches.intercept(torch.amp.GradScaler, "_unscale_grads_", _tell_found)
    _followers.add(follower)


def leave(follower: OptimizerSteps) -> None:
    """Undo :func:`follow`."""
    _followers.discard(follower)
    if not _followers:
        _patches.undo()


def _tell(original: Function, scaler: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
    for follower in list(_followers):
        follower.scaler_looks(scaler, optimizer)
    return original(scaler, optimizer, *arguments, **keywords)


def _tell_found(original: Function, scaler: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
    found = original(scaler, optimizer, *arguments, **keywords)
    for follower in list(_followers):
        follower.scaler_found(optimizer, found)
    return found
