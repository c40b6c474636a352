"""Compressor classes for activations: one file each, and one line here.

What a class is to have is in :mod:`.compressor`; ``dct.model_parallel`` names it by its key in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config.methods import Method
from .bounded import Bounded
from .compressor import ActivationCompressor, AnsweringCompressor, Site, Written
from .learned import Learned
from .lowrank import LowRank
from .none import Whole
from .quantise import Quantised
from .randomk import RandomK
from .threshold import Thresholded
from .topk import TopK
from .transform import Transformed

__all__ = ["COMPRESSORS", "ActivationCompressor", "AnsweringCompressor", "Site", "Written", "create"]

#: Every class by its ``method``.
COMPRESSORS: Mapping[str, type[ActivationCompressor[Any]]] = {
    "threshold": Thresholded,
    "topk": TopK,
    "randomk": RandomK,
    "quantise": Quantised,
    "bound": Bounded,
    "lowrank": LowRank,
    "learned": Learned,
    "transform": Transformed,
    "none": Whole,
}


def create(method: Method, site: Site) -> ActivationCompressor[Any]:
    """The compressor of a method; one that leaves nothing out where the method does not."""
    return COMPRESSORS[method.label() if method.compresses else "none"](method, site)
