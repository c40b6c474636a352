"""The compressor of one tensor stream: threshold, residual, codec.

Everything that crosses the network passes one of these, becomes a
:class:`~dct_plugin.codecs.payload.Payload`, and is a tensor again on the other side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .codecs.index import IndexEncoding
from .codecs.message import MessageWriter
from .codecs.payload import Payload, payload_bound
from .codecs.values import ValueDtype
from .config import DataParallelConfig, DCTConfig
from .feedback import Residual, Velocity
from .kernels import Backend, Stats, get_backend
from .schedules import SparsitySchedule
from .thresholds import Threshold, wanted

#: Room beside the configured capacity, so that tiny parts are not cut by counting noise.
_CAPACITY_SLACK = 64
#: Multiplier of the position from which a full message is filled; odd and large, so that successive starts
#: spread.
_START_STRIDE = 0x9E3779B1
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Compressor:
    """Thresholds one tensor stream (a parameter's gradient, step after step) and keeps what it did not send.

    Source: DCT-DP, Gupta et al., KDD 2021, section 3. The four verbs of a compressor read as: compensate (add
    the residual), compress (select and encode), update (keep what was not sent), all in one pass of the
    kernel, and send, which is left to the collectives.

    Args:
        config: ``data_parallel`` settings; a whole :class:`DCTConfig` is accepted; defaults when None.
        name: Name of the stream (the parameter), used in messages and to seed the threshold's sample.
        rank: Rank in the group, seeds the sample too.
        kernels: Backend, or None for the best one of the tensor's device.
        transactional: Support :meth:`rollback` (costs a second residual buffer).
        overrides: Single settings over ``config``, for example ``sparsity=0.9``.

    Raises:
        ConfigError: A setting is unknown or out of range.

    Example:
        >>> compressor = Compressor(sparsity=0.99)
        >>> payload = compressor.compress(gradient)       # bytes for the wire; the rest waits in the residual
        >>> received = compressor.decompress(payload)     # fp32, the shape of the gradient
    """

    def __init__(
        self,
        config: DataParallelConfig | DCTConfig | None = None,
        *,
        name: str = "tensor",
        rank: int = 0,
        kernels: Backend | None = None,
        transactional: bool = False,
        **overrides: Any,
    ) -> None:
        if isinstance(config, DCTConfig):
            config = config.data_parallel
        if overrides or config is None:
            config = DataParallelConfig.of(None if config is None else config.model_dump(), **overrides)
        self.config = config
        self.name = name
        self.schedule = SparsitySchedule(config.sparsity, config.warmup_steps, config.sparsity_warmup_steps)
        self.threshold = Threshold.for_stream(name, rank, config)
        self.residual: Residual | None = None
        self.velocity: Velocity | None = None
        self._kernels = kernels
        self._transactional = transactional
        self._shape: torch.Size | None = None
        self._value_dtype = ValueDtype.parse(config.value_dtype)
        self._encoding = (
            None if config.index_encoding == "auto" else IndexEncoding.parse(config.index_encoding)
        )
        self._saved_threshold: dict[str, Any] | None = None
        self._loaded: dict[str, Tensor] = {}

    # -- the public pair ---

    def compress(self, tensor: Tensor) -> Payload:
        """Encode what of ``tensor + residual`` reaches the threshold; the residual keeps the rest.

        Args:
            tensor: Any shape, fp32, bf16, fp16 (fp64 is rounded to fp32); the same number of entries at every
                call. Left unchanged.

        Returns:
            A payload with memory of its own. When ``tensor`` holds a non-finite entry (or a magnitude of
            ``2**126`` and more) the payload says so, decodes to NaN, and residual and threshold stay bitwise
            as they were.

        Raises:
            TypeError: ``tensor`` is not a floating-point tensor.
            ValueError: The number of entries changed.
        """
        flat = self._flatten(tensor)
        writer = MessageWriter(flat.device)
        self.compress_parts(flat, [(0, flat.numel(), writer)])
        self._shape = tensor.shape
        return Payload.from_tensor(writer.message.clone())

    def decompress(self, payload: Payload | Tensor) -> Tensor:
        """The tensor that ``payload`` stands for: fp32, zeros where nothing was sent.

        Returns:
            The shape of the tensors compressed here when the number of entries agrees, else 1-D.

        Raises:
            PayloadError: The payload is malformed.
        """
        if not isinstance(payload, Payload):
            payload = Payload.from_tensor(payload)
        out = torch.zeros(payload.numel, dtype=torch.float32, device=payload.data.device)
        self._backend(out.device).decode_add(payload.data, out)
        return (
            out.view(self._shape) if self._shape is not None and self._shape.numel() == out.numel() else out
        )

    # -- in parts, straight into messages ---

    def compress_parts(
        self,
        grad: Tensor,
        parts: Sequence[tuple[int, int, MessageWriter]],
        density: float | None = None,
    ) -> list[Stats]:
        """Like :meth:`compress`, with one payload per part, written into the messages of the part's
        receivers.

        The threshold is that of the whole tensor, the payloads' positions are relative to their part.

        Args:
            grad: 1-D contiguous, fp32/bf16/fp16.
            parts: ``(start, stop, writer)``; together they cover the tensor once.
            density: Share of entries to keep in this step; None follows the stream's own schedule.

        Returns:
            One :class:`~dct_plugin.kernels.Stats` per part.
        """
        numel = grad.numel()
        kernels = self._backend(grad.device)
        if density is None:
            density = self.schedule.density(self.threshold.step)
        if self._transactional and self._saved_threshold is None:
            self._saved_threshold = self.threshold.state_dict()
        source, target = self._residual_buffers(numel, grad.device)
        if self.velocity is not None:
            grad = self.velocity.accumulate(grad)
        tau = 0.0
        if density < 1.0 and numel:
            tau = self.threshold.update(kernels, grad, source, density)
        stats = []
        for start, stop, writer in parts:
            length = stop - start
            capacity = length if tau == 0.0 else self._capacity(density, length)
            room = writer.reserve(payload_bound(length, capacity, self._value_dtype))
            part = kernels.compress(
                grad[start:stop],
                None if source is None else source[start:stop],
                tau,
                room,
                residual_out=None if target is None else target[start:stop],
                capacity=capacity,
                start=(self.threshold.step * _START_STRIDE) % length if length else 0,
                value_dtype=self._value_dtype,
                encoding=self._encoding,
            )
            if self.velocity is not None and self.config.momentum_masking and part.nnz and tau > 0.0:
                self.velocity.restart(start, kernels.decode_mask(room[: part.nbytes], length))
            writer.advance(part.nbytes)
            stats.append(part)
        if not any(part.nonfinite for part in stats):
            if tau > 0.0:
                self.threshold.observe(sum(part.above for part in stats), numel)
            else:
                self.threshold.step += 1
        return stats

    # -- steps that may be taken back ---

    def commit(self) -> None:
        """The optimizer step went through: keep residual and threshold."""
        self._saved_threshold = None
        for buffer in self._buffers().values():
            buffer.commit()

    def rollback(self) -> None:
        """The optimizer step was skipped: residual and threshold are bitwise what they were at the last
        commit.
        """
        if self._saved_threshold is not None:
            self.threshold.load_state_dict(self._saved_threshold)
            self._saved_threshold = None
        for buffer in self._buffers().values():
            buffer.rollback()

    def rescale(self, factor: float) -> None:
        """The unit of the gradients changed by ``factor`` (loss scale)."""
        self.threshold.rescale(factor)
        for buffer in self._buffers().values():
            buffer.rescale(factor)

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Residual (fp32, CPU), threshold and counters; a resumed run goes on bitwise."""
        saved = {**self._loaded, **{name: buffer.saved() for name, buffer in self._buffers().items()}}
        return {
            "threshold": self.threshold.state_dict(),
            "residual": saved.get("residual"),
            "velocity": saved.get("velocity"),
            "shape": None if self._shape is None else tuple(self._shape),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ValueError: The residual has another number of entries than the stream.
        """
        self.threshold.load_state_dict(state["threshold"])
        self._shape = None if state["shape"] is None else torch.Size(state["shape"])
        self._saved_threshold = None
        self._loaded = {key: state[key] for key in ("residual", "velocity") if state.get(key) is not None}
        self._adopt_loaded()

    # -- inside ---

    def _backend(self, device: torch.device) -> Backend:
        if self._kernels is None:
            self._kernels = get_backend(device)
        return self._kernels

    def _flatten(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise TypeError(f"{self.name}: expected a floating-point tensor, got {tensor.dtype}")
        flat = tensor.detach().reshape(-1)
        return flat if flat.dtype in _GRAD_DTYPES else flat.to(torch.float32)

    def _capacity(self, density: float, length: int) -> int:
        return min(length, math.ceil(self.config.capacity * wanted(density, length)) + _CAPACITY_SLACK)

    def _residual_buffers(self, numel: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if self.config.error_feedback == "none":
            return None, None
        if self.residual is None:
            self.residual = Residual(numel, device, transactional=self._transactional)
            if self.config.momentum_correction > 0.0:
                self.velocity = Velocity(
                    numel, device, self.config.momentum_correction, transactional=self._transactional
                )
            self._adopt_loaded()
        if self.residual.current.numel() != numel:
            raise ValueError(
                f"{self.name}: the stream has {self.residual.current.numel()} entries, got a tensor of "
                f"{numel}; one compressor serves one tensor"
            )
        return self.residual.begin()

    def _buffers(self) -> dict[str, Residual]:
        """What the stream remembers per entry."""
        buffers = {} if self.residual is None else {"residual": self.residual}
        if self.velocity is not None:
            buffers["velocity"] = self.velocity.buffer
        return buffers

    def _adopt_loaded(self) -> None:
        for name, buffer in self._buffers().items():
            if name in self._loaded:
                buffer.restore(self._loaded.pop(name))
