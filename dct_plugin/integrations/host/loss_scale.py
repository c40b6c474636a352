"""The loss scale of a gradient scaler, read without waiting for a device where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dct_plugin.codecs.copies import Mirror

from .patches import Function, Patches


class LossScale:
    """The scale of the coming gradients.

    Args:
        scaler: The gradient scaler, None where gradients are not scaled. Its ``update`` also starts the copy
            of the new scale to the host: later a device would first run the next forward pass.
        updated: Called after each ``update`` of the scaler.
    """

    def __init__(
        self, scaler: torch.amp.GradScaler | None, updated: Callable[[], None] = lambda: None
    ) -> None:
        self.scaler, self._updated = scaler, updated
        self._mirror, self._patches = Mirror(), Patches()
        if scaler is not None:
            self._patches.intercept(scaler, "update", self._update)

    def close(self) -> None:
        """Follow the scaler no longer."""
        self._patches.undo()

    def current(self) -> float | None:
        """Return the scale, None without a scaler."""
        if self.scaler is None:
            return None
        scale = self.scaler._get_scale_async()
        return float(self.scaler.get_scale() if scale is None else self._mirror.of(scale))

    def skipped_since(self, scale: float) -> bool:
        """Return whether the scaler has skipped the step with this scale: it is lowered only then."""
        current = self.current()
        return current is not None and current < scale

    def _update(self, original: Function, *arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        if scale is not None:
            self._mirror.begin(scale)
        self._updated()
