"""The parts of DeepSpeed that the plugin works with, and the file that offers each; for ``dct doctor``, too.

This module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from .section import asks_for_slot


class Feature(NamedTuple):
    """A part of DeepSpeed that the plugin supports.

    Attributes:
        name: The name that ``dct doctor`` shows.
        file: The file of DeepSpeed that offers it.
        asks: Returns whether a JSON needs DeepSpeed to be changed while its engine is made.
        load: Imports the module of this package that changes it. It has two functions: ``prepared()`` returns
            a context manager, inside which DeepSpeed is changed; ``explain(configuration)`` returns a better
            error, or None, for an engine that could not be made from this JSON.
    """

    name: str
    file: str
    asks: Callable[[Any], bool] = lambda configuration: False
    load: Callable[[], ModuleType] | None = None


def _onebit() -> ModuleType:
    from . import onebit

    return onebit


#: Deleting the row and the module of a feature with ``load`` removes the feature.
FEATURES = (
    Feature("ZeRO stage 0, 1, 2", "runtime/zero/stage_1_and_2.py"),
    Feature("ZeRO stage 3", "runtime/zero/stage3.py"),
    Feature("pipeline engine", "runtime/pipe/p2p.py"),
    Feature("experts on other ranks (MoE)", "moe/sharded_moe.py"),
    Feature(
        '1-bit Adam, 1-bit LAMB, 0/1 Adam (comm_backend_name "dct")',
        "runtime/fp16/onebit/adam.py",
        asks_for_slot,
        _onebit,
    ),
)
