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

import math
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .codecs.index import IndexEncoding
from .codecs.payload import HEADER_NBYTES, Header, header_bytes, parse_payload, payload_bound
from .codecs.values import ValueDtype
from .collectives import Exchange
from .config import ActivationConfig, KernelConfig, PipelineConfig
from .errors import PayloadError
from .kernels import Backend, Stats, get_backend
from .metrics import Metrics, Record
from .thresholds import Threshold

_FLOATS = {torch.float32: ValueDtype.FP32, torch.bfloat16: ValueDtype.BF16, torch.float16: ValueDtype.FP16}
_TINY = float(torch.finfo(torch.float32).tiny)
_ITEMSIZE = {ValueDtype.FP32: 4, ValueDtype.BF16: 2, ValueDtype.FP16: 2, ValueDtype.INT8: 1}
#: Multiplier of the position from which a full message is filled; odd and large, so that starts spread.
_START_STRIDE = 0x9E3779B1
#: A message of :class:`FixedMessages` begins with its number, int64.
_PREAMBLE = 8


class ActivationStream:
    """Threshold and codec of the activations that cross at one place, step after step.

    Args:
        config: Settings of the place.
        name: Name of the place, in messages and as the seed of the threshold's sample.
        rank: Rank in the group, seeds the sample too.
        sparsity: Overrides that of ``config`` (single boundaries).
        kernels: Backend, or None for the best one of the tensors' device.
    """

    def __init__(
        self,
        config: ActivationConfig,
        *,
        name: str = "activation",
        rank: int = 0,
        sparsity: float | None = None,
        kernels: Backend | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> None:
        self.config = config
        self.name = name
        self.sparsity = config.sparsity if sparsity is None else sparsity
        self.threshold = Threshold.for_stream(name, rank, config)
        self.step = 0
        """Optimizer steps so far."""
        self.training = True
        """False in forward-only passes: the threshold is used and left as it is."""
        self._kernels = kernels
        self._kernel_config = kernel_config or KernelConfig()
        self._measured = False
        self._above = self._numel = self._reported = 0

    @property
    def density(self) -> float:
        """Share of the entries that cross in this step; 1 in warm-up steps and at sparsity 0."""
        return 1.0 if self.step < self.config.warmup_steps else 1.0 - self.sparsity

    def backend(self, device: torch.device) -> Backend:
        """The kernels in use."""
        if self._kernels is None:
            self._kernels = get_backend(device, self._kernel_config.backend)
        return self._kernels

    def value_dtype(self, tensor_dtype: torch.dtype, *, gradient: bool = False) -> ValueDtype:
        """Type of the values on the wire; lossless where everything is sent."""
        own = _FLOATS.get(tensor_dtype, ValueDtype.FP32)
        if self.density >= 1.0:
            return own
        choice = self.config.gradient_value_dtype if gradient else self.config.value_dtype
        if choice == "auto":
            return ValueDtype.FP16 if own is ValueDtype.FP16 else ValueDtype.BF16
        return ValueDtype.parse(choice)

    def tau(self, *parts: Tensor) -> float:
        """Threshold of this step, measured on the first tensor (in parts) that asks; 0 sends everything."""
        density = self.density
        if density >= 1.0:
            return 0.0
        if self.threshold.tau <= 0.0 or (self.training and not self._measured):
            flat = as_flat(parts[0]) if len(parts) == 1 else torch.cat([as_flat(part) for part in parts])
            if not flat.numel():
                return _TINY
            self.threshold.update(self.backend(flat.device), flat, None, density)
            self._measured = True
        return self.threshold.tau

    def encode(self, flat: Tensor, out: Tensor, *, tau: float, capacity: int | None = None) -> Stats:
        """Write the payload of ``flat`` (:func:`as_flat`) to ``out``, uint8 of ``payload_bound`` bytes."""
        numel = flat.numel()
        stats = self.backend(flat.device).compress(
            flat,
            None,
            tau,
            out,
            capacity=numel if capacity is None or tau == 0.0 else capacity,
            start=(self.step * _START_STRIDE) % numel if numel else 0,
            value_dtype=self.value_dtype(flat.dtype),
        )
        if self.training and tau > 0.0 and not stats.nonfinite:
            self._above += stats.above
            self._numel += numel
        return stats

    def new_refreshes(self) -> int:
        """Measurements of the threshold since the last call."""
        count, self._reported = self.threshold.refreshes - self._reported, self.threshold.refreshes
        return count

    def advance(self) -> None:
        """An optimizer step is complete: the threshold may change now."""
        if self._measured and self._numel:
            self.threshold.observe(self._above, self._numel)
        self._measured = False
        self._above = self._numel = 0
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Threshold and step counter."""
        return {"step": self.step, "threshold": self.threshold.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.step = state["step"]
        self.threshold.load_state_dict(state["threshold"])


def as_flat(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernels read it: detached, 1-D, contiguous; fp32, bf16, fp16 (fp64 is rounded)."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.dtype in _FLOATS else flat.to(torch.float32)


def add_payload(kernels: Backend, payload: Tensor, out: Tensor, mask: Tensor | None = None) -> None:
    """``out += decoded payload``; ``out`` contiguous, of any floating type; ``mask`` if it is values only."""
    flat = out.view(-1)
    total = flat if flat.dtype == torch.float32 else flat.to(torch.float32)
    if mask is None:
        kernels.decode_add(payload, total)
    else:
        kernels.decode_shared_add(payload, mask, total)
    if total is not flat:
        flat.copy_(total)


# -- messages of known size -------------------------------------------------------------------------------


class Mask(NamedTuple):
    """What both ends keep of a forward message.

    Attributes:
        number: The sender's number of the message.
        payload: uint8, the forward payload, whose positions the gradient's values take.
        entries: How many positions those are.
    """

    number: int
    payload: Tensor
    entries: int


class FixedMessages:
    """Messages between a sender and a receiver whose size follows from shape and configuration alone.

    A message is a number (int64), one payload, and padding up to its capacity. The number says which forward
    message a gradient answers, so that several may be in flight in any order.

    Args:
        stream: Threshold and codec; the receiver's needs the same settings.
        capacity: Room as a multiple of the target density, headers included; None takes the one of a
            :class:`~dct_plugin.config.PipelineConfig`.
    """

    def __init__(self, stream: ActivationStream, capacity: float | None = None) -> None:
        self.stream = stream
        if capacity is None:
            capacity = stream.config.capacity if isinstance(stream.config, PipelineConfig) else 1.0
        self.capacity = capacity

    def entries(self, numel: int, value_dtype: ValueDtype) -> int:
        """Most entries of a message about a tensor of ``numel`` entries."""
        density = self.stream.density
        if density >= 1.0:
            return numel
        room = int(self.capacity * density * numel)
        header = -(-(_PREAMBLE + HEADER_NBYTES) // _ITEMSIZE[value_dtype])
        return max(1, min(numel, max(room // 2, room - header)))

    def nbytes(
        self, numel: int, dtype: torch.dtype, *, gradient: bool = False, mask: Mask | None = None
    ) -> int:
        """Size of every forward (or ``gradient``) message about a tensor of ``numel`` entries.

        With ``mask``, that of the gradient message that answers it and holds no room to spare.
        """
        forward = self.stream.value_dtype(dtype)
        entries = self.entries(numel, forward) if mask is None else mask.entries
        if gradient:
            value_dtype = self.stream.value_dtype(dtype, gradient=True)
            bound = payload_bound(numel, entries, value_dtype, IndexEncoding.SHARED_MASK)
        else:
            bound = payload_bound(numel, entries, forward)
        return _PREAMBLE + bound

    def encode(self, tensor: Tensor, number: int) -> tuple[Tensor, Mask, Stats]:
        """The forward message of ``tensor``: ``(message, mask, stats)``; the mask has memory of its own."""
        flat = as_flat(tensor)
        tau = self.stream.tau(flat)
        message = self._message(flat, number, gradient=False)
        entries = self.entries(flat.numel(), self.stream.value_dtype(flat.dtype))
        stats = self.stream.encode(flat, message[_PREAMBLE:], tau=tau, capacity=entries)
        payload = message[_PREAMBLE : _PREAMBLE + stats.nbytes]
        return message, Mask(number, payload, stats.nnz), stats

    def decode(self, message: Tensor, out: Tensor) -> Mask:
        """Fill ``out`` (contiguous) from a forward message; the mask is a view of the message.

        Raises:
            PayloadError: The message is malformed or of a tensor of another size.
        """
        mask = self._open(message)
        add_payload(self.stream.backend(out.device), mask.payload, out.zero_())
        return mask

    def encode_gradient(self, gradient: Tensor, mask: Mask, *, exact: bool = False) -> tuple[Tensor, Stats]:
        """The message that answers ``mask``: the gradient's values there.

        ``exact`` leaves no room to spare, for receivers that know which mask is answered next.
        """
        flat = as_flat(gradient)
        message = self._message(flat, mask.number, gradient=True, mask=mask if exact else None)
        code = self.stream.value_dtype(flat.dtype, gradient=True)
        stats = self.stream.backend(flat.device).encode_shared(flat, mask.payload, code, message[_PREAMBLE:])
        return message, stats

    def decode_gradient(self, message: Tensor, masks: dict[int, Mask], out: Tensor) -> Mask:
        """Fill ``out`` from a gradient message; the mask it answers is taken out of ``masks``.

        Raises:
            PayloadError: The message is malformed, or answers none of ``masks``.
        """
        number, payload, _ = self._open(message)
        mask = masks.pop(number, None)
        if mask is None:
            known = ", ".join(str(n) for n in sorted(masks)) or "none"
            raise PayloadError(f"{self.stream.name}: gradient of message {number}; awaited are {known}")
        add_payload(self.stream.backend(out.device), payload, out.zero_(), mask.payload)
        return mask

    def _message(self, flat: Tensor, number: int, *, gradient: bool, mask: Mask | None = None) -> Tensor:
        size = self.nbytes(flat.numel(), flat.dtype, gradient=gradient, mask=mask)
        message = torch.empty(size, dtype=torch.uint8, device=flat.device)
        message[:_PREAMBLE] = torch.tensor([number], dtype=torch.int64).view(torch.uint8).to(flat.device)
        return message

    def _open(self, message: Tensor) -> Mask:
        number = int(message[:_PREAMBLE].cpu().view(torch.int64))
        body = message[_PREAMBLE:]
        try:
            header = Header.parse(header_bytes(body), body.numel())
        except PayloadError as error:
            raise PayloadError(f"{self.stream.name}: message {number}: {error}") from error
        return Mask(number, body[: header.nbytes], header.nnz)


class MaskedLink:
    """Send and receive as autograd functions, for hand-written pipelines of two ranks.

    Args:
        messages: Settings; the same on both ends.
        peer: Global rank of the other end.
        group: Process group that both belong to.

    Example:
        >>> token = link.send(activation)         # on the sender;   later: token.backward()
        >>> activation = link.recv((8, 16))       # on the receiver; its backward pass sends the gradient
    """

    def __init__(self, messages: FixedMessages, peer: int, group: dist.ProcessGroup | None = None) -> None:
        self.messages = messages
        self.peer = peer
        self.group = group
        self._sent = 0

    def send(self, tensor: Tensor) -> Tensor:
        """Send ``tensor``; returns a zero whose backward pass receives the gradient."""
        return _Send.apply(tensor, self)

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Receive a tensor; its backward pass sends the gradient's values at the mask."""
        anchor = torch.empty(0, dtype=dtype, device=device, requires_grad=True)
        return _Recv.apply(anchor, tuple(shape), self)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, link: MaskedLink) -> Tensor:
        message, mask, _ = link.messages.encode(tensor, link._sent)
        link._sent += 1
        dist.send(message, link.peer, group=link.group)
        ctx.link, ctx.mask, ctx.like = link, mask, (tensor.shape, tensor.dtype, tensor.device)
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device = ctx.like
        size = ctx.link.messages.nbytes(shape.numel(), dtype, gradient=True)
        message = torch.empty(size, dtype=torch.uint8, device=device)
        dist.recv(message, ctx.link.peer, group=ctx.link.group)
        gradient = torch.empty(shape, dtype=dtype, device=device)
        ctx.link.messages.decode_gradient(message, {ctx.mask.number: ctx.mask}, gradient)
        return gradient, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...], link: MaskedLink) -> Tensor:
        out = anchor.new_empty(shape)
        message = torch.empty(
            link.messages.nbytes(out.numel(), out.dtype), dtype=torch.uint8, device=out.device
        )
        dist.recv(message, link.peer, group=link.group)
        ctx.link, ctx.mask = link, link.messages.decode(message, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        message, _ = ctx.link.messages.encode_gradient(gradients[0], ctx.mask)
        dist.send(message, ctx.link.peer, group=ctx.link.group)
        return gradients[0].new_zeros(0), None, None


# -- collectives ------------------------------------------------------------------------------------------


class MaskedCollectives:
    """Collectives of a model-parallel group whose backward passes reuse the forward masks.

    All methods are collectives in both directions: every rank calls them in the same order with tensors of
    the same shape, and runs their backward passes in the same order.

    Args:
        group: Process group (gloo or nccl), None for the default one.
        device: Device of the tensors.
        metrics: Where bytes, density and times are recorded.
        cls: Tensor class of the records; gradients are recorded as ``cls + "_gradient"``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        metrics: Metrics | None = None,
        cls: str = "activation",
    ) -> None:
        self.exchange = Exchange(group, torch.device(device))
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.metrics = metrics
        self.cls = cls

    def all_gather(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Concatenate the ranks' tensors along the first dimension; others see this rank's thresholded.

        The gradient of this rank's tensor is the sum of its own part's and of the others' at the mask.
        """
        return _AllGather.apply(tensor, self, stream)

    def reduce_scatter(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum equal chunks (along the first dimension) of the ranks' partial sums at the chunk's rank.

        What goes to other ranks is thresholded; its gradient comes back at the mask. The own chunk is exact.
        """
        return _ReduceScatter.apply(tensor, self, stream)

    def all_reduce(self, tensor: Tensor, stream: ActivationStream) -> Tensor:
        """Sum the ranks' thresholded partial sums, the own one too: bitwise the same result on every rank.

        Backward needs no communication where the gradient of the sum is the same on every rank: it is kept at
        the own mask.
        """
        return _AllReduce.apply(tensor, self, stream)

    def all_to_all(
        self,
        tensor: Tensor,
        stream: ActivationStream,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send row blocks to the ranks, thresholded, and concatenate what arrives.

        Gradients return as values at the masks.

        Args:
            tensor: ``[rows, ...]``.
            input_splits: Rows for each rank; equal parts when None.
            output_splits: Rows from each rank; equal to the input's when None.
        """
        return _AllToAll.apply(tensor, self, stream, input_splits, output_splits)

    # -- forward and backward halves ---------------------------------------------------------------------

    def _others(self, parts: list[Tensor]) -> list[Tensor]:
        """What crosses: all parts but the own one."""
        return [part for rank, part in enumerate(parts) if rank != self.rank] or parts

    def _send_parts(
        self, parts: list[Tensor], stream: ActivationStream, tau: float, kind: str
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each rank's part to that rank: ``(payloads sent, payloads received)``; the own ones are empty.

        ``parts`` may hold the same tensor for all ranks, which is encoded once.
        """
        sent: list[Tensor] = []
        stats: list[Stats] = []
        encoded: dict[int, Tensor] = {}
        try:
            for rank, part in enumerate(parts):
                if rank == self.rank:
                    sent.append(torch.empty(0, dtype=torch.uint8, device=part.device))
                    continue
                payload = encoded.get(id(part))
                if payload is None:
                    flat = as_flat(part)
                    room = torch.empty(
                        payload_bound(flat.numel(), flat.numel(), stream.value_dtype(flat.dtype)),
                        dtype=torch.uint8,
                        device=flat.device,
                    )
                    stats.append(stream.encode(flat, room, tau=tau))
                    payload = encoded[id(part)] = room[: stats[-1].nbytes].clone()
                sent.append(payload)
        except BaseException:
            self.exchange.abort()
            raise
        began, before = time.perf_counter(), self.exchange.sent_bytes
        fingerprint = zlib.crc32(f"{kind}:{stream.name}:{[tuple(p.shape[1:]) for p in parts]}".encode())
        received = self.exchange.all_to_all(sent, fingerprint)
        self._record(self.cls, parts, stream, stats, tau, self.exchange.sent_bytes - before, began)
        return sent, received

    def _return_values(
        self, parts: list[Tensor], received: list[Tensor], sent: list[Tensor], stream: ActivationStream
    ) -> list[Tensor]:
        """Backward of :meth:`_send_parts`: gradient parts to their senders, at the masks, sizes known."""
        dtype = parts[self.rank].dtype
        code = stream.value_dtype(dtype, gradient=True)
        messages, stats = [], []
        for rank, part in enumerate(parts):
            message = torch.empty(
                0 if rank == self.rank else _values_nbytes(received[rank], code),
                dtype=torch.uint8,
                device=part.device,
            )
            if rank != self.rank:
                flat = as_flat(part)
                stats.append(stream.backend(flat.device).encode_shared(flat, received[rank], code, message))
            messages.append(message)
        sizes = [0 if r == self.rank else _values_nbytes(p, code) for r, p in enumerate(sent)]
        began, before = time.perf_counter(), self.exchange.sent_bytes
        answers = self.exchange.transfer(messages, sizes)
        bytes_sent = self.exchange.sent_bytes - before
        self._record(f"{self.cls}_gradient", parts, stream, stats, 0.0, bytes_sent, began)
        return [
            answer if rank == self.rank else answer[: Header.parse(header_bytes(answer)).nbytes]
            for rank, answer in enumerate(answers)
        ]

    def _record(
        self,
        cls: str,
        parts: list[Tensor],
        stream: ActivationStream,
        stats: list[Stats],
        tau: float,
        sent: int,
        began: float,
    ) -> None:
        if self.metrics is None:
            return
        others = self._others(parts) if self.world_size > 1 else []
        # A tensor that goes to all ranks is encoded once and counted once per receiver.
        copies = len(others) / len(stats) if stats else 1
        self.metrics.record(
            Record(
                cls,
                dense_bytes=sum(part.numel() * part.element_size() for part in others),
                sent_bytes=sent,
                numel=sum(part.numel() for part in others),
                nnz=round(copies * sum(part.nnz for part in stats)),
                target_density=stream.density,
                tau=tau,
                refreshes=stream.new_refreshes(),
                select_ms=sum(part.select_ns for part in stats) / 1e6,
                encode_ms=sum(part.encode_ns for part in stats) / 1e6,
                exchange_ms=1e3 * (time.perf_counter() - began),
            )
        )


def _values_nbytes(mask: Tensor, code: ValueDtype) -> int:
    """Bytes of a values-only payload for ``mask``; a non-finite one is shorter and padded."""
    header = Header.parse(header_bytes(mask), mask.numel())
    return payload_bound(header.numel, header.nnz, code, IndexEncoding.SHARED_MASK)


def _checked(payload: Tensor, numel: int, stream: ActivationStream, sender: int) -> Tensor:
    try:
        parse_payload(payload, numel, verify=False)  # decoding verifies
    except PayloadError as error:
        raise PayloadError(f"{stream.name}: message from rank {sender} of the group: {error}") from error
    return payload


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: MaskedCollectives, stream: ActivationStream) -> Tensor:
        tensor = tensor.contiguous()
        tau = stream.tau(tensor)
        sent, received = comm._send_parts([tensor] * comm.world_size, stream, tau, "all_gather")
        out = tensor.new_zeros((comm.world_size, *tensor.shape))
        _fill(list(out), tensor, received, comm, stream)
        ctx.comm, ctx.stream, ctx.sent, ctx.received = comm, stream, sent, received
        return out.view(-1, *tensor.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        comm, stream = ctx.comm, ctx.stream
        parts = list(gradients[0].contiguous().chunk(comm.world_size))
        answers = comm._return_values(parts, ctx.received, ctx.sent, stream)
        total = _sum(parts[comm.rank], answers, comm, stream, masks=ctx.sent)
        return total.to(parts[comm.rank].dtype), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: MaskedCollectives, stream: ActivationStream) -> Tensor:
        tensor = tensor.contiguous()
        if tensor.shape[0] % comm.world_size:
            raise ValueError(
                f"{stream.name}: first dimension {tensor.shape[0]} is not a multiple of {comm.world_size}"
            )
        parts = list(tensor.chunk(comm.world_size))
        tau = stream.tau(*comm._others(parts))
        sent, received = comm._send_parts(parts, stream, tau, "reduce_scatter")
        total = _sum(parts[comm.rank], received, comm, stream)
        ctx.comm, ctx.stream, ctx.sent, ctx.received = comm, stream, sent, received
        return total.to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        comm, stream = ctx.comm, ctx.stream
        gradient = gradients[0].contiguous()
        # The same gradient goes to every contributor, at that one's mask.
        answers = comm._return_values([gradient] * comm.world_size, ctx.received, ctx.sent, stream)
        out = gradient.new_zeros((comm.world_size, *gradient.shape))
        _fill(list(out), gradient, answers, comm, stream, masks=ctx.sent)
        return out.view(-1, *gradient.shape[1:]), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: MaskedCollectives, stream: ActivationStream) -> Tensor:
        tensor = tensor.contiguous()
        tau = stream.tau(tensor)
        sent, received = comm._send_parts([tensor] * comm.world_size, stream, tau, "all_reduce")
        own = next((payload for payload in sent if payload.numel()), None)
        total = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
        kernels = stream.backend(tensor.device)
        for rank, payload in enumerate(received):
            if rank != comm.rank:
                add_payload(kernels, _checked(payload, tensor.numel(), stream, rank), total)
            elif own is not None:
                add_payload(kernels, own, total)
            else:
                total.add_(tensor)
        ctx.stream, ctx.own = stream, own
        return total.to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        if ctx.own is not None:
            mask = ctx.stream.backend(gradient.device).decode_mask(ctx.own, gradient.numel())
            gradient = gradient * mask.view(gradient.shape)
        return gradient, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        comm: MaskedCollectives,
        stream: ActivationStream,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
    ) -> Tensor:
        tensor = tensor.contiguous()
        rows = _splits(tensor.shape[0], comm.world_size, input_splits, stream)
        arriving = rows if output_splits is None else list(output_splits)
        parts = list(tensor.split(rows))
        tau = stream.tau(*comm._others(parts))
        sent, received = comm._send_parts(parts, stream, tau, "all_to_all")
        out = tensor.new_zeros((sum(arriving), *tensor.shape[1:]))
        _fill(out.split(arriving), parts[comm.rank], received, comm, stream)
        ctx.comm, ctx.stream, ctx.sent, ctx.received = comm, stream, sent, received
        ctx.rows, ctx.arriving = rows, arriving
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        comm, stream = ctx.comm, ctx.stream
        parts = list(gradients[0].contiguous().split(ctx.arriving))
        answers = comm._return_values(parts, ctx.received, ctx.sent, stream)
        out = gradients[0].new_zeros((sum(ctx.rows), *gradients[0].shape[1:]))
        _fill(out.split(ctx.rows), parts[comm.rank], answers, comm, stream, masks=ctx.sent)
        return out, None, None, None, None


def _fill(
    blocks: Sequence[Tensor],
    own: Tensor,
    payloads: list[Tensor],
    comm: MaskedCollectives,
    stream: ActivationStream,
    masks: list[Tensor] | None = None,
) -> None:
    """Each rank's payload into its block (of zeros), ``own`` into this rank's; ``masks`` if values only."""
    for rank, (payload, block) in enumerate(zip(payloads, blocks, strict=True)):
        if rank == comm.rank:
            block.copy_(own)
        else:
            _add(payload, block, rank, stream, masks)


def _sum(
    own: Tensor,
    payloads: list[Tensor],
    comm: MaskedCollectives,
    stream: ActivationStream,
    masks: list[Tensor] | None = None,
) -> Tensor:
    """``own`` plus the others' payloads, in fp32 and in rank order, whoever sums."""
    total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
    for rank, payload in enumerate(payloads):
        if rank == comm.rank:
            total.add_(own)
        else:
            _add(payload, total, rank, stream, masks)
    return total


def _add(
    payload: Tensor, out: Tensor, rank: int, stream: ActivationStream, masks: list[Tensor] | None
) -> None:
    kernels = stream.backend(out.device)
    if masks is None:
        add_payload(kernels, _checked(payload, out.numel(), stream, rank), out)
    else:
        add_payload(kernels, payload, out, masks[rank])


def _splits(rows: int, world_size: int, splits: Sequence[int] | None, stream: ActivationStream) -> list[int]:
    if splits is None:
        if rows % world_size:
            raise ValueError(f"{stream.name}: {rows} rows are not a multiple of {world_size}; give splits")
        return [rows // world_size] * world_size
    if sum(splits) != rows or len(splits) != world_size or min(splits) < 0:
        raise ValueError(f"{stream.name}: splits {list(splits)} do not add up to {rows} rows")
    return list(splits)


def wire_bits(density: float, value_bits: int, index_bits: float | None = None) -> float:
    """Bits per entry of the tensor that a forward message takes (index bits default to the entropy bound)."""
    if not 0 < density < 1:
        return float(value_bits)
    if index_bits is None:
        index_bits = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    return density * (value_bits + index_bits)
