"""What crosses between the stages of a pipeline, in the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor

from dct_plugin.metrics import Metrics, Record
from dct_plugin.stream import Encoded

__all__ = ["Crossings"]


class Crossings(NamedTuple):
    """Records of one pass.

    Attributes:
        metrics: Where they go.
        training: Whether the pass has a backward pass; others have classes of their own, and no times.
    """

    metrics: Metrics
    training: bool

    def sent(self, cls: str, tensor: Tensor, message: Tensor, encoded: Encoded) -> None:
        """A message (uint8) in place of a tensor."""
        self.metrics.record(
            encoded.record(
                cls if self.training else f"{cls}_evaluation",
                dense_bytes=tensor.numel() * tensor.element_size(),
                sent_bytes=message.numel(),
            )
        )

    @contextmanager
    def timed(self, what: Literal["exchange", "decode"]) -> Iterator[None]:
        """The time that the block takes."""
        record = Record("pipeline", tensors=0)
        with record.timed(what):
            yield
        if self.training:
            self.metrics.record(record)
