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
from dataclasses import dataclass
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
from ..host.refusals import refuse_features
from .session import Hook, RankCoordinates, Session

_CHUNK = "_dct_chunk"
_PREFIX = "pipeline boundary "
#: A message's number is that of its model chunk times this, and a counter.
_CHUNK_FACTOR = 1 << 40


class PipelineHook(Hook):
    """Replaces ``P2PCommunicator._communicate`` and notes which model chunk a tensor comes from."""

    def __init__(self, session: Session) -> None:
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        self.session, self.config = session, session.config.model_parallel.pipeline
        # Tensor-parallel ranks send the same activation (unless their sequences differ, and with them what
        # they send): it must stay the same behind the boundary.
        self.streams = session.streams_of(_PREFIX, lambda: RankCoordinates.of_this_rank().data)
        self.pipeline_metrics = PipelineMetrics(lambda: session.metrics, self.streams)
        self._p2p = p2p_communication
        self._count = 0
        self._sent: dict[int, Kept] = {}
        self._received: list[tuple[Tensor, Kept, FixedMessages]] = []
        self._checked: Any = None
        session.patches.intercept(p2p_communication.P2PCommunicator, "_communicate", self._communicate)
        session.patches.intercept(schedules, "forward_step", self._forward_step)

    # -- iterations -----------------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
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
        config, rank = communicator.config, communicator.pp_group.rank()
        moved = {name: keywords[f"tensor_{name}"] for name in ("send_next", "send_prev")}
        moved |= {name: keywords[name] or None for name in ("recv_prev", "recv_next")}
        # The boundary to the next stage has the number of this stage.
        ends = {"next": rank, "prev": (rank - 1) % communicator.pp_group.size()}
        boundaries = {name: ends[name[5:]] for name, each in moved.items() if each is not None}
        sparse = [name for name, boundary in boundaries.items() if self._is_sparse(boundary)]
        if not sparse:
            return original(communicator, wait_on_reqs=wait_on_reqs, **keywords)
        if config is not self._checked:
            _check(config)
            self._checked = config
        if config.batch_p2p_comm and not wait_on_reqs:
            raise DCTError("Megatron asked for batched communication that it does not wait for")
        for name in boundaries.keys() & {"recv_prev", "recv_next"}:
            moved[name] = _empty(keywords["tensor_shape"], config)
        messages: dict[str, Tensor] = {}
        finish: dict[str, Callable[[], None]] = {}
        # Without interleaving gradients come back in the order of the activations: both ends know what is
        # answered, and the message needs no room to spare.
        is_ordered = not config.virtual_pipeline_model_parallel_size
        for name in sparse:
            tensor, boundary = moved[name], boundaries[name]
            if name == "send_next":
                messages[name] = self._encode(tensor, boundary)
            elif name == "send_prev":
                messages[name] = self._encode_gradient(tensor, exact=is_ordered)
            else:
                messages[name], finish[name] = self._prepare_to_receive(
                    tensor, boundary, gradient=name == "recv_next", is_ordered=is_ordered
                )
        requests = self._start(communicator, moved, messages)
        received = moved["recv_prev"], moved["recv_next"]
        if not wait_on_reqs:
            handles = {
                key: _Handle(self.pipeline_metrics, request, finish.get(key), messages)
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

    def _start(self, communicator: Any, moved: dict[str, Tensor | None], messages: dict[str, Tensor]) -> Any:
        """Start the transfers by Megatron's functions; return its requests."""
        batched = communicator.config.batch_p2p_comm
        transfer = self._p2p._batched_p2p_ops if batched else self._p2p._p2p_ops
        with own_traffic():
            requests = transfer(
                **{f"tensor_{name}": messages.get(name, tensor) for name, tensor in moved.items()},
                group=communicator.pp_group,
                prev_pipeline_rank=communicator.prev_rank,
                next_pipeline_rank=communicator.next_rank,
            )
        for name in ("send_next", "send_prev"):
            tensor = moved[name]
            if tensor is not None and name not in messages:
                self.pipeline_metrics.sent_whole(tensor)
        return requests

    def _prepare_to_receive(
        self, into: Tensor, boundary: int, *, gradient: bool, is_ordered: bool
    ) -> tuple[Tensor, Callable[[], None]]:
        """Return a buffer for the message about a tensor, and a function that decodes it."""
        kept = next(iter(self._sent.values()), None) if gradient and is_ordered else None
        messages = self._messages(boundary, 0 if kept is None else kept.number)
        size = messages.nbytes(into.shape, into.dtype, gradient=gradient, kept=kept)
        message = torch.empty(size, dtype=torch.uint8, device=into.device)
        return message, partial(self._decode_gradient if gradient else self._decode, message, into, boundary)

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
        return FixedMessages(self.streams.stream(name, self.config.at(boundary)))

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


@dataclass
class _Handle:
    """The handle that Megatron waits for with ``overlap_p2p_comm``: the transfer, then decoding.

    ``messages`` must live until they are sent, so the handle holds them.
    """

    metrics: PipelineMetrics
    request: Any
    finish: Callable[[], None] | None
    messages: dict[str, Tensor]

    def wait(self, *arguments: Any) -> None:
        """Wait for the transfer and fill the tensor; further calls do nothing."""
        request, self.request = self.request, None
        if request is not None:
            with self.metrics.timed("exchange"):
                request.wait()
            if self.finish is not None:
                self.finish()
            self.messages = {}


def _empty(shape: Any, config: Any) -> Tensor:
    """Return a tensor to receive into, as Megatron makes it."""
    if config.pipeline_dtype is None or shape is None:
        raise RuntimeError("pipeline_dtype and tensor_shape must be given to receive")
    return torch.empty(
        tuple(shape), requires_grad=True, device=torch.cuda.current_device(), dtype=config.pipeline_dtype
    )


def _check(config: Any) -> None:
    """Refuse what changes sizes from message to message or goes around this method."""
    refuse_features("dct.model_parallel.pipeline", config)
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
