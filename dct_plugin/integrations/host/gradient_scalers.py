"""Gradient scalers of torch: which one scales the gradients of an attached model, passed or not."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch

from .patching import Function, Patches


class FollowsScalers(Protocol):
    """An object that is told of gradient scalers."""

    def scaler_looks(self, scaler: Any, optimizer: Any) -> None:
        """Note that a scaler looks at the gradients of an optimizer, before its step."""


_followers: WeakSet[FollowsScalers] = WeakSet()
_patches = Patches()


def follow(follower: FollowsScalers) -> None:
    """Tell an object of all scalers of this process, until :func:`leave`."""
    if not _followers:
        for name in ("unscale_", "step"):
            _patches.intercept(torch.amp.GradScaler, name, _tell)
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
