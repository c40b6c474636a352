"""DeepSpeed's pipeline engine: activations forward and gradients backward between stages, compressed.

The engine executes a schedule of instructions; four of them send or receive through the module ``p2p``.
While one of these runs, the engine module's ``p2p`` is a channel that replaces the tensors that are
compressed by messages of fixed size (:class:`~dct_plugin.model_parallel.FixedMessages`) and hands everything
else on: shapes, integer and boolean tensors, tensors so small that a message would be no smaller. The
schedule, buffers and shapes stay DeepSpeed's. Which micro-batch a gradient belongs to is its pipeline buffer,
on both sides, so that both know what the gradient that crosses next answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from dct_plugin.config import ActivationConfig, DCTConfig, PipelineConfig
from dct_plugin.kernels import GRAD_DTYPES
from dct_plugin.metrics import Metrics
from dct_plugin.model_parallel import ActivationStream, FixedMessages, Kept

from ..host.patches import Patches
from ..host.pipeline_metrics import PipelineMetrics
from ..host.streams import ActivationStreams, average
from .support import is_pipeline

__all__ = ["PipelineHooks"]

_PREFIX = "pipeline boundary "
#: Of one tensor that crossed: how, and what its gradient takes; None where it crossed as it was.
_Crossed = tuple[FixedMessages, Kept] | None


class PipelineHooks:
    """Compresses what a ``PipelineEngine`` sends between its stages.

    Args:
        engine: DeepSpeed's engine, of two stages or more.
        config: The whole section.
        metrics: Where bytes, density and times are recorded.
    """

    def __init__(self, engine: Any, config: DCTConfig, metrics: Metrics) -> None:
        self.engine = engine
        self.config = config.model_parallel.pipeline
        self.metrics = metrics
        self._kernels = config.kernels
        self.streams = ActivationStreams(self._make, _PREFIX)
        self._number = 0
        self._sent: dict[int, list[_Crossed]] = {}  # by pipeline buffer, one for each floating-point tensor
        self._received: dict[int, list[_Crossed]] = {}

    @staticmethod
    def wanted(engine: Any, config: DCTConfig) -> bool:
        """Whether anything is to be compressed between this engine's stages."""
        if not is_pipeline(engine):
            return False
        return any(section.compresses for section in _sections(engine, config.model_parallel.pipeline))

    @property
    def summary(self) -> str:
        """What is done at the boundaries, for people."""
        return "; ".join(dict.fromkeys(section.summary for section in _sections(self.engine, self.config)))

    def install(self, patches: Patches) -> None:
        """Patch the engine instance."""
        instructions = dict(self.engine._INSTRUCTION_MAP)
        channels: dict[Any, Callable[[int], _Channel]] = {
            schedule.SendActivation: self._send_activations,
            schedule.RecvActivation: self._receive_activations,
            schedule.SendGrad: self._send_gradients,
            schedule.RecvGrad: self._receive_gradients,
        }
        for instruction, channel in channels.items():
            instructions[instruction] = _through(instructions[instruction], channel)
        patches.replace(self.engine, "_INSTRUCTION_MAP", instructions)

    def _make(self, name: str, config: ActivationConfig) -> ActivationStream:
        # Both ends of a boundary are of the same replica.
        replica = self.engine.grid.get_data_parallel_id()
        group = self.engine.grid.get_data_parallel_group()
        return ActivationStream(
            config,
            name=name,
            rank=replica,
            kernels=self._kernels,
            average=lambda tensors: average(tensors, group),
        )

    # -- the four instructions ------------------------------------------------------------------------------

    def _send_activations(self, buffer_id: int) -> _Channel:
        """Outputs to the next stage; what their gradients take is kept."""
        boundary = self.engine.stage_id
        outputs = _tensors(self.engine.pipe_buffers["outputs"][buffer_id])
        sparse = self._begin(boundary)
        crossed = self._kept(self._sent, buffer_id)

        def send(tensor: Tensor, transfer: Callable[[Tensor], Any], position: int) -> None:
            messages = self._messages(boundary, position, tensor) if sparse else None
            if messages is None:
                crossed.append(None)
                transfer(tensor)
                return
            message, kept, encoded = messages.encode(tensor, self._number)
            self._number += 1
            crossed.append((messages, kept))
            self._pipeline_metrics.sent("pipeline", tensor, message, encoded)
            self._timed(transfer, message)

        return _Channel(lambda: self._floating(outputs), send)

    def _receive_activations(self, buffer_id: int) -> _Channel:
        """Inputs from the previous stage, into DeepSpeed's buffers, which it copies."""
        boundary = self.engine.stage_id - 1
        sparse = self._begin(boundary)
        crossed = self._kept(self._received, buffer_id)

        def receive(buffer: Tensor, transfer: Callable[[Tensor], Any], position: int) -> None:
            messages = self._messages(boundary, position, buffer) if sparse else None
            if messages is None:
                crossed.append(None)
                transfer(buffer)
                return
            message = _room(buffer, messages.nbytes(buffer.shape, buffer.dtype))
            self._timed(transfer, message)
            with self._pipeline_metrics.timed("decode"):
                crossed.append((messages, messages.decode(message, buffer)))

        # The buffers are made after the first shapes arrived, inside the instruction.
        return _Channel(lambda: self._floating(_tensors(self.engine.pipe_recv_buf)), receive)

    def _send_gradients(self, buffer_id: int) -> _Channel:
        """Of the inputs, in their order, to the previous stage."""
        crossed = self._received.pop(buffer_id, [])

        def send(gradient: Tensor, transfer: Callable[[Tensor], Any], position: int) -> None:
            if (known := crossed[position]) is None:
                transfer(gradient)
                return
            messages, kept = known
            message, encoded = messages.encode_gradient(gradient, kept, exact=True)
            self._pipeline_metrics.sent("pipeline_gradient", gradient, message, encoded)
            self._timed(transfer, message)

        return _Channel(lambda: None, send)

    def _receive_gradients(self, buffer_id: int) -> _Channel:
        """Of the outputs, in their order, from the next stage."""
        crossed = self._sent.pop(buffer_id, [])

        def receive(buffer: Tensor, transfer: Callable[[Tensor], Any], position: int) -> None:
            if (known := crossed[position]) is None:
                transfer(buffer)
                return
            messages, kept = known
            size = messages.nbytes(buffer.shape, buffer.dtype, gradient=True, kept=kept)
            message = _room(buffer, size)
            self._timed(transfer, message)
            with self._pipeline_metrics.timed("decode"):
                messages.decode_gradient(message, {kept.number: kept}, buffer)

        return _Channel(lambda: None, receive)

    # -- what is compressed ----------------------------------------------------------------------------------

    def _begin(self, boundary: int) -> bool:
        """A pass reaches a boundary; whether it is compressed there."""
        training = torch.is_grad_enabled()  # of which eval_batch has none
        self.streams.begin(training)
        if not training and not self.config.evaluation:
            return False
        return self.config.at(boundary).compresses and self.streams.step >= self.config.warmup_steps

    def _kept(self, where: dict[int, list[_Crossed]], buffer_id: int) -> list[_Crossed]:
        """What gradients will need of a pass; those without a backward pass leave nothing behind."""
        return where.setdefault(buffer_id, []) if self.streams.training else []

    def _messages(self, boundary: int, position: int, tensor: Tensor) -> FixedMessages | None:
        """For the floating-point tensor at a position of what crosses; None: it crosses as it is."""
        if tensor.dtype not in GRAD_DTYPES:
            return None
        name = f"{_PREFIX}{boundary}" + (f" tensor {position}" if position else "")
        messages = FixedMessages(self.streams.stream(name, self.config.at(boundary)))
        size = messages.nbytes(tensor.shape, tensor.dtype)
        return messages if size < tensor.numel() * tensor.element_size() else None

    def _floating(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those whose gradients come back; the last one may be a boolean mask that crosses as a number."""
        if self.engine.has_attention_mask or self.engine.has_bool_tensors:
            tensors = tensors[:-1]
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    # -- metrics --------------------------------------------------------------------------------------------

    @property
    def _pipeline_metrics(self) -> PipelineMetrics:
        """Of the current pass."""
        return PipelineMetrics(self.metrics, self.streams.training)

    def _timed(self, transfer: Callable[[Tensor], Any], message: Tensor) -> None:
        with self._pipeline_metrics.timed("exchange"):
            transfer(message)


def _sections(engine: Any, config: PipelineConfig) -> list[PipelineConfig]:
    """Of the boundaries between an engine's stages."""
    return [config.at(boundary) for boundary in range(engine.num_stages - 1)]


class _Channel:
    """Stands for the module ``p2p`` while one instruction runs.

    Args:
        expected: The tensors that are handled, in the order in which they cross; whatever else comes, crosses
            as it is. None: all tensors are handled.
        handle: Called with one of them, a function that transfers a tensor in its place, and its position.
    """

    def __init__(
        self,
        expected: Callable[[], Sequence[Tensor] | None],
        handle: Callable[[Tensor, Callable[[Tensor], Any], int], None],
    ) -> None:
        self._expected, self._handle = expected, handle
        self._position = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(_p2p, name)

    def send(self, tensor: Tensor, stage: int, *more: Any, **keywords: Any) -> None:
        self._cross(tensor, lambda message: _p2p.send(message, stage, *more, **keywords))

    def recv(self, tensor: Tensor, stage: int, *more: Any, **keywords: Any) -> None:
        self._cross(tensor, lambda message: _p2p.recv(message, stage, *more, **keywords))

    def _cross(self, tensor: Tensor, transfer: Callable[[Tensor], Any]) -> None:
        expected, position = self._expected(), self._position
        if expected is not None and (position >= len(expected) or tensor is not expected[position]):
            transfer(tensor)
        else:
            self._position += 1
            self._handle(tensor, transfer, position)


_p2p = pipe_engine.p2p


def _through(original: Callable[..., None], channel: Callable[[int], _Channel]) -> Callable[..., None]:
    """An instruction whose transfers go through a channel."""

    def execute(engine: Any, buffer_id: int) -> None:
        pipe_engine.p2p = channel(buffer_id)
        try:
            original(engine, buffer_id)
        finally:
            pipe_engine.p2p = _p2p

    return execute


def _tensors(crossing: Any) -> Sequence[Tensor]:
    """What crosses in one instruction: a tensor, several, or not known yet."""
    if crossing is None:
        return ()
    return (crossing,) if isinstance(crossing, Tensor) else crossing


def _room(tensor: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=tensor.device)
