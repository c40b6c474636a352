"""Index section of a payload: which entries are kept, as strictly ascending positions.

The numbers of kept and of all entries say how it is written, and its size:

* none or all are kept: nothing;
* otherwise the smaller one of a **bitmap**, a bit per entry, and **Elias-Fano code** (P. Elias, J. ACM 21,
  1974; R. Fano, MIT, 1971): in a bitmap of ``nnz + ((numel - 1) >> k)`` bits, bit ``(position >> k) + j`` is
  set for the ``j``-th position; behind it follow the ``k`` lower bits of all positions.

Bits stand in bytes from the least significant one up, and a bitmap ends with a whole byte. ``k`` is
``floor(log2((numel - 1) / nnz))``, at most 16: that makes the code smallest. Bits per kept entry, and the
least that any code takes for positions spread at random:

============ ===== ===== ===== ===== ======
sparsity, %  70    80    90    99    99.9
============ ===== ===== ===== ===== ======
these bits   3.33  4.25  5.25  8.56  11.95
the least    2.94  3.61  4.69  8.08  11.41
============ ===== ===== ===== ===== ======

A position can be written and read without those before it, which kernels of accelerators need. Plain torch,
any device; the compiled kernels write the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PayloadError

MAX_NUMEL = 2**32 - 1
#: The most lower bits of a position that follow the bitmap.
MOST_LOWER = 16


class IndexForm(NamedTuple):
    """How the positions of so many entries are written."""

    bits: int
    """Bits of the bitmap; 0: there is no section."""
    lower: int
    """Lower bits of each position behind it; 0: the bitmap has a bit per entry."""
    nbytes: int
    """Size of the section."""


def index_form(nnz: int, numel: int) -> IndexForm:
    """Return how ``nnz`` of ``numel`` positions are written."""
    if nnz in (0, numel):
        return IndexForm(0, 0, 0)
    lower = min(((numel - 1) // nnz).bit_length() - 1, MOST_LOWER)
    bits = nnz + ((numel - 1) >> lower)
    code, bitmap = _whole_bytes(bits) + _whole_bytes(nnz * lower), _whole_bytes(numel)
    return IndexForm(bits, lower, code) if code < bitmap else IndexForm(numel, 0, bitmap)


def _whole_bytes(bits: int) -> int:
    return -(-bits // 8)


def index_bound(nnz: int, numel: int) -> int:
    """Return the most bytes of an index section of at most ``nnz`` of ``numel`` entries."""
    bitmap = _whole_bytes(numel)
    if nnz >= numel:
        return bitmap
    # Fewer positions never need more bits. Rounding both parts of a code to bytes may add a byte.
    return min(bitmap, index_form(nnz, numel).nbytes + 1) if nnz else 0


def check_positions(idx: Tensor, numel: int) -> None:
    """Raise ``ValueError`` unless ``idx``, int64 [nnz], can be encoded; see :func:`encode_indices`."""
    if not 0 <= numel <= MAX_NUMEL:
        raise ValueError(f"numel {numel} is outside 0..{MAX_NUMEL}")
    if nnz := idx.numel():
        ascending = nnz == 1 or bool((idx[1:] > idx[:-1]).all())
        if not ascending or int(idx[0]) < 0 or int(idx[-1]) >= numel:
            raise ValueError(f"positions must be strictly ascending within 0..{numel - 1}")


def encode_indices(idx: Tensor, numel: int) -> Tensor:
    """Return the index section, uint8, of strictly ascending positions ``idx``, int64 [nnz], below ``numel``.

    Raises:
        ValueError: Positions are out of range or do not ascend, or ``numel`` is above 2**32 - 1.
    """
    check_positions(idx, numel)
    bits, lower, nbytes = index_form(idx.numel(), numel)
    out = torch.zeros(nbytes, dtype=torch.uint8, device=idx.device)
    if not nbytes:
        return out
    at = (idx >> lower) + torch.arange(idx.numel(), device=idx.device) if lower else idx
    _set_bits(out, at)
    for place in range(lower):
        ones = (idx >> place & 1).nonzero().reshape(-1)
        _set_bits(out[_whole_bytes(bits) :], ones * lower + place)
    return out


def _set_bits(out: Tensor, at: Tensor) -> None:
    """Set bits of uint8 that are 0; each occurs once, so adding them sets them."""
    out.index_add_(0, at >> 3, (1 << (at & 7)).to(torch.uint8))


def decode_indices(data: Tensor, nnz: int, numel: int) -> Tensor:
    """Return the positions of an index section, uint8, strictly ascending, int64 [nnz], all below ``numel``.

    Raises:
        PayloadError: The section is not the one that an encoder writes for ``nnz`` of ``numel`` entries.
    """
    bits, lower, _ = check_section(data, nnz, numel)
    if not bits:
        return torch.arange(nnz, dtype=torch.int64, device=data.device)
    at = _bits_set(data[: _whole_bytes(bits)])
    if at.numel() != nnz:
        raise PayloadError(f"index section holds {at.numel()} entries, header says {nnz}")
    if int(at[-1]) >= bits:
        raise PayloadError("index section holds an index outside the tensor")
    if not lower:
        return at
    ranks = torch.arange(nnz, dtype=torch.int64, device=data.device)
    idx = (at - ranks) << lower
    ones = _bits_set(data[_whole_bytes(bits) :])
    if ones.numel() and int(ones[-1]) >= nnz * lower:
        raise PayloadError("index section has trailing bits")
    idx.index_add_(0, ones // lower, 1 << (ones % lower))
    if int(idx[-1]) >= numel:
        raise PayloadError("index section holds an index outside the tensor")
    if not bool((idx[1:] > idx[:-1]).all()):
        raise PayloadError("index section holds positions that do not ascend")
    return idx


def check_section(data: Tensor, nnz: int, numel: int) -> IndexForm:
    """Return how an index section, uint8, is written.

    Raises:
        PayloadError: No section of so many bytes holds ``nnz`` of ``numel`` positions.
    """
    if 0 <= nnz <= numel <= MAX_NUMEL and data.numel() == (form := index_form(nnz, numel)).nbytes:
        return form
    raise PayloadError(f"index section of {data.numel()} bytes is impossible for {nnz} of {numel} entries")


def _bits_set(data: Tensor) -> Tensor:
    """Return the places of the bits that are set in uint8, ascending, int64."""
    used = data.nonzero().reshape(-1)
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    row, bit = ((data[used].unsqueeze(1) >> shifts) & 1).nonzero(as_tuple=True)
    return used[row] * 8 + bit
