"""Streams of activations and their metrics, for pipeline stages, layers and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import Tensor

from dct_plugin.compression.stream import Encoded
from dct_plugin.config import ActivationConfig, KernelConfig
from dct_plugin.metrics import HOST, Metrics, Record
from dct_plugin.model_parallel import ActivationStream


class ActivationStreams:
    """Streams by name; each is made at its first use, with the state that was loaded for it.

    Args:
        kernels: The ``kernels`` settings.

    Attributes:
        step: Optimizer steps so far.
        training: Whether the current pass has a backward pass.
    """

    def __init__(self, kernels: KernelConfig) -> None:
        self.step = 0
        self.training = True
        self._kernels = kernels
        self._streams: dict[str, ActivationStream] = {}
        self._loaded: dict[str, Any] = {}

    def stream(self, name: str, config: ActivationConfig, rank: Callable[[], int]) -> ActivationStream:
        """Return the stream of a name. At its first use ``config`` has its settings, and ``rank`` returns the
        rank whose stream it is: what seeds it beside the name.
        """
        stream = self._streams.get(name)
        if stream is None:
            stream = ActivationStream(config, name=name, rank=rank(), kernels=self._kernels)
            self._streams[name] = stream
            if (state := self._loaded.pop(name, None)) is not None:
                stream.load_state_dict(state)
            stream.step, stream.training = self.step, self.training
        return stream

    def begin(self, training: bool) -> None:
        """Begin a pass."""
        self.training = training
        for stream in self._streams.values():
            stream.training = training

    def end_step(self, *, skipped: bool = False, loss_scale: float | None = None) -> None:
        """End an optimizer step, taken or skipped (see :class:`.steps.HasSteps`)."""
        self.step += 1
        for stream in self._streams.values():
            stream.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the streams by name, also of those not used since they were loaded."""
        return {**self._loaded, **{name: stream.state_dict() for name, stream in self._streams.items()}}

    def load_state_dict(self, streams: dict[str, Any], *, step: int) -> None:
        """Restore :meth:`state_dict`; other streams start afresh.

        Args:
            streams: States by name.
            step: Optimizer steps so far.
        """
        self.step = step
        self._streams.clear()
        self._loaded = dict(streams)


class PipelineMetrics(NamedTuple):
    """Metrics of the messages of pipeline boundaries. Passes without a backward pass have record classes of
    their own, and no times.

    Attributes:
        metrics: Returns the metrics that take the records.
        streams: The streams of the boundaries.
    """

    metrics: Callable[[], Metrics]
    streams: ActivationStreams

    def sent(self, cls: str, tensor: Tensor, message: Tensor, encoded: Encoded) -> None:
        """Record a message (uint8) that was sent in place of a tensor."""
        name = cls if self.streams.training else f"{cls}_evaluation"
        self.metrics().record(encoded.record(name, dense_bytes=tensor.nbytes, sent_bytes=message.nbytes))

    def sent_whole(self, tensor: Tensor) -> None:
        """Record a tensor that was sent as it is."""
        self.metrics().record(Record(f"{HOST}send", tensor.nbytes, tensor.nbytes, tensor.numel()))

    @contextmanager
    def timed(self, what: Literal["exchange", "decode"]) -> Iterator[None]:
        """Record the time that the block takes."""
        record = Record("pipeline")
        with record.timed(what):
            yield
        if self.streams.training:
            self.metrics().record(record)
