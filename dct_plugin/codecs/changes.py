"""Changed entries of 16-bit weights: a record of their positions and differences, by bits alone.

A weight is a number of 16 bits here, so ``-0.0`` and NaN are weights like others. In the order of the floats
most changes are one or two steps, so a difference of these *ordinals* takes few bits. Little endian:

====== ==== ===============================================================================================
offset type field
====== ==== ===============================================================================================
0      u16  magic 0xDC7B
2      u8   version, 1
3      u8   index encoding (:class:`~dct_plugin.codecs.index.IndexEncoding`)
4      u8   bits of a difference in the first section: 2, 4, 8 or 16. 0: all weights as they are
5      u8   parameter (Rice k, else 0)
6      u16  0
8      u32  numel
12     u32  nnz: entries that changed
16     u32  bytes of the index section
20     u32  bytes of the differences
24     u64  0
32     u32  check1, check2: those of a payload (:mod:`.payload`)
40          index section, then the sections of differences
====== ==== ===============================================================================================

A difference d is the code d - 1 if it is positive, else d: signed, and the lowest code of a section says that
the next section, of twice the bits, has the difference. The encoder takes the smallest first section, and
sends all weights as they are if that is not larger. A message is a concatenation of records.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PayloadError
from .index import IndexEncoding, check_section, decode_indices, encode_indices
from .payload import HEADER_NBYTES, checksum, header_bytes
from .quantised import pack, unpack

MAGIC, VERSION = 0xDC7B, 1
#: Bits that the first section of differences may have.
FIRST_BITS = (2, 4, 8, 16)
#: The bits of the largest fp16 number.
_LARGEST = 0x7BFF
_CHECKED = struct.Struct("<HBBBBHIIIIQ")
_CHECKS = struct.Struct("<II")


class _Record(NamedTuple):
    """A record in a message."""

    encoding: IndexEncoding
    bits: int
    param: int
    numel: int
    nnz: int
    positions: Tensor
    differences: Tensor


def record_bound(numel: int) -> int:
    """Return the largest size in bytes of a record of ``numel`` entries."""
    return HEADER_NBYTES + 2 * numel


def encode_changes(wanted: Tensor, held: Tensor) -> tuple[Tensor, int]:
    """Return the record that turns ``held`` into ``wanted`` (bf16 or fp16 [numel] both), and the number of
    entries that differ.
    """
    new, old = wanted.view(torch.int16), held.view(torch.int16)
    numel, index = new.numel(), (new != old).nonzero().view(-1)
    difference = (_ordinals(new[index]) - _ordinals(old[index])).to(torch.int32)
    code = difference - (difference > 0).to(torch.int32)
    bits, values = min(((b, _sections(code, b)) for b in FIRST_BITS), key=lambda each: each[1].numel())
    encoding, param, positions = encode_indices(index, numel)
    if positions.numel() + values.numel() >= 2 * numel:
        encoding, bits, param = IndexEncoding.DENSE, 0, 0
        positions, values = positions[:0], new.view(torch.uint8)
    body = torch.cat([positions, values])
    sizes = positions.numel(), values.numel()
    checked = _CHECKED.pack(MAGIC, VERSION, encoding, bits, param, 0, numel, index.numel(), *sizes, 0)
    header = bytearray(checked + _CHECKS.pack(*checksum(checked, body)))
    return torch.cat([torch.frombuffer(header, dtype=torch.uint8).to(body.device), body]), index.numel()


def apply_changes(message: Tensor, outs: Sequence[Tensor]) -> None:
    """Apply the records of a message to ``outs``, one each; bf16 or fp16, changed in place.

    Raises:
        PayloadError: The message is damaged, or does not fit ``outs``, of which none has changed then.
    """
    applied = [_changed(record, out.view(torch.int16)) for record, out in _records(message, outs)]
    for (index, weights), out in zip(applied, outs, strict=True):
        if index is None:
            out.view(torch.int16).copy_(weights)
        else:
            out.view(torch.int16)[index] = weights


def steps_between(wanted: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`add_steps` adds to ``held`` to get ``wanted`` (bf16 or fp16 [numel] both), fp16
    [numel] each: the differences of ordinals that are 1 or -1, and as bits of numbers all others. Return
    also, bool [], whether one is too large for a number, and cut.
    """
    difference = _ordinals(wanted.view(torch.int16)) - _ordinals(held.view(torch.int16))
    single = difference.abs() == 1
    others = difference.masked_fill(single, 0)
    coded = others.clamp(-_LARGEST, _LARGEST)
    bits = _ordinals(coded + (coded >> 15)).view(torch.float16)
    return difference.masked_fill_(~single, 0).to(torch.float16), bits, (coded != others).any()


def add_steps(weights: Tensor, single: Tensor, others: Tensor) -> None:
    """Change weights in place by what :func:`steps_between` returned."""
    place = _ordinals(others.view(torch.int16))
    difference = place - (place >> 15) + single.to(torch.int16)
    bits = weights.view(torch.int16)
    bits.copy_(_ordinals(_ordinals(bits) + difference))


def _records(message: Tensor, outs: Sequence[Tensor]) -> list[tuple[_Record, Tensor]]:
    """Return the records of a message, headers and checksums checked, with the weights that they change."""
    found, at = [], 0
    for out in outs:
        head = header_bytes(message[at:])
        if len(head) < HEADER_NBYTES:
            raise PayloadError(f"record is truncated: {len(head)} bytes, a header has {HEADER_NBYTES}")
        magic, version, encoding, bits, param, zero, numel, nnz, index, values, zeros = _CHECKED.unpack_from(
            head
        )
        end = at + HEADER_NBYTES + index + values
        whole = bits == 0 and encoding == index == param == 0 and values == 2 * numel
        if (magic, version, zero, zeros) != (MAGIC, VERSION, 0, 0) or not (whole or bits in FIRST_BITS):
            raise PayloadError(f"header of a record is wrong: {head.hex()}")
        if numel != out.numel() or nnz > numel or end > message.numel():
            raise PayloadError(f"record has {nnz} of {numel} entries, expected {out.numel()} at most")
        body = message[at + HEADER_NBYTES : end]
        if checksum(head[: _CHECKED.size], body) != _CHECKS.unpack_from(head, _CHECKED.size):
            raise PayloadError("checksum of a record is wrong: corrupted in transit or in memory")
        try:
            checked = IndexEncoding.DENSE if whole else check_section(encoding, param, index, nnz, numel)
        except ValueError as error:
            raise PayloadError(str(error)) from None
        found.append((_Record(checked, bits, param, numel, nnz, body[:index], body[index:]), out))
        at = end
    if at != message.numel():
        raise PayloadError(f"message has {message.numel() - at} bytes behind its records")
    return found


def _changed(record: _Record, old: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the positions that a record changes (None: all), and their weights, int16."""
    if not record.bits:
        return None, record.differences.clone().view(torch.int16)
    index = decode_indices(record.encoding, record.param, record.positions, record.nnz, record.numel)
    code = _codes(record)
    difference = (code + (code >= 0).to(torch.int32)).to(torch.int16)
    # The order of the floats turned into bits again: the same map.
    return index, _ordinals(_ordinals(old[index]) + difference)


def _ordinals(bits: Tensor) -> Tensor:
    """Return the places of floats, given as int16, in their order, int16; and the bits of places."""
    return bits ^ (bits >> 15 & 0x7FFF)


def _sections(code: Tensor, bits: int) -> Tensor:
    """Return the sections of differences, uint8, from a first one of so many bits on."""
    sections = []
    while bits < 16:
        escape = -(2 ** (bits - 1))
        fits = code.abs() < -escape
        padded = code.new_zeros(-(-code.numel() // (8 // bits)) * (8 // bits))
        padded[: code.numel()] = torch.where(fits, code, escape)
        sections.append(pack((padded & (2**bits - 1)).to(torch.uint8), bits))
        code, bits = code[~fits], 2 * bits
    return torch.cat([*sections, code.to(torch.int16).view(torch.uint8)])


def _codes(record: _Record) -> Tensor:
    """Return the codes of a record, int32 [nnz]."""
    data, bits, count = record.differences, record.bits, record.nnz
    found = torch.zeros(count, dtype=torch.int32, device=data.device)
    places = torch.arange(count, device=data.device)
    while bits < 16:
        size = -(-count * bits // 8)
        if data.numel() < size:
            raise PayloadError("differences of a record are truncated")
        code = unpack(data[:size], bits).to(torch.int32)
        if bool(code[count:].any()):
            raise PayloadError("differences of a record have trailing bits")
        half = 2 ** (bits - 1)
        code = code[:count] - 2 * half * (code[:count] >= half).to(torch.int32)
        found[places] = code
        places = places[code == -half]
        data, bits, count = data[size:], 2 * bits, places.numel()
    if data.numel() != 2 * count:
        raise PayloadError(f"differences of a record end with {data.numel()} bytes, expected {2 * count}")
    found[places] = data.clone().view(torch.int16).to(torch.int32)
    if bool((found == 0x7FFF).any()):
        raise PayloadError("a record holds a difference that no encoder writes")
    return found
