"""Metrics of the messages between the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor

from dct_plugin.compression.stream import Encoded
from dct_plugin.metrics import HOST, Metrics, Record


class PipelineMetrics(NamedTuple):
    """Metrics of the messages of one pass.

    Attributes:
        metrics: The metrics that take the records.
        training: Whether the pass has a backward pass. Other passes have record classes of their own, and no
            times.
    """

    metrics: Metrics
    training: bool

    def sent(self, cls: str, tensor: Tensor, message: Tensor, encoded: Encoded) -> None:
        """Record a message (uint8) that was sent in place of a tensor."""
        self.metrics.record(
            encoded.record(
                cls if self.training else f"{cls}_evaluation",
                dense_bytes=tensor.numel() * tensor.element_size(),
                sent_bytes=message.numel(),
            )
        )

    def sent_whole(self, tensor: Tensor) -> None:
        """Record a tensor that was sent as it is."""
        nbytes = tensor.numel() * tensor.element_size()
        self.metrics.record(Record(f"{HOST}send", nbytes, nbytes, tensor.numel(), tensors=0))

    @contextmanager
    def timed(self, what: Literal["exchange", "decode"]) -> Iterator[None]:
        """Record the time that the block takes."""
        record = Record("pipeline", tensors=0)
        with record.timed(what):
            yield
        if self.training:
            self.metrics.record(record)
