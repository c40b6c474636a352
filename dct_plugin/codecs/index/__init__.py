"""Index section of a payload: which entries are kept, as strictly ascending positions.

One file per codec; :data:`CODECS` is the table that everything else looks them up in. Bits per kept entry on
uniformly spread positions at 90 / 99 / 99.9 % sparsity:

======= ===================================================================== =================
bitmap  one bit per entry                                                     10 / 99 / 1000
gaps8   one byte per gap; 255 means "skip 255 entries and go on"              8.0 / 8.7 / 35.7
block16 a 16-bit offset in its block of 65,536 entries, a u32 count per block 16 / 16 / 16.5
rice    Golomb-Rice code of the gap: quotient in unary, then ``k`` low bits   4.8 / 8.1 / 11.5
dense   nothing: every entry is kept
======= ===================================================================== =================

A gap is ``index[j] - index[j-1] - 1`` with ``index[-1] = -1``. The encoder takes the smallest encoding, the
lowest number on ties. Plain torch, any device; the compiled kernels write the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from ...errors import PayloadError
from .bitmap import Bitmap
from .block16 import Block16
from .codec import MAX_NUMEL as MAX_NUMEL
from .codec import IndexCodec, Positions
from .codec import IndexEncoding as IndexEncoding
from .dense import Dense
from .gaps8 import Gaps8
from .rice import Rice

#: Every index encoding's codec, ascending by the number in the header.
CODECS: Mapping[IndexEncoding, IndexCodec] = {
    codec.encoding: codec for codec in (Dense(), Bitmap(), Gaps8(), Block16(), Rice())
}

#: Encodings that hold any positions, and so can be asked for by name.
ANY_POSITIONS = tuple(encoding for encoding, codec in CODECS.items() if codec.can_hold(0, 1))


def index_bound(numel: int, nnz: int, encoding: int | None = None) -> int:
    """Return an upper bound of the index section's bytes for at most ``nnz`` kept of ``numel`` entries.

    ``encoding`` None is the encoder's own choice, which is never larger than any single encoding.
    """
    nnz = min(nnz, numel)
    if encoding is not None:
        return CODECS[IndexEncoding(encoding)].bound(nnz, numel)
    return min(codec.bound(nnz, numel) for codec in CODECS.values() if codec.bounds_choice)


def check_section(encoding: int, param: int, nbytes: int, nnz: int, numel: int) -> IndexEncoding:
    """Check that an index section of ``nbytes`` can hold ``nnz`` of ``numel`` entries, and return its
    encoding.

    After it, ``nnz`` is bounded by the bytes that are there (dense: by ``numel``).

    Raises:
        PayloadError: It cannot, or parameter or counts are out of range.
    """
    codec = CODECS[IndexEncoding(encoding)]
    label = codec.encoding.label
    if not 0 <= nnz <= numel <= MAX_NUMEL:
        raise PayloadError(f"nnz {nnz} of numel {numel} is impossible")
    if not 0 <= param <= codec.max_param:
        raise PayloadError(f"parameter {param} is not allowed for {label}; allowed: 0..{codec.max_param}")
    low, high = codec.section_sizes(param, nnz, numel)
    if not low <= nbytes <= high:
        raise PayloadError(
            f"index section of {nbytes} bytes is impossible for {nnz} of {numel} entries in {label}"
        )
    return codec.encoding


def check_positions(idx: Tensor, numel: int, encoding: int | None) -> None:
    """Raise ``ValueError`` unless ``idx``, int64 [nnz], can be encoded; see :func:`encode_indices`."""
    nnz = idx.numel()
    if not 0 <= numel <= MAX_NUMEL:
        raise ValueError(f"numel {numel} is outside 0..{MAX_NUMEL}")
    if nnz:
        ascending = nnz == 1 or bool((idx[1:] > idx[:-1]).all())
        if not ascending or int(idx[0]) < 0 or int(idx[-1]) >= numel:
            raise ValueError(f"positions must be strictly ascending within 0..{numel - 1}")
    if encoding is not None and not CODECS[IndexEncoding(encoding)].can_hold(nnz, numel):
        raise ValueError(f"{IndexEncoding(encoding).label} encoding cannot hold {nnz} of {numel} positions")


def encode_indices(
    idx: Tensor, numel: int, encoding: int | None = None, *, among: Collection[IndexEncoding] = tuple(CODECS)
) -> tuple[IndexEncoding, int, Tensor]:
    """Encode strictly ascending positions ``idx``, int64 [nnz], all below ``numel``.

    ``encoding`` None: the smallest of those ``among`` which to choose.

    Returns:
        encoding, parameter (Rice ``k``, else 0), index section uint8 [index_nbytes].
    Raises:
        ValueError: positions that are out of range or not ascending, ``numel`` above 2**32 - 1, ``encoding``
            that cannot express them (dense with fewer than ``numel`` positions).
    """
    check_positions(idx, numel, encoding)
    positions = Positions(idx, numel)
    chosen = IndexEncoding(encoding) if encoding is not None else _smallest(positions, among)
    _, param = CODECS[chosen].plan(positions)
    return chosen, param, CODECS[chosen].encode(positions, param)


def _smallest(positions: Positions, among: Collection[IndexEncoding]) -> IndexEncoding:
    if CODECS[IndexEncoding.DENSE].can_hold(positions.nnz, positions.numel):
        return IndexEncoding.DENSE
    able = [CODECS[e] for e in among if CODECS[e].can_hold(positions.nnz, positions.numel)]
    return min((codec.plan(positions)[0], codec.encoding) for codec in able)[1]


def decode_indices(encoding: int, param: int, data: Tensor, nnz: int, numel: int) -> Tensor:
    """Decode an index section, uint8, into strictly ascending positions, int64 [nnz], all below ``numel``.

    Raises:
        PayloadError: the section is not exactly what an encoder writes for ``nnz`` of ``numel`` entries.
    """
    codec = CODECS[check_section(encoding, param, data.numel(), nnz, numel)]
    return codec.decode(data, param, nnz, numel)
