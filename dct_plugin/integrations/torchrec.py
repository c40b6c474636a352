"""DCT-MP for torchrec: a communication codec for its all-to-all of pooled embeddings.

    registry = dct_registry(sparsity=0.9)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)

Every chunk of the message keeps its largest entries, as half-precision values and byte positions; the
backward message reuses the forward's positions and is values only. torchrec allots buffers by length alone,
so a chunk keeps a fixed number of entries rather than what reaches a threshold.

torchrec and fbgemm have to fit torch exactly: beside torch 2.13 that is 1.8, with fbgemm's CPU wheel

    pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
    pip install tensordict torchmetrics==1.0.3 pyre-extensions tqdm iopath

while a plain ``pip install torchrec`` brings a version that does not import. So torchrec is no dependency,
and is imported by :func:`dct_registry` only. For table-wise and column-wise sharding; row-wise sharding sums
inside its reduce-scatter, where no sparse message can be added up.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from dct_plugin.errors import DCTError, DesyncError


class Context:
    """The context that torchrec asks of a codec."""

    padded_dim_sum_per_rank: list[int] | None = None


class Positions:
    """Positions of the forward messages that wait for their backward ones, newest first.

    torchrec passes no context from forward to backward. Backward passes run in the opposite order of forward
    ones, so the newest positions are the ones wanted; those of evaluations are never asked for and drop out
    at the end.
    """

    def __init__(self, in_flight: int) -> None:
        self.sent: deque[Tensor] = deque(maxlen=in_flight)
        self.received: deque[Tensor] = deque(maxlen=in_flight)
        self.dense_bytes = 0
        self.sent_bytes = 0

    @staticmethod
    def take(waiting: deque[Tensor], chunks: int) -> Tensor:
        if not waiting or len(waiting[-1]) != chunks:
            last = len(waiting[-1]) if waiting else "there is none"
            raise DesyncError(
                f"a gradient message of {chunks} chunks does not answer the last forward message ({last}); "
                "the sync (compiled) path of torchrec is not supported, and in_flight "
                "must not be less than the sharded modules"
            )
        return waiting.pop()


class _Codec:
    """Base class of both codecs: ``keep`` entries of each ``chunk`` cross."""

    #: Bytes of an entry that crosses: its value, and its position if that is sent.
    entry_nbytes = 2

    def __init__(self, keep: int, chunk: int, dtype: torch.dtype, positions: Positions) -> None:
        self.keep, self.chunk, self.dtype, self.positions = keep, chunk, dtype, positions

    @property
    def quantized_dtype(self) -> torch.dtype:
        return torch.uint8

    def create_context(self) -> Context:
        return Context()

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: Context
    ) -> tuple[int, int]:
        """Return (padded dims, padding): there is none."""
        return input_tensor.shape[1], 0

    def calc_quantized_size(self, input_len: int, ctx: Context | None = None) -> int:
        """Return the bytes of a message of ``input_len`` entries."""
        return self._chunks(input_len) * self.entry_nbytes * self.keep

    def encode(self, input_tensor: Tensor, ctx: Context | None = None) -> Tensor:
        rows = input_tensor.reshape(self._chunks(input_tensor.numel()), self.chunk)
        at, limit = self._chosen(rows), torch.finfo(self.dtype).max
        values = rows.gather(1, at).clamp(-limit, limit).to(self.dtype).contiguous().view(torch.uint8)
        message = torch.cat([values, at.to(torch.uint8)], dim=1)[:, : self.entry_nbytes * self.keep].flatten()
        self.positions.dense_bytes += input_tensor.numel() * input_tensor.element_size()
        self.positions.sent_bytes += message.numel()
        return message

    def decode(self, input_tensor: Tensor, ctx: Context | None = None) -> Tensor:
        rows = input_tensor.reshape(-1, self.entry_nbytes * self.keep)
        values, at = rows[:, : 2 * self.keep], self._arrived(rows)
        decoded = values.contiguous().view(self.dtype).float()
        return decoded.new_zeros(len(at), self.chunk).scatter_(1, at, decoded).reshape(-1)

    def _chosen(self, rows: Tensor) -> Tensor:
        """Return the positions of the entries to send, int64 [chunks, keep]."""
        raise NotImplementedError

    def _arrived(self, rows: Tensor) -> Tensor:
        """Return the positions of the entries of a message, int64 [chunks, keep]."""
        raise NotImplementedError

    def _chunks(self, length: int) -> int:
        if length % self.chunk:
            raise DCTError(
                f"a message of {length} entries does not divide into chunks of {self.chunk}; "
                "take a chunk that divides samples per rank times embedding widths per rank, "
                "such as the embedding width"
            )
        return length // self.chunk


class ForwardCodec(_Codec):
    """The entries of largest magnitude of each chunk: values, then positions."""

    entry_nbytes = 3

    def _chosen(self, rows: Tensor) -> Tensor:
        at = rows.abs().topk(self.keep, dim=1, sorted=False).indices.sort(dim=1).values
        self.positions.sent.append(at)
        return at

    def _arrived(self, rows: Tensor) -> Tensor:
        at = rows[:, 2 * self.keep :].long()
        self.positions.received.append(at)
        return at


class BackwardCodec(_Codec):
    """Gradients at the positions of the forward message: values only."""

    def _chosen(self, rows: Tensor) -> Tensor:
        return self.positions.take(self.positions.received, len(rows))

    def _arrived(self, rows: Tensor) -> Tensor:
        return self.positions.take(self.positions.sent, len(rows))


def codecs(
    sparsity: float, *, chunk: int = 256, in_flight: int = 16
) -> tuple[ForwardCodec, BackwardCodec, Positions]:
    """A pair of codecs that share their positions; see :func:`dct_registry`."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity}: must be in [0, 1)")
    if not 1 <= chunk <= 256:
        raise ValueError(f"chunk={chunk}: must be from 1 to 256, positions are bytes")
    keep = max(1, round((1 - sparsity) * chunk))
    positions = Positions(in_flight)
    forward = ForwardCodec(keep, chunk, torch.float16, positions)
    # Gradients are small: bf16 has the range.
    return forward, BackwardCodec(keep, chunk, torch.bfloat16, positions), positions


def dct_registry(sparsity: float, *, chunk: int = 256, in_flight: int = 16) -> dict[str, Any]:
    """Return the codecs for ``EmbeddingBagCollectionSharder(qcomm_codecs_registry=...)``.

    Args:
        sparsity: Share of the entries of each chunk that do not cross.
        chunk: Entries of a chunk, at most 256; has to divide samples per rank times widths per rank. The
            embedding width gives a selection per vector.
        in_flight: At least the number of sharded modules (and of batches in a pipeline).

    Raises:
        DCTError: torchrec is not installed, or does not import.
        ValueError: An argument is out of range.
    """
    forward, backward, _ = codecs(sparsity, chunk=chunk, in_flight=in_flight)
    try:
        from torchrec.distributed.types import CommOp, QuantizedCommCodecs
    except ImportError as error:
        raise DCTError(
            f"torchrec does not import ({error}); beside torch 2.13 install it with: "
            "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
        ) from error
    pair = QuantizedCommCodecs(forward=forward, backward=backward)
    return {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: pair}
