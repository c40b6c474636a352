"""Activations between model-parallel ranks, compressed, and their gradients.

Which compressor class, and its settings, are one section of the configuration; each class is one file in
:mod:`.compressors`. The default is DCT-MP (Gupta et al., KDD 2021, section 4): forward, the entries that
reach a threshold cross, with their positions. Both ends keep the positions, so that backward only values
cross: the gradient at the mask. That is the exact gradient of "threshold, then send". There is no residual:
the next batch holds other samples.

What a compressor remembers changes between optimizer steps only, never by call count: activation
recomputation runs a forward pass twice and must send the same again.

Two ways of travelling:

- :class:`FixedMessages` for a sender and a receiver that must know a message's size in advance (pipelines);
- :class:`CompressedCollectives` for the ranks of a group: autograd functions around messages of exactly the
  bytes there are.
"""

from __future__ import annotations

from .collectives import CompressedCollectives
from .fixed import FixedMessages, Kept
from .stream import ActivationStream

__all__ = ["ActivationStream", "CompressedCollectives", "FixedMessages", "Kept"]
