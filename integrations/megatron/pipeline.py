"""Pipeline parallelism: activations forward and gradients backward at ``P2PCommunicator._communicate``.

All of Megatron's schedules (1F1B, interleaved, overlapped, batched or not) send and receive through this
one method. Forward a boundary's activation goes as a message of fixed size
(:class:`~dct_plugin.model_parallel.FixedMessages`); both ends keep what the gradient's message refers to,
which comes without padding where the order of messages is known. Which micro-batch and model chunk a
gradient belongs to is in the number of the message: the receiver of an activation keeps it together with the
tensor, and recognises the gradient to send as that tensor's ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.errors import DCTError
from dct_plugin.model_parallel import FixedMessages, Kept
from dct_plugin.model_parallel.fixed import number_of

from ..host.pipeline_metrics import Crossings
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
        session.patches.wrap(p2p_communication.P2PCommunicator, "_communicate", self._make_communicate)
        session.patches.wrap(schedules, "forward_step", self._make_forward_step)

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

    def _make_forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(*arguments: Any, **keywords: Any) -> Any:
            result = original(*arguments, **keywords)
            chunk = keywords.get("vp_stage")
            if chunk:
                outputs = result[0] if isinstance(result[0], list) else [result[0]]
                for output in outputs:
                    if isinstance(output, Tensor):
                        setattr(output, _CHUNK, chunk)
            return result

        return forward_step

    def _make_communicate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(
            communicator: Any,
            *,
            tensor_send_next: Tensor | None,
            tensor_send_prev: Tensor | None,
            recv_prev: bool,
            recv_next: bool,
            tensor_shape: Any,
            wait_on_reqs: bool = True,
        ) -> Any:
            size, rank = communicator.pp_group.size(), communicator.pp_group.rank()
            behind, before = rank, (rank - 1) % size
            sparse_next, sparse_prev = self._is_sparse(behind), self._is_sparse(before)
            if not (sparse_next and (recv_next or tensor_send_next is not None)) and not (
                sparse_prev and (recv_prev or tensor_send_prev is not None)
            ):
                return original(
                    communicator,
                    tensor_send_next=tensor_send_next,
                    tensor_send_prev=tensor_send_prev,
                    recv_prev=recv_prev,
                    recv_next=recv_next,
                    tensor_shape=tensor_shape,
                    wait_on_reqs=wait_on_reqs,
                )
            config = communicator.config
            if config is not self._checked:
                _check(config)
                self._checked = config
            # Without interleaving gradients come back in the order of the activations, so that both ends know
            # what is answered, and the message needs no room to spare.
            ordered = not config.virtual_pipeline_model_parallel_size
            send_next, send_prev = tensor_send_next, tensor_send_prev
            if send_next is not None and sparse_next:
                send_next = self._encode(send_next, behind)
            if send_prev is not None and sparse_prev:
                send_prev = self._encode_gradient(send_prev, exact=ordered)
            from_prev = _empty(tensor_shape, config) if recv_prev else None
            from_next = _empty(tensor_shape, config) if recv_next else None
            into_prev, into_next = from_prev, from_next
            finish: dict[str, Callable[[], None]] = {}  # by Megatron's name of the transfer
            if from_prev is not None and sparse_prev:
                into_prev = self._buffer(from_prev, before, gradient=False)
                finish["recv_prev"] = partial(self._decode, into_prev, from_prev, before)
            if from_next is not None and sparse_next:
                awaited = next(iter(self._sent.values()), None) if ordered else None
                into_next = self._buffer(from_next, behind, gradient=True, kept=awaited)
                finish["recv_next"] = partial(self._decode_gradient, into_next, from_next, behind)
            if config.batch_p2p_comm and not wait_on_reqs:
                raise DCTError("Megatron asked for batched communication that it does not wait for")
            transfer = self._p2p._batched_p2p_ops if config.batch_p2p_comm else self._p2p._p2p_ops
            requests = transfer(
                tensor_send_prev=send_prev,
                tensor_recv_prev=into_prev,
                tensor_send_next=send_next,
                tensor_recv_next=into_next,
                group=communicator.pp_group,
                prev_pipeline_rank=communicator.prev_rank,
                next_pipeline_rank=communicator.next_rank,
            )
            if not wait_on_reqs:
                # Messages must live until they are sent, so the handles hold them.
                kept = (send_next, send_prev)
                return (
                    from_prev,
                    from_next,
                    {key: _Handle(self, request, finish.get(key), kept) for key, request in requests.items()},
                )
            with self.crossings.timed("exchange"):
                for request in requests if isinstance(requests, list) else requests.values():
                    request.wait()
                if config.batch_p2p_comm and config.batch_p2p_sync and torch.cuda.is_available():
                    torch.cuda.synchronize()
            for action in finish.values():
                action()
            return from_prev, from_next, None

        return communicate

    def _is_sparse(self, boundary: int) -> bool:
        if not self.session.training and not self.config.evaluation:
            return False
        if not self.session.pass_through:
            return True
        return self.config.at(boundary).compresses and self.session.step >= self.config.warmup_steps

    def _messages(self, boundary: int, number: int = 0) -> FixedMessages:
        """Of a boundary and, in interleaved schedules, the sender's model chunk, which is in the number."""
        chunk = number // _CHUNK_FACTOR
        name = f"{_PREFIX}{boundary}" + (f" chunk {chunk}" if chunk else "")
        return FixedMessages(self.stream(name, self.config.at(boundary)))

    def _buffer(self, tensor: Tensor, boundary: int, *, gradient: bool, kept: Kept | None = None) -> Tensor:
        """A buffer for the message about ``tensor``."""
        messages = self._messages(boundary, 0 if kept is None else kept.number)
        size = messages.nbytes(tensor.shape, tensor.dtype, gradient=gradient, kept=kept)
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)

    def _encode(self, tensor: Tensor, boundary: int) -> Tensor:
        number = getattr(tensor, _CHUNK, 0) * _CHUNK_FACTOR + self._count
        message, kept, encoded = self._messages(boundary, number).encode(tensor, number)
        if self.session.training and tensor.requires_grad:
            self._sent[number] = kept
        self._count += 1
        self.crossings.sent("pipeline", tensor, message, encoded)
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
        self.crossings.sent("pipeline_gradient", gradient, message, encoded)
        return message

    def _decode(self, message: Tensor, out: Tensor, boundary: int) -> None:
        with self.crossings.timed("decode"):
            messages = self._messages(boundary, number_of(message))
            kept = messages.decode(message, out.detach())
        if self.session.training and torch.is_grad_enabled():
            self._received.append((out, kept, messages))

    def _decode_gradient(self, message: Tensor, out: Tensor, boundary: int) -> None:
        with self.crossings.timed("decode"):
            messages = self._messages(boundary, number_of(message))
            messages.decode_gradient(message, self._sent, out.detach())

    # -- metrics --------------------------------------------------------------------------------------------

    @property
    def crossings(self) -> Crossings:
        """Of the current pass."""
        return Crossings(self.session.metrics, self.session.training)


class _Handle:
    """What Megatron waits on with ``overlap_p2p_comm``: the transfer, then decoding."""

    def __init__(
        self, hook: PipelineHook, request: Any, finish: Callable[[], None] | None, kept: tuple[Any, ...]
    ) -> None:
        self._hook = hook
        self._request: Any = request
        self._finish = finish
        self._kept: Any = kept

    def wait(self, *arguments: Any) -> None:
        """Wait for the transfer and fill the tensor; further calls do nothing."""
        request, self._request = self._request, None
        if request is not None:
            with self._hook.crossings.timed("exchange"):
                request.wait()
            if self._finish is not None:
                self._finish()
            self._kept = None


def _empty(shape: Any, config: Any) -> Tensor:
    """A tensor to receive into, as Megatron makes it."""
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
    scope = [str(getattr(item, "name", item)) for item in getattr(config, "cuda_graph_scope", None) or []]
    if getattr(config, "cuda_graph_impl", "none") != "none" and "full_iteration" in scope:
        raise DCTError(
            "dct.model_parallel.pipeline does not work with CUDA graphs of full iterations: the number of "
            "entries that cross depends on the data"
        )
    if config.pipeline_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise DCTError(
            f"dct.model_parallel.pipeline does not work with pipeline_dtype {config.pipeline_dtype}"
        )
