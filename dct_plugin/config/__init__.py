"""The ``dct`` section: one model per concern, each fault is named with key, value and what is allowed.

``sections`` holds the models, ``options`` what may be written for each key, ``faults`` the error texts. A new
concern is one more model and one more field of :class:`DCTConfig`; the error texts, ``dct config`` and the
documentation's tables follow from the fields.
"""

from __future__ import annotations

from .options import OptionDoc, options
from .sections import (
    ActivationConfig,
    DataParallelConfig,
    DCTConfig,
    EmbeddingChannelConfig,
    ExpertsConfig,
    KernelConfig,
    MetricsConfig,
    ModelParallelConfig,
    ParametersConfig,
    PipelineConfig,
    Section,
    TensorConfig,
)

__all__ = [
    "ActivationConfig",
    "DCTConfig",
    "DataParallelConfig",
    "EmbeddingChannelConfig",
    "ExpertsConfig",
    "KernelConfig",
    "MetricsConfig",
    "ModelParallelConfig",
    "OptionDoc",
    "ParametersConfig",
    "PipelineConfig",
    "Section",
    "TensorConfig",
    "options",
]
