"""DCT-DP: gradients between data-parallel ranks, thresholded, with error feedback.

Source: Gupta et al., KDD 2021, section 3. The paper's parameter server is sharded over the ranks: every rank
owns a part of each large gradient, sums what the ranks send it, thresholds the sum with a residual of its own
and sends the result to all (``two_phase``). With few ranks it is cheaper if every rank sends to all others
(``direct``). Under ZeRO-1/2 the owner is the rank that holds the optimizer partition, and only the first half
is needed (``reduce_scatter``).

All ranks decode the same bytes in the same order, their own included, so results are bitwise identical
everywhere.
"""

from __future__ import annotations

from .passes import weights
from .plan import Shard
from .reducer import GradientReducer

__all__ = ["GradientReducer", "Shard", "weights"]
