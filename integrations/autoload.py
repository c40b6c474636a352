"""The entry point that torch calls in every process, at the end of ``import torch``.

torch loads the entry points of group ``torch.backends`` (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches that
off), and an exception in one of them breaks ``import torch``. So this module imports nothing but the standard
library, does nothing but wait for DeepSpeed's engine, and never raises.
"""

from __future__ import annotations

import warnings


def autoload() -> None:
    """Wait for the DeepSpeed engine, or hook it if it is already there. Idempotent; never raises."""
    try:
        # Here, so that not even an incomplete installation breaks "import torch".
        from .deepspeed import activate
        from .host import build_lock
        from .host.post_import import when_imported

        when_imported(build_lock.MODULE, build_lock.watch)
        activate()
    except Exception as error:
        warnings.warn(f"dct-plugin: could not wait for DeepSpeed: {error!r}", RuntimeWarning, stacklevel=2)
