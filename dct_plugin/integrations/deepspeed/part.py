"""The interface of everything that the plugin adds to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dct_plugin.config import DCTConfig
from dct_plugin.metrics import Metrics

from ..host.patches import Patches
from ..host.steps import StepHooks


@dataclass
class EngineContext:
    """The engine that the parts are added to, and what they share.

    Attributes:
        engine: DeepSpeed's engine.
        config: The ``dct`` section as it is applied to this engine.
        metrics: Records bytes, densities and times.
        steps: The steps of the engine's optimizer.
    """

    engine: Any
    config: DCTConfig
    metrics: Metrics
    steps: StepHooks


class EnginePart:
    """Something that the plugin adds to an engine."""

    def install(self, patches: Patches) -> None:
        """Patch the engine or its optimizer: these instances, not their classes."""

    def before_step(self) -> None:
        """Prepare an optimizer step."""

    def after_step(self) -> None:
        """Complete an optimizer step, before it is counted."""

    def close(self) -> None:
        """Release what the part holds; the engine is being destroyed."""
