"""Device code that reads whole messages, and puts them into slots; :mod:`.messages` and :mod:`.backend`
launch it.

The host knows how long a message may be and which tensors it is for. Sizes and counts are found
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
    BLOCK,
    CHECKED_WORDS,
    CHUNK,
    COUNTED,
    FP16,
    FP32,
    GROUP,
    HEADER,
    INT2,
    INT8,
    LOG4,
    LOG_BLOCK,
    MAGIC_AND_VERSION,
    ROW,
    SIGN,
    _as_position,
    _before,
    _bits_set,
    _index_form,
    _levels_of,
    _load_bytes,
    _load_grad,
    _log_level,
    _log_scale,
    _lowest,
    _place_of,
    _places,
    _pointer,
    _round,
    _rounded,
    _row_of,
    _scales_nbytes,
    _sums_of,
    _value_nbytes,
)

#: Places in a row: where the payload's body begins in the buffer, the type of the values, kept entries, bytes
#: of the index section, what becomes of the output (see below); two checksums that the body has to have, and
#: has; what is wrong; the first unit of work of the checks, of the positions; where its positions begin.
BODY, VALUE, COUNT, INDEX, STATE, WANTED = map(tl.constexpr, range(6))
FOUND, WRONG, CHECKS, SCANS, PLACE = map(tl.constexpr, (8, 10, 11, 12, 13))

#: What becomes of an output: the payload is added, or (flagged, or missing from a sum) it becomes NaN.
ADDED, POISONED = map(tl.constexpr, range(2))

#: Numbers of a tensor that payloads are for: entries; where they are, and their type, if they are added to;
#: if several messages are, the first program that does so, and the first of its entries in the fp32 memory
#: beside, or -1 where it adds up in place.
META = tl.constexpr(5)
#: The type of 16-bit floats that are moved in the order of the floats.
PLACES = tl.constexpr(3)
#: Entries that such a program owns, messages that it searches at once, and positions of each that it looks
#: at together.
RANGE, SEARCHED, PROBES = map(tl.constexpr, (16384, 32, 8))

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

    The fields: value type, kept entries, flag, and the two checksums that the body has to have. A header is
    damaged, too, if it is not of a tensor of ``numel`` entries, or if the payload goes beyond ``end``.
    """
    lane = tl.arange(0, 32)
    byte = tl.load(buffer + at + lane, mask=(at + lane < end) & (lane < HEADER), other=0).to(tl.int64)
    part = tl.where(lane < 4 * CHECKED_WORDS, byte << ((lane % 4) * 8), 0)
    wanted1 = _field(byte, lane, 16, 4) - tl.sum(part, 0)
    wanted2 = _field(byte, lane, 20, 4) - tl.sum(part * (lane // 4 + 1), 0)
    value = _field(byte, lane, 3, 1)
    flagged = _field(byte, lane, 4, 4)
    nnz = _field(byte, lane, 12, 4)
    bad = (_field(byte, lane, 0, 3) != MAGIC_AND_VERSION) | (value > SIGN) | (flagged > 1)
    bad = bad | (_field(byte, lane, 8, 4) != numel) | (nnz > tl.where(flagged != 0, 0, numel))
    nnz = tl.where(bad, 0, nnz)
    _bits, _lower, index = _index_form(nnz, numel)
    bad = bad | (at + HEADER + index + _value_nbytes(nnz, value) > end)
    return value, nnz, flagged, wanted1, wanted2, bad


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
        absent = ((size < 0) | (size > end - at - PREFIX) | stands_for_nothing).to(tl.int64)
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
        value, nnz, flagged, wanted1, wanted2, bad = _read_header(buffer, at, end, numel)
        exists = row < payloads
        bad = bad | ((nnz < numel) & (places + nnz > room))
        bad = (bad | (broken != 0)) & (absent == 0) & exists
        gone = bad | (absent != 0) | (exists == 0)
        broken = tl.where(bad, 1, broken)
        nnz = tl.where(gone, 0, nnz)
        bits, _lower, index = _index_form(nnz, numel)
        nbytes = tl.where(gone, 0, index + _value_nbytes(nnz, value))
        state = tl.where((flagged != 0) & (bad == 0), POISONED, ADDED)
        state = tl.where(absent != 0, ABSENT, state)
        tl.store(here + BODY, at + HEADER)
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
        scans += (bits + BLOCK - 1) // BLOCK
        places += tl.where(nnz < numel, nnz, 0)
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
        tl.atomic_add(here + FOUND + 1, tl.sum(content * (CHECKED_WORDS + 1 + word), 0) & 0xFFFFFFFF)


@triton.jit
def _bitmap_words(index, word, bits):
    """Load words of a bitmap, uint32; return also whether one has bits behind its end."""
    size = (bits + 7) // 8
    content = tl.zeros(word.shape, tl.int32)
    for i in tl.static_range(4):
        at = word * 4 + i
        content = content | (tl.load(index + at, mask=at < size, other=0).to(tl.int32) << (8 * i))
    outside = tl.maximum(tl.minimum(word * 32 + 32 - bits, 32), 0)
    allowed = tl.where(outside < 32, (tl.full(content.shape, 0xFFFFFFFF, tl.int64) >> outside), 0)
    stray = (content.to(tl.uint32, bitcast=True).to(tl.int64) & ~allowed) != 0
    inside = (content.to(tl.int64) & allowed).to(tl.int32).to(tl.uint32, bitcast=True)
    return inside, tl.max(stray.to(tl.int32), 0)


@triton.jit
def _part_of(rows, meta, count, unit):
    """Return the row of a unit of positions, its entries, kept ones, bits of the bitmap, lower bits of each
    position, and which part of the bitmap this is.
    """
    row = _row_of(rows, count, unit, SCANS)
    here = rows + row * ROW
    numel = tl.load(meta + META * row)
    nnz = tl.load(here + COUNT)
    bits, lower, _nbytes = _index_form(nnz, numel)
    return row, here, numel, nnz, bits, lower, unit - tl.load(here + SCANS)


@triton.jit(do_not_specialize=["count", "stride", "units", "width", "checks"])
def scan(buffer, rows, meta, counts, count, stride, units, width, checks):
    """Write the number of kept entries of every unit of positions; before that, in so many programs, the
    checksums of the bodies.

    ``counts``, int64 [messages, width], zeros: ``units`` counts, and behind them the sums of those of each
    row.
    """
    unit = tl.program_id(0).to(tl.int64)
    message = tl.program_id(1).to(tl.int64)
    rows += message * (count + 1) * ROW
    meta += message * stride
    counts += message * width
    if unit < checks:
        _check(buffer, rows, count, unit)
    unit -= checks
    if (unit >= 0) & (unit < tl.load(rows + count * ROW + SCANS)):
        row, here, _numel, _nnz, bits, _lower, part = _part_of(rows, meta, count, unit)
        word = part * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        content, stray = _bitmap_words(buffer + tl.load(here + BODY), word, bits)
        tl.atomic_max(here + WRONG, tl.where(stray > 0, BAD_POSITION, 0).to(tl.int64))
        entries = tl.sum(_bits_set(content), 0).to(tl.int64)
        tl.store(counts + unit, entries)
        tl.atomic_add(_sums_of(counts + units, unit - part, row) + part // COUNTED, entries)


@triton.jit
def _lower_of(rest, rank, lower, mask):
    """Return the lower bits, 1 to 16, of the positions of the ranks given, int64.

    Up to two bytes behind the section are read: a value section has two at least.
    """
    bit = rank * lower
    found = _load_bytes(rest, bit // 8, mask, 3) >> (bit % 8).to(tl.int32)
    return (found & ((1 << lower.to(tl.int32)) - 1)).to(tl.int64)


@triton.jit(do_not_specialize=["count", "stride", "units", "width", "room"])
def place(buffer, rows, meta, counts, positions, count, stride, units, width, room):
    """Write ``positions``, int32 [messages, room]: those of the kept entries of every payload."""
    unit = tl.program_id(0).to(tl.int64)
    message = tl.program_id(1).to(tl.int64)
    rows += message * (count + 1) * ROW
    meta += message * stride
    counts += message * width
    if unit < tl.load(rows + count * ROW + SCANS):
        row, here, numel, nnz, bits, lower, part = _part_of(rows, meta, count, unit)
        first = unit - part
        sums = _sums_of(counts + units, first, row)
        counts += first
        before = _before(counts, sums, part)
        wrong = tl.where(_before(counts, sums, (bits + BLOCK - 1) // BLOCK) != nnz, BAD_COUNT, 0)
        index = buffer + tl.load(here + BODY)
        rest = index + (bits + 7) // 8
        positions += message * room + tl.load(here + PLACE)
        word = part * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        content, _stray = _bitmap_words(index, word, bits)
        set_bits = _bits_set(content)
        rank = before + (tl.cumsum(set_bits, 0) - set_bits).to(tl.int64)
        # Where the bit before is set, too, the upper bits of the position before are the same.
        carried = tl.load(index + word * 4 - 1, mask=(word > 0) & (word * 32 < bits), other=0) >> 7
        follows = (content << 1) | carried.to(tl.uint32)
        most = tl.max(set_bits, 0)
        done = most * 0
        while done < most:
            one = _lowest(content)
            kept = (content != 0) & (rank < nnz)
            position = word * 32 + _bits_set(one - 1)
            if lower > 0:
                low = _lower_of(rest, rank, lower, kept)
                again = kept & ((follows & one) != 0)
                worst = tl.where(again & (_lower_of(rest, rank - 1, lower, again) >= low), BAD_ORDER, 0)
                position = ((position - rank) << lower) + low
                worst = tl.maximum(worst, tl.where(kept & (position >= numel), BAD_POSITION, 0))
                wrong = tl.maximum(wrong, tl.max(worst, 0))
            tl.store(positions + rank, position.to(tl.int32), mask=kept)
            content = content ^ one
            rank += 1
            done += 1
        if (part == 0) & (lower > 0):
            used = nnz * lower % 8
            last = tl.load(rest + (nnz * lower - 1) // 8).to(tl.int64)
            wrong = tl.where((used > 0) & ((last >> used) > 0), BAD_POSITION, wrong)
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
def _count_before(positions, count, limit):
    """Return how many of the first ``count`` ascending positions are below a limit, for each message.

    PROBES of them are looked at together: 700,000 positions take seven loads one after the other.
    """
    probes = tl.arange(0, PROBES)
    low = count * 0
    while tl.max(count, 0) > 0:
        step = tl.maximum((count + PROBES - 1) // PROBES, 1)  # 0 would read what is before the first one
        at = probes[None, :] * step[:, None] + (step - 1)[:, None]
        inside = at < count[:, None]
        found = _as_position(tl.load(positions[:, None] + low[:, None] + at, mask=inside, other=0))
        passed = tl.sum((inside & (found < limit)).to(tl.int64), 1) * step
        low += passed
        count = tl.minimum(step - 1, count - passed)
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
        sparse = tl.load(of + INDEX, mask=there, other=0) > 0
        places = positions + each * room + tl.load(of + PLACE, mask=there, other=0)
        searched = tl.where(sparse, nnz, 0)
        begins = tl.where(sparse, _count_before(places, searched, first), first)
        ends = tl.where(sparse, _count_before(places, searched, end), tl.minimum(nnz, end))
        message = group
        while message < tl.minimum(group + SEARCHED, beyond):
            here = rows + message * width
            error = _error_of(here)
            unreadable = (sum_form == PLACES) & (tl.load(here + STATE) == POISONED)
            error = tl.where((error == 0) & unreadable, BAD_VALUE, error)
            if first == 0:
                tl.atomic_max(errors + first_error + message * error_stride, error.to(tl.int64))
            rank = tl.max(tl.where(each == message, begins, 0), 0)
            last = tl.where(error == 0, tl.max(tl.where(each == message, ends, 0), 0), 0)
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
                if tl.load(here + INDEX) > 0:
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
