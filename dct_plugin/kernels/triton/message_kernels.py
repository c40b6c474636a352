"""Device code that reads whole messages, and puts them into slots; :mod:`.messages` and :mod:`.backend`
launch it.

The host knows how long a message may be and which tensors it is for. Encodings, sizes and counts are found
here: one program per message walks over its headers and makes a row of each, and the kernels behind it share
out their programs by the rows, all payloads of all messages in one launch. A program belongs to the row whose
first unit of work is the last one not above its own number; those beyond the last row have none.

Slots are those of :mod:`dct_plugin.codecs.slots`. A slot whose message does not fit is not opened: the
message counts as missing.

``rows`` is int64 [messages, payloads + 1, ROW]; in a message's last row stand the totals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selection_kernels import (
    BAD_CHECKSUM,
    BAD_COUNT,
    BAD_HEADER,
    BAD_ORDER,
    BAD_POSITION,
    BAD_VALUE,
    BF16,
    BITMAP,
    BLOCK,
    BLOCK16,
    CHUNK,
    COUNTED,
    DENSE,
    FP16,
    FP32,
    GAPS8,
    GROUP,
    HEADER,
    INT2,
    INT8,
    LOG4,
    LOG_BLOCK,
    MAGIC_AND_VERSION,
    ROW,
    SIGN,
    STEP,
    _as_position,
    _before,
    _bits_set,
    _levels_of,
    _load_bytes,
    _load_grad,
    _log_level,
    _log_scale,
    _lowest,
    _places,
    _pointer,
    _round,
    _rounded,
    _row_of,
    _scales_nbytes,
    _sums_of,
    _value_nbytes,
)

#: Places in a row: where the payload's body begins in the buffer, its encoding, the type of the values, kept
#: entries, bytes of the index section, what becomes of the output (see below); two checksums that the body
#: has to have, and has; what is wrong; the first unit of work of the checks, of the positions; where
#: its positions begin.
BODY, KIND, VALUE, COUNT, INDEX, STATE, WANTED = map(tl.constexpr, range(7))
FOUND, WRONG, CHECKS, SCANS, PLACE = map(tl.constexpr, (8, 10, 11, 12, 13))

#: What becomes of an output: the payload is added, or (flagged, or missing from a sum) it becomes NaN.
ADDED, POISONED = map(tl.constexpr, range(2))

#: Numbers of a tensor that payloads are for: entries; where they are, and their type, if they are added to;
#: if several messages are, the first program that does so, and the first of its entries in the fp32 memory
#: beside, or -1 where it adds up in place.
META = tl.constexpr(5)
#: The type of 16-bit floats that are moved in the order of the floats.
PLACES = tl.constexpr(3)
#: Entries that such a program owns, and messages that it searches at once.
RANGE, SEARCHED = map(tl.constexpr, (16384, 32))

#: Bytes of a slot before its message, and the words in them: size, fingerprint, nothing to add, 0.
PREFIX, WORDS = map(tl.constexpr, (32, 4))
#: Numbers of a slot, and of a payload that is put into one.
PART = tl.constexpr(4)
#: Bytes that a program copies into a slot.
COPIED = tl.constexpr(4096)


@triton.jit
def _error_of(row):
    """Return what is wrong with a payload whose body has been checked."""
    first = tl.load(row + FOUND) ^ tl.load(row + WANTED)
    second = tl.load(row + FOUND + 1) ^ tl.load(row + WANTED + 1)
    wrong = tl.load(row + WRONG)
    damaged = (wrong != BAD_HEADER) & (((first | second) & 0xFFFFFFFF) != 0)
    return tl.where(damaged, BAD_CHECKSUM, wrong)


@triton.jit
def _field(byte, lane, FIRST: tl.constexpr, BYTES: tl.constexpr):
    """Return a number of a header, from its bytes."""
    mine = (lane >= FIRST) & (lane < FIRST + BYTES)
    return tl.sum(tl.where(mine, byte << (((lane - FIRST) & 7) * 8), 0), 0)


@triton.jit
def _read_header(buffer, at, end, numel):
    """Return the fields of a payload's header, and whether it is damaged.

    The fields: encoding, value type, kept entries, bytes of the index section, flag, and the two checksums
    that the body has to have. A header is damaged, too, if it is not of a tensor of ``numel`` entries, or if
    the payload goes beyond ``end``.
    """
    lane = tl.arange(0, 64)
    byte = tl.load(buffer + at + lane, mask=(at + lane < end) & (lane < HEADER), other=0).to(tl.int64)
    part = tl.where(lane < 32, byte << ((lane % 4) * 8), 0)
    wanted1 = _field(byte, lane, 32, 4) - tl.sum(part, 0)
    wanted2 = _field(byte, lane, 36, 4) - tl.sum(part * (lane // 4 + 1), 0)
    kind = _field(byte, lane, 3, 1)
    value = _field(byte, lane, 4, 1)
    flagged = _field(byte, lane, 5, 1)
    param = _field(byte, lane, 6, 1)
    entries = _field(byte, lane, 8, 8)
    nnz = _field(byte, lane, 16, 8)
    index = _field(byte, lane, 24, 8)
    low = nnz * 0
    low = tl.where(kind == BITMAP, (numel + 7) // 8, low)
    low = tl.where(kind == GAPS8, nnz, low)
    low = tl.where(kind == BLOCK16, (numel + BLOCK - 1) // BLOCK * 4 + 2 * nnz, low)
    high = tl.where(kind == GAPS8, nnz + (numel - nnz) // 255, low)
    least = tl.where(kind == DENSE, numel, 0)
    bad = (_field(byte, lane, 0, 3) != MAGIC_AND_VERSION) | (kind > BLOCK16) | (value > SIGN)
    bad = bad | (flagged > 1) | (param != 0) | (_field(byte, lane, 7, 1) != 0) | (entries != numel)
    body_bad = (nnz < least) | (nnz > numel) | (index < low) | (index > high)
    flag_bad = (kind != 0) | (nnz != 0) | (index != 0)
    bad = bad | (((flagged == 0) & body_bad) | ((flagged != 0) & flag_bad))
    nnz = tl.where(bad, 0, nnz)
    index = tl.where(bad, 0, index)
    bad = bad | (at + HEADER + index + _value_nbytes(nnz, value) > end)
    return kind, value, nnz, index, flagged, wanted1, wanted2, bad


@triton.jit(do_not_specialize=["bounds_at", "count", "stride", "room"])
def open_messages(
    buffer, meta, rows, heads, bounds_at, count, stride, room, SLOTS: tl.constexpr,
    ABSENT: tl.constexpr,
):  # fmt: skip
    """Make the rows of messages, which lie between two bytes of ``buffer``.

    One program opens one message.

    ``meta``, int64 [count, META], has the entries of the tensors that the payloads are for; that of the
    next message begins ``stride`` numbers on. ``bounds_at`` numbers on, int64 [messages, 3]: the two bytes of
    each message, and the number of its payloads. A header that is damaged, or has more positions than there
    is ``room`` for, ends the walk. ABSENT: the state of what is missing. ``heads``, int64 [messages, WORDS],
    become the first words of the slots; zeros without.
    """
    message = tl.program_id(0).to(tl.int64)
    rows += message * (count + 1) * ROW
    bounds = meta + bounds_at
    meta += message * stride
    at = tl.load(bounds + 3 * message)
    end = tl.load(bounds + 3 * message + 1)
    payloads = tl.load(bounds + 3 * message + 2)
    absent = at * 0
    lanes = tl.arange(0, WORDS)
    head = tl.zeros((WORDS,), tl.int64)
    if SLOTS:
        words = buffer.to(tl.pointer_type(tl.int64))
        size = tl.load(words + at // 8)
        stands_for_nothing = tl.load(words + at // 8 + 2) != 0
        head = tl.load(words + at // 8 + lanes)
        absent = ((size < 0) | (at + PREFIX + size > end) | stands_for_nothing).to(tl.int64)
        at += PREFIX
        end = tl.where(absent != 0, at, at + size)
    tl.store(heads + WORDS * message + lanes, tl.where(lanes < WORDS - 1, head, 0))
    checks = absent * 0
    scans = absent * 0
    places = absent * 0
    broken = absent * 0
    row = 0
    while row < count:
        here = rows + row * ROW
        numel = tl.load(meta + META * row)
        kind, value, nnz, index, flagged, wanted1, wanted2, bad = _read_header(buffer, at, end, numel)
        exists = row < payloads
        bad = bad | ((kind != DENSE) & (places + nnz > room))
        bad = (bad | (broken != 0)) & (absent == 0) & exists
        gone = bad | (absent != 0) | (exists == 0)
        broken = tl.where(bad, 1, broken)
        kind = tl.where(gone, 0, kind)
        nnz = tl.where(gone, 0, nnz)
        index = tl.where(gone, 0, index)
        nbytes = tl.where(gone, 0, index + _value_nbytes(nnz, value))
        state = tl.where((flagged != 0) & (bad == 0), POISONED, ADDED)
        state = tl.where(absent != 0, ABSENT, state)
        tl.store(here + BODY, at + HEADER)
        tl.store(here + KIND, kind)
        tl.store(here + VALUE, value)
        tl.store(here + COUNT, nnz)
        tl.store(here + INDEX, index)
        tl.store(here + STATE, state.to(tl.int64))
        tl.store(here + WANTED, tl.where(gone, 0, wanted1))
        tl.store(here + WANTED + 1, tl.where(gone, 0, wanted2))
        tl.store(here + FOUND, nnz * 0)
        tl.store(here + FOUND + 1, nnz * 0)
        tl.store(here + WRONG, tl.where(bad, BAD_HEADER, 0).to(tl.int64))
        _store_units(here, checks, scans, places)
        checks += ((nbytes + 3) // 4 + CHUNK - 1) // CHUNK
        blocks = tl.where((kind == BITMAP) | (kind == BLOCK16), (numel + BLOCK - 1) // BLOCK, 0)
        scans += tl.where(kind == GAPS8, (index + CHUNK - 1) // CHUNK, blocks)
        places += tl.where(kind == DENSE, 0, nnz)
        at = tl.where(exists, tl.where(gone, end, at + HEADER + nbytes), at)
        row += 1
    last = rows + count * ROW
    _store_units(last, checks, scans, places)
    if (at != end) & (payloads > 0):  # the message goes on behind its payloads
        tl.store(rows + (payloads - 1) * ROW + WRONG, tl.full((), BAD_HEADER, tl.int64))


@triton.jit
def _store_units(row, checks, scans, places):
    """Store a row's first units of work, and where its positions begin."""
    tl.store(row + CHECKS, checks)
    tl.store(row + SCANS, scans)
    tl.store(row + PLACE, places)


@triton.jit
def _check(buffer, rows, count, unit):
    """Compute the checksums of a part of the bodies."""
    row = _row_of(rows, count, unit, CHECKS)
    if row < count:
        here = rows + row * ROW
        body = buffer + tl.load(here + BODY)
        nbytes = tl.load(here + INDEX) + _value_nbytes(tl.load(here + COUNT), tl.load(here + VALUE))
        word = (unit - tl.load(here + CHECKS)) * CHUNK + tl.arange(0, CHUNK)
        content = tl.zeros((CHUNK,), tl.int64)
        for i in tl.static_range(4):
            at = word * 4 + i
            content += tl.load(body + at, mask=at < nbytes, other=0).to(tl.int64) << (8 * i)
        tl.atomic_add(here + FOUND, tl.sum(content, 0) & 0xFFFFFFFF)
        tl.atomic_add(here + FOUND + 1, tl.sum(content * (9 + word), 0) & 0xFFFFFFFF)


@triton.jit
def _bitmap_words(index, word, numel):
    """Load words of a bitmap, uint32; return also whether one has bits outside the tensor."""
    size = (numel + 7) // 8
    content = tl.zeros(word.shape, tl.int32)
    for i in tl.static_range(4):
        at = word * 4 + i
        content = content | (tl.load(index + at, mask=at < size, other=0).to(tl.int32) << (8 * i))
    outside = tl.maximum(tl.minimum(word * 32 + 32 - numel, 32), 0)
    allowed = tl.where(outside < 32, (tl.full(content.shape, 0xFFFFFFFF, tl.int64) >> outside), 0)
    stray = (content.to(tl.uint32, bitcast=True).to(tl.int64) & ~allowed) != 0
    inside = (content.to(tl.int64) & allowed).to(tl.int32).to(tl.uint32, bitcast=True)
    return inside, tl.max(stray.to(tl.int32), 0)


@triton.jit
def _steps(index, nbytes, chunk):
    """Return how far each byte of a chunk of ``gaps8`` goes, and whether it ends at an entry."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    byte = tl.load(index + at, mask=at < nbytes, other=0).to(tl.int64)
    ends = (at < nbytes) & (byte != 255)
    return tl.where(at < nbytes, byte, 0) + ends.to(tl.int64), ends.to(tl.int64)


@triton.jit(do_not_specialize=["count", "stride", "units", "width", "checks"])
def scan(buffer, rows, meta, counts, count, stride, units, width, checks):
    """Write the entries of every unit of positions, and what its bytes step over; before that, in so many
    programs, the checksums of the bodies.

    ``counts``, int64 [messages, 2, width], zeros: ``units`` counts, and behind them the sums of those of each
    row.
    """
    unit = tl.program_id(0).to(tl.int64)
    message = tl.program_id(1).to(tl.int64)
    rows += message * (count + 1) * ROW
    meta += message * stride
    counts += message * 2 * width
    if unit < checks:
        _check(buffer, rows, count, unit)
    unit -= checks
    row = _row_of(rows, count, unit, SCANS)
    if (row >= 0) & (row < count):
        here = rows + row * ROW
        index = buffer + tl.load(here + BODY)
        first = tl.load(here + SCANS)
        part = unit - first
        sums = _sums_of(counts + units, first, row) + part // COUNTED
        kind = tl.load(here + KIND)
        numel = tl.load(meta + META * row)
        entries = part * 0
        if kind == BITMAP:
            word = part * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
            content, stray = _bitmap_words(index, word, numel)
            tl.atomic_max(here + WRONG, tl.where(stray > 0, BAD_POSITION, 0).to(tl.int64))
            entries = tl.sum(_bits_set(content), 0).to(tl.int64)
        elif kind == BLOCK16:
            entries = _as_position(_load_bytes(index, part * 4, part >= 0, 4))
            # No total of all blocks is right then.
            entries = tl.where(entries > BLOCK, 1 << 40, entries)
        else:
            nbytes = tl.load(here + INDEX)
            steps, ends = _steps(index, nbytes, part)
            entries = tl.sum(ends, 0)
            passed = tl.sum(steps, 0)
            tl.store(counts + width + unit, passed)
            tl.atomic_add(sums + width, passed)
            if part == 0:
                last = tl.load(index + nbytes - 1, mask=nbytes > 0, other=0)
                wrong = tl.where((nbytes > 0) & (last == 255), BAD_COUNT, 0)
                tl.atomic_max(here + WRONG, wrong.to(tl.int64))
        tl.store(counts + unit, entries)
        tl.atomic_add(sums, entries)


@triton.jit
def _place_block16(index, positions, here, block, numel, start, count):
    """Write the positions of a block, the first of which is the ``start``-th of all."""
    lanes = tl.arange(0, STEP)
    offsets = index + (numel + BLOCK - 1) // BLOCK * 4 + start * 2
    done = count * 0
    worst = tl.zeros((STEP,), tl.int32)
    while done < count:
        at = done + lanes
        mine = at < count
        offset = _load_bytes(offsets, at * 2, mine, 2)
        before_it = _load_bytes(offsets, at * 2 - 2, mine & (at > 0), 2)
        position = block * BLOCK + offset
        worst = tl.maximum(worst, tl.where(mine & (position >= numel), BAD_POSITION, 0))
        worst = tl.maximum(worst, tl.where(mine & (at > 0) & (offset <= before_it), BAD_ORDER, 0))
        tl.store(positions + start + at, position.to(tl.int32), mask=mine)
        done += STEP
    tl.atomic_max(here + WRONG, tl.max(worst, 0).to(tl.int64))


@triton.jit(do_not_specialize=["count", "stride", "units", "width", "room"])
def place(buffer, rows, meta, counts, positions, count, stride, units, width, room):
    """Write ``positions``, int32 [messages, room]: those of the kept entries of every payload."""
    unit = tl.program_id(0).to(tl.int64)
    message = tl.program_id(1).to(tl.int64)
    rows += message * (count + 1) * ROW
    meta += message * stride
    counts += message * 2 * width
    row = _row_of(rows, count, unit, SCANS)
    if row < count:
        here = rows + row * ROW
        first = tl.load(here + SCANS)
        mine = tl.load(here + ROW + SCANS) - first
        part = unit - first
        nnz = tl.load(here + COUNT)
        numel = tl.load(meta + META * row)
        kind = tl.load(here + KIND)
        index = buffer + tl.load(here + BODY)
        positions += message * room + tl.load(here + PLACE)
        sums = _sums_of(counts + units, first, row)
        counts += first
        before = _before(counts, sums, part)
        wrong = tl.where(_before(counts, sums, mine) != nnz, BAD_COUNT, 0)
        if kind == BLOCK16:
            if wrong == 0:
                _place_block16(index, positions, here, part, numel, before, tl.load(counts + part))
        elif kind == BITMAP:
            word = part * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
            content, _stray = _bitmap_words(index, word, numel)
            set_bits = _bits_set(content)
            rank = before + (tl.cumsum(set_bits, 0) - set_bits).to(tl.int64)
            most = tl.max(set_bits, 0)
            bit = 0
            while bit < most:
                low = _lowest(content)
                position = word * 32 + _bits_set(low - 1)
                tl.store(positions + rank, position.to(tl.int32), mask=(content != 0) & (rank < nnz))
                content = content ^ low
                rank += 1
                bit += 1
        else:
            passed = _before(counts + width, sums + width, part)
            steps, ends = _steps(index, tl.load(here + INDEX), part)
            entry = passed + tl.cumsum(steps, 0) - 1
            number = before + tl.cumsum(ends, 0) - 1
            kept = ends != 0
            outside = tl.max((kept & (entry >= numel)).to(tl.int32), 0) > 0
            wrong = tl.where((wrong == 0) & outside, BAD_POSITION, wrong)
            tl.store(positions + number, entry.to(tl.int32), mask=kept & (number < nnz))
        tl.atomic_max(here + WRONG, wrong.to(tl.int64))


@triton.jit
def _values(body, values_at, rank, nnz, kept, VALUE: tl.constexpr):
    """Load the fp32 values of the ranks given."""
    if VALUE == FP32:
        return _load_bytes(body, values_at + rank * 4, kept, 4).to(tl.float32, bitcast=True)
    if VALUE == BF16:
        return (_load_bytes(body, values_at + rank * 2, kept, 2) << 16).to(tl.float32, bitcast=True)
    if VALUE == FP16:
        bits = _load_bytes(body, values_at + rank * 2, kept, 2).to(tl.int16)
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    WIDTH: tl.constexpr = 8 if VALUE == INT8 else (2 if VALUE == INT2 else (1 if VALUE == SIGN else 4))
    HALF: tl.constexpr = 1 << (WIDTH - 1)
    byte = _load_bytes(body, values_at + _scales_nbytes(nnz, VALUE) + rank * WIDTH // 8, kept, 1)
    code = (byte >> (rank * WIDTH % 8).to(tl.int32)) & (2 * HALF - 1)
    if VALUE == LOG4:
        group_at = values_at + rank // CHUNK * (CHUNK // LOG_BLOCK + 1)
        step = _load_bytes(body, group_at + 1 + rank % CHUNK // LOG_BLOCK, kept, 1)
        value = _log_level(code % HALF) * _log_scale(_load_bytes(body, group_at, kept, 1), step)
    else:
        scales = _load_bytes(body, values_at + rank // GROUP * 4, kept, 4)
        value = scales.to(tl.float32, bitcast=True)
        if VALUE == INT8:
            value *= tl.where(code >= HALF, 2 * HALF - code, code).to(tl.float32)
        elif VALUE != SIGN:
            start, step = _levels_of(scales, VALUE)
            value = start + (code % HALF).to(tl.float32) * step
    return tl.where(code >= HALF, -value, value)


@triton.jit
def _place_of(bits):
    """Return the place of a 16-bit float (int16) in the order of floats, int32; and the bits of a place."""
    wide = bits.to(tl.int32)
    return wide ^ ((wide >> 15) & 0x7FFF)


@triton.jit
def _count_below(positions, count, limit):
    """Return how many of the ascending positions of each payload are below a limit."""
    low = count * 0
    while tl.max(count - low, 0) > 0:
        middle = (low + count) // 2
        open_ = low < count
        below = _as_position(tl.load(positions + middle, mask=open_, other=0)) < limit
        low = tl.where(open_ & below, middle + 1, low)
        count = tl.where(open_ & (below == 0), middle, count)
    return low


@triton.jit(do_not_specialize=["first_error", "error_stride", "messages", "count", "stride", "room"])
def add(
    buffer, rows, meta, positions, beside, errors, first_error, error_stride, scale, messages, count, stride,
    room, SCALED: tl.constexpr, SCALED_SUM: tl.constexpr,
):  # fmt: skip
    """Add the payloads with which nothing is wrong of so many ``messages``, one after the other, to the same
    tensors; those of the next so many, whose numbers in ``meta`` begin ``stride`` further, to others.

    ``errors``, int64: the number of each message's error is written there, ``error_stride`` apart, the first
    one ``first_error`` numbers on.

    A program owns RANGE entries of a tensor, so each sum has the order of the messages. Where several are
    added to a tensor that is not fp32, the sum is made ``beside`` it (fp32, zeros) and rounded once.
    """
    unit = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64) * messages
    beyond = group + messages
    meta += group * stride
    row = _row_of(meta, count - 1, unit, 3, META)
    meta += META * row
    first = (unit - tl.load(meta + 3)) * RANGE
    end = tl.minimum(first + RANGE, tl.load(meta))
    address = tl.load(meta + 1)
    form = tl.load(meta + 2)
    apart = tl.load(meta + 4)
    sums = tl.where(apart < 0, address, beside.to(tl.int64) + 4 * apart)
    sum_form = tl.where(sums == address, form, FP32)
    rows += row * ROW
    width = (count + 1) * ROW
    lanes = tl.arange(0, CHUNK)
    while group < beyond:
        each = group + tl.arange(0, SEARCHED)
        there = each < beyond
        of = rows + each * width
        poisoned = tl.load(of + STATE, mask=there, other=ADDED) == POISONED
        nnz = tl.where(poisoned, end, tl.load(of + COUNT, mask=there, other=0))
        sparse = tl.load(of + KIND, mask=there, other=0) != DENSE
        places = positions + each * room + tl.load(of + PLACE, mask=there, other=0)
        searched = tl.where(sparse, nnz, 0)
        begins = tl.where(sparse, _count_below(places, searched, first), first)
        ends = tl.where(sparse, _count_below(places, searched, end), tl.minimum(nnz, end))
        message = group
        while message < tl.minimum(group + SEARCHED, beyond):
            here = rows + message * width
            error = _error_of(here)
            unreadable = (sum_form == PLACES) & (tl.load(here + STATE) == POISONED)
            error = tl.where((error == 0) & unreadable, BAD_VALUE, error)
            if first == 0:
                tl.atomic_max(errors + first_error + message * error_stride, error.to(tl.int64))
            rank = tl.sum(tl.where(each == message, begins, 0), 0)
            last = tl.where(error == 0, tl.sum(tl.where(each == message, ends, 0), 0), 0)
            body = buffer + tl.load(here + BODY)
            value = tl.where(tl.load(here + STATE) == POISONED, -1, tl.load(here + VALUE))
            while rank < last:
                at = rank + lanes
                kept = at < last
                read = tl.full((CHUNK,), float("nan"), tl.float32)  # stays so if the payload is poisoned
                for kind in tl.static_range(8):
                    if value == kind:
                        read = _values(body, tl.load(here + INDEX), at, tl.load(here + COUNT), kept, kind)
                if SCALED:
                    read *= scale
                if tl.load(here + KIND) != DENSE:
                    at = _places(positions + message * room + tl.load(here + PLACE), at, kept, False)
                for kind in tl.static_range(3):
                    if sum_form == kind:  # a position occurs once in a payload: no atomics
                        out = _pointer(sums, kind, False) + at
                        total = _load_grad(out, 0, kept, kind) + read
                        tl.store(out, _rounded(total, kind), mask=kept)
                if sum_form == PLACES:  # nor in the payloads for the same weights
                    out = sums.to(tl.pointer_type(tl.int16)) + at
                    by = _round(tl.minimum(tl.maximum(read, -32768.0), 32768.0)).to(tl.int32)
                    place = _place_of(tl.load(out, mask=kept, other=0)) + by
                    tl.store(out, _place_of(place.to(tl.int16)).to(tl.int16), mask=kept)
                rank += CHUNK
            tl.debug_barrier()  # other threads of this program add the next message to these entries
            message += 1
        group += SEARCHED
    if (sums != address) | SCALED_SUM:
        while first < end:
            at = first + lanes
            total = tl.load(sums.to(tl.pointer_type(tl.float32)) + at, mask=at < end, other=0.0)
            if SCALED_SUM:
                total *= scale
            for kind in tl.static_range(3):
                if form == kind:
                    tl.store(_pointer(address, kind, False) + at, _rounded(total, kind), mask=at < end)
            first += CHUNK


# ---- slots --------------------------------------------------------------------------------------------


@triton.jit
def _sizes(places, part, mask):
    """Load the sizes of payloads: the first of their figures."""
    figures = tl.load(places + part * PART + 2, mask=mask, other=0).to(tl.pointer_type(tl.int64))
    return tl.load(figures, mask=mask, other=0)


@triton.jit(do_not_specialize=["slots", "fingerprint"])
def fill_slots(places, buffer, nothing, slots, fingerprint, EMPTY: tl.constexpr):
    """Copy payloads into their slots, as far as there is room, and write the first words of the slots, with
    the flag ``nothing`` if EMPTY.

    ``places``, int64 [slots + payloads, PART]. Of a slot: its first payload, number of payloads, first byte
    in the buffer, and the one behind it. Of a payload: address, first unit of work in its slot, address of
    its figures, and 0.
    """
    unit = tl.program_id(0).to(tl.int64)
    head = places + tl.program_id(1).to(tl.int64) * PART
    begin = tl.load(head)
    parts = tl.load(head + 1).to(tl.int32)
    slot = buffer + tl.load(head + 2)
    room = tl.load(head + 3) - tl.load(head + 2) - PREFIX
    places += (slots + begin) * PART
    mine = tl.full((), 0, tl.int32)
    if parts > 0:
        mine = _row_of(places, parts - 1, unit, 1, PART)
    lanes = tl.arange(0, SEARCHED)
    before = begin * 0
    total = begin * 0
    first = 0
    while first < parts:
        at = first + lanes
        nbytes = _sizes(places, at, at < parts)
        before += tl.sum(tl.where(at < mine, nbytes, 0), 0)
        total += tl.sum(nbytes, 0)
        first += SEARCHED
    if parts > 0:
        source = tl.load(places + mine * PART).to(tl.pointer_type(tl.uint8))
        within = (unit - tl.load(places + mine * PART + 1)) * COPIED + tl.arange(0, COPIED)
        nbytes = tl.load(tl.load(places + mine * PART + 2).to(tl.pointer_type(tl.int64)))
        target = before + within
        there = (within < nbytes) & (target < room)
        byte = tl.load(source + within, mask=there, other=0)
        tl.store(slot + PREFIX + target, byte, mask=there)
    if unit == 0:
        words = slot.to(tl.pointer_type(tl.int64))
        tl.store(words, total)
        tl.store(words + 1, fingerprint.to(tl.int64))
        empty = total * 0
        if EMPTY:
            empty = tl.load(nothing)
        tl.store(words + 2, empty)
        tl.store(words + 3, total * 0)
