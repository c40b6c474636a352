"""Parameters that are unfrozen after the host has listed the parameters that it trains."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

logger = logging.getLogger("dct_plugin")


class FrozenParameters:
    """The parameters that are frozen now; :meth:`check` warns when one of them becomes trainable.

    Args:
        named: The model's parameters by name.
        consequence: What the host does with gradients of unfrozen parameters, and what to do, in words.
        is_reduced: Tells whether the host reduces a parameter's gradients nevertheless.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        consequence: str,
        is_reduced: Callable[[Tensor], bool] = lambda parameter: False,
    ) -> None:
        frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
        self._frozen = weakref.WeakValueDictionary(frozen)
        self._consequence, self._is_reduced = consequence, is_reduced

    def check(self) -> None:
        """Warn about the parameters that became trainable since the last call; after a step."""
        unfrozen = {name: each for name, each in self._frozen.items() if each.requires_grad}
        for name in unfrozen:
            del self._frozen[name]
        found = sorted(name for name, parameter in unfrozen.items() if not self._is_reduced(parameter))
        if found:
            logger.warning(
                "dct: unfrozen during the training: %s%s; %s",
                ", ".join(found[:5]),
                ", ..." if len(found) > 5 else "",
                self._consequence,
            )
