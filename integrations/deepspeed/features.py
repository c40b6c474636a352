"""The parts of DeepSpeed that the plugin works with, and the file that offers each; for ``dct doctor``, too.

This module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple


class Feature(NamedTuple):
    """A part of DeepSpeed that the plugin supports.

    Attributes:
        name: The name that ``dct doctor`` shows.
        file: The file of DeepSpeed that offers it.
        modules: Modules of DeepSpeed that must be hooked when they are imported.
        load: Imports the module of this package that hooks them. It has two functions: ``prepare(module)``
            hooks one of the modules; ``explain(configuration)`` returns a better error, or None, for an
            engine that could not be made from this JSON.
    """

    name: str
    file: str
    modules: tuple[str, ...] = ()
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
        (
            "deepspeed.runtime.fp16.onebit.adam",
            "deepspeed.runtime.fp16.onebit.lamb",
            "deepspeed.runtime.fp16.onebit.zoadam",
        ),
        _onebit,
    ),
)
