"""Index section of a payload: which entries are kept, as strictly ascending positions.

Four encodings, with their bits per kept entry on uniformly spread positions at 90 / 99 / 99.9 % sparsity:

=========  =====================================================================  =================
bitmap     one bit per entry                                                      10 / 99 / 1000
gaps8      one byte per gap; 255 means "skip 255 entries and go on"               8.0 / 8.7 / 35.7
block16    a 16-bit offset in its block of 65,536 entries, a u32 count per block  16 / 16 / 16.5
rice       Golomb-Rice code of the gap: quotient in unary, then ``k`` low bits    4.8 / 8.1 / 11.5
=========  =====================================================================  =================

A gap is ``index[j] - index[j-1] - 1`` with ``index[-1] = -1``. The encoder takes the smallest encoding, the
lowest number on ties. Plain torch, any device; the compiled kernels write the same bytes.
Golomb-Rice: Rice and Plaunt, IEEE Trans. Communications 19 (1971).
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from ..errors import PayloadError

MAX_NUMEL = 2**32 - 1
MAX_RICE_PARAM = 30
BLOCK = 65536
_RICE_WINDOW = 1 << 17  # bytes decoded at once


class IndexEncoding(IntEnum):
    """Index encoding as written in the header."""

    DENSE = 0
    BITMAP = 1
    GAPS8 = 2
    BLOCK16 = 3
    RICE = 4
    SHARED_MASK = 5

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, value: int | str) -> IndexEncoding:
        """The member for a name (``"rice"``) or a number; ``ValueError`` names the allowed ones."""
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            allowed = ", ".join(m.label for m in cls)
            raise ValueError(f"index encoding {value!r} is unknown; allowed: {allowed}") from None


def index_bound(numel: int, nnz: int, encoding: int | None = None) -> int:
    """Upper bound of the index section's bytes for at most ``nnz`` kept of ``numel`` entries.

    ``encoding`` None is the encoder's own choice, which is never larger than any single encoding.
    """
    nnz = min(nnz, numel)
    bounds = {
        IndexEncoding.DENSE: 0,
        IndexEncoding.SHARED_MASK: 0,
        IndexEncoding.BITMAP: -(-numel // 8),
        IndexEncoding.GAPS8: nnz + (numel - nnz) // 255,
        IndexEncoding.BLOCK16: 4 * (-(-numel // BLOCK)) + 2 * nnz,
        IndexEncoding.RICE: _rice_bound(numel, nnz),
    }
    if encoding is not None:
        return bounds[IndexEncoding(encoding)]
    return min(bounds[e] for e in (IndexEncoding.BITMAP, IndexEncoding.GAPS8, IndexEncoding.BLOCK16))


def _rice_bound(numel: int, nnz: int) -> int:
    # With k = b, where 2**b exceeds the mean gap, the unary parts add less than one bit per entry to the k +
    # 1 others, and b <= log2(numel / nnz) + 1. The result grows with nnz, so it covers every smaller number
    # of entries too.
    return math.ceil(nnz * (math.log2(numel / nnz) + 3) / 8) + 1 if nnz else 0


def check_section(encoding: int, param: int, nbytes: int, nnz: int, numel: int) -> IndexEncoding:
    """Whether an index section of ``nbytes`` can hold ``nnz`` of ``numel`` entries: every decoder checks it.

    After it, ``nnz`` is bounded by the bytes that are there (dense: by ``numel``).

    Raises:
        PayloadError: it cannot, or parameter or counts are out of range.
    """
    enc = IndexEncoding(encoding)
    if not 0 <= nnz <= numel <= MAX_NUMEL:
        raise PayloadError(f"nnz {nnz} of numel {numel} is impossible")
    if not 0 <= param <= (MAX_RICE_PARAM if enc is IndexEncoding.RICE else 0):
        raise PayloadError(f"parameter {param} is not allowed for {enc.label}")
    if enc is IndexEncoding.DENSE and nnz != numel:
        raise PayloadError(f"dense, but nnz {nnz} is not numel {numel}")
    if enc is IndexEncoding.GAPS8:
        low, high = nnz, nnz + (numel - nnz) // 255
    elif enc is IndexEncoding.RICE:
        codes = nnz * (param + 1)
        low, high = -(-codes // 8), -(-(codes + ((numel - nnz) >> param)) // 8)
    elif enc is IndexEncoding.BLOCK16:
        low = high = 4 * (-(-numel // BLOCK)) + 2 * nnz
    elif enc is IndexEncoding.BITMAP:
        low = high = -(-numel // 8)
    else:
        low = high = 0
    if not low <= nbytes <= high:
        raise PayloadError(
            f"index section of {nbytes} bytes is impossible for {nnz} of {numel} entries in {enc.label}"
        )
    return enc


def check_positions(idx: Tensor, numel: int, encoding: int | None) -> None:
    """Raise ``ValueError`` unless ``idx``, int64 [nnz], can be encoded; see :func:`encode_indices`."""
    nnz = idx.numel()
    if not 0 <= numel <= MAX_NUMEL:
        raise ValueError(f"numel {numel} is outside 0..{MAX_NUMEL}")
    if nnz:
        ascending = nnz == 1 or bool((idx[1:] > idx[:-1]).all())
        if not ascending or int(idx[0]) < 0 or int(idx[-1]) >= numel:
            raise ValueError(f"positions must be strictly ascending within 0..{numel - 1}")
    if encoding is not None and IndexEncoding(encoding) is IndexEncoding.DENSE and nnz != numel:
        raise ValueError(f"dense encoding needs all {numel} entries, got {nnz}")


def rice_candidates(numel: int, nnz: int) -> list[int]:
    """Rice parameters that are tried, ascending: floor(log2 of the mean gap) and its two neighbours."""
    if nnz == 0:
        return [0]
    b = ((numel - nnz) // nnz).bit_length()
    return sorted({min(max(k, 0), MAX_RICE_PARAM) for k in (b - 2, b - 1, b)})


def _gaps(idx: Tensor) -> Tensor:
    gaps = idx.clone()
    gaps[1:] -= idx[:-1] + 1
    return gaps


def _smallest(gaps: Tensor, nnz: int, numel: int) -> tuple[IndexEncoding, int]:
    if nnz == numel:
        return IndexEncoding.DENSE, 0
    param, rice_bits = _best_rice(gaps, nnz, numel)
    sizes = [
        (-(-numel // 8), IndexEncoding.BITMAP),
        (nnz + int((gaps // 255).sum()), IndexEncoding.GAPS8),
        (4 * (-(-numel // BLOCK)) + 2 * nnz, IndexEncoding.BLOCK16),
        (-(-rice_bits // 8), IndexEncoding.RICE),
    ]
    _, encoding = min(sizes)
    return encoding, param if encoding is IndexEncoding.RICE else 0


def _best_rice(gaps: Tensor, nnz: int, numel: int) -> tuple[int, int]:
    costs = [(nnz * (k + 1) + int((gaps >> k).sum()), k) for k in rice_candidates(numel, nnz)]
    bits, k = min(costs)
    return k, bits


def encode_indices(idx: Tensor, numel: int, encoding: int | None = None) -> tuple[IndexEncoding, int, Tensor]:
    """Encode strictly ascending positions ``idx``, int64 [nnz], all below ``numel``.

    Returns:
        encoding, parameter (Rice ``k``, else 0), index section uint8 [index_nbytes].
    Raises:
        ValueError: positions that are out of range or not ascending, ``numel`` above 2**32 - 1, ``encoding``
            that cannot express them (dense with fewer than ``numel`` positions).
    """
    check_positions(idx, numel, encoding)
    nnz = idx.numel()
    gaps = _gaps(idx)
    param = 0
    if encoding is None:
        chosen, param = _smallest(gaps, nnz, numel)
    else:
        chosen = IndexEncoding(encoding)
        if chosen is IndexEncoding.RICE:
            param, _ = _best_rice(gaps, nnz, numel)
    if chosen is IndexEncoding.BITMAP:
        return chosen, 0, _encode_bitmap(idx, numel)
    if chosen is IndexEncoding.GAPS8:
        return chosen, 0, _encode_gaps8(gaps)
    if chosen is IndexEncoding.BLOCK16:
        return chosen, 0, _encode_block16(idx, numel)
    if chosen is IndexEncoding.RICE:
        return chosen, param, _encode_rice(gaps, param)
    return chosen, 0, torch.empty(0, dtype=torch.uint8, device=idx.device)


def _encode_bitmap(idx: Tensor, numel: int) -> Tensor:
    out = torch.zeros(-(-numel // 8), dtype=torch.uint8, device=idx.device)
    # Every position occurs once, so adding bits is setting bits.
    return out.index_add_(0, idx >> 3, (1 << (idx & 7)).to(torch.uint8))


def _encode_gaps8(gaps: Tensor) -> Tensor:
    length = gaps // 255 + 1
    last = torch.cumsum(length, 0) - 1
    total = int(last[-1]) + 1 if gaps.numel() else 0
    out = torch.full((total,), 255, dtype=torch.uint8, device=gaps.device)
    out[last] = (gaps % 255).to(torch.uint8)
    return out


def _encode_block16(idx: Tensor, numel: int) -> Tensor:
    blocks = -(-numel // BLOCK)
    counts = torch.bincount(idx >> 16, minlength=blocks).to(torch.int32)
    low = idx & 0xFFFF
    offsets = torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)
    return torch.cat([counts.view(torch.uint8), offsets.view(torch.uint8)])


def _encode_rice(gaps: Tensor, k: int) -> Tensor:
    quotient = gaps >> k
    length = quotient + (1 + k)
    end = torch.cumsum(length, 0)
    total_bits = int(end[-1]) if gaps.numel() else 0
    out = torch.zeros(-(-total_bits // 8), dtype=torch.uint8, device=gaps.device)
    start = end - (1 + k)  # position of the terminating 1
    code = (1 | ((gaps & ((1 << k) - 1)) << 1)) << (start & 7)
    first = start >> 3
    for byte in range((k + 1 + 7 + 7) // 8):
        part = ((code >> (8 * byte)) & 0xFF).to(torch.uint8)
        # Codes share bytes but no bits: adding is setting. The last code's upper bytes may lie past the end
        # and are 0.
        out.index_add_(0, (first + byte).clamp_(max=max(out.numel() - 1, 0)), part)
    return out


def decode_indices(encoding: int, param: int, data: Tensor, nnz: int, numel: int) -> Tensor:
    """Decode an index section, uint8, into strictly ascending positions, int64 [nnz], all below ``numel``.

    Raises:
        PayloadError: the section is not exactly what an encoder writes for ``nnz`` of ``numel`` entries.
    """
    enc = check_section(encoding, param, data.numel(), nnz, numel)
    if enc is IndexEncoding.DENSE:
        return torch.arange(numel, dtype=torch.int64, device=data.device)
    if enc is IndexEncoding.BITMAP:
        return _decode_bitmap(data, nnz, numel)
    if enc is IndexEncoding.GAPS8:
        return _decode_gaps8(data, nnz, numel)
    if enc is IndexEncoding.BLOCK16:
        return _decode_block16(data, nnz, numel)
    if enc is IndexEncoding.RICE:
        return _decode_rice(data, param, nnz, numel)
    raise PayloadError("a shared_mask payload holds no positions; decode it with the payload that does")


def _decode_bitmap(data: Tensor, nnz: int, numel: int) -> Tensor:
    used = data.nonzero().reshape(-1)
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    bits = (data[used].unsqueeze(1) >> shifts) & 1
    row, bit = bits.nonzero(as_tuple=True)
    idx = used[row] * 8 + bit
    if idx.numel() != nnz:
        raise PayloadError(f"bitmap holds {idx.numel()} set bits, header says {nnz}")
    if nnz and int(idx[-1]) >= numel:
        raise PayloadError("bitmap has a bit set past the last entry")
    return idx


def _decode_gaps8(data: Tensor, nnz: int, numel: int) -> Tensor:
    if nnz == 0:
        if data.numel():
            raise PayloadError("gaps8 index section holds bytes but no entries")
        return torch.empty(0, dtype=torch.int64, device=data.device)
    steps = data.to(torch.int64)
    terminal = steps != 255
    steps += terminal
    idx = (torch.cumsum(steps, 0) - 1)[terminal]
    if idx.numel() != nnz or not bool(terminal[-1]):
        raise PayloadError(f"gaps8 index section holds {idx.numel()} entries, header says {nnz}")
    if int(idx[-1]) >= numel:
        raise PayloadError(f"index {int(idx[-1])} is outside a tensor of {numel} entries")
    return idx


def _decode_block16(data: Tensor, nnz: int, numel: int) -> Tensor:
    blocks = -(-numel // BLOCK)
    counts = data[: 4 * blocks].clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    if (blocks and int(counts.max()) > BLOCK) or int(counts.sum()) != nnz:
        raise PayloadError(f"block16 counts do not add up to nnz {nnz}")
    low = data[4 * blocks :].clone().view(torch.int16).to(torch.int64) & 0xFFFF
    base = torch.arange(blocks, dtype=torch.int64, device=data.device) << 16
    idx = base.repeat_interleave(counts) + low
    if nnz and (int(idx[-1]) >= numel or not bool((idx[1:] > idx[:-1]).all())):
        raise PayloadError("block16 offsets are not ascending or lie past the last entry")
    return idx


def _decode_rice(data: Tensor, k: int, nnz: int, numel: int) -> Tensor:
    total_bits = 8 * data.numel()
    # A Rice code can only be followed from its start; the walk runs on the host over "position of the next
    # 1".
    raw = data.cpu().numpy()
    ones = np.empty(nnz, dtype=np.int64)
    found, pos = 0, 0
    for lo in range(0, raw.size, _RICE_WINDOW):
        if found == nnz:
            break
        bits = np.unpackbits(raw[lo : lo + _RICE_WINDOW], bitorder="little")
        base, size = 8 * lo, bits.size
        if pos >= base + size:
            continue
        here: list[int] = []
        at = pos - base
        nxt = np.minimum.accumulate(np.where(bits, np.arange(size), size)[::-1])[::-1].tolist()
        room = nnz - found
        while at < size and len(here) < room:
            one = nxt[at]
            if one == size:
                at = size
                break
            here.append(one)
            at = one + 1 + k
        ones[found : found + len(here)] = here
        ones[found : found + len(here)] += base
        found += len(here)
        # A run of zeros may go on in the next window: keep looking from its first bit.
        pos = base + at
    if found < nnz or (nnz and int(ones[-1]) + 1 + k > total_bits):
        raise PayloadError(f"rice index section holds {found} entries, header says {nnz}")
    end = int(ones[-1]) + 1 + k if nnz else 0
    if -(-end // 8) != raw.size or (end & 7 and int(raw[-1]) >> (end & 7)):
        raise PayloadError("rice index section has trailing bits")
    starts = np.concatenate([np.zeros(min(nnz, 1), dtype=np.int64), ones[:-1] + 1 + k])
    quotient = ones - starts
    if nnz and int(quotient.max()) > numel >> k:
        raise PayloadError(f"rice gap is outside a tensor of {numel} entries")
    gaps = quotient << k
    if k:
        low = ones + 1
        padded = np.concatenate([raw, np.zeros(8, dtype=np.uint8)]).astype(np.int64)
        first = low >> 3
        word = np.zeros(nnz, dtype=np.int64)
        for byte in range((k + 7 + 7) // 8):
            word |= padded[first + byte] << (8 * byte)
        gaps |= (word >> (low & 7)) & ((1 << k) - 1)
    if nnz and int(gaps.max()) >= numel:
        raise PayloadError(f"rice gap is outside a tensor of {numel} entries")
    idx = np.cumsum(gaps + 1) - 1
    if nnz and int(idx[-1]) >= numel:
        raise PayloadError(f"index {int(idx[-1])} is outside a tensor of {numel} entries")
    return torch.from_numpy(idx).to(data.device)
