"""Finds out whether Triton's interpreter takes a mask made of a number's comparison and a block's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _masked(x, out):
    lanes = tl.arange(0, 8)
    mask = (tl.load(x) > 0) & (lanes < 5)
    tl.store(out + lanes, tl.load(x + lanes, mask=mask, other=0))


def taken() -> bool:
    """Return whether such a mask works; with a GPU it does."""
    if torch.cuda.is_available():
        return True
    try:
        _masked[(1,)](torch.ones(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    except Exception:
        return False
    return True


#: Triton 3.9 makes integers of a comparison that it spreads over a block, and refuses them as a mask.
needs_masks = pytest.mark.skipif(not taken(), reason="this Triton's interpreter refuses masks of comparisons")
