"""The interface of index codecs, which are listed in :mod:`dct_plugin.codecs.index`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from ..labelled import Labelled

MAX_NUMEL = 2**32 - 1


class IndexEncoding(Labelled):
    """Index encoding as written in the header; a number once given (5, too) is never given to another one."""

    DENSE = 0
    BITMAP = 1
    GAPS8 = 2
    BLOCK16 = 3
    RICE = 4


@dataclass(frozen=True)
class Positions:
    """Kept entries of a tensor.

    Attributes:
        idx: int64 [nnz], strictly ascending, all below ``numel``.
        numel: entries of the tensor.
    """

    idx: Tensor
    numel: int

    @property
    def nnz(self) -> int:
        return self.idx.numel()

    @cached_property
    def gaps(self) -> Tensor:
        """int64 [nnz]: ``idx[j] - idx[j-1] - 1``, with ``idx[-1] = -1``."""
        gaps = self.idx.clone()
        gaps[1:] -= self.idx[:-1] + 1
        return gaps


class IndexCodec(ABC):
    """One way of writing positions. Plain torch, any device; compiled kernels write the same bytes.

    A codec whose sections have a size that follows from the counts alone has :meth:`size`. Others have
    :meth:`bound`, :meth:`section_sizes` and :meth:`plan` of their own.

    Attributes:
        encoding: its number in the header.
        max_param: largest parameter in the header (smallest: 0).
        bounds_choice: its bound also bounds what the encoder chooses by itself. False for one computed in
            floating point: sender and receiver of a fixed-size message have to find the same number.
    """

    encoding: ClassVar[IndexEncoding]
    max_param: ClassVar[int] = 0
    bounds_choice: ClassVar[bool] = True

    def can_hold(self, nnz: int, numel: int) -> bool:
        """Return whether any ``nnz`` of ``numel`` positions can be written."""
        return True

    def size(self, nnz: int, numel: int) -> int:
        """Return the bytes of a section."""
        raise NotImplementedError(f"sections of {self.encoding.label} differ in size")

    def bound(self, nnz: int, numel: int) -> int:
        """Return an upper bound of a section's bytes for at most ``nnz`` of ``numel`` positions."""
        return self.size(nnz, numel)

    def section_sizes(self, param: int, nnz: int, numel: int) -> tuple[int, int]:
        """Return the smallest and the largest section that holds exactly ``nnz`` positions, bytes; none if
        they cross over.

        ``nnz`` must follow from the smallest one (or be ``numel``): decoders allocate by it.
        """
        return self.size(nnz, numel), self.size(nnz, numel)

    def plan(self, positions: Positions) -> tuple[int, int]:
        """Return the exact size of the section in bytes, and the parameter to write it with."""
        return self.size(positions.nnz, positions.numel), 0

    @abstractmethod
    def encode(self, positions: Positions, param: int) -> Tensor:
        """Return the section, uint8 [size], with a parameter of :meth:`plan`."""

    @abstractmethod
    def decode(self, data: Tensor, param: int, nnz: int, numel: int) -> Tensor:
        """Return the positions of a section, uint8, whose size :meth:`section_sizes` allows: int64 [nnz].

        Raises:
            PayloadError: the section is not exactly what :meth:`encode` writes for ``nnz`` of ``numel``.
        """
