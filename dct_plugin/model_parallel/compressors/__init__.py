"""Compressor classes for activations: one file each, and one line here.

What a class is to have is in :mod:`.compressor`; ``dct.model_parallel`` names it by its key in the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...config import ActivationConfig
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
COMPRESSORS: Mapping[str, type[ActivationCompressor]] = {
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


def create(config: ActivationConfig, site: Site) -> ActivationCompressor:
    """The compressor that a section asks for; one that leaves nothing out where its sparsity is 0."""
    return COMPRESSORS[config.method if config.compresses_forward else "none"](config, site)
