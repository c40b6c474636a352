"""DCT-DP: gradients between data-parallel ranks, thresholded, with error feedback.

Source: Gupta et al., KDD 2021, section 3. The paper's parameter server is sharded over the ranks: every rank
owns a part of each large gradient, sums what the ranks send it, thresholds the sum with a residual of its own
and sends the result to all (``two_phase``). With few ranks it is cheaper that everybody sends everybody
(``direct``). Under ZeRO-1/2 the owner is the rank that holds the optimizer partition, and only the first half
is needed (``reduce_scatter``).

All ranks decode the same bytes in the same order, their own included, so results are bitwise identical
everywhere.
"""

from __future__ import annotations

from typing import Any

from .displaced_weights import weights
from .plan import Shard
from .reducer import GradientReducer

__all__ = ["DCTState", "GradientReducer", "Shard", "dct_hook", "weights"]


def __getattr__(name: str) -> Any:
    # The one place where the library imports an integration, when it is asked for one of torch DDP's names.
    if name in ("DCTState", "dct_hook"):
        from ..integrations import ddp

        return getattr(ddp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
