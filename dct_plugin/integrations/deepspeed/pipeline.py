"""DeepSpeed's pipeline engine: activations forward and gradients backward between stages, compressed.

The engine executes a schedule of instructions; four of them send or receive through the module ``p2p``.
While one of these runs, the engine module's ``p2p`` is a :class:`_Transfers` that replaces the tensors that
are compressed by messages of fixed size (:class:`~dct_plugin.model_parallel.FixedMessages`) and hands
everything else on: shapes, integer and boolean tensors, tensors so small that a message would be no smaller.
The schedule, buffers and shapes stay DeepSpeed's. Which micro-batch a gradient belongs to is its pipeline
buffer, on both sides, so that both know which activation the next gradient answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from dct_plugin.config import DCTConfig, PipelineConfig
from dct_plugin.host_traffic import counted_by, own_traffic
from dct_plugin.kernels.job import GRAD_DTYPES
from dct_plugin.model_parallel import FixedMessages, Kept

from ..host.activation_streams import ActivationStreams, PipelineMetrics
from ..host.patching import Patches
from ..host.versions import Target
from .engine import EngineContext, is_pipeline, targets_of
from .path import ActivationPath

_PREFIX = "pipeline boundary "

#: How one tensor was compressed, and what its gradient needs; None where it was sent as it is.
_Compressed = tuple[FixedMessages, Kept] | None
_ByBuffer = dict[int, list[_Compressed]]
_Transfer = Callable[[Tensor], Any]
#: Called with a tensor, a function that transfers a message in its place, the messages, and, of a gradient,
#: what its activation left; returns what the gradient needs.
_Exchange = Callable[[Tensor, _Transfer, FixedMessages, Kept | None], Kept]
#: Called with a tensor, a function that transfers a tensor in its place, and its position.
_Handle = Callable[[Tensor, _Transfer, int], None]


class PipelinePath(ActivationPath):
    """The compressed exchange of activations and their gradients between the stages of an engine."""

    name = "pipeline"
    targets = (
        *targets_of(
            "deepspeed.runtime.pipe.engine",
            "PipelineEngine",
            train_batch="data_iter",
            _exec_send_activations="buffer_id",
            _exec_recv_activations="buffer_id",
            _exec_send_grads="buffer_id",
            _exec_recv_grads="buffer_id",
        ),
        Target("deepspeed.runtime.pipe.p2p", "send", "tensor dest_stage async_op"),
        Target("deepspeed.runtime.pipe.p2p", "recv", "tensor src_stage async_op"),
        Target("deepspeed.runtime.pipe.module", "PipelineModule.get_tied_weights_and_groups", "self"),
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.config = context.config.model_parallel.pipeline
        self.streams = ActivationStreams(context.config.kernels)
        self._pass_metrics = PipelineMetrics(lambda: context.metrics, self.streams)
        self._number = 0
        # By pipeline buffer, one for each floating-point tensor.
        self._sent: _ByBuffer = {}
        self._received: _ByBuffer = {}

    @classmethod
    def applies(cls, engine: Any, config: DCTConfig) -> bool:
        if not is_pipeline(engine):
            return False
        return any(section.compresses for section in _sections(engine, config.model_parallel.pipeline))

    def describe(self) -> str:
        return "; ".join(dict.fromkeys(section.summary for section in _sections(self.engine, self.config)))

    def install(self, patches: Patches) -> None:
        instructions = dict(self.engine._INSTRUCTION_MAP)
        transfers: dict[Any, Callable[[int], _Transfers]] = {
            schedule.SendActivation: self._send_activations,
            schedule.RecvActivation: self._receive_activations,
            schedule.SendGrad: partial(self._backward, self._received, self._send),
            schedule.RecvGrad: partial(self._backward, self._sent, self._receive),
        }
        for instruction, make in transfers.items():
            instructions[instruction] = partial(self._execute, instructions[instruction], make)
        patches.replace(self.engine, "_INSTRUCTION_MAP", instructions)

    def _execute(
        self, original: Callable[..., None], make: Callable[[int], _Transfers], engine: Any, buffer_id: int
    ) -> None:
        """Execute an instruction; its transfers go through what ``make(buffer_id)`` returns."""
        with counted_by(self._count), Patches() as patches:
            patches.replace(pipe_engine, "p2p", make(buffer_id))
            original(engine, buffer_id)

    # -- the four instructions ---

    def _send_activations(self, buffer_id: int) -> _Transfers:
        """Send outputs to the next stage, and keep what their gradients need."""
        outputs = _tensors(self.engine.pipe_buffers["outputs"][buffer_id])
        handle = self._forward(self.engine.stage_id, self._sent, self._send, buffer_id)
        return _Transfers(lambda: self._floating(outputs), handle)

    def _receive_activations(self, buffer_id: int) -> _Transfers:
        """Receive inputs from the previous stage into DeepSpeed's buffers, which it copies."""
        handle = self._forward(self.engine.stage_id - 1, self._received, self._receive, buffer_id)
        # The buffers are made after the first shapes arrived, inside the instruction.
        return _Transfers(lambda: self._floating(_tensors(self.engine.pipe_recv_buf)), handle)

    def _forward(self, boundary: int, kept: _ByBuffer, exchange: _Exchange, buffer_id: int) -> _Handle:
        """Return what transfers the activations of a boundary; it keeps what their gradients need."""
        training = torch.is_grad_enabled()  # not so in eval_batch
        self.streams.begin(training)
        compresses = self.config.at(boundary).compresses and self.streams.step >= self.config.warmup_steps
        compresses = compresses and (training or self.config.evaluation)
        compressed = kept.setdefault(buffer_id, []) if training else []

        def transfer_one(tensor: Tensor, transfer: _Transfer, position: int) -> None:
            messages = self._messages(boundary, position, tensor) if compresses else None
            if messages is None:
                transfer(tensor)
                compressed.append(None)
            else:
                compressed.append((messages, exchange(tensor, transfer, messages, None)))

        return transfer_one

    def _backward(self, kept: _ByBuffer, exchange: _Exchange, buffer_id: int) -> _Transfers:
        """Transfer the gradients of the activations in a buffer, in their order."""
        compressed = kept.pop(buffer_id, [])

        def transfer_one(tensor: Tensor, transfer: _Transfer, position: int) -> None:
            if (activation := compressed[position]) is None:
                transfer(tensor)
            else:
                exchange(tensor, transfer, *activation)

        return _Transfers(lambda: None, transfer_one)

    # -- one tensor ---

    def _send(self, tensor: Tensor, transfer: _Transfer, messages: FixedMessages, kept: Kept | None) -> Kept:
        if kept is not None:
            message, encoded = messages.encode_gradient(tensor, kept, exact=True)
            self._pass_metrics.sent("pipeline_gradient", tensor, message, encoded)
        else:
            message, kept, encoded = messages.encode(tensor, self._number)
            self._number += 1
            self._pass_metrics.sent("pipeline", tensor, message, encoded)
        self._timed(transfer, message)
        return kept

    def _receive(
        self, buffer: Tensor, transfer: _Transfer, messages: FixedMessages, kept: Kept | None
    ) -> Kept:
        size = messages.nbytes(buffer.shape, buffer.dtype, gradient=kept is not None, kept=kept)
        message = torch.empty(size, dtype=torch.uint8, device=buffer.device)
        self._timed(transfer, message)
        with self._pass_metrics.timed("decode"):
            if kept is None:
                return messages.decode(message, buffer)
            messages.decode_gradient(message, {kept.number: kept}, buffer)
            return kept

    # -- what is compressed ---

    def _messages(self, boundary: int, position: int, tensor: Tensor) -> FixedMessages | None:
        """Return the messages for a floating-point tensor; None: it is sent as it is.

        Args:
            boundary: The stage before the boundary.
            position: The tensor's position among those that are sent together.
            tensor: The tensor, or a buffer of its shape and type.
        """
        if tensor.dtype not in GRAD_DTYPES:
            return None
        name = f"{_PREFIX}{boundary}" + (f" tensor {position}" if position else "")
        # Both ends of a boundary belong to the same replica.
        replica = self.engine.grid.get_data_parallel_id
        messages = FixedMessages(self.streams.stream(name, self.config.at(boundary), replica))
        size = messages.nbytes(tensor.shape, tensor.dtype)
        return messages if size < tensor.numel() * tensor.element_size() else None

    def _floating(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors whose gradients come back.

        The last one may be a boolean mask that is sent as a number.
        """
        if self.engine.has_attention_mask or self.engine.has_bool_tensors:
            tensors = tensors[:-1]
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    # -- metrics ---

    def _count(self, nbytes: float) -> None:
        """Count what crosses as it is after the start."""
        if self.streams.training and self.streams.step >= self.config.warmup_steps:
            self.metrics.uncompressed("pipeline", "small", nbytes)

    def _timed(self, transfer: _Transfer, message: Tensor) -> None:
        with self._pass_metrics.timed("exchange"), own_traffic():
            transfer(message)


def _sections(engine: Any, config: PipelineConfig) -> list[PipelineConfig]:
    """Return the sections of the boundaries between an engine's stages."""
    return [config.at(boundary) for boundary in range(engine.num_stages - 1)]


@dataclass
class _Transfers:
    """A replacement of the module ``p2p`` while one instruction runs.

    Args:
        _expected: Returns the tensors that are handled, in the order in which they are transferred; whatever
            else comes is transferred as it is. None: all tensors are handled.
        _handle: Transfers one of them.
    """

    _expected: Callable[[], Sequence[Tensor] | None]
    _handle: _Handle
    _position: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(_p2p, name)

    def send(self, tensor: Tensor, stage: int, *more: Any, **keywords: Any) -> None:
        self._transfer(tensor, lambda message: _p2p.send(message, stage, *more, **keywords))

    def recv(self, tensor: Tensor, stage: int, *more: Any, **keywords: Any) -> None:
        self._transfer(tensor, lambda message: _p2p.recv(message, stage, *more, **keywords))

    def _transfer(self, tensor: Tensor, transfer: _Transfer) -> None:
        expected, position = self._expected(), self._position
        if expected is not None and (position >= len(expected) or tensor is not expected[position]):
            transfer(tensor)
        else:
            self._position += 1
            self._handle(tensor, transfer, position)


_p2p = pipe_engine.p2p


def _tensors(transferred: Any) -> Sequence[Tensor]:
    """Return what one instruction transfers: a tensor, several, or none yet."""
    if transferred is None:
        return ()
    return (transferred,) if isinstance(transferred, Tensor) else transferred
