"""Device code of requests for embedding rows; :mod:`.requests` launches it.

The format is that of :mod:`dct_plugin.embedding.request_message`, of which a device writes and reads requests
for distinct rows of all tables, in index sections that the kernels of payloads write. ``parts`` is int64
[messages, 5] as of :mod:`.embedding_kernels`, in its last places a message's first byte in the buffer,
and how many it can have; ``sizes`` is int64 [messages, 4].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .embedding_kernels import _crc
from .message_kernels import BODY, COUNT, INDEX, KIND, PLACE, SCANS, WRONG
from .selection_kernels import (
    BITMAP,
    BLOCK,
    BLOCK16,
    BLOCKS,
    CHUNK,
    CHUNKS,
    DENSE,
    ENCODING,
    ENTRY_CHUNKS,
    GAPS8,
    INDEX_NBYTES,
    NNZ,
    NUMEL,
    OUT_AT,
    ROOM,
    ROW,
    STATE,
    _bytes_of,
    _job_of,
    _write_index,
)

HEADER = tl.constexpr(32)
#: With the flag that says that bags, of which there are none, have one row each.
MAGIC_VERSION_FLAGS = tl.constexpr(0x0201DC7D)
#: The header's word that is its checksum.
CHECK = tl.constexpr(7)
#: Place in a job's row: where the words of its bitmap begin.
WORDS_AT = tl.constexpr(2)

#: Places in ``sizes``.
NBYTES = tl.constexpr(0)
SAMPLES = tl.constexpr(1)
STATUS = tl.constexpr(2)  # 0; or 1: not what a device reads, for the host to say what it is
ROWS = tl.constexpr(3)


@triton.jit(do_not_specialize=["owners"])
def mark_rows(rows, starts, table, words, positions, kept_counts, owners):
    """Write positions, bitmaps and counts per block of the distinct rows, one owner's behind the other's.

    ``starts``, int64 [owners + 1]: where each owner's begin; rows behind the last are none.
    """
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    total = tl.load(starts + owners)
    inside = at < total
    row = tl.load(rows + at, mask=inside, other=0)
    owner = tl.zeros((CHUNK,), tl.int64)
    other = 1
    while other < owners:
        owner += (tl.load(starts + other) <= at).to(tl.int64)
        other += 1
    job = table + owner * ROW
    inside = inside & (row < tl.load(job + NUMEL, mask=inside, other=0))
    tl.store(positions + at, row.to(tl.int32), mask=inside)
    block = tl.load(job + BLOCKS, mask=inside, other=0) + row // BLOCK
    tl.atomic_add(kept_counts + block, tl.full((CHUNK,), 1, tl.int32), mask=inside)
    first = tl.load(job + WORDS_AT, mask=inside, other=-1)
    bit = tl.full((CHUNK,), 1, tl.int32) << (row % 32).to(tl.int32)
    tl.atomic_or(words + first + row // 32, bit, mask=inside & (first >= 0))


@triton.jit(do_not_specialize=["count"])
def write_rows(table, words, positions, kept_counts, state, sums, count):
    """Write a chunk of an index section."""
    number, job, chunk = _job_of(table, count, CHUNKS)
    state += number * STATE
    words += tl.maximum(tl.load(job + WORDS_AT), 0)
    positions += tl.load(job + ROOM)
    kept_counts += tl.load(job + BLOCKS)
    sums += tl.load(job + ENTRY_CHUNKS)
    out = _bytes_of(job, OUT_AT)
    nnz = tl.load(state + NNZ)
    _write_index(out, words, positions, kept_counts, state, sums, chunk, tl.load(job + NUMEL), nnz)


@triton.jit
def head_request(parts, tables, state, sizes, buffer, samples):
    """Write all of a request but its index section and its checksum; ``tables``, int64: of each owner."""
    message = tl.program_id(0).to(tl.int64)
    start = tl.load(parts + message * 5 + 3)
    state += message * STATE
    several = tl.load(tables + message)
    index = tl.load(state + INDEX_NBYTES)
    lanes = tl.arange(0, CHUNK)
    done = several * 0
    while done < several:
        at = start + HEADER + done + lanes
        tl.store(buffer + at, tl.full((CHUNK,), 1, tl.uint8), mask=done + lanes < several)
        done += CHUNK
    body = start + HEADER + several
    tl.store(buffer + body, tl.load(state + ENCODING).to(tl.uint8))
    tl.store(buffer + body + 1, (several * 0).to(tl.uint8))
    word = tl.arange(0, 8)
    content = tl.where(word == 0, MAGIC_VERSION_FLAGS, several * 0)
    content = tl.where(word == 1, samples, content)
    content = tl.where(word == 2, several, content)
    content = tl.where(word == 3, tl.load(state + NNZ), content)
    content = tl.where(word == 4, index, content)
    content = tl.where(word == 6, several + 2 + index, content)
    for i in tl.static_range(4):
        tl.store(buffer + start + word * 4 + i, ((content >> (8 * i)) & 0xFF).to(tl.uint8))
    tl.store(sizes + message * 4 + NBYTES, several + index + (HEADER + 2))


@triton.jit
def seal_request(parts, sizes, checks, powers, words):
    """Write the checksum in the header."""
    message = tl.program_id(0).to(tl.int64)
    found = _crc(checks, powers, message, tl.load(sizes + message * 4 + NBYTES))
    tl.store(words + tl.load(parts + message * 5 + 3) // 4 + CHECK, found.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["tables", "limit", "room"])
def open_requests(parts, sizes, checks, powers, buffer, words, rows, tables, limit, room):
    """Check a request of NBYTES, and make the row that ``scan`` and ``place`` find its positions by.

    ``limit``: rows of this rank's ``tables``; ``room``: positions that are kept.
    """
    message = tl.program_id(0).to(tl.int64)
    sizes += message * 4
    rows += message * 2 * ROW
    start = tl.load(parts + message * 5 + 3)
    nbytes = tl.load(sizes + NBYTES)
    which = tl.arange(0, 8)
    header = tl.load(words + start // 4 + which, mask=(which * 0 + nbytes) >= HEADER, other=0)
    header = header.to(tl.uint32, bitcast=True).to(tl.int64)
    begin = tl.sum(tl.where(which == 0, header, 0), 0)
    samples = tl.sum(tl.where(which == 1, header, 0), 0)
    several = tl.sum(tl.where(which == 2, header, 0), 0)
    nnz = tl.sum(tl.where(which == 3, header, 0), 0)
    index = tl.sum(tl.where(which == 4, header, 0), 0)
    ids = tl.sum(tl.where(which == 5, header, 0), 0)
    body = tl.sum(tl.where(which == 6, header, 0), 0)
    check = tl.sum(tl.where(which == CHECK, header, 0), 0)
    bad = (nbytes < HEADER) | (begin != MAGIC_VERSION_FLAGS) | (several != tables) | (ids != 0)
    bad = bad | (body != nbytes - HEADER) | (body != tables + 2 + index) | (nnz > limit) | (nnz > room)
    found = _crc(checks, powers, message, tl.maximum(nbytes, HEADER)).to(tl.int64) & 0xFFFFFFFF
    bad = bad | (found != check)
    lanes = tl.arange(0, CHUNK)
    first = start + HEADER
    done = nnz * 0
    while done < tables:
        flag = tl.load(buffer + first + done + lanes, mask=(done + lanes < tables) & (bad == 0), other=1)
        bad = bad | (tl.max((flag != 1).to(tl.int32), 0) > 0)
        done += CHUNK
    kind = tl.load(buffer + first + tables, mask=bad == 0, other=0).to(tl.int64)
    param = tl.load(buffer + first + tables + 1, mask=bad == 0, other=0)
    blocks = (nnz * 0 + limit + BLOCK - 1) // BLOCK
    low = tl.where(kind == BITMAP, (nnz * 0 + limit + 7) // 8, 0)
    low = tl.where(kind == GAPS8, nnz, low)
    low = tl.where(kind == BLOCK16, blocks * 4 + 2 * nnz, low)
    high = tl.where(kind == GAPS8, nnz + (limit - nnz) // 255, low)
    bad = bad | (kind > BLOCK16) | (param != 0) | (index < low) | (index > high)
    bad = bad | ((kind == DENSE) & (nnz != limit))
    nnz = tl.where(bad, 0, nnz)
    index = tl.where(bad, 0, index)
    kind = tl.where(bad, DENSE, kind)
    by_block = (kind == BITMAP) | (kind == BLOCK16)
    units = tl.where(by_block, blocks, tl.where(kind == GAPS8, (index + CHUNK - 1) // CHUNK, 0))
    tl.store(rows + BODY, first + tables + 2)
    tl.store(rows + KIND, kind)
    tl.store(rows + COUNT, nnz)
    tl.store(rows + INDEX, index)
    tl.store(rows + WRONG, nnz * 0)
    tl.store(rows + SCANS, nnz * 0)
    tl.store(rows + PLACE, nnz * 0)
    tl.store(rows + ROW + SCANS, units)
    tl.store(sizes + SAMPLES, samples)
    tl.store(sizes + STATUS, tl.where(bad, 1, 0).to(tl.int64))
    tl.store(sizes + ROWS, nnz)
