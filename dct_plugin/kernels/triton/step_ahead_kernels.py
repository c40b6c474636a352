"""Device code of step-ahead: row and column means of squared gradients, and displaced weights.

A launch serves any number of tensors: ``table``, int64 [jobs + 1, ROW], has a row for each, and in its last
row the totals, as in :mod:`.selection_kernels`. Sums are taken in one order, so that they are the same bits
every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selection_kernels import CHUNK, ROW, _floats_of, _job_of, _load_grad, _pointer, _rounded

#: A program of :func:`partial_sums` goes through so many rows of so many columns, ACROSS_ROWS at a time.
ROWS_EACH, COLUMNS_EACH, ACROSS_ROWS = map(tl.constexpr, (512, 128, 32))
#: Sums of a program of :func:`add_partial_sums`.
SUMS = tl.constexpr(128)

#: Places in a row of the table of squares: addresses of the gradient, the row means, and the column means (0:
#: a vector, which has one mean); its rows, columns and entries; tiles across and down; first tile, first
#: program that adds up; where its partial sums begin. Entries before a part in its first row; rows of the
#: whole matrix, or entries of the whole vector.
GRAD_AT, ROWS_AT, COLUMNS_AT, HEIGHT, WIDTH, NUMEL, ACROSS, DOWN, TILES, PROGRAMS, PARTIAL, BEFORE, OF = map(
    tl.constexpr, range(13)
)
#: Places in a row of the table of displacements, besides ROWS_AT, COLUMNS_AT, HEIGHT, WIDTH and NUMEL: an
#: address, the first chunk, the first entry; bits of fp32 numbers; two addresses.
WEIGHT_AT, CHUNKS, FIRST, OBSERVED, RATIO, EPS, LIMIT, SCALE, RESIDUAL_AT, OUT_AT = map(
    tl.constexpr, (0, 6, 7, 8, 9, 10, 11, 12, 13, 14)
)
TINY = tl.constexpr(2.0**-126)


@triton.jit
def _number(job, WHAT: tl.constexpr):
    """Return the fp32 number whose bits are in the table."""
    return tl.load(job + WHAT).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def partial_sums(table, partial, count, GRAD: tl.constexpr):
    """Sum the squares of a tile's rows and columns; those of columns stand before those of rows."""
    _number_of_job, job, tile = _job_of(table, count, TILES)
    across = tl.load(job + ACROSS)
    height = tl.load(job + HEIGHT)
    width = tl.load(job + WIDTH)
    numel = tl.load(job + NUMEL)
    before = tl.load(job + BEFORE)
    grad = _pointer(tl.load(job + GRAD_AT), GRAD, False)
    partial += tl.load(job + PARTIAL)
    down = tile // across
    along = tile - down * across
    columns = along * COLUMNS_EACH + tl.arange(0, COLUMNS_EACH)
    of_rows = partial + tl.load(job + DOWN) * width + along * height
    is_matrix = tl.load(job + COLUMNS_AT) != 0
    row = down * ROWS_EACH
    stop = tl.minimum(row + ROWS_EACH, height)
    total = tl.zeros((COLUMNS_EACH,), tl.float32)
    while row < stop:
        rows = row + tl.arange(0, ACROSS_ROWS)
        at = rows[:, None] * width + columns[None, :]
        inside = (rows < stop)[:, None] & (columns < width)[None, :] & (at >= before) & (at < numel)
        x = _load_grad(grad, at, inside, GRAD)
        squares = x * x
        total += tl.sum(squares, axis=0)
        if is_matrix:
            tl.store(of_rows + rows, tl.sum(squares, axis=1), mask=rows < stop)
        row += ACROSS_ROWS
    tl.store(partial + down * width + columns, total, mask=columns < width)


@triton.jit(do_not_specialize=["count"])
def add_partial_sums(table, partial, count):
    """Add the means of partial sums to those of a step so far."""
    _number_of_job, job, program = _job_of(table, count, PROGRAMS)
    height = tl.load(job + HEIGHT)
    width = tl.load(job + WIDTH)
    down = tl.load(job + DOWN)
    partial += tl.load(job + PARTIAL)
    is_matrix = tl.load(job + COLUMNS_AT) != 0
    of_columns = (width + SUMS - 1) // SUMS
    here = program * SUMS + tl.arange(0, SUMS)
    length = width
    terms = down
    if is_matrix & (program >= of_columns):  # sums of rows
        here = (program - of_columns) * SUMS + tl.arange(0, SUMS)
        partial += down * width
        length = height
        terms = tl.load(job + ACROSS)
    inside = here < length
    total = tl.zeros((SUMS,), tl.float32)
    term = terms * 0
    while term < terms:
        total += tl.load(partial + term * length + here, mask=inside, other=0.0)
        term += 1
    if is_matrix:
        out = _floats_of(job, COLUMNS_AT, False)
        others = tl.load(job + OF)
        if program >= of_columns:
            out = _floats_of(job, ROWS_AT, False)
            others = width
        mean = tl.load(out + here, mask=inside, other=0.0) + total / others.to(tl.float32)
        tl.store(out + here, mean, mask=inside)
    else:
        out = _floats_of(job, ROWS_AT, False)
        tl.store(out, tl.load(out) + tl.sum(total, 0) / tl.load(job + OF).to(tl.float32))


@triton.jit
def mean_rows(table, means):
    """Write the mean of a job's row means; one program each."""
    number = tl.program_id(0)
    job = table + number.to(tl.int64) * ROW
    rows = _floats_of(job, ROWS_AT, False)
    height = tl.load(job + HEIGHT)
    lanes = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    first = height * 0
    while first < height:
        total += tl.load(rows + first + lanes, mask=first + lanes < height, other=0.0)
        first += CHUNK
    tl.store(means + number, tl.sum(total, 0) / height.to(tl.float32))


@triton.jit(do_not_specialize=["count"])
def displace(table, means, count, WEIGHT: tl.constexpr):
    """Write ``weight + SCALE * clamp(residual / (RATIO * sqrt(second moment / OBSERVED) + EPS), LIMIT)``."""
    number, job, chunk = _job_of(table, count, CHUNKS)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < tl.load(job + NUMEL)
    rows = _floats_of(job, ROWS_AT, False)
    observed = _number(job, OBSERVED)
    ratio = _number(job, RATIO)
    nothing = tl.zeros((CHUNK,), tl.float32)
    if tl.load(job + COLUMNS_AT) != 0:
        width = tl.load(job + WIDTH)
        entry = tl.load(job + FIRST) + at
        row = entry // width
        mean = tl.maximum(tl.load(means + number), TINY)
        share = tl.math.div_rn(tl.load(rows + row, mask=inside, other=0.0), nothing + mean)
        column = tl.load(_floats_of(job, COLUMNS_AT, False) + entry - row * width, mask=inside, other=0.0)
        denominator = tl.sqrt_rn(tl.math.div_rn(share, nothing + observed)) * ratio * tl.sqrt_rn(column)
    else:
        denominator = tl.sqrt_rn(tl.math.div_rn(nothing + tl.load(rows), nothing + observed)) * ratio
    denominator += _number(job, EPS)
    limit = _number(job, LIMIT)
    step = tl.math.div_rn(
        tl.load(_floats_of(job, RESIDUAL_AT, False) + at, mask=inside, other=0.0), denominator
    )
    step = tl.minimum(tl.maximum(step, -limit), limit) * _number(job, SCALE)
    weight = _load_grad(_pointer(tl.load(job + WEIGHT_AT), WEIGHT, False), at, inside, WEIGHT)
    out = _pointer(tl.load(job + OUT_AT), WEIGHT, False)
    tl.store(out + at, _rounded(weight + step, WEIGHT), mask=inside)
