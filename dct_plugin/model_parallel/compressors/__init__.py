"""Compressor classes for activations: one file each, and one line here.

:mod:`.compressor` has their base classes; ``dct.model_parallel`` names a class by its key in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config.model_parallel import Method
from .bounded import Bounded
from .compressor import ActivationCompressor, Site, Written
from .payloads import Whole
from .quantise import Quantised
from .threshold import Thresholded
from .transform import Transformed

__all__ = ["COMPRESSORS", "ActivationCompressor", "Site", "Written", "create"]

#: Every class by its ``method``.
COMPRESSORS: Mapping[str, type[ActivationCompressor[Any]]] = {
    "threshold": Thresholded,
    "quantise": Quantised,
    "bound": Bounded,
    "transform": Transformed,
    "none": Whole,
}


def create(method: Method, site: Site, name: str = "") -> ActivationCompressor[Any]:
    """Return the compressor of a method; :class:`Whole` if the method leaves nothing out."""
    return COMPRESSORS[method.label() if method.compresses else "none"](method, site, name)
