"""The entry point that torch calls in every process, at the end of ``import torch``.

torch loads the entry points of group ``torch.backends`` (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches that
off), and an exception in one of them breaks ``import torch``. So this module imports nothing but the standard
library, and does nothing but wait for DeepSpeed, but in jobs of ``dct advise``.
"""

from __future__ import annotations

import os
import warnings

from .host.measured_job import VARIABLE


def autoload() -> None:
    """Wait for DeepSpeed's engines, or hook them if they are already imported. Idempotent.

    In a job that ``dct advise`` started, also measure what the job trains with DistributedDataParallel.
    """
    if VARIABLE in os.environ:
        from .advice import observe

        observe()
    try:
        from .deepspeed import activate

        activate()
    except Exception as error:
        warnings.warn(f"dct-plugin: could not wait for DeepSpeed: {error!r}", RuntimeWarning, stacklevel=2)
