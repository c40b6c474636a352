"""A comparison of a backend with the reference on the device that it serves, before ``auto`` uses it.

Every value type, every kind of payload and every kernel is tried on a few thousand random entries, and every
result is compared bit by bit with that of :class:`.reference.ReferenceBackend` on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.index import IndexEncoding
from ..codecs.message import MessageWriter, read_messages
from ..codecs.payload import payload_bound
from ..codecs.slots import PREFIX
from ..codecs.stats import read_stats
from ..codecs.values import ValueDtype
from .backend import Backend
from .checks import PACK_BLOCK
from .displacement import Displacement, SecondMoment, Squares
from .job import GRAD_DTYPES, Job
from .reference import ReferenceBackend

_NUMEL = 3001
_HOST = torch.device("cpu")


class _Difference(Exception):
    """A result that is not the reference's."""


class _Pair:
    """A backend on its device, and the reference on the host."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.reference = ReferenceBackend(backend.encodings)
        self.backend, self.device = backend, device

    def alike(
        self,
        what: str,
        run: Callable[[Backend, torch.device], Sequence[Tensor | float]],
        tolerance: float = 0.0,
    ) -> None:
        """Raise :class:`_Difference` unless ``run`` gives the same bits on both sides, or, with a
        ``tolerance``, numbers that differ by no more than this share.
        """
        with torch.no_grad():
            expected, found = run(self.reference, _HOST), run(self.backend, self.device)
        for one, other in zip(expected, found, strict=True):
            _compare(what, torch.as_tensor(one).to(_HOST), torch.as_tensor(other).to(_HOST), tolerance)


def _compare(what: str, expected: Tensor, found: Tensor, tolerance: float = 0.0) -> None:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        raise _Difference(f"{what}: {found.dtype} {list(found.shape)} in place of {list(expected.shape)}")
    differs = _bits(expected) != _bits(found)
    if tolerance:
        differs = ~torch.isclose(expected, found, rtol=tolerance, atol=tolerance)
    if expected.is_floating_point():  # a NaN may have any bits
        differs &= ~(expected.isnan() & found.isnan())
    if bool(differs.any()):
        raise _Difference(f"{what}: {int(differs.sum())} of {differs.numel()} entries differ")


def _bits(tensor: Tensor) -> Tensor:
    numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(numbers[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _random(seed: int, numel: int = _NUMEL) -> Tensor:
    """Return fp32 [numel] on the host, with a few large entries; the same for a seed everywhere."""
    generator = torch.Generator(_HOST).manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float32, device=_HOST)
    values[:: max(1, numel // 7)] *= 50
    return values


def _compressed(job: Job, backend: Backend) -> tuple[Tensor, list[Tensor | float]]:
    """Return a payload, and everything that its compression has changed."""
    stats = backend.compress(job)
    payload = job.out[: stats.nbytes].clone()
    left = torch.empty(0) if job.residual_out is None else job.residual_out
    return payload, [*map(float, stats.counts), stats.tau, payload, left, job.grad]


class _Form(NamedTuple):
    """A value type and a kind of payload."""

    number: int
    value_dtype: ValueDtype
    encoding: IndexEncoding

    def __str__(self) -> str:
        return f"{self.value_dtype.label}, {self.encoding.label}"

    def job(self, where: torch.device) -> Job:
        """Return a compression of this form: type of the gradient, residual, threshold and limit vary."""
        number = self.number
        grad = _random(number).to(GRAD_DTYPES[number % 3]).to(where)
        if number % 11 == 10:
            grad[1234] = float("inf")
        residual = None if number % 5 == 4 else _random(100 + number).mul_(0.3).to(where)
        bound = payload_bound(_NUMEL, None, self.value_dtype, self.encoding)
        return Job(
            grad,
            residual,
            0.0 if self.encoding is IndexEncoding.DENSE else 1.2,
            torch.zeros(bound, dtype=torch.uint8, device=where),
            residual_out=torch.zeros(_NUMEL, device=where) if number % 2 else None,
            capacity=300 if number % 4 == 3 else _NUMEL,
            start=2500,
            value_dtype=self.value_dtype,
            encoding=self.encoding,
            clear=number % 3 == 1,
        )


def _forms(backend: Backend) -> list[_Form]:
    """Return every value type with every kind of payload that the backend writes."""
    return [
        _Form(number, value_dtype, encoding)
        for number, (value_dtype, encoding) in enumerate(itertools.product(ValueDtype, backend.encodings))
    ]


def _selection(pair: _Pair) -> None:
    """Compare payloads, figures, residuals and cleared gradients."""
    for form in _forms(pair.backend):
        pair.alike(f"selection ({form})", partial(_written, form))


def _written(form: _Form, backend: Backend, where: torch.device) -> Sequence[Tensor | float]:
    return _compressed(form.job(where), backend)[1]


def _decoding(pair: _Pair) -> None:
    """Compare what is read of single payloads, and values at the positions of another payload."""
    for form in _forms(pair.backend)[::5]:  # every value type, and every kind
        payload, _ = _compressed(form.job(_HOST), pair.reference)
        pair.alike(f"decoding ({form})", partial(_read, form.value_dtype, payload))


def _read(
    value_dtype: ValueDtype, payload: Tensor, backend: Backend, where: torch.device
) -> Sequence[Tensor | float]:
    payload, total, source = payload.to(where), _random(1).to(where), _random(2).to(where)
    nnz, mask = backend.decode_add(payload, total), backend.decode_mask(payload, _NUMEL)
    bound = payload_bound(_NUMEL, None, value_dtype)
    out = torch.zeros(bound, dtype=torch.uint8, device=where)
    stats = backend.encode_shared(source, payload, value_dtype, out)
    other = _random(3).to(where)
    backend.decode_add(out[: stats.nbytes], other, payload)
    return [nnz, mask, total, *map(float, stats.counts), out[: stats.nbytes], other]


def _sums(pair: _Pair) -> None:
    """Compare sums of two messages of payloads of all forms, in every type of gradient."""
    payloads = [_compressed(form.job(_HOST), pair.reference)[0] for form in _forms(pair.backend)]
    messages = [torch.cat(payloads[::2]), torch.cat(payloads[1::2])]

    def total(backend: Backend, where: torch.device) -> list[Tensor]:
        outs = [
            torch.zeros(_NUMEL, dtype=GRAD_DTYPES[at % 3], device=where) for at in range(len(payloads) // 2)
        ]
        backend.sum_messages([message.to(where) for message in messages], outs, 1 / 3)
        return outs

    pair.alike("sums of messages", total)


def _buckets(pair: _Pair) -> None:
    """Compare a batch of tensors whose thresholds stay on the device; and the message in a slot."""

    def batch(backend: Backend, where: torch.device) -> list[Tensor | float]:
        writer, figures, found = MessageWriter(where), [], []
        tensors = [
            (_random(at, size).to(GRAD_DTYPES[at % 3]).to(where), _random(50 + at, size).to(where))
            for at, size in enumerate((700, 1, 1301, 0, 999))
        ]
        with backend.batched():
            for at, (grad, residual) in enumerate(tensors):
                tau = backend.sample_threshold(grad, residual, 0.1, 1000, seed=at)
                room = writer.reserve(payload_bound(grad.numel(), None, ValueDtype.BF16))
                job = Job(grad, residual, tau, room, value_dtype=ValueDtype.BF16, clear=True)
                figures.append(backend.compress(job))
                writer.advance(figures[-1])
                found += [grad, residual]
        outs = [torch.zeros(grad.numel(), device=where) for grad, _ in tensors]
        if not backend.lengths_on_host:
            slot = torch.zeros(PREFIX + 16_384, dtype=torch.uint8, device=where)
            backend.write_slots([(writer, slot)], 7)
            wrong, missing = backend.sum_slots(slot, [(0, slot.numel())], [outs], 1.0)
            if int(wrong.amax()) or int(missing.amax()):
                raise _Difference(f"a message in a slot is refused: {wrong.tolist()}, {missing.tolist()}")
        (message,) = read_messages([writer])
        if backend.lengths_on_host:
            backend.sum_messages([message], outs)
        read_stats(figures)
        return [message, *found, *outs, *(number for each in figures for number in (*each.counts, each.tau))]

    pair.alike("a batch of tensors", batch)


def _thresholds(pair: _Pair) -> None:
    """Compare sampled and exact thresholds."""

    def found(backend: Backend, where: torch.device) -> list[float]:
        taus = []
        for number, dtype in enumerate(GRAD_DTYPES):
            grad, residual = _random(number).to(dtype).to(where), _random(9 + number).to(where)
            taus += [backend.sample_threshold(grad, each, 0.05, 500, number) for each in (None, residual)]
            taus += [backend.exact_threshold(grad, residual, 77)]
        return [float(tau) for tau in taus]

    pair.alike("thresholds", found)


def _residuals(pair: _Pair) -> None:
    """Compare packed residuals, momentum and differences of weights."""

    def packed(backend: Backend, where: torch.device) -> list[Tensor]:
        results = []
        for dtype in (torch.bfloat16, torch.int8):
            out, values = torch.zeros(_NUMEL, dtype=dtype, device=where), _random(3).to(where)
            blocks = torch.zeros(-(-_NUMEL // PACK_BLOCK), dtype=torch.int8, device=where)
            exponents = blocks if dtype == torch.int8 else None
            backend.pack(values, out, exponents, seed=5)
            unpacked = torch.zeros(_NUMEL, device=where)
            backend.unpack(out, exponents, unpacked)
            results += [out, blocks, unpacked]
        return results

    def passes(backend: Backend, where: torch.device) -> list[Tensor]:
        results = []
        for dtype in GRAD_DTYPES:
            grad, wanted = _random(4).to(dtype).to(where), _random(5).to(where)
            results.append(torch.zeros(_NUMEL, device=where))
            backend.difference(wanted, grad, results[-1])
        return results

    pair.alike("packed residuals", packed)
    pair.alike("differences", passes)


def _step_ahead(pair: _Pair) -> None:
    """Compare moments of gradients and displaced weights; sums of another order differ in their last bits."""

    def displaced(backend: Backend, where: torch.device) -> list[Tensor]:
        found = []
        for number, (dtype, (rows, columns)) in enumerate(
            itertools.product(GRAD_DTYPES, ((1, 1), (3, 700), (700, 3)))
        ):
            numel = rows * columns if columns > 1 else _NUMEL
            sums = torch.ones(rows, device=where), torch.ones(columns, device=where)
            backend.add_squares([Squares(_random(number, numel).to(dtype).to(where), *sums)])
            weight = _random(50 + number, numel).to(dtype).to(where)
            residual, out = _random(90 + number, numel).to(where), torch.zeros_like(weight)
            moment = SecondMoment(*sums, 0.5, 0, 0.7, 1e-3)
            backend.displace([Displacement(weight, out, residual, -0.1, moment, 5.0)])
            found += [*sums, out.float()]
        return found

    pair.alike("moments and displaced weights", displaced, tolerance=1e-2)


#: Everything that is compared, by the name of the kernels.
CHECKS: dict[str, Callable[[_Pair], None]] = {
    "selection": _selection,
    "decoding": _decoding,
    "sums": _sums,
    "batches and slots": _buckets,
    "thresholds": _thresholds,
    "residuals": _residuals,
    "step-ahead": _step_ahead,
}


def first_difference(backend: Backend, device: torch.device) -> str | None:
    """Return where a backend on ``device`` first differs from the reference, or fails; None: nowhere."""
    pair = _Pair(backend, device)
    for name, check in CHECKS.items():
        try:
            check(pair)
        except _Difference as difference:
            return f"{name}: {difference}"
        except Exception as error:  # what it may be, a compiler's or a driver's, no one can list
            return f"{name}: {type(error).__name__}: {error}"
    return None
