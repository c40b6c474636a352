"""The settings of a training: what a section becomes for its optimizer, ranks and length, and why.

Every host, ``dct config check``, ``dct config suggest`` and ``dct advise`` take the same decisions here.
:mod:`.evidence` holds the measurements behind them, one row each, with the size of the model.
"""

from __future__ import annotations

from .optimizers import OptimizerFamily
from .resolve import AppliedSettings, Training, resolve
from .rules import compresses

__all__ = ["AppliedSettings", "OptimizerFamily", "Training", "compresses", "resolve"]
