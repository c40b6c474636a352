"""Device code of error-bounded codes; :mod:`.embedding` launches it.

The format is that of :mod:`.embedding_format`, of which a device writes and reads the methods raw, zero and
packed. A payload is planned by one program (methods, step widths, where each segment's bits begin), then
written by as many as there are entries, whose bits do not overlap: what they add with atomics is the same in
any order. CRC-32 is linear: each program advances the words of its part of a message by the bytes behind
them.

``segments`` is int64 [all segments + 1, 4]: first entry, entries, message, first unit of work; ``parts`` is
int64 [messages, 5]: first segment, segments, entries, first byte in the buffer, bytes or (writing) kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .message_kernels import _LOOK
from .selection_kernels import CHUNK, OVERFLOW, STEP

HEADER = tl.constexpr(20)
MAGIC_AND_VERSION = tl.constexpr(0x0002DC7B)
NONFINITE = tl.constexpr(1)
DEFLATED = tl.constexpr(2)
RAW = tl.constexpr(14)
ZERO = tl.constexpr(15)
PACKED = tl.constexpr(16)
MAX_CODE = tl.constexpr(1 << 15)
#: Half a step width in bf16 for a bound of 1, which stands where all entries are 0.
HALF_OF_ONE = tl.constexpr(0x3F7F)
#: Adding and subtracting it rounds fp64 to the nearest integer, ties to even, below 2**51.
ROUNDER = tl.constexpr(6755399441055744.0)
POLYNOMIAL = tl.constexpr(0xEDB88320)

#: Places in ``plans``, int64 [segments, 4].
WIDTH = tl.constexpr(0)  # bits of a code; raw: 32
AT = tl.constexpr(1)  # first bit behind the raw entries; raw: first raw entry
HALF = tl.constexpr(2)  # half a step width, bf16
#: Places in ``sizes``, int64 [messages, 4].
NBYTES = tl.constexpr(0)  # of the payload
RAWS = tl.constexpr(1)  # raw entries
STATUS = tl.constexpr(2)  # what is wrong (a number of embedding_format), or one of these
SHOWN = tl.constexpr(3)  # what was found instead, for the error
IS_NONFINITE = tl.constexpr(15)
FOR_THE_HOST = tl.constexpr(20)  # a method that is not read here


@triton.jit
def _segment_of(segments, count, unit):
    """Return the segment that a unit of work belongs to; ``count``: none."""
    lanes = tl.arange(0, _LOOK)
    found = tl.zeros((_LOOK,), tl.int32)
    first = 0
    while first <= count:
        at = first + lanes
        begins = tl.load(segments + at * 4 + 3, mask=at <= count, other=unit + 1)
        found += (begins <= unit).to(tl.int32)
        first += _LOOK
    return tl.sum(found, 0) - 1


@triton.jit
def _half(word):
    """Return half a step width, fp64, from its bf16 bits."""
    return (word.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _rounded(x, half):
    """Round ``x / (2 * half)`` to the nearest integer, int64."""
    step = tl.where(half > 0, half * 2.0, 1.0)
    return (((x.to(tl.float64) / step) + ROUNDER) - ROUNDER).to(tl.int64)


@triton.jit
def _lay_out(plan, there, raw, entries, width, word, raws, bits):
    """Return the numbers of raw entries and bits behind segments; write width, place and step width of
    these.
    """
    raw_entries = tl.where(raw & there, entries, 0)
    code_bits = tl.where(raw | (there == 0), 0, entries * width)
    at = tl.where(
        raw, raws + tl.cumsum(raw_entries, 0) - raw_entries, bits + tl.cumsum(code_bits, 0) - code_bits
    )
    tl.store(plan + WIDTH, tl.where(raw, 32, width), mask=there)
    tl.store(plan + AT, at, mask=there)
    tl.store(plan + HALF, word.to(tl.int64), mask=there)
    return raws + tl.sum(raw_entries, 0), bits + tl.sum(code_bits, 0)


@triton.jit(do_not_specialize=["count"])
def extremes(x, segments, largest, status, count):
    """Write the bits of the largest entry of each segment and of the largest negated one, int32 [segments,
    2].
    """
    unit = tl.program_id(0).to(tl.int64)
    row = _segment_of(segments, count, unit)
    if row < count:
        here = segments + row * 4
        at = (unit - tl.load(here + 3)) * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(x + tl.load(here) + at, mask=at < tl.load(here + 1), other=0.0)
        zero = tl.zeros((CHUNK,), tl.float32)
        up = tl.where(value > 0, value, zero).to(tl.int32, bitcast=True)
        down = tl.where(value < 0, -value, zero).to(tl.int32, bitcast=True)
        tl.atomic_max(largest + row * 2, tl.max(up, 0))
        tl.atomic_max(largest + row * 2 + 1, tl.max(down, 0))
        fine = tl.min((tl.abs(value) < OVERFLOW).to(tl.int32), 0)
        if fine == 0:
            tl.store(status + tl.load(here + 2) * 4 + STATUS, tl.full((), IS_NONFINITE, tl.int64))


@triton.jit
def plan_codes(segments, parts, largest, halves, plans, sizes, buffer, words):
    """Write method, step width and place of every segment of a message, its headers and its size."""
    part = parts + tl.program_id(0).to(tl.int64) * 5
    size = sizes + tl.program_id(0).to(tl.int64) * 4
    first = tl.load(part)
    count = tl.load(part + 1)
    start = tl.load(part + 3)
    raws = first * 0
    bits = first * 0
    done = first * 0
    while done < count:
        lane = done + tl.arange(0, STEP)
        there = lane < count
        row = first + lane
        entries = tl.load(segments + row * 4 + 1, mask=there, other=0)
        up = tl.load(largest + row * 2, mask=there, other=0).to(tl.float32, bitcast=True)
        down = tl.load(largest + row * 2 + 1, mask=there, other=0).to(tl.float32, bitcast=True)
        most = tl.maximum(up, down)
        word = tl.load(halves + row, mask=there, other=0)
        word = tl.where(most == 0.0, HALF_OF_ONE, word)
        half = _half(word)
        raw = (most.to(tl.float64) < half * 65534.0) == 0
        zero = tl.zeros((STEP,), tl.float32)
        code = tl.maximum(
            _rounded(tl.where(raw, zero, down), half) * 2, _rounded(tl.where(raw, zero, up), half) * 2 - 1
        )
        width = tl.zeros((STEP,), tl.int64)
        for power in tl.static_range(17):
            width += (code >= (1 << power)).to(tl.int64)
        method = tl.where(raw, RAW, tl.where(width == 0, ZERO, width + PACKED))
        word = tl.where(raw, 0, word)
        tl.store(buffer + start + HEADER + lane, method.to(tl.uint8), mask=there)
        place = start + HEADER + count + 2 * lane
        tl.store(buffer + place, (word & 0xFF).to(tl.uint8), mask=there)
        tl.store(buffer + place + 1, (word >> 8).to(tl.uint8), mask=there)
        raws, bits = _lay_out(plans + row * 4, there, raw, entries, width, word, raws, bits)
        done += STEP
    flagged = tl.load(size + STATUS) != 0
    body = tl.where(flagged, 0, 3 * count + 4 * raws + (bits + 7) // 8)
    tl.store(size + NBYTES, body + HEADER)
    tl.store(size + RAWS, raws)
    header = words + start // 4
    tl.store(header, (tl.where(flagged, NONFINITE << 24, 0) + MAGIC_AND_VERSION).to(tl.int32))
    tl.store(header + 1, tl.load(part + 2).to(tl.int32))
    tl.store(header + 2, count.to(tl.int32))
    tl.store(header + 3, body.to(tl.int32))


@triton.jit
def _first_bit(plan, part, size):
    """Return the first bit of a segment, from the start of its message."""
    raw = tl.load(plan + WIDTH) == 32
    begin = 8 * (3 * tl.load(part + 1) + HEADER)
    at = tl.load(plan + AT)
    return begin + tl.where(raw, 32 * at, 32 * tl.load(size + RAWS) + at)


@triton.jit(do_not_specialize=["count"])
def write_codes(x, segments, parts, plans, sizes, words, decoded, count, DECODED: tl.constexpr):
    """Write the bits of a chunk of entries into words that are 0, and (DECODED) what a receiver decodes."""
    unit = tl.program_id(0).to(tl.int64)
    row = _segment_of(segments, count, unit)
    if row < count:
        here = segments + row * 4
        message = tl.load(here + 2)
        size = sizes + message * 4
        if tl.load(size + STATUS) == 0:
            part = parts + message * 5
            plan = plans + row * 4
            width = tl.load(plan + WIDTH)
            half = _half(tl.load(plan + HALF))
            at = (unit - tl.load(here + 3)) * CHUNK + tl.arange(0, CHUNK)
            inside = at < tl.load(here + 1)
            begin = tl.load(here)
            value = tl.load(x + begin + at, mask=inside, other=0.0)
            raw = width == 32
            number = _rounded(tl.where(raw, 0.0, value), half)
            code = 2 * tl.abs(number) - (number > 0).to(tl.int64)
            whole = value.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True).to(tl.int64)
            code = tl.where(raw, whole, code)
            if width > 0:
                bit = 8 * tl.load(part + 3) + _first_bit(plan, part, size) + at * width
                low = code << (bit & 31)
                tl.atomic_or(words + bit // 32, low.to(tl.int32), mask=inside & ((low & 0xFFFFFFFF) != 0))
                high = low >> 32
                tl.atomic_or(words + bit // 32 + 1, high.to(tl.int32), mask=inside & (high != 0))
            if DECODED:
                rounded = (number.to(tl.float64) * (half * 2.0)).to(tl.float32)
                tl.store(decoded + begin + at, tl.where(raw, value, rounded), mask=inside)


@triton.jit
def _times(a, b):
    """Multiply polynomials over GF(2) modulo that of CRC-32, uint32, the highest bit for 1."""
    product = a ^ a
    for i in range(32):
        product = product ^ (b * ((a >> (31 - i)) & 1))
        b = (b >> 1) ^ ((b & 1) * POLYNOMIAL)
    return product


@triton.jit
def _advance(powers, nbytes):
    """Return the factor that moves a checksum ``nbytes`` on, uint32; ``powers`` has that of 1, 2, 4, ...
    bytes.
    """
    found = (nbytes * 0 + 0x80000000).to(tl.uint32)
    left = nbytes
    while left > 0:
        if (left & 1) != 0:
            found = _times(found, tl.load(powers).to(tl.uint32, bitcast=True))
        left = left >> 1
        powers += 1
    return found


@triton.jit
def checksum(words, parts, sizes, advances, powers, checks, AT: tl.constexpr, COUNTED: tl.constexpr):
    """Add a chunk's share of a message's CRC-32, without its first and last inversion. The word AT is that of
    the CRC-32 itself: left out, or (COUNTED) 0. ``advances``: by 4 bytes times 0, 1, 2, ...
    """
    chunk = tl.program_id(0).to(tl.int64)
    message = tl.program_id(1).to(tl.int64)
    nbytes = tl.load(sizes + message * 4 + NBYTES)
    if not COUNTED:
        nbytes -= 4
    words += tl.load(parts + message * 5 + 3) // 4
    count = (nbytes + 3) // 4
    if chunk * CHUNK < count:
        last = tl.minimum(chunk * CHUNK + CHUNK, count) - 1
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        place = at
        there = at <= last
        if COUNTED:
            there = there & (at != AT)
        else:
            place = tl.where(at < AT, at, at + 1)
        word = tl.load(words + place, mask=there, other=0).to(tl.uint32, bitcast=True)
        beyond = tl.maximum(4 * at + 4 - nbytes, 0) * 8  # bits of the last word that are behind the payload
        word = tl.where(beyond < 32, (word << beyond.to(tl.uint32)) >> beyond.to(tl.uint32), 0).to(tl.uint32)
        moved = _times(
            word, tl.load(advances + last - at, mask=at <= last, other=0).to(tl.uint32, bitcast=True)
        )
        found = _times(tl.xor_sum(moved, 0), _advance(powers, nbytes - 4 * last))
        tl.atomic_xor(checks + message, found.to(tl.int32, bitcast=True))


@triton.jit
def _crc(checks, powers, message, nbytes):
    """Return the CRC-32 of so many bytes of a message, uint32, from what :func:`checksum` found."""
    begin = _times(_advance(powers, nbytes), (nbytes * 0 + 0xFFFFFFFF).to(tl.uint32))
    return begin ^ tl.load(checks + message).to(tl.uint32, bitcast=True) ^ 0xFFFFFFFF


@triton.jit
def seal_codes(parts, sizes, checks, powers, buffer, words):
    """Write the checksum in the header, and the byte behind the payload."""
    message = tl.program_id(0).to(tl.int64)
    part = parts + message * 5
    start = tl.load(part + 3)
    nbytes = tl.load(sizes + message * 4 + NBYTES)
    tl.store(words + start // 4 + 4, _crc(checks, powers, message, nbytes - 4).to(tl.int32, bitcast=True))
    tl.store(buffer + start + nbytes, tl.load(part + 4).to(tl.uint8))


# ---- reading ------------------------------------------------------------------------------------------


@triton.jit
def _byte(buffer, at, mask):
    return tl.load(buffer + at, mask=mask, other=0).to(tl.int64)


@triton.jit
def open_codes(segments, parts, plans, sizes, buffer, words):
    """Check a payload's header, methods and sizes, and find where the bits of its segments begin."""
    message = tl.program_id(0).to(tl.int64)
    part = parts + message * 5
    size = sizes + message * 4
    first = tl.load(part)
    count = tl.load(part + 1)
    start = tl.load(part + 3)
    nbytes = tl.load(part + 4)
    whole = nbytes >= HEADER
    which = tl.arange(0, 8)
    header = tl.load(words + start // 4 + which, mask=whole & (which < 5), other=0)
    header = header.to(tl.uint32, bitcast=True).to(tl.int64)
    begin = tl.sum(tl.where(which == 0, header, 0), 0)
    flags = begin >> 24
    entries = tl.sum(tl.where(which == 1, header, 0), 0)
    several = tl.sum(tl.where(which == 2, header, 0), 0)
    body = tl.sum(tl.where(which == 3, header, 0), 0)
    status = tl.where(whole, 0, 1).to(tl.int64)
    status = tl.where((status == 0) & ((begin & 0xFFFF) != (MAGIC_AND_VERSION & 0xFFFF)), 2, status)
    status = tl.where((status == 0) & ((begin & 0xFFFFFF) != MAGIC_AND_VERSION), 3, status)
    status = tl.where((status == 0) & ((flags > DEFLATED) | (several > 0xFFFF)), 4, status)
    status = tl.where((status == 0) & ((entries != tl.load(part + 2)) | (several != count)), 5, status)
    wrong_size = (body != nbytes - HEADER) | ((flags == NONFINITE) & (body != 0))
    status = tl.where((status == 0) & wrong_size, 6, status)
    status = tl.where((status == 0) & (flags != NONFINITE) & (body < 3 * count), 10, status)
    status = tl.where((status == 0) & (flags == NONFINITE), IS_NONFINITE, status)
    shown = tl.where(status == 2, begin & 0xFFFF, nbytes)
    shown = tl.where(status == 3, (begin >> 16) & 0xFF, shown)
    shown = tl.where(status == 4, flags, shown)
    shown = tl.where(status == 5, tl.where(entries != tl.load(part + 2), entries, several), shown)
    raws = first * 0
    bits = first * 0
    if status == 0:
        done = first * 0
        while done < count:
            lane = done + tl.arange(0, STEP)
            there = lane < count
            row = first + lane
            number = tl.load(segments + row * 4 + 1, mask=there, other=0)
            method = _byte(buffer, start + HEADER + lane, there)
            place = start + HEADER + count + 2 * lane
            word = _byte(buffer, place, there) | (_byte(buffer, place + 1, there) << 8)
            unknown = there & ((method > PACKED + 16) | (method == PACKED))
            odd = there & (number > 0) & ((method == RAW) != (word == 0))
            odd = odd | (there & (word >= 0x7F80))
            other = there & (method < RAW)
            width = tl.where(method > PACKED, method - PACKED, 0)
            raws, bits = _lay_out(plans + row * 4, there, method == RAW, number, width, word, raws, bits)
            odd_here = tl.where(tl.max(odd.to(tl.int32), 0) > 0, 9, 0)
            wrong = tl.where(tl.max(unknown.to(tl.int32), 0) > 0, 8, odd_here)
            shown = tl.where(wrong == 8, tl.max(tl.where(unknown, method, 0), 0), shown)
            for_host = (tl.max(other.to(tl.int32), 0) > 0) | (flags == DEFLATED)
            wrong = tl.where((wrong == 0) & for_host, FOR_THE_HOST, wrong)
            status = tl.where((status == 0) | ((status == FOR_THE_HOST) & (wrong != 0)), wrong, status)
            done += STEP
        end = 3 * count + 4 * raws + HEADER
        needed = end + (bits + 7) // 8
        status = tl.where((status == 0) & (needed > nbytes), 10, status)
        last = _byte(buffer, start + nbytes - 1, nbytes > 0)
        stray = ((bits & 7) != 0) & ((last >> (bits & 7)) != 0)
        status = tl.where((status == 0) & ((needed < nbytes) | stray), 13, status)
    tl.store(size + NBYTES, tl.where(whole, nbytes, 4))
    tl.store(size + RAWS, raws)
    tl.store(size + STATUS, status)
    tl.store(size + SHOWN, shown)


@triton.jit
def judge(parts, sizes, checks, powers, words):
    """Check a payload's checksum."""
    message = tl.program_id(0).to(tl.int64)
    size = sizes + message * 4
    status = tl.load(size + STATUS)
    if (status == 0) | (status >= 8):
        found = _crc(checks, powers, message, tl.load(size + NBYTES) - 4).to(tl.int32, bitcast=True)
        if found != tl.load(words + tl.load(parts + message * 5 + 3) // 4 + 4):
            tl.store(size + STATUS, tl.full((), 7, tl.int64))


@triton.jit(do_not_specialize=["count"])
def read_codes(segments, parts, plans, sizes, words, outs, places, count):
    """Read the values of a chunk of entries; ``places``: the begin of a message's output behind ``outs``."""
    unit = tl.program_id(0).to(tl.int64)
    row = _segment_of(segments, count, unit)
    if row < count:
        here = segments + row * 4
        message = tl.load(here + 2)
        size = sizes + message * 4
        part = parts + message * 5
        status = tl.load(size + STATUS)
        at = (unit - tl.load(here + 3)) * CHUNK + tl.arange(0, CHUNK)
        inside = at < tl.load(here + 1)
        out = outs + tl.load(places + message) + tl.load(here)
        if status == IS_NONFINITE:
            tl.store(out + at, tl.full((CHUNK,), float("nan"), tl.float32), mask=inside)
        if status == 0:
            plan = plans + row * 4
            width = tl.load(plan + WIDTH)
            bit = 8 * tl.load(part + 3) + _first_bit(plan, part, size) + at * width
            some = inside & (width > 0)
            low = tl.load(words + bit // 32, mask=some, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            over = some & ((bit & 31) + width > 32)
            high = tl.load(words + bit // 32 + 1, mask=over, other=0).to(tl.uint32, bitcast=True)
            low = low >> (bit & 31)
            high = (high.to(tl.int64) << (32 - (bit & 31))) & 0xFFFFFFFF
            code = (low | high) & ((width * 0 + 1 << width) - 1)
            value = code.to(tl.int32).to(tl.float32, bitcast=True)
            if width < 32:
                number = tl.where((code & 1) != 0, (code + 1) >> 1, -(code >> 1))
                half = _half(tl.load(plan + HALF))
                value = (number.to(tl.float64) * (half * 2.0)).to(tl.float32)
                if tl.max(tl.where(inside, code, 0), 0) > 2 * (MAX_CODE - 1):
                    tl.atomic_max(size + STATUS, tl.full((), 11, tl.int64))
            finite = (value.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
            if tl.min((finite | (inside == 0)).to(tl.int32), 0) == 0:
                tl.atomic_max(size + STATUS, tl.full((), 12, tl.int64))
            tl.store(out + at, value, mask=inside)
