"""The one place that chooses the paths of an engine's gradients and activations."""

from __future__ import annotations

from typing import Any

from dct_plugin.config import DCTConfig

from .bf16 import Bf16Path
from .moe import ExpertPath
from .path import ActivationPath, GradientPath
from .pipeline import PipelinePath
from .section import gradient_path_of_optimizer
from .stage0 import Stage0Path
from .support import has_optimizer
from .zero import ZeroPath
from .zero3 import Zero3Path

#: The first that applies to an engine is its gradients' path.
GRADIENT_PATHS: tuple[type[GradientPath], ...] = (Zero3Path, ZeroPath, Bf16Path, Stage0Path)
ACTIVATION_PATHS: tuple[type[ActivationPath], ...] = (PipelinePath, ExpertPath)


def gradient_path_of(engine: Any, config: DCTConfig) -> type[GradientPath] | None:
    """Return the class of path for the engine's gradients; None if there is none, or nothing to train."""
    if not has_optimizer(engine):
        return None
    of_optimizer: type[GradientPath] | None = gradient_path_of_optimizer(engine)
    if of_optimizer is not None:
        return of_optimizer
    return next((path for path in GRADIENT_PATHS if path.applies(engine, config)), None)


def activation_paths_of(engine: Any, config: DCTConfig) -> list[type[ActivationPath]]:
    """Return the classes of paths for the activations that are to be compressed."""
    return [path for path in ACTIVATION_PATHS if path.applies(engine, config)]
