"""The base classes of compressors for activations."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...codecs.stats import Stats
from ...compression.stream import Encoded
from ...config import KernelConfig
from ...config.model_parallel import AnswerMethod, Method

#: What precedes a message of known size: its number, int64.
NUMBER_NBYTES = 8
#: Values that share a scale (2 bytes): 64 would cost 0.25 bit a value, 256 0.06.
GROUP_SIZE = 128

Settings = TypeVar("Settings", bound=Method)


@dataclass(eq=False)
class Site:
    """A point of the model at which something crosses, as its compressors see it.

    Attributes:
        name: The same at both ends.
        rank: Of this end; seeds samples.
        kernels: Which kernels run; the defaults when None.
        step: Optimizer steps so far.
        training: False in forward-only passes: state is used and left as it is, and nothing is kept.
        fixed_size: Whether a receiver must know the size of a message in advance.
        group_size: Values that share a scale, a power of two.
        answer: How gradients that come back in terms of the forward message are written.
    """

    name: str
    rank: int = 0
    kernels: KernelConfig | None = None
    step: int = 0
    training: bool = True
    fixed_size: bool = False
    group_size: int = GROUP_SIZE
    answer: AnswerMethod = field(default_factory=AnswerMethod)


class Written(NamedTuple):
    """The messages of some tensors.

    Attributes:
        messages: uint8 each, in memory of their own.
        kept: What this end keeps of each until its gradient arrives.
        encoded: Figures.
    """

    messages: list[Tensor]
    kept: list[Any]
    encoded: Encoded


class ActivationCompressor(ABC, Generic[Settings]):
    """One way for tensors to cross.

    One instance serves one direction of one site, at both ends. The same tensor gives the same message for as
    long as a step lasts, so that activation recomputation finds what was sent: state changes in
    :meth:`end_step` only.

    Args:
        config: The settings of the method.
        site: The point of the model.
        name: The same at both ends; seeds what is random. That of the site by default.
    """

    #: Whether every message about tensors of one shape has :meth:`nbytes` bytes, no fewer.
    exact: ClassVar[bool] = True

    def __init__(self, config: Settings, site: Site, name: str = "") -> None:
        self.config, self.site, self.name = config, site, name or site.name

    @property
    def density(self) -> float:
        """Share of the entries that is to cross."""
        return 1.0

    @abstractmethod
    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the most bytes of a message about a tensor, by what both ends know."""

    def encode(self, parts: Sequence[Tensor]) -> Written:
        """Write one message for each tensor, of any shapes and floating types."""
        began = time.perf_counter()
        pairs = [self.encode_one(part) for part in parts]
        return self.written([m for m, _ in pairs], [kept for _, kept in pairs], parts, began)

    def encode_one(self, part: Tensor) -> tuple[Tensor, Any]:
        """Return the message of one tensor, uint8, and what this end keeps until its gradient arrives."""
        raise NotImplementedError(f"{type(self).__name__} writes all tensors at once")

    @abstractmethod
    def decode(self, message: Tensor, out: Tensor, peer: int) -> Any:
        """Add what a message holds to ``out``, contiguous, of any floating type.

        Args:
            message: uint8; padding may follow.
            peer: Rank of the sender in the group.

        Returns:
            What this end keeps to answer with a gradient.

        Raises:
            PayloadError: The message is malformed, or of a tensor of another size.
        """

    def end_step(self) -> None:
        """Let state change: an optimizer step is over."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to go on bitwise, between steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        return

    # -- for the classes -------------------------------------------------------------------------------------

    def written(
        self, messages: list[Tensor], kept: list[Any], parts: Sequence[Tensor], began: float
    ) -> Written:
        """Return messages with their figures; ``began`` by ``perf_counter``."""
        spent = round(1e9 * (time.perf_counter() - began) / max(len(parts), 1))
        stats = [
            Stats(message.numel(), count, count, False, ns=(0, spent))
            for message, count in zip(messages, (round(self.density * p.numel()) for p in parts), strict=True)
        ]
        return Written(messages, kept, Encoded(stats, sum(part.numel() for part in parts), self.density))


def rows_of(tensor: Tensor) -> Tensor:
    """Return fp32 [rows, size of the last dimension]."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.float32)


def size_of_rows(shape: torch.Size) -> tuple[int, int]:
    """Return the shape of :func:`rows_of`."""
    return shape.numel() // max(shape[-1], 1), shape[-1]


def add(out: Tensor, values: Tensor) -> None:
    """Add ``values`` to ``out``, rounded once; as many entries, in whatever shape."""
    flat = out.view(-1)
    flat.copy_(flat.to(torch.float32) + values.reshape(-1))


class GradientMessages:
    """The messages with gradients of one stream: a compressor writes them without regard to the forward
    messages.

    Attributes:
        size_is_known: True if :meth:`nbytes` is exact, given what an end kept.
    """

    def __init__(self, compressor: ActivationCompressor[Any]) -> None:
        self.compressor = compressor
        self.size_is_known = compressor.exact

    def nbytes(self, shape: torch.Size, dtype: torch.dtype, kept: Any = None) -> int:
        """Return the most bytes of a message; with what an end ``kept``, those of the answer to that."""
        return self.compressor.nbytes(shape, dtype)

    def encode(self, gradient: Tensor, kept: Any) -> tuple[Tensor, Encoded]:
        """Write the gradient of a tensor that was decoded, uint8; ``kept`` is what decoding it returned."""
        written = self.compressor.encode([gradient])
        return written.messages[0], written.encoded

    def decode(self, message: Tensor, kept: Any, out: Tensor, peer: int = 0) -> None:
        """Add the gradient of a tensor that was encoded to ``out``; ``kept`` is what encoding it returned.

        Raises:
            PayloadError: The message is malformed.
        """
        self.compressor.decode(message, out, peer)

    def pull_back(self, gradient: Tensor, kept: Any) -> Tensor:
        """Return the gradient of a tensor that this end encoded and decoded; nothing is rounded."""
        return gradient
