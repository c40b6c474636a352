"""Device code of the Triton backend; :mod:`.batch` launches it.

Counting and writing are separate kernels with a prefix sum between them, so that every byte has one writer
and results do not depend on the order of the programs; what programs add up with atomics are integers.

A launch serves any number of tensors: ``table``, int64 [jobs + 1, ROW], has a row for each, with addresses
and sizes, and in its last row the totals. A program belongs to the row whose first unit of work (a tile, a
block, a chunk) is the last one not above its own number.

``state`` is int64: what one kernel finds out about a job and the next ones need, see the constants below.
Positions are the lower 32 bits, as an unsigned number, in int32. What changes from call to call (sizes, where
a payload begins) compiles nothing anew.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...codecs import index, payload
from ...codecs.stats import KERNEL_ERRORS
from ...codecs.values import ValueDtype

#: Entries of a program of the selection, and bits of a block of a bitmap.
TILE = tl.constexpr(4096)
BLOCK = tl.constexpr(65536)
#: Kept entries, words or bytes of a program of everything else; whole groups of values that share scales.
CHUNK = tl.constexpr(1024)
GROUP = tl.constexpr(256)
LOG_BLOCK = tl.constexpr(32)
HEADER = tl.constexpr(payload.HEADER_NBYTES)
CHECKED_WORDS = tl.constexpr(4)  # of the header, under the checksums

#: Places in ``state``: whether the input overflows, selected entries below ``start`` in its block, checksums
#: of the body, and what ``compact`` found. Behind the last job's, there are counts of selected entries per
#: block (:func:`_counts_of`).
FLAG, BEFORE, CHECK1, CHECK2, NNZ, ABOVE = map(tl.constexpr, range(6))
STATE = tl.constexpr(8)  # its size

ROW = tl.constexpr(16)
#: Places in a job's row: addresses; sizes; a number from which the start follows (:func:`_start_of`); the
#: first tile, block, chunk of the body; where its positions begin; the row of its figures; the threshold's
#: place on the device, or -1, and its bits.
GRAD_AT, RESIDUAL_AT, LEFT_AT, OUT_AT, NUMEL, CAPACITY, START = map(tl.constexpr, range(7))
TILES, BLOCKS, CHUNKS, ROOM, SLOT, TAU_SLOT, TAU_BITS = map(tl.constexpr, range(7, 14))
#: Of changes: the smallest and the largest distance that are sent; the address of the weights that are held
#: is in the place of the residual's.
NEAREST, FARTHEST = map(tl.constexpr, (14, 15))
#: Places in a sample's row; GRAD_AT, RESIDUAL_AT, NUMEL and CHUNKS are the same.
SAMPLES, SEED, ALL, SHARE, RANK = map(tl.constexpr, (2, 3, 5, 6, 7))
#: Places in a row of what is done entry by entry: addresses, GRAD_AT first; NUMEL, CHUNKS and SEED are as in
#: the others.
SECOND_AT, THIRD_AT = map(tl.constexpr, (1, 2))

#: Types of values that these kernels write and read: a new one is refused until it has its branches here.
_NAMES = ("FP32", "BF16", "FP16", "INT8", "INT4", "INT2", "LOG4", "SIGN")
VALUE_DTYPES = tuple(ValueDtype[name] for name in _NAMES)
FP32, BF16, FP16, INT8, INT4, INT2, LOG4, SIGN = map(tl.constexpr, map(int, VALUE_DTYPES))
#: In place of a gradient's type: distances of 16-bit weights from those that are held (codecs/changes.py).
CHANGES = tl.constexpr(3)
#: The most lower bits of a position behind the bitmap (codecs/index.py).
MOST_LOWER = tl.constexpr(index.MOST_LOWER)
#: What is wrong with a payload, see :data:`~dct_plugin.codecs.stats.KERNEL_ERRORS`.
BAD_CHECKSUM, BAD_VALUE, _, BAD_POSITION, BAD_COUNT, BAD_ORDER, BAD_HEADER = map(tl.constexpr, KERNEL_ERRORS)

MAGIC_AND_VERSION = tl.constexpr(0x0002DC7A)
OVERFLOW = tl.constexpr(2.0**126)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
BFLOAT16_MAX = tl.constexpr(3.3895313892515355e38)
FLOAT16_MAX = tl.constexpr(65504.0)
GROUPED_MAX = tl.constexpr(2.0**127)
#: Entries of a residual that share an exponent, the smallest one, and the largest entry.
SHARING = tl.constexpr(64)
PACK_SMALLEST = tl.constexpr(-112)
PACK_LARGEST = tl.constexpr(127 * 2.0**121)
SMALLEST_TAU = tl.constexpr(2.0**-126)
#: Adding and subtracting it rounds to the nearest integer, ties to even, below 2**22.
ROUNDER = tl.constexpr(12582912.0)
#: Counts that have a sum beside them.
COUNTED = tl.constexpr(128)


_LOOK = tl.constexpr(256)

# ---- helpers ------------------------------------------------------------------------------------------


@triton.jit
def _row_of(rows, count, unit, WHAT: tl.constexpr, SIZE: tl.constexpr = ROW):
    """Return the row (of SIZE numbers) that a unit of work belongs to; ``count``: none."""
    lanes = tl.arange(0, _LOOK)
    found = tl.zeros((_LOOK,), tl.int32)
    first = 0
    while first <= count:
        at = first + lanes
        begins = tl.load(rows + at * SIZE + WHAT, mask=at <= count, other=unit + 1)
        found += (begins <= unit).to(tl.int32)
        first += _LOOK
    return tl.sum(found, 0) - 1


@triton.jit
def _job_of(table, count, WHAT: tl.constexpr):
    """Return the number of this program's job, its row, and which of its units of work this is; int64."""
    unit = tl.program_id(0).to(tl.int64)
    number = tl.full((), 0, tl.int32)
    if count > 1:
        number = _row_of(table, count, unit, WHAT)
    job = table + number * ROW
    return number.to(tl.int64), job, unit - tl.load(job + WHAT)


@triton.jit
def _start_of(job, numel):
    """Return the position from which on entries are kept, if more pass the threshold than have room."""
    return tl.load(job + START) % tl.maximum(numel, 1)


@triton.jit
def _grad_of(job, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to a job's gradient."""
    return _pointer(tl.load(job + GRAD_AT), GRAD, ALIGNED)


@triton.jit
def _pointer(at, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer of an address of fp32, fp16, or others: as int16, which every machine can load.

    ALIGNED: the compiler knows that it is to a multiple of 16 bytes, and lets so many be read at once. (It
    forgets that of what another function returns.)
    """
    if KIND == FP32:
        pointer = at.to(tl.pointer_type(tl.float32))
    elif KIND == FP16:
        pointer = at.to(tl.pointer_type(tl.float16))
    else:
        pointer = at.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, [16])
    return pointer


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    """Return fp32 values in a type of gradients (bf16 as int16); what is too large becomes infinite."""
    if KIND == FP32:
        narrow = x
    elif KIND == BF16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow = tl.where(x == x, bits, 0x7FC0).to(tl.int16)
    else:
        narrow = x.to(tl.float16)
    return narrow


@triton.jit
def _floats_of(job, WHAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to a job's residual, or to what it leaves."""
    pointer = tl.load(job + WHAT).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, [16])
    return pointer


@triton.jit
def _bytes_of(job, WHAT: tl.constexpr):
    return tl.load(job + WHAT).to(tl.pointer_type(tl.uint8))


@triton.jit
def _bits_set(x):
    """Count the set bits of uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _lowest(x):
    """Return the lowest set bit of uint32, alone; 0 for 0."""
    return x & (0 - x.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True)


@triton.jit
def _as_position(low):
    """Return the int64 position that the lower 32 bits stand for."""
    return low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _places(positions, rank, kept, ALL: tl.constexpr):
    """Return the positions of the entries of the ranks given, int64; if ALL are kept, the ranks."""
    if ALL:
        at = rank
    else:  # what follows a return is compiled, too
        at = _as_position(tl.load(positions + rank, mask=kept, other=0))
    return at


@triton.jit
def _load_grad(grad, at, mask, GRAD: tl.constexpr):
    """Load fp32 entries of a gradient; of weights, their places in the order of the floats."""
    if GRAD == BF16:
        return _from_bf16(tl.load(grad + at, mask=mask, other=0))
    if GRAD == CHANGES:
        return _place_of(tl.load(grad + at, mask=mask, other=0)).to(tl.float32)
    return tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_whole(grad, at, GRAD: tl.constexpr):
    """Do what :func:`_load_grad` does, without a mask: 16 bytes at once, whatever the number of entries."""
    if GRAD == BF16:
        return _from_bf16(tl.load(grad + at))
    if GRAD == CHANGES:
        return _place_of(tl.load(grad + at)).to(tl.float32)
    return tl.load(grad + at).to(tl.float32)


@triton.jit
def _place_of(bits):
    """Return the place of a 16-bit float (int16) in the order of floats, int32; and the bits of a place."""
    wide = bits.to(tl.int32)
    return wide ^ ((wide >> 15) & 0x7FFF)


@triton.jit
def _distance(job, place, held):
    """Return how far a float is from one that is held, both given as by :func:`_load_grad`, in the order of
    the floats, modulo 2**16; 0 if it is another job that sends such a distance.
    """
    moved = (place - held).to(tl.int32).to(tl.int16).to(tl.float32)
    sent = (tl.abs(moved) >= tl.load(job + NEAREST)) & (tl.abs(moved) <= tl.load(job + FARTHEST))
    return tl.where(sent, moved, 0.0)


@triton.jit
def _from_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _clamp(x, limit: tl.constexpr):
    return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit
def _load_bytes(data, at, mask, COUNT: tl.constexpr):
    """Load a little-endian number of COUNT bytes, int32."""
    word = tl.load(data + at, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, COUNT):
        word = word | (tl.load(data + at + i, mask=mask, other=0).to(tl.int32) << (8 * i))
    return word


@triton.jit
def _put(body, at, bits, mask, COUNT: tl.constexpr):
    """Write COUNT bytes of ``bits``, int32, at byte ``at`` of the body; return what they add to both
    checksums.
    """
    check1 = tl.zeros(bits.shape, tl.int64)
    check2 = tl.zeros(bits.shape, tl.int64)
    for i in tl.static_range(COUNT):
        byte = (bits >> (8 * i)) & 0xFF
        tl.store(body + at + i, byte.to(tl.uint8), mask=mask)
        place = at + i
        part = tl.where(mask, byte.to(tl.int64) << (8 * (place & 3)), 0)
        check1 += part
        check2 += part * (CHECKED_WORDS + 1 + (place >> 2))
    return check1, check2


@triton.jit
def _add_checks(state, check1, check2):
    tl.atomic_add(state + CHECK1, tl.sum(tl.ravel(check1), 0) & 0xFFFFFFFF)
    tl.atomic_add(state + CHECK2, tl.sum(tl.ravel(check2), 0) & 0xFFFFFFFF)


@triton.jit
def _to_float_bits(x, VALUE: tl.constexpr):
    """Return the bits of fp32 values in a floating-point type, and the values that they decode to."""
    if VALUE == FP32:
        return x.to(tl.int32, bitcast=True), x
    if VALUE == BF16:
        bits = _clamp(x, BFLOAT16_MAX).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits, (bits << 16).to(tl.float32, bitcast=True)
    half = _clamp(x, FLOAT16_MAX).to(tl.float16)
    return half.to(tl.int16, bitcast=True).to(tl.int32), half.to(tl.float32)


@triton.jit
def _levels_of(bits, VALUE: tl.constexpr):
    """Return ``(start, step)`` of the levels of 4 and 2 bits, from both scales in one number."""
    low = (bits << 16).to(tl.float32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    step = high - low
    if VALUE == INT4:
        step = tl.math.div_rn(step, tl.full(step.shape, 7.0, tl.float32))
    return low, step


@triton.jit
def _scales_nbytes(nnz, value):
    """Return the bytes of the scales of a type of values that has scales."""
    log4 = (nnz + CHUNK - 1) // CHUNK + (nnz + LOG_BLOCK - 1) // LOG_BLOCK
    return tl.where(value == LOG4, log4, (nnz + GROUP - 1) // GROUP * 4)


@triton.jit
def _value_nbytes(nnz, value):
    """Return the bytes of a value section."""
    width = tl.where(value == INT8, 8, tl.where(value == INT2, 2, tl.where(value == SIGN, 1, 4)))
    width = tl.where(value == FP32, 32, tl.where(value < INT8, 16, width))
    return (nnz * width + 7) // 8 + tl.where(value >= INT8, _scales_nbytes(nnz, value), 0)


@triton.jit
def _round(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _flag_unless(state, ok):
    """Flag the input unless all are ok."""
    if tl.min(tl.ravel(ok.to(tl.int32)), 0) == 0:
        tl.store(state + FLAG, tl.full((), 1, tl.int64))  # whoever writes, writes the same


# ---- selection ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def overflow(table, state, count, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    """Flag gradients with an entry that is not finite, or far too large."""
    number, job, tile = _job_of(table, count, TILES)
    grad = _grad_of(job, GRAD, ALIGNED)
    numel = tl.load(job + NUMEL)
    at = tile * TILE + tl.arange(0, TILE)
    if (tile + 1) * TILE <= numel:
        ok = tl.abs(_load_whole(grad, at, GRAD)) < OVERFLOW
    else:
        ok = tl.abs(_load_grad(grad, at, at < numel, GRAD)) < OVERFLOW
    _flag_unless(state + number * STATE, ok)


@triton.jit(do_not_specialize=["count"])
def select(
    table, words, state, taus, count, GRAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_LEFT: tl.constexpr, IN_PLACE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Accumulate and compare: one pass over gradients and residuals.

    What is left becomes the accumulated value everywhere. In place, ``overflow`` has looked before, and a
    flagged tensor is left alone; else this flags, and ``settle`` repairs.
    """
    number, job, tile = _job_of(table, count, TILES)
    numel = tl.load(job + NUMEL)
    start = _start_of(job, numel)
    grad = _grad_of(job, GRAD, ALIGNED)
    counts, sums = _counts_of(state + count * STATE, table, count, number, BLOCKS)
    state += number * STATE
    words += tl.load(job + BLOCKS) * (BLOCK // 32)
    rows = tl.arange(0, TILE // 32)
    columns = tl.arange(0, 32)
    at = tile * TILE + (rows[:, None] * 32 + columns[None, :])
    inside = at < numel
    slot = tl.load(job + TAU_SLOT)
    tau = tl.load(job + TAU_BITS).to(tl.int32).to(tl.float32, bitcast=True)
    if slot >= 0:
        tau = tl.load(taus + slot)
    whole = (tile + 1) * TILE <= numel
    if whole:
        acc = _load_whole(grad, at, GRAD)
        ok = tl.abs(acc) < OVERFLOW
        if HAS_RESIDUAL:
            acc += tl.load(_floats_of(job, RESIDUAL_AT, ALIGNED) + at)
        if GRAD == CHANGES:
            held = _pointer(tl.load(job + RESIDUAL_AT), GRAD, ALIGNED)
            acc = _distance(job, acc, _load_whole(held, at, GRAD))
    else:
        acc = _load_grad(grad, at, inside, GRAD)
        ok = tl.abs(acc) < OVERFLOW
        if HAS_RESIDUAL:
            acc += tl.load(_floats_of(job, RESIDUAL_AT, ALIGNED) + at, mask=inside, other=0.0)
        if GRAD == CHANGES:
            held = _pointer(tl.load(job + RESIDUAL_AT), GRAD, ALIGNED)
            acc = _distance(job, acc, _load_grad(held, at, inside, GRAD))
    if HAS_LEFT:
        left = _floats_of(job, LEFT_AT, ALIGNED)
        live = tile >= 0
        if IN_PLACE:
            live = tl.load(state + FLAG) == 0
        if live:
            if whole:
                tl.store(left + at, acc)
            else:
                tl.store(left + at, acc, mask=inside)
    selected = ((tl.abs(acc) >= tau) & inside).to(tl.int32)
    tl.store(words + tile * (TILE // 32) + rows, tl.sum(selected << columns[None, :], axis=1))
    block = tile // (BLOCK // TILE)
    found = tl.sum(tl.ravel(selected), 0).to(tl.int64)
    tl.atomic_add(counts + block, found)
    tl.atomic_add(sums + block // COUNTED, found)
    if not IN_PLACE:
        _flag_unless(state, ok)
    if (block == start // BLOCK) & (tile * TILE < start):
        tl.atomic_add(state + BEFORE, tl.sum(tl.ravel(tl.where(at < start, selected, 0)), 0).to(tl.int64))


@triton.jit(do_not_specialize=["count", "blocks"])
def settle(
    table, state, counts, errors, count, blocks, SELECTED: tl.constexpr, VALUE: tl.constexpr,
    GRAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PUT_BACK: tl.constexpr, CLEAR: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Finish when all is written: put the old residual back where the input overflows (PUT_BACK), and clear
    gradients (CLEAR), a program for each of so many blocks; behind those, a program for each header.
    """
    if tl.program_id(0) >= blocks:
        _seal(table, state, counts, errors, (tl.program_id(0) - blocks).to(tl.int64), SELECTED, VALUE)
    else:
        number, job, block = _job_of(table, count, BLOCKS)
        numel = tl.load(job + NUMEL)
        first = block * BLOCK
        end = tl.minimum(first + BLOCK, numel)
        overflows = first < 0
        if PUT_BACK:
            overflows = tl.load(state + number * STATE + FLAG) != 0
        if not CLEAR:
            end = tl.where(overflows, end, first)
        while first < end:
            at = first + tl.arange(0, TILE)
            inside = at < numel
            if overflows:
                old = tl.zeros((TILE,), tl.float32)
                if HAS_RESIDUAL:
                    old = tl.load(_floats_of(job, RESIDUAL_AT, ALIGNED) + at, mask=inside, other=0.0)
                tl.store(_floats_of(job, LEFT_AT, ALIGNED) + at, old, mask=inside)
            if CLEAR:
                grad = _grad_of(job, GRAD, ALIGNED)
                nothing = tl.zeros((TILE,), grad.dtype.element_ty)
                if first + TILE <= numel:  # then 16 bytes at once
                    tl.store(grad + at, nothing)
                else:
                    tl.store(grad + at, nothing, mask=inside)
            first += TILE


@triton.jit
def _counts_of(counts, table, count, number, WHAT: tl.constexpr):
    """Return pointers to the counts of a job's units of work, and to the sums of COUNTED of them each; those
    of all jobs lie behind all counts.
    """
    first = tl.load(table + number * ROW + WHAT)
    sums = counts + tl.load(table + count * ROW + WHAT)
    return counts + first, _sums_of(sums, first, number)


@triton.jit
def _sums_of(sums, first, row):
    """Return the pointer to the sums of a row's counts, of which the first is the ``first`` of all rows."""
    return sums + first // COUNTED + row


@triton.jit
def _before(counts, sums, place):
    """Return the sum of the counts before a place: those of whole groups, and the rest one by one."""
    lanes = tl.arange(0, COUNTED)
    groups = place // COUNTED
    total = tl.load(counts + groups * COUNTED + lanes, mask=lanes < place % COUNTED, other=0)
    first = groups * 0
    while first < groups:
        total += tl.load(sums + first + lanes, mask=first + lanes < groups, other=0)
        first += COUNTED
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["positions_at", "count"])
def compact(table, words, state, positions_at, count):
    """Write the positions of the set bits, ascending; of more than the capacity, those that follow the start.

    Bits that are not kept are cleared. ``words``, int32, are those of all jobs; positions lie so many numbers
    behind.
    """
    positions = words + positions_at
    job_number, job, block = _job_of(table, count, BLOCKS)
    numel = tl.load(job + NUMEL)
    capacity = tl.load(job + CAPACITY)
    start = _start_of(job, numel)
    first_block = tl.load(job + BLOCKS)
    blocks = tl.load(job + ROW + BLOCKS) - first_block
    counts, sums = _counts_of(state + count * STATE, table, count, job_number, BLOCKS)
    state += job_number * STATE
    words += first_block * (BLOCK // 32)
    positions += tl.load(job + ROOM)
    before = _before(counts, sums, block)
    above = _before(counts, sums, blocks)
    first = _before(counts, sums, start // BLOCK) + tl.load(state + BEFORE)
    flagged = tl.load(state + FLAG) != 0
    cut = above > capacity
    # Of the selected entries, numbered from 0, [0, wrapped) and [first, first + capacity) are kept.
    first = tl.where(cut, first, 0)
    wrapped = tl.where(cut, tl.maximum(first + capacity - above, 0), 0)
    end = tl.where(flagged, 0, tl.minimum(first + capacity, above))
    wrapped = tl.where(flagged, 0, wrapped)

    lanes = tl.arange(0, BLOCK // 32)
    word_at = block * (BLOCK // 32) + lanes
    inside = word_at < (numel + 31) // 32
    word = tl.load(words + word_at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    set_bits = _bits_set(word)
    number = before + (tl.cumsum(set_bits, 0) - set_bits).to(tl.int64)
    kept_word = tl.zeros((BLOCK // 32,), tl.uint32)
    base = word_at * 32
    most = tl.max(set_bits, 0)
    bit = 0
    while bit < most:
        low = _lowest(word)
        kept = (word != 0) & ((number < wrapped) | ((number >= first) & (number < end)))
        target = tl.where(number < wrapped, number, number - first + wrapped)
        position = base + _bits_set(low - 1)
        tl.store(positions + target, position.to(tl.int32), mask=kept)
        kept_word = kept_word | tl.where(kept, low, 0).to(tl.uint32)
        word = word ^ low
        number += 1
        bit += 1
    if cut:
        tl.store(words + word_at, kept_word.to(tl.int32, bitcast=True), mask=inside)
    if block == 0:
        tl.store(state + NNZ, tl.where(flagged, 0, tl.minimum(above, capacity)))
        tl.store(state + ABOVE, tl.where(flagged, 0, above))


@triton.jit
def _index_form(nnz, numel):
    """Return how ``nnz`` of ``numel`` positions are written, int64: the bits of the bitmap, the lower bits of
    each position behind it (0: the bitmap has a bit per entry), and the bytes of the section; see
    codecs/index.py.
    """
    ratio = (numel - 1) // tl.maximum(nnz, 1)
    lower = nnz * 0
    for i in tl.static_range(1, MOST_LOWER + 1):
        lower += (ratio >> i) > 0
    bits = nnz + ((numel - 1) >> lower)
    nbytes = (bits + 7) // 8 + (nnz * lower + 7) // 8
    bitmap = (numel + 7) // 8
    few = nbytes < bitmap
    some = (nnz > 0) & (nnz < numel)
    lower = tl.where(some & few, lower, 0)
    bits = tl.where(some, tl.where(few, bits, numel), 0)
    return bits, lower, tl.where(some, tl.where(few, nbytes, bitmap), 0)


@triton.jit
def _count_below(positions, count, limit, lower):
    """Return how many of the ascending positions ``p`` have ``(p[j] >> lower) + j`` below a limit."""
    low = count * 0
    while tl.max(count - low, 0) > 0:
        middle = (low + count) // 2
        open_ = low < count
        at = (_as_position(tl.load(positions + middle, mask=open_, other=0)) >> lower) + middle
        low = tl.where(open_ & (at < limit), middle + 1, low)
        count = tl.where(open_ & (at >= limit), middle, count)
    return low


# ---- writing a payload --------------------------------------------------------------------------------


@triton.jit
def _write_index(job, words, positions, state, chunk, nnz, numel):
    """Write a part of a job's index section. A lane writes four bytes of the bitmap, whose first position it
    finds by bisection, and two bytes behind the bitmap, where a position has at most 16 bits.
    """
    bits, lower, nbytes = _index_form(nnz, numel)
    body = _bytes_of(job, OUT_AT) + HEADER
    unit = chunk * CHUNK + tl.arange(0, CHUNK)
    size = (bits + 7) // 8
    inside = unit * 4 < size
    word = tl.zeros((CHUNK,), tl.int32)
    if lower == 0:
        word = tl.load(words + tl.load(job + BLOCKS) * (BLOCK // 32) + unit, mask=inside, other=0)
    if lower > 0:
        rank = _count_below(positions, tl.where(inside, nnz, 0), unit * 32, lower)
        more = chunk >= 0
        while more:
            kept = inside & (rank < nnz)
            position = _as_position(tl.load(positions + rank, mask=kept, other=0))
            bit = (position >> lower) + rank - unit * 32
            kept = kept & (bit < 32)
            word = word | tl.where(kept, 1 << bit.to(tl.int32), 0)
            rank += 1
            more = tl.max(kept.to(tl.int32), 0) > 0
    check1 = tl.zeros((CHUNK,), tl.int64)
    check2 = tl.zeros((CHUNK,), tl.int64)
    for i in tl.static_range(4):
        a, b = _put(body, unit * 4 + i, word >> (8 * i), unit * 4 + i < size, 1)
        check1 += a
        check2 += b
    if lower > 0:
        for i in tl.static_range(2):
            at = unit * 2 + i
            first = at * 8
            rank = first // lower
            place = first - rank * lower
            byte = tl.zeros((CHUNK,), tl.int32)
            for bit in tl.static_range(8):
                low = tl.load(positions + rank, mask=rank < nnz, other=0)
                byte = byte | (((low >> place.to(tl.int32)) & 1) << bit)
                place += 1
                rank = tl.where(place == lower, rank + 1, rank)
                place = tl.where(place == lower, 0, place)
            a, b = _put(body, size + at, byte, size + at < nbytes, 1)
            check1 += a
            check2 += b
    _add_checks(state, check1, check2)
    return nbytes


@triton.jit
def _to_int8(x):
    """Return the bits of a scale per group, a code per entry, and what they decode to, of [groups, GROUP]."""
    x = _clamp(x, GROUPED_MAX)
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.math.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    by = tl.where(scale > 0, scale, 1.0)[:, None]
    level = _round(tl.math.div_rn(x, tl.broadcast_to(by, x.shape)))
    # A zero scale divides by zero; a subnormal one may have been rounded so far that the quotient passes 127.
    # -0 becomes the +0 a receiver gets.
    level = tl.where((scale > 0)[:, None], _clamp(level, 127.0), 0.0) + 0.0
    return scale.to(tl.int32, bitcast=True), level.to(tl.int32), level * scale[:, None]


@triton.jit
def _to_levels(x, kept, VALUE: tl.constexpr):
    """Do what :func:`_to_int8` does, for a sign and one of 8 or 2 levels; scales are two bf16 numbers."""
    negative = x < 0
    magnitude = tl.abs(_clamp(x, GROUPED_MAX))
    low = tl.min(tl.where(kept, magnitude, FLOAT32_MAX), axis=1)
    high = tl.max(magnitude, axis=1)
    low = tl.minimum(low, high)  # a group without entries
    lowest = low
    if VALUE == INT2:
        lowest = low + (high - low) * 0.125
        highest = low + (high - low) * 0.5
    else:
        highest = low + (high - low)
    lowest_bits, _ = _to_float_bits(lowest, BF16)
    highest_bits, _ = _to_float_bits(highest, BF16)
    scales = (lowest_bits & 0xFFFF) | (highest_bits << 16)
    start, step = _levels_of(scales, VALUE)
    start = tl.broadcast_to(start[:, None], x.shape)
    step = tl.broadcast_to(step[:, None], x.shape)
    LEVELS: tl.constexpr = 8 if VALUE == INT4 else 2
    # No more than the levels: the quotient may be too large to be rounded by adding.
    level = tl.math.div_rn(magnitude - start, tl.where(step > 0, step, 1.0))
    level = _round(tl.minimum(tl.maximum(level, 0.0), LEVELS - 1.0))
    level = tl.where(step > 0, level, 0.0)
    decoded = start + level * step
    decoded = tl.where(negative, -decoded, decoded)
    return scales, level.to(tl.int32) + tl.where(negative, LEVELS, 0), decoded


@triton.jit
def _log_level(level):
    """Return the share of the largest magnitude that a level of log4 is; see codecs/values.py."""
    share = tl.where(level % 4 == 3, 1.0, tl.where(level % 4 == 2, 0.5946035385131836, 0.3535533845424652))
    share = tl.where(level == 4, 0.21022410690784454, tl.where(level < 4, share * 0.125, share))
    return tl.where(level == 0, 0.0, share)


@triton.jit
def _log_scale(exponent, step):
    """Return the scale of both bytes of log4, int32, that it has."""
    return (tl.maximum(step + 8 * exponent - 247, 0) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _to_log4(x):
    """Do what :func:`_to_int8` does, for [blocks, LOG_BLOCK]; return the exponent of all scales first."""
    magnitude = tl.abs(_clamp(x, GROUPED_MAX))
    rounded = (tl.max(magnitude, axis=1).to(tl.int32, bitcast=True) + 0x80000) >> 20
    exponent = tl.max(rounded, axis=0) >> 3
    step = tl.maximum(rounded - 8 * exponent + 247, 0)
    scale = tl.broadcast_to(_log_scale(exponent, step)[:, None], x.shape)
    level = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(7):
        level += (magnitude > scale * ((_log_level(k) + _log_level(k + 1)) * 0.5)).to(tl.int32)
    negative = (x < 0) & (level > 0)
    decoded = _log_level(level) * scale
    return exponent, step, level + tl.where(negative, 8, 0), tl.where(negative, -decoded, decoded)


@triton.jit
def _to_sign(x, kept):
    """Do what :func:`_to_int8` does, for the mean magnitude of a group; see codecs/values.py."""
    magnitude = tl.abs(_clamp(x, GROUPED_MAX))
    largest = tl.max(magnitude, axis=1)
    step = tl.math.div_rn(largest, tl.full(largest.shape, 32767.0, tl.float32))
    by = tl.where(step > 0, step, 1.0)[:, None]
    part = _round(tl.minimum(tl.math.div_rn(magnitude, tl.broadcast_to(by, x.shape)), 32767.0))
    total = tl.sum(tl.where((step > 0)[:, None], part, 0.0), axis=1)
    count = tl.maximum(tl.sum(kept.to(tl.float32), axis=1), 1.0)
    scale = tl.math.div_rn(total, count) * step
    decoded = tl.where(x < 0, -scale[:, None], scale[:, None])
    return scale.to(tl.int32, bitcast=True), (x < 0).to(tl.int32), decoded


@triton.jit
def _put_codes(body, values_at, chunk, code, rank, nnz, VALUE: tl.constexpr):
    """Write a chunk of codes of 8 to 1 bits; return what they add to both checksums."""
    kept = rank < nnz
    code = tl.where(kept, code, 0)
    if VALUE == INT8:  # returned at the end: all returns of a function have one type
        checks = _put(body, values_at + rank, code, kept, 1)
    else:
        PER_BYTE: tl.constexpr = 8 if VALUE == SIGN else (4 if VALUE == INT2 else 2)
        # Not by a sum along an axis: its result lies twice in a warp, and Triton 3.6 then counts some of it
        # twice in the checksums (seen on an H100; its interpreter does not show it).
        if VALUE == SIGN:
            even, odd = tl.split(tl.reshape(code, (CHUNK // 8, 2, 2, 2)))
            first, third = tl.split(even | (odd << 1))
            even, odd = tl.split(first | (third << 2))
            byte = even | (odd << 4)
        elif VALUE != INT2:
            first, second = tl.split(tl.reshape(code, (CHUNK // 2, 2)))
            byte = first | (second << 4)
        else:
            even, odd = tl.split(tl.reshape(code, (CHUNK // 4, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            byte = first | (second << 2) | (third << 4) | (fourth << 6)
        place = chunk * (CHUNK // PER_BYTE) + tl.arange(0, CHUNK // PER_BYTE)
        checks = _put(body, values_at + place, byte, place * PER_BYTE < nnz, 1)
    return checks


@triton.jit(do_not_specialize=["positions_at", "count"])
def write(
    table, words, state, positions_at, count, SELECTED: tl.constexpr, ACCUMULATED: tl.constexpr,
    VALUE: tl.constexpr, GRAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Write a chunk of the body: positions and values. What the values do not carry stays in what is left.

    SELECTED: The entries of ``positions`` are written, not all.
    ACCUMULATED: Their values are in what is left.
    """
    number, job, chunk = _job_of(table, count, CHUNKS)
    state += number * STATE
    if tl.load(state + FLAG) == 0:
        left = _floats_of(job, LEFT_AT, False)
        numel = tl.load(job + NUMEL)
        nnz = numel
        values_at = nnz * 0
        positions = words
        if SELECTED:
            positions = words + positions_at + tl.load(job + ROOM)
            nnz = tl.load(state + NNZ)
            values_at = _write_index(job, words, positions, state, chunk, nnz, numel)
        rank = chunk * CHUNK + tl.arange(0, CHUNK)
        SHARING_SCALES: tl.constexpr = LOG_BLOCK if VALUE == LOG4 else GROUP
        if VALUE >= INT8:
            rank = tl.reshape(rank, (CHUNK // SHARING_SCALES, SHARING_SCALES))
        kept = rank < nnz
        at = _places(positions, rank, kept, not SELECTED)
        if ACCUMULATED:
            acc = tl.load(left + at, mask=kept, other=0.0)
        else:
            acc = _load_grad(_grad_of(job, GRAD, False), at, kept, GRAD)
            if HAS_RESIDUAL:
                acc += tl.load(_floats_of(job, RESIDUAL_AT, False) + at, mask=kept, other=0.0)
            if GRAD == CHANGES:
                held = _pointer(tl.load(job + RESIDUAL_AT), GRAD, False)
                acc = _distance(job, acc, _load_grad(held, at, kept, GRAD))
        # Only the residual can have made this infinite; the largest number is sent then, the excess is lost.
        acc = _clamp(acc, FLOAT32_MAX)
        body = _bytes_of(job, OUT_AT) + HEADER
        if VALUE < INT8:
            bits, decoded = _to_float_bits(acc, VALUE)
            WIDTH: tl.constexpr = 4 if VALUE == FP32 else 2
            check1, check2 = _put(body, values_at + rank * WIDTH, bits, kept, WIDTH)
        else:
            if VALUE == INT8:
                scales, code, decoded = _to_int8(acc)
            elif VALUE == LOG4:
                exponent, scales, code, decoded = _to_log4(acc)
            elif VALUE == SIGN:
                scales, code, decoded = _to_sign(acc, kept)
            else:
                scales, code, decoded = _to_levels(acc, kept, VALUE)
            SIZE: tl.constexpr = 1 if VALUE == LOG4 else 4
            groups = (nnz + SHARING_SCALES - 1) // SHARING_SCALES
            group = chunk * (CHUNK // SHARING_SCALES) + tl.arange(0, CHUNK // SHARING_SCALES)
            codes_at = values_at + _scales_nbytes(nnz, VALUE)
            if VALUE == LOG4:  # an exponent before the scales of each chunk
                first = (group % (CHUNK // LOG_BLOCK) == 0) & (group < groups)
                check1, check2 = _put(body, values_at + chunk + group, exponent + scales * 0, first, 1)
                _add_checks(state, check1, check2)
                values_at += chunk + 1
            check1, check2 = _put(body, values_at + group * SIZE, scales, group < groups, SIZE)
            _add_checks(state, check1, check2)
            check1, check2 = _put_codes(body, codes_at, chunk, code, rank, nnz, VALUE)
        _add_checks(state, check1, check2)
        if HAS_LEFT:
            tl.store(left + at, acc - decoded, mask=kept)


@triton.jit
def _seal(table, state, counts, errors, number, SELECTED: tl.constexpr, VALUE: tl.constexpr):
    """Write a header, and the payload's figures: int64 nbytes, nnz, above, and the flag.

    Whatever was wrong with a payload read before goes to the host with them, once: 2 * error + flag.
    """
    job = table + number * ROW
    state += number * STATE
    out = _bytes_of(job, OUT_AT)
    counts += tl.load(job + SLOT) * 4
    numel = tl.load(job + NUMEL)
    flagged = tl.load(state + FLAG) != 0
    nnz = numel
    above = numel
    if SELECTED:
        nnz = tl.load(state + NNZ)
        above = tl.load(state + ABOVE)
    nnz = tl.where(flagged, 0, nnz)
    _bits, _lower, index_nbytes = _index_form(nnz, numel)
    # The words of the header before its checksums.
    word = tl.arange(0, CHECKED_WORDS)
    content = tl.where(word == 1, flagged.to(tl.int64), MAGIC_AND_VERSION | (VALUE << 24))
    content = tl.where(word == 2, numel, tl.where(word == 3, nnz, content))
    check1 = tl.load(state + CHECK1) + tl.sum(content, 0)
    check2 = tl.load(state + CHECK2) + tl.sum(content * (word + 1), 0)
    for i in tl.static_range(4):
        tl.store(out + word * 4 + i, ((content >> (8 * i)) & 0xFF).to(tl.uint8))
        tl.store(out + 16 + i, ((check1 >> (8 * i)) & 0xFF).to(tl.uint8))
        tl.store(out + 20 + i, ((check2 >> (8 * i)) & 0xFF).to(tl.uint8))
    tl.store(counts, index_nbytes + HEADER + _value_nbytes(nnz, nnz * 0 + VALUE))
    tl.store(counts + 1, nnz)
    tl.store(counts + 2, tl.where(flagged, 0, above))
    error = tl.atomic_xchg(errors, tl.full((), 0, tl.int64))
    tl.store(counts + 3, 2 * error + flagged.to(tl.int64))


# ---- thresholds ---------------------------------------------------------------------------------------


@triton.jit
def _mixed(z):
    """Compute SplitMix64's output function (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["count"])
def sample(table, magnitudes, count, GRAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Write the bits of ``|grad + residual|`` at random positions (or of every entry), int32; -1: not
    finite.
    """
    _number, job, chunk = _job_of(table, count, CHUNKS)
    numel = tl.load(job + NUMEL)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    at = place
    if tl.load(job + ALL) == 0:
        counter = (place + 1).to(tl.uint64) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        high = _mixed(counter + tl.load(job + SEED).to(tl.uint64)) >> 32
        at = ((high * numel.to(tl.uint64)) >> 32).to(tl.int64)
    mask = place < tl.load(job + SAMPLES)
    acc = _load_grad(_grad_of(job, GRAD, False), at, mask, GRAD)
    if HAS_RESIDUAL:
        acc += tl.load(_floats_of(job, RESIDUAL_AT, False) + at, mask=mask, other=0.0)
    bits = acc.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    found = tl.where(bits < 0x7F800000, bits, -1)
    tl.store(magnitudes + tl.load(job + CHUNKS) * CHUNK + place, found, mask=mask)


@triton.jit
def _reaching(magnitudes, samples, least, LANES: tl.constexpr):
    """Count the samples that are at least ``least``."""
    lanes = tl.arange(0, LANES)
    reaching = tl.zeros((LANES,), tl.int32)
    first = samples * 0
    while first < samples:
        bits = tl.load(magnitudes + first + lanes, mask=first + lanes < samples, other=-1)
        reaching += (bits >= least).to(tl.int32)
        first += LANES
    return tl.sum(reaching, 0)


@triton.jit
def kth_largest(table, magnitudes, taus, LANES: tl.constexpr):
    """Find thresholds, one program each: the RANK-th largest, or (0) that of the SHARE to keep of the finite
    ones. The search goes bit by bit from the top, as the bits of magnitudes are in order.

    SHARE is the bits of an fp64 number: the rank is the one that the host would find.
    """
    job = table + tl.program_id(0) * ROW
    samples = tl.load(job + SAMPLES)
    magnitudes += tl.load(job + CHUNKS) * CHUNK
    count = _reaching(magnitudes, samples, 0, LANES)
    rank = tl.load(job + RANK)
    if rank == 0:
        share = tl.load(job + SHARE).to(tl.float64, bitcast=True)
        rank = tl.maximum((share * count.to(tl.float64) + 0.5).to(tl.int64), 1)
    rank = tl.minimum(rank, count)
    found = count * 0
    bit = count * 0 + (1 << 30)
    while bit > 0:
        trial = found | bit
        enough = _reaching(magnitudes, samples, trial, LANES) >= rank
        found = tl.where(enough, trial, found)
        bit = bit >> 1
    value = tl.where(count > 0, found, 0).to(tl.float32, bitcast=True)
    tl.store(taus + tl.load(job + SLOT), tl.maximum(value, SMALLEST_TAU))


# ---- entry by entry, before or after the selection ----------------------------------------------------


@triton.jit
def _entries(table, count):
    """Return the number of this program's job, its row, the chunk, the entries, and which of them exist."""
    number, job, chunk = _job_of(table, count, CHUNKS)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    return number, job, chunk, at, at < tl.load(job + NUMEL)


@triton.jit(do_not_specialize=["count"])
def difference(table, count, GRAD: tl.constexpr):
    """Write ``wanted``, rounded to the other's type, less ``held``; fp32. Addresses: held, wanted,
    difference.
    """
    _number, job, _chunk, at, inside = _entries(table, count)
    wanted = tl.load(_floats_of(job, SECOND_AT, False) + at, mask=inside, other=0.0)
    rounded = _rounded(wanted, GRAD)
    if GRAD == BF16:
        rounded = _from_bf16(rounded)
    held = _load_grad(_grad_of(job, GRAD, False), at, inside, GRAD)
    tl.store(_floats_of(job, THIRD_AT, False) + at, rounded.to(tl.float32) - held, mask=inside)


@triton.jit
def _lowbias(x):
    """Compute the hash "lowbias32" (C. Wellons) of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _packed_at(job, GROUPED: tl.constexpr):
    """Return the pointer to packed values; bf16 comes as int16."""
    at = tl.load(job + SECOND_AT)
    if GROUPED:
        pointer = at.to(tl.pointer_type(tl.int8))
    else:
        pointer = at.to(tl.pointer_type(tl.int16))
    return pointer


@triton.jit(do_not_specialize=["count"])
def pack(table, count, GROUPED: tl.constexpr):
    """Round fp32 to bf16, or GROUPED to int8 with an exponent per SHARING entries. Addresses: values, packed,
    exponents.
    """
    _number, job, chunk, place, mask = _entries(table, count)
    packed = _packed_at(job, GROUPED)
    x = _clamp(tl.load(_floats_of(job, GRAD_AT, False) + place, mask=mask, other=0.0), PACK_LARGEST)
    start = _lowbias(tl.load(job + SEED).to(tl.uint32))
    random = _lowbias(place.to(tl.uint32) + start).to(tl.int32, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    if GROUPED:
        rows: tl.constexpr = CHUNK // SHARING
        largest = tl.max(tl.reshape(bits & 0x7FFFFFFF, (rows, SHARING)), 1)
        exponent = (largest >> 23) - 133 + ((largest & 0x7FFFFF) > 0x7E0000).to(tl.int32)
        exponent = tl.maximum(exponent, PACK_SMALLEST)
        factor = ((142 - exponent) << 23).to(tl.float32, bitcast=True)
        fixed = tl.reshape(x, (rows, SHARING)) * factor[:, None] + ROUNDER
        fixed = tl.reshape(fixed, (CHUNK,)).to(tl.int32, bitcast=True) - 0x4B400000
        tl.store(packed + place, ((fixed + (random & 0x7FFF)) >> 15).to(tl.int8), mask=mask)
        row = chunk * rows + tl.arange(0, rows)
        exponents = tl.load(job + THIRD_AT).to(tl.pointer_type(tl.int8))
        tl.store(exponents + row, exponent.to(tl.int8), mask=row * SHARING < tl.load(job + NUMEL))
    else:
        # As unsigned numbers: the sign's bit is shifted along.
        rounded = bits.to(tl.uint32, bitcast=True) + (random & 0xFFFF).to(tl.uint32)
        tl.store(packed + place, (rounded >> 16).to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=["count"])
def unpack(table, count, GROUPED: tl.constexpr):
    """Read what :func:`pack` wrote, fp32; the addresses are the same."""
    _number, job, _chunk, place, mask = _entries(table, count)
    x = tl.load(_packed_at(job, GROUPED) + place, mask=mask, other=0)
    if GROUPED:
        exponents = tl.load(job + THIRD_AT).to(tl.pointer_type(tl.int8))
        exponent = tl.load(exponents + place // SHARING, mask=mask, other=0).to(tl.int32)
        found = x.to(tl.float32) * ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    else:
        found = _from_bf16(x)
    tl.store(_floats_of(job, GRAD_AT, False) + place, found, mask=mask)
