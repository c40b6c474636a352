"""The ``dct`` section: one model per concern, and errors that name the key, its value and what is allowed.

A new concern is one more model and one more field of :class:`DCTConfig`. Error messages, ``dct config`` and
the tables of ``docs/configuration.md`` follow from the models' fields and the texts below them.
"""

from __future__ import annotations

from .data_parallel import AccordionConfig as AccordionConfig
from .data_parallel import AutoFeedback as AutoFeedback
from .data_parallel import DataParallelConfig as DataParallelConfig
from .data_parallel import ExpertSettings as ExpertSettings
from .data_parallel import LocalFeedback as LocalFeedback
from .data_parallel import NoFeedback as NoFeedback
from .data_parallel import ParametersConfig as ParametersConfig
from .dct import DCTConfig as DCTConfig
from .dct import KernelConfig as KernelConfig
from .dct import MetricsConfig as MetricsConfig
from .embedding import EmbeddingChannelConfig as EmbeddingChannelConfig
from .model_parallel import ActivationConfig as ActivationConfig
from .model_parallel import PipelineConfig as PipelineConfig
from .model_parallel import TensorConfig as TensorConfig
from .options import option_values as option_values
from .options import options as options
from .section import Section as Section
