"""Compressed activations between model-parallel ranks, and their gradients.

The configuration selects one of the compressor classes of :mod:`.compressors`. Thresholds are DCT-MP (Gupta
et al., KDD 2021, section 4): forward, the entries that reach a threshold are sent with their positions. Both
ends keep the positions, so only values return. That is the exact gradient of "threshold, then send". There
is no residual, because the next batch has other samples.

The state of a compressor changes between optimizer steps only, because recomputed activations must give the
same message.

There are two kinds of exchange:

- :class:`FixedMessages` for a sender and a receiver that must know a message's size in advance (pipelines);
- :class:`CompressedCollectives` for the ranks of a group: autograd functions around messages of exactly the
  bytes there are.
"""

from __future__ import annotations

from .collectives import CompressedCollectives
from .fixed import FixedMessages, Kept
from .stream import ActivationStream

__all__ = ["ActivationStream", "CompressedCollectives", "FixedMessages", "Kept"]
