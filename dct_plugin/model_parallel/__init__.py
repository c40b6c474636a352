"""DCT-MP: activations between model-parallel ranks, thresholded; their gradients reuse the mask.

Source: Gupta et al., KDD 2021, section 4. Forward, the entries that reach the threshold cross, with their
positions. Both ends keep the positions, so that backward only values cross: the gradient at the mask. That is
the exact gradient of "threshold, then send". There is no residual: the next batch holds other samples.

Thresholds change between optimizer steps only, never by call count: activation recomputation runs a forward
pass twice and must find the same mask again.

Two ways of travelling:

- :class:`FixedMessages` for a sender and a receiver that must know a message's size in advance (pipelines);
- :class:`MaskedCollectives` for the ranks of a group: autograd functions around messages of exactly the bytes
  there are, whose backward passes need no sizes, as the masks tell them.
"""

from __future__ import annotations

from ..stream import ActivationStream
from .collectives import MaskedCollectives
from .fixed import FixedMessages, Mask

__all__ = ["ActivationStream", "FixedMessages", "Mask", "MaskedCollectives"]
