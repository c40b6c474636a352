"""Step-ahead's two passes over memory, in plain torch: squared gradients, and displaced weights.

A second moment is kept as row and column means, ``rows[r] * columns[c] / mean(rows)`` (Shazeer and Stern,
*Adafactor*, ICML 2018, section 3); that of a vector is one number. See :mod:`dct_plugin.data_parallel` for
what they are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Scratch: TypeAlias = Callable[[str, Tensor], Tensor]
"""Returns fp32 memory of a tensor's size to overwrite: the same memory for the same name."""
TINY = torch.finfo(torch.float32).tiny
#: Entries that need scratch memory at a time.
_PART = 1 << 20


def fresh(_: str, like: Tensor) -> Tensor:
    """Return memory of its own: a :data:`Scratch`."""
    return torch.empty_like(like, dtype=torch.float32)


class Squares(NamedTuple):
    """The squares of a gradient, see :meth:`.backend.Backend.add_squares`.

    Attributes:
        gradient: 1-D, of any floating type.
        rows, columns: fp32 [R] and [C], to which the means of the rows and columns of the squares as [R, C]
            are added. If there is one column, all rows get the mean of all squares.
        first, entries: If the gradient is a part of a tensor, its first entry, and the entries of the tensor,
            by whose sizes the sums are divided; None: it is the whole tensor.
    """

    gradient: Tensor
    rows: Tensor
    columns: Tensor
    first: int = 0
    entries: int | None = None


class SecondMoment(NamedTuple):
    """The second moment of the entries of a tensor from ``first`` on.

    Attributes:
        rows, columns: Row and column means, fp32 [R] and [C].
        observed: The divisor of both.
        first: The first entry.
        ratio, eps: The denominator of a step is ``ratio * sqrt(moment) + eps``.
    """

    rows: Tensor
    columns: Tensor
    observed: float
    first: int = 0
    ratio: float = 1.0
    eps: float = 0.0


class Displacement(NamedTuple):
    """A weight and how to displace it, see :meth:`.backend.Backend.displace`.

    Attributes:
        weight, out: 1-D, contiguous, of one floating type.
        residual: fp32, of the same size; None: zeros.
        scale: Factor of the residual.
        moment: By the root of which the residual is divided; None: by nothing.
        limit: The most that the residual divided by the root may be.
        pending: An update (fp32), the first entry that it is for, and its factor.
    """

    weight: Tensor
    out: Tensor
    residual: Tensor | None
    scale: float
    moment: SecondMoment | None = None
    limit: float = float("inf")
    pending: tuple[Tensor, int, float] | None = None


def add_squares(job: Squares, scratch: Scratch = fresh) -> None:
    """See :meth:`.backend.Backend.add_squares`."""
    if job.entries is not None:
        _add_squares_of_part(job, job.entries)
        return
    if (columns := job.columns.numel()) == 1:
        for part in job.gradient.split(_PART):
            job.rows.add_(scratch("step", part).copy_(part).square_().sum() / job.gradient.numel())
        return
    height = max(1, _PART // columns)
    for part, rows in zip(job.gradient.split(height * columns), job.rows.split(height), strict=True):
        squares = scratch("step", part).copy_(part).square_().view(-1, columns)
        rows.add_(squares.mean(1))
        job.columns.add_(squares.sum(0).div_(job.rows.numel()))


def _add_squares_of_part(job: Squares, entries: int) -> None:
    squares = job.gradient.float().square()
    if job.columns.numel() == 1:
        job.rows.add_(squares.sum() / entries)
        return
    rows, inside = rows_of(job.first, squares.numel(), job.columns.numel())
    rows_in_full = squares.new_zeros(rows.stop - rows.start, job.columns.numel())
    rows_in_full.view(-1)[inside] = squares
    job.rows[rows].add_(rows_in_full.mean(1))
    job.columns.add_(rows_in_full.sum(0) / job.rows.numel())


def denominator(moment: SecondMoment, out: Tensor) -> Tensor:
    """Set ``out`` (fp32, 1-D) to the denominators of its entries."""
    factors, roots, eps = terms_of(moment, out.numel())
    if roots is None:
        return out.copy_(factors[0] + eps)
    if out.numel() == factors.numel() * roots.numel():
        torch.mul(factors[:, None], roots[None, :], out=out.view(-1, roots.numel()))
    else:
        _, inside = rows_of(moment.first, out.numel(), roots.numel())
        out.copy_((factors[:, None] * roots[None, :]).view(-1)[inside])
    return out.add_(eps)


def terms_of(moment: SecondMoment, numel: int) -> tuple[Tensor, Tensor | None, float]:
    """Return the terms of the denominators of ``numel`` entries.

    Returns:
        The roots of the rows that hold the entries, times the ratio (fp32); those of the columns (fp32), by
        which they are multiplied, or None where there is one column; and what is added to the products.
    """
    rows, columns, observed, first, ratio, eps = moment
    eps = max(eps, TINY)  # 0 / 0 is to be 0
    if columns.numel() == 1:
        return (rows[:1] / observed).sqrt().mul(ratio), None, eps
    held, _ = rows_of(first, numel, columns.numel())
    return (rows[held] / rows.mean().clamp_min(TINY) / observed).sqrt().mul(ratio), columns.sqrt(), eps


def rows_of(first: int, numel: int, columns: int) -> tuple[slice, slice]:
    """Return the rows that hold ``numel`` entries from ``first`` on, and where these lie in the rows."""
    start = first // columns
    rows = slice(start, -(-(first + numel) // columns))
    return rows, slice(first - start * columns, first - start * columns + numel)


def displace(job: Displacement, scratch: Scratch = fresh) -> None:
    """See :meth:`.backend.Backend.displace`."""
    for start in range(0, job.out.numel(), _PART):
        _displace(job, start, job.out[start : start + _PART], scratch)


def _displace(job: Displacement, start: int, out: Tensor, scratch: Scratch) -> None:
    """Set ``out``, the part of the displaced weights from ``start`` on."""
    stop = start + out.numel()
    weight = job.weight[start:stop]
    # In fp32: scaled residuals can be too large for fp16.
    step = out if out.dtype == torch.float32 else scratch("step", weight)
    if job.residual is None:
        step.zero_()
    elif job.moment is None:
        torch.mul(job.residual[start:stop], job.scale, out=step)
    else:
        moment = job.moment._replace(first=job.moment.first + start)
        torch.div(job.residual[start:stop], denominator(moment, step), out=step)
        step.clamp_(-job.limit, job.limit).mul_(job.scale)
    if job.pending is not None:
        update, begin, factor = job.pending
        first, last = (min(max(at, begin), begin + update.numel()) for at in (start, stop))
        step[first - start : last - start].add_(update[first - begin : last - begin], alpha=factor)
    if out.element_size() < 4:
        out.copy_(step.add_(scratch("weight", weight).copy_(weight)))
    else:
        torch.add(step, weight, out=out)
