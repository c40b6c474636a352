"""Megatron-LM / megatron-core: launch wrapper, launch-script patcher, version checks, communication hooks.

Trainings with megatron.core alone take :func:`install` and the functions beside it from here. They are loaded
when they are first asked for: importing this package imports neither torch nor megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hooks import (
        detach,
        gather_parameters,
        install,
        load_checkpoint,
        load_state_dict,
        save_checkpoint,
        state_dict,
        uninstall,
    )

__all__ = [
    "detach",
    "gather_parameters",
    "install",
    "load_checkpoint",
    "load_state_dict",
    "save_checkpoint",
    "state_dict",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import hooks

    return getattr(hooks, name)
