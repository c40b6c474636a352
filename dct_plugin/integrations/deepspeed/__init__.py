"""DCT for DeepSpeed: a ``dct`` section in the JSON, nothing else.

Importing this package, before or after ``import deepspeed``, activates the plugin. ``import torch`` does it
by itself, unless torch's entry points are switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). The import
loads neither torch nor DeepSpeed: it only waits for DeepSpeed's engine.
"""

from __future__ import annotations

import warnings
from types import ModuleType

from ..host.patching import when_imported

#: The engines of DeepSpeed that have a constructor of their own and are supported, by module.
ENGINES = {
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.pipe.engine": "PipelineEngine",
}


def activate() -> None:
    """Wait for the DeepSpeed engines, or hook them if they are already imported. Idempotent."""
    for module in ENGINES:
        when_imported(module, _hook_engine)


def _hook_engine(module: ModuleType) -> None:
    try:
        from .engine_hook import hook_engine

        hook_engine(getattr(module, ENGINES[module.__name__]))
    except Exception as error:
        warnings.warn(
            f"dct-plugin: could not hook {module.__name__}: {error!r}; a 'dct' section will have no effect",
            RuntimeWarning,
            stacklevel=2,
        )


activate()
