"""DCT for DeepSpeed: a ``dct`` section in the JSON, nothing else.

Importing this package, before or after ``import deepspeed``, activates the plugin. ``import torch`` does it
by itself, unless torch's entry points are switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). The import
loads neither torch nor DeepSpeed: it only waits for DeepSpeed's engine.
"""

from __future__ import annotations

import warnings
from types import ModuleType

from ..host import build_lock
from ..host.post_import import when_imported

ENGINE_MODULE = "deepspeed.runtime.engine"


def activate() -> None:
    """Wait for the DeepSpeed engine, or hook it if it is already imported. Idempotent.

    Compilations that DeepSpeed starts are watched, too: others may wait for them.
    """
    when_imported(build_lock.BUILDER, build_lock.watch_builder)
    when_imported(ENGINE_MODULE, _hook_engines)


def _hook_engines(module: ModuleType) -> None:
    try:
        from .activation import hook_engines

        hook_engines(module)
    except Exception as error:
        warnings.warn(
            f"dct-plugin: could not hook {ENGINE_MODULE}: {error!r}; a 'dct' section will have no effect",
            RuntimeWarning,
            stacklevel=2,
        )


activate()
