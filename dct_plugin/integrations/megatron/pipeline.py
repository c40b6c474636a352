"""Pipeline parallelism: activations forward and gradients backward at ``P2PCommunicator._communicate``.

All of Megatron's schedules (1F1B, interleaved, overlapped, batched or not) send and receive through this
one method. Forward a boundary's activation goes as a message of fixed size
(:class:`~dct_plugin.model_parallel.FixedMessages`); both ends keep what the gradient's message refers to,
which comes without padding where the order of messages is known. Which micro-batch and model chunk a
gradient belongs to is in the number of the message: the receiver of an activation keeps it together with the
tensor, and recognises the gradient to send as that tensor's ``.grad``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.errors import DCTError
from dct_plugin.host_traffic import own_traffic
from dct_plugin.model_parallel import FixedMessages, Kept
from dct_plugin.model_parallel.fixed import number_of

from ..host.activation_streams import PipelineMetrics
from ..host.patching import Function, given
from .session import Session
from .streams import ActivationHook, data_parallel_group

_CHUNK = "_dct_chunk"
_PREFIX = "pipeline boundary "
#: A message's number is that of its model chunk times this, and a counter.
_CHUNK_FACTOR = 1 << 40


class PipelineHook(ActivationHook):
    """Replaces ``P2PCommunicator._communicate`` and notes which model chunk a tensor comes from."""

    def __init__(self, session: Session) -> None:
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        self.config = session.config.model_parallel.pipeline
        super().__init__(session, self.config, _PREFIX)
        self._p2p = p2p_communication
        self._count = 0
        self._sent: dict[int, Kept] = {}
        self._received: list[tuple[Tensor, Kept, FixedMessages]] = []
        self._checked: Any = None
        session.patches.intercept(p2p_communication.P2PCommunicator, "_communicate", self._communicate)
        session.patches.intercept(schedules, "forward_step", self._forward_step)

    def seed(self) -> int:
        # Tensor-parallel ranks send the same activation (unless their sequences differ, and with them what
        # they send): it must stay the same behind the boundary.
        group = data_parallel_group()
        return dist.get_rank() if group is None else group.rank()

    # -- iterations -----------------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
        super().begin(training)
        self._sent.clear()
        self._received.clear()

    # -- communication --------------------------------------------------------------------------------------

    def _forward_step(self, original: Function, *arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        chunk = given(original, "vp_stage", arguments, keywords)
        if chunk:
            outputs = result[0] if isinstance(result[0], list) else [result[0]]
            for output in outputs:
                if isinstance(output, Tensor):
                    setattr(output, _CHUNK, chunk)
        return result

    def _communicate(
        self, original: Function, communicator: Any, *, wait_on_reqs: bool = True, **keywords: Any
    ) -> Any:
        transfer = _Transfer(communicator, **keywords)
        if not self._compresses(transfer):
            return original(communicator, wait_on_reqs=wait_on_reqs, **keywords)
        config = communicator.config
        if config is not self._checked:
            _check(config)
            self._checked = config
        if config.batch_p2p_comm and not wait_on_reqs:
            raise DCTError("Megatron asked for batched communication that it does not wait for")
        self._encode_all(transfer)
        finish = self._prepare_to_receive(transfer)
        with own_traffic():
            requests = transfer.start(self._p2p)
        for tensor in transfer.sent_whole:
            self.pipeline_metrics.sent_whole(tensor)
        received = transfer.recv_prev, transfer.recv_next
        if not wait_on_reqs:
            handles = {
                key: _Handle(self, request, finish.get(key), transfer.messages)
                for key, request in requests.items()
            }
            return *received, handles
        with self.pipeline_metrics.timed("exchange"):
            for request in requests if isinstance(requests, list) else requests.values():
                request.wait()
            if config.batch_p2p_comm and config.batch_p2p_sync and torch.cuda.is_available():
                torch.cuda.synchronize()
        for action in finish.values():
            action()
        return *received, None

    def _compresses(self, transfer: _Transfer) -> bool:
        """Return whether something crosses a boundary that has a compressor."""
        to_next, to_prev = transfer.crosses_next, transfer.crosses_prev
        return (to_next and self._is_sparse(transfer.boundary_next)) or (
            to_prev and self._is_sparse(transfer.boundary_prev)
        )

    def _encode_all(self, transfer: _Transfer) -> None:
        """Replace what is sent by messages."""
        if transfer.send_next is not None and self._is_sparse(transfer.boundary_next):
            transfer.messages["send_next"] = self._encode(transfer.send_next, transfer.boundary_next)
        if transfer.send_prev is not None and self._is_sparse(transfer.boundary_prev):
            exact = transfer.is_ordered
            transfer.messages["send_prev"] = self._encode_gradient(transfer.send_prev, exact=exact)

    def _prepare_to_receive(self, transfer: _Transfer) -> dict[str, Callable[[], None]]:
        """Make buffers for messages; return what decodes them, by Megatron's names of the transfers."""
        finish: dict[str, Callable[[], None]] = {}
        into, boundary = transfer.recv_prev, transfer.boundary_prev
        if into is not None and self._is_sparse(boundary):
            message = self._buffer(into, boundary, gradient=False)
            transfer.messages["recv_prev"] = message
            finish["recv_prev"] = partial(self._decode, message, into, boundary)
        into, boundary = transfer.recv_next, transfer.boundary_next
        if into is not None and self._is_sparse(boundary):
            awaited = next(iter(self._sent.values()), None) if transfer.is_ordered else None
            message = self._buffer(into, boundary, gradient=True, kept=awaited)
            transfer.messages["recv_next"] = message
            finish["recv_next"] = partial(self._decode_gradient, message, into, boundary)
        return finish

    def _is_sparse(self, boundary: int) -> bool:
        if not self.session.training and not self.config.evaluation:
            return False
        if not self.session.pass_through:
            return True
        return self.config.at(boundary).compresses and self.session.step >= self.config.warmup_steps

    def _messages(self, boundary: int, number: int = 0) -> FixedMessages:
        """Return the messages of a boundary and, if interleaved, of the model chunk in a message's number."""
        chunk = number // _CHUNK_FACTOR
        name = f"{_PREFIX}{boundary}" + (f" chunk {chunk}" if chunk else "")
        return FixedMessages(self.stream(name, self.config.at(boundary)))

    def _buffer(self, tensor: Tensor, boundary: int, *, gradient: bool, kept: Kept | None = None) -> Tensor:
        """Return a buffer for the message about ``tensor``."""
        messages = self._messages(boundary, 0 if kept is None else kept.number)
        size = messages.nbytes(tensor.shape, tensor.dtype, gradient=gradient, kept=kept)
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)

    def _encode(self, tensor: Tensor, boundary: int) -> Tensor:
        number = getattr(tensor, _CHUNK, 0) * _CHUNK_FACTOR + self._count
        message, kept, encoded = self._messages(boundary, number).encode(tensor, number)
        if self.session.training and tensor.requires_grad:
            self._sent[number] = kept
        self._count += 1
        self.pipeline_metrics.sent("pipeline", tensor, message, encoded)
        return message

    def _encode_gradient(self, gradient: Tensor, *, exact: bool) -> Tensor:
        for position, (tensor, _, _) in enumerate(self._received):
            if tensor.grad is gradient:
                _, kept, messages = self._received.pop(position)
                break
        else:
            raise DCTError(
                f"rank {dist.get_rank()}: the gradient that Megatron sends back, of shape "
                f"{tuple(gradient.shape)}, is not that of one of the {len(self._received)} activations "
                "received; a changed backward_step is not supported with dct.model_parallel.pipeline"
            )
        message, encoded = messages.encode_gradient(gradient, kept, exact=exact)
        self.pipeline_metrics.sent("pipeline_gradient", gradient, message, encoded)
        return message

    def _decode(self, message: Tensor, out: Tensor, boundary: int) -> None:
        with self.pipeline_metrics.timed("decode"):
            messages = self._messages(boundary, number_of(message))
            kept = messages.decode(message, out.detach())
        if self.session.training and torch.is_grad_enabled():
            self._received.append((out, kept, messages))

    def _decode_gradient(self, message: Tensor, out: Tensor, boundary: int) -> None:
        with self.pipeline_metrics.timed("decode"):
            messages = self._messages(boundary, number_of(message))
            messages.decode_gradient(message, self._sent, out.detach())

    # -- metrics --------------------------------------------------------------------------------------------

    @property
    def pipeline_metrics(self) -> PipelineMetrics:
        """The metrics of the current pass."""
        return PipelineMetrics(self.session.metrics, self.session.training)


class _Transfer:
    """The tensors that one call of ``_communicate`` moves, in both directions.

    Attributes:
        boundary_next: Number of the boundary to the next stage, which is this stage's rank.
        is_ordered: Whether gradients come back in the order of the activations, as they do without
            interleaving. Both ends then know what is answered, and the message needs no room to spare.
        messages: Compressed messages in place of tensors, by the names of the transfers.
    """

    def __init__(
        self,
        communicator: Any,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> None:
        self._communicator, self._shape = communicator, tensor_shape
        size, rank = communicator.pp_group.size(), communicator.pp_group.rank()
        self.boundary_next, self.boundary_prev = rank, (rank - 1) % size
        self.send_next, self.send_prev = tensor_send_next, tensor_send_prev
        self.crosses_next = recv_next or tensor_send_next is not None
        self.crosses_prev = recv_prev or tensor_send_prev is not None
        self._receives_prev, self._receives_next = recv_prev, recv_next
        self.messages: dict[str, Tensor] = {}

    @functools.cached_property
    def recv_prev(self) -> Tensor | None:
        """The activation from the previous stage."""
        return _empty(self._shape, self._communicator.config) if self._receives_prev else None

    @functools.cached_property
    def recv_next(self) -> Tensor | None:
        """The gradient from the next stage."""
        return _empty(self._shape, self._communicator.config) if self._receives_next else None

    @property
    def sent_whole(self) -> list[Tensor]:
        """The tensors that are sent as they are, beside messages."""
        sent = {"send_next": self.send_next, "send_prev": self.send_prev}
        return [each for name, each in sent.items() if each is not None and name not in self.messages]

    @property
    def is_ordered(self) -> bool:
        return not self._communicator.config.virtual_pipeline_model_parallel_size

    def start(self, p2p: Any) -> Any:
        """Start the transfers by Megatron's functions; return its requests."""
        ends, messages = self._communicator, self.messages
        transfer = p2p._batched_p2p_ops if ends.config.batch_p2p_comm else p2p._p2p_ops
        return transfer(
            tensor_send_prev=messages.get("send_prev", self.send_prev),
            tensor_recv_prev=messages.get("recv_prev", self.recv_prev),
            tensor_send_next=messages.get("send_next", self.send_next),
            tensor_recv_next=messages.get("recv_next", self.recv_next),
            group=ends.pp_group,
            prev_pipeline_rank=ends.prev_rank,
            next_pipeline_rank=ends.next_rank,
        )


class _Handle:
    """The handle that Megatron waits for with ``overlap_p2p_comm``: the transfer, then decoding.

    ``messages`` must live until they are sent, so the handle holds them.
    """

    def __init__(
        self, hook: PipelineHook, request: Any, finish: Callable[[], None] | None, messages: dict[str, Tensor]
    ) -> None:
        self._hook = hook
        self._request: Any = request
        self._finish = finish
        self._messages = messages

    def wait(self, *arguments: Any) -> None:
        """Wait for the transfer and fill the tensor; further calls do nothing."""
        request, self._request = self._request, None
        if request is not None:
            with self._hook.pipeline_metrics.timed("exchange"):
                request.wait()
            if self._finish is not None:
                self._finish()
            self._messages = {}


def _empty(shape: Any, config: Any) -> Tensor:
    """Return a tensor to receive into, as Megatron makes it."""
    if config.pipeline_dtype is None or shape is None:
        raise RuntimeError("pipeline_dtype and tensor_shape must be given to receive")
    return torch.empty(
        tuple(shape), requires_grad=True, device=torch.cuda.current_device(), dtype=config.pipeline_dtype
    )


def _check(config: Any) -> None:
    """Refuse what changes sizes from message to message or goes around this method."""
    refused = {
        "variable_seq_lengths": "receivers must know sizes in advance",
        "mtp_standalone": "its shapes differ between stages",
        "use_ring_exchange_p2p": "its transfers cannot be replaced",
    }
    for name, reason in refused.items():
        if getattr(config, name, False):
            raise DCTError(f"dct.model_parallel.pipeline does not work with Megatron's {name}: {reason}")
    graphs = getattr(config, "cuda_graph_impl", "none")  # "full_iteration" is an item of its scope up to 0.17
    scope = [str(getattr(item, "name", item)) for item in getattr(config, "cuda_graph_scope", None) or []]
    if graphs == "full_iteration" or (graphs != "none" and "full_iteration" in scope):
        raise DCTError(
            "dct.model_parallel.pipeline does not work with CUDA graphs of full iterations: the number of "
            "entries that cross depends on the data"
        )
    if config.pipeline_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise DCTError(
            f"dct.model_parallel.pipeline does not work with pipeline_dtype {config.pipeline_dtype}"
        )
