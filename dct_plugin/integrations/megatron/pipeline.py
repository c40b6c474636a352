"""Pipeline parallelism: activations forward and gradients backward inside ``P2PCommunicator._communicate``.

All of Megatron's schedules (1F1B, interleaved, overlapped, batched or not) send and receive through this
one method. It makes the tensors that it receives into, starts transfers by one of two functions, and waits
for what these return. Here they transfer messages in place of tensors. Forward a boundary's activation goes
as a message of fixed size (:class:`~dct_plugin.model_parallel.FixedMessages`); both ends keep what the
gradient's message refers to, which comes without padding where the order of messages is known. Which
micro-batch and model chunk a gradient belongs to is in the number of the message: the receiver of an
activation keeps it together with the tensor, and recognises the gradient to send as that tensor's ``.grad``.
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
    """Replaces tensors that Megatron transfers, and notes which model chunk a tensor comes from."""

    def __init__(self, session: Session) -> None:
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        self.session, self.config = session, session.config.model_parallel.pipeline
        self.pipeline_metrics = PipelineMetrics(lambda: session.metrics, session.streams)
        self._count = 0
        self._sent: dict[int, Kept] = {}
        self._received: list[tuple[Tensor, Kept, FixedMessages]] = []
        self._checked: Any = None
        """Megatron's configuration of the transfers that are made."""
        session.patches.intercept(p2p_communication.P2PCommunicator, "_communicate", self._communicate)
        for transfer in ("_batched_p2p_ops", "_p2p_ops"):
            session.patches.intercept(p2p_communication, transfer, self._transfer)
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

    def _communicate(self, original: Function, communicator: Any, **keywords: Any) -> Any:
        if communicator.config is not self._checked:
            _check(communicator.config)
            self._checked = communicator.config
        return original(communicator, **keywords)

    def _transfer(self, original: Function, *, group: dist.ProcessGroup, **keywords: Any) -> Any:
        """Start Megatron's transfers, with messages in place of compressed tensors; return its requests."""
        # The boundary to the next stage has the number of this stage.
        ends = {"next": group.rank(), "prev": (group.rank() - 1) % group.size()}
        tensors = {name: each for name, each in keywords.items() if isinstance(each, Tensor)}
        boundaries = {name: ends[name[-4:]] for name in tensors}
        active = [name for name, at in boundaries.items() if self.session.is_active(self.config.at(at))]
        if not active:
            return original(group=group, **keywords)
        messages: dict[str, Tensor] = {}
        finish: dict[str, Callable[[], None]] = {}
        # Without interleaving gradients come back in the order of the activations: both ends know what is
        # answered, and the message needs no room to spare.
        is_ordered = not self._checked.virtual_pipeline_model_parallel_size
        for name, tensor in tensors.items():
            boundary = boundaries[name]
            if name not in active:
                if "send" in name:
                    self.pipeline_metrics.sent_whole(tensor)
            elif name == "tensor_send_next":
                messages[name] = self._encode(tensor, boundary)
            elif name == "tensor_send_prev":
                messages[name] = self._encode_gradient(tensor, exact=is_ordered)
            else:
                messages[name], finish[name.removeprefix("tensor_")] = self._prepare_to_receive(
                    tensor, boundary, gradient=name == "tensor_recv_next", is_ordered=is_ordered
                )
        with own_traffic():
            requests = original(group=group, **{**keywords, **messages})
        if isinstance(requests, list):  # batched: they are waited for together
            return [_Handle(self.pipeline_metrics, requests, list(finish.values()), messages)]
        return {
            name: _Handle(
                self.pipeline_metrics, [request], [finish[name]] if name in finish else [], messages
            )
            for name, request in requests.items()
        }

    def _prepare_to_receive(
        self, into: Tensor, boundary: int, *, gradient: bool, is_ordered: bool
    ) -> tuple[Tensor, Callable[[], None]]:
        """Return a buffer for the message about a tensor, and a function that decodes it."""
        kept = next(iter(self._sent.values()), None) if gradient and is_ordered else None
        messages = self._messages(boundary, 0 if kept is None else kept.number)
        size = messages.nbytes(into.shape, into.dtype, gradient=gradient, kept=kept)
        message = torch.empty(size, dtype=torch.uint8, device=into.device)
        return message, partial(self._decode_gradient if gradient else self._decode, message, into, boundary)

    def _messages(self, boundary: int, number: int = 0) -> FixedMessages:
        """Return the messages of a boundary and, if interleaved, of the model chunk in a message's number."""
        chunk = number // _CHUNK_FACTOR
        name = f"{_PREFIX}{boundary}" + (f" chunk {chunk}" if chunk else "")
        return FixedMessages(self.session.streams.stream(name, self.config.at(boundary), _replica))

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
    """The handle that Megatron waits for: the transfers, then decoding.

    ``messages`` must live until they are sent, so the handle holds them.
    """

    metrics: PipelineMetrics
    requests: list[Any]
    finish: list[Callable[[], None]]
    messages: dict[str, Tensor]

    def wait(self, *arguments: Any) -> None:
        """Wait for the transfers and fill the tensors; further calls do nothing."""
        requests, self.requests = self.requests, []
        if not requests:
            return
        with self.metrics.timed("exchange"):
            for request in requests:
                request.wait()
            if self.finish and torch.cuda.is_available():  # decoding begins with a number on the CPU
                torch.cuda.current_stream().synchronize()
        for decode in self.finish:
            decode()
        self.messages = {}


def _replica() -> int:
    """Return the number of this rank's replica of the model, which seeds its streams.

    Tensor-parallel ranks send the same activation (unless their sequences differ, and with them what they
    send): it must stay the same behind the boundary.
    """
    return RankCoordinates.of_this_rank().data


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
