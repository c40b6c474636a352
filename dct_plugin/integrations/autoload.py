"""The entry point that torch calls in every process, at the end of ``import torch``.

torch loads the entry points of group ``torch.backends`` (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches that
off), and an exception in one of them breaks ``import torch``. So this module imports nothing but the standard
library, and does nothing but wait for DeepSpeed, but in jobs of ``dct advise``.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.abc import MetaPathFinder
from typing import Any

#: ``host.measured_job.VARIABLE``, without that import.
_ADVISED = "DCT_ADVISE"


def autoload() -> None:
    """Activate the plugin for DeepSpeed, at the first import of one of its modules. Idempotent.

    In a job that ``dct advise`` started, also measure what the job trains with DistributedDataParallel.
    """
    if _ADVISED in os.environ:
        from .advice import observe

        observe()
    if "deepspeed" in sys.modules:
        _activate()
    elif not any(isinstance(finder, _WaitForDeepSpeed) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForDeepSpeed())


class _WaitForDeepSpeed(MetaPathFinder):
    """Finds nothing, and leaves ``sys.meta_path`` when DeepSpeed is imported.

    Whoever only asks whether DeepSpeed is installed looks for ``deepspeed``; its import looks for modules
    inside.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("deepspeed.") and self in sys.meta_path:
            # A new list: the import system is iterating over the old one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            _activate()


def _activate() -> None:
    try:
        from .deepspeed import activate

        activate()
    except Exception as error:
        warnings.warn(f"dct-plugin: could not wait for DeepSpeed: {error!r}", RuntimeWarning, stacklevel=2)
