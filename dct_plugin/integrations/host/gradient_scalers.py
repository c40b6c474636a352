"""Gradient scalers of torch: which one scales the gradients of an attached model, passed or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from .patching import Function, Patches


class FollowsScalers(Protocol):
    """An object that is told of gradient scalers."""

    def scaler_looks(self, scaler: Any, optimizer: Any) -> None:
        """Note that a scaler looks at the gradients of an optimizer, before its step."""

    def scaler_found(self, optimizer: Any, found: Mapping[Any, Tensor]) -> None:
        """See whether a scaler found gradients of an optimizer that are not finite: 1 or 0, by device."""


_followers: WeakSet[FollowsScalers] = WeakSet()
_patches = Patches()


def follow(follower: FollowsScalers) -> None:
    """Tell an object of all scalers of this process, until :func:`leave`."""
    if not _followers:
        for name in ("unscale_", "step"):
            _patches.intercept(torch.amp.GradScaler, name, _tell)
        _patches.intercept(torch.amp.GradScaler, "_unscale_grads_", _tell_found)
    _followers.add(follower)


def leave(follower: FollowsScalers) -> None:
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
