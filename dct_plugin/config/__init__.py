"""The ``dct`` section: one model per concern, and errors that name the key, its value and what is allowed.

A new concern is one more model and one more field of :class:`DCTConfig`. Error messages, ``dct config`` and
the tables of ``docs/configuration.md`` follow from the models' fields and the texts below them.
"""

from __future__ import annotations

from .data_parallel import (
    AccordionConfig,
    AutoFeedback,
    DataParallelConfig,
    ExpertSettings,
    LocalFeedback,
    NoFeedback,
    ParametersConfig,
)
from .dct import DCTConfig, KernelConfig, MetricsConfig
from .embedding import EmbeddingChannelConfig
from .model_parallel import ActivationConfig, PipelineConfig, TensorConfig
from .options import OptionDoc, options
from .section import Section

__all__ = [
    "AccordionConfig",
    "ActivationConfig",
    "AutoFeedback",
    "DCTConfig",
    "DataParallelConfig",
    "EmbeddingChannelConfig",
    "ExpertSettings",
    "KernelConfig",
    "LocalFeedback",
    "MetricsConfig",
    "NoFeedback",
    "OptionDoc",
    "ParametersConfig",
    "PipelineConfig",
    "Section",
    "TensorConfig",
    "options",
]
