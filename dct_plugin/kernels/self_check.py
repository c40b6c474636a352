"""A comparison of a backend with the reference on the device that it serves, before ``auto`` uses it.

Every value type, every kind of payload and every kernel is tried on a few thousand random entries, and every
result is compared bit by bit with that of :class:`.reference.ReferenceBackend` on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..codecs.changes import BANDS
from ..codecs.message import MessageWriter
from ..codecs.payload import payload_bound
from ..codecs.slots import PREFIX
from ..codecs.values import ValueDtype
from .backend import PACK_BLOCK, Backend, Residuals, Selection, mask_of
from .displacement import Displacement, SecondMoment, Squares
from .job import GRAD_DTYPES, Job
from .reference import ReferenceBackend

_NUMEL = 3001
_HOST = torch.device("cpu")

Results: TypeAlias = Iterator[tuple[str, Sequence[Tensor | float]]]
"""A case, and all of its results."""


class _Difference(Exception):
    """A result that is not the reference's."""


def _compare(expected: Tensor, found: Tensor, tolerance: float) -> None:
    """Raise :class:`_Difference` unless the bits are the same, or, with a ``tolerance``, numbers differ by no
    more than this share.
    """
    if expected.dtype != found.dtype or expected.shape != found.shape:
        raise _Difference(f"{found.dtype} {list(found.shape)} in place of {list(expected.shape)}")
    differs = _bits(expected) != _bits(found)
    if tolerance:
        differs = ~torch.isclose(expected, found, rtol=tolerance, atol=tolerance)
    if expected.is_floating_point():  # a NaN may have any bits
        differs &= ~(expected.isnan() & found.isnan())
    if bool(differs.any()):
        raise _Difference(f"{int(differs.sum())} of {differs.numel()} entries differ")


def _bits(tensor: Tensor) -> Tensor:
    numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(numbers[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _random(seed: int, numel: int = _NUMEL) -> Tensor:
    """Return fp32 [numel] on the host, with a few large entries; the same for a seed everywhere."""
    generator = torch.Generator(_HOST).manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float32, device=_HOST)
    values[:: max(1, numel // 7)] *= 50
    return values


class _Form(NamedTuple):
    """A value type and a threshold: 0, or one that a bitmap or Elias-Fano code follows from."""

    number: int
    value_dtype: ValueDtype
    tau: float

    def __str__(self) -> str:
        return f"{self.value_dtype.label}, threshold {self.tau}"

    def compressed(self, backend: Backend, where: torch.device) -> list[Tensor | float]:
        """Return the payload of a compression of this form, and everything that it has changed: type of the
        gradient, residual, threshold and limit vary.
        """
        number = self.number
        grad = _random(number).to(GRAD_DTYPES[number % 3]).to(where)
        if number % 11 == 10:
            grad[1234] = float("inf")
        bound = payload_bound(_NUMEL, None, self.value_dtype)
        job = Job(
            grad,
            None if number % 5 == 4 else _random(100 + number).mul_(0.3).to(where),
            self.tau,
            torch.zeros(bound, dtype=torch.uint8, device=where),
            residual_out=torch.zeros(_NUMEL, device=where, dtype=torch.float32) if number % 2 else None,
            capacity=300 if number % 4 == 3 else _NUMEL,
            start=2500,
            value_dtype=self.value_dtype,
            clear=number % 3 == 1,
        )
        stats = backend.compress(job)
        left = torch.empty(0) if job.residual_out is None else job.residual_out
        return [job.out[: stats.nbytes], *map(float, stats.counts), stats.tau, left, grad]

    def payload(self) -> Tensor:
        """Return the payload of this form that the reference writes."""
        return torch.as_tensor(self.compressed(ReferenceBackend(), _HOST)[0])


def _forms(backend: Backend) -> list[_Form]:
    """Return every value type with every kind of payload that the backend writes."""
    return [
        _Form(n, *form) for n, form in enumerate(itertools.product(backend.value_dtypes, (0.0, 0.4, 1.9)))
    ]


def _selection(backend: Backend, where: torch.device) -> Results:
    """Write payloads; figures, residuals and cleared gradients."""
    for form in _forms(backend):
        yield str(form), form.compressed(backend, where)


def _decoding(backend: Backend, where: torch.device) -> Results:
    """Read single payloads."""
    for form in _forms(backend)[::2]:  # every value type, and every kind
        payload, total = form.payload().to(where), _random(1).to(where)
        nnz, mask = backend.decode_add(payload, total), mask_of(backend, payload, _NUMEL)
        yield str(form), [nnz, mask, total, backend.positions(payload, _NUMEL)]


def _sums(backend: Backend, where: torch.device) -> Results:
    """Sum two messages of payloads of all forms, in every type of gradient."""
    payloads = [form.payload() for form in _forms(backend)]
    messages = [torch.cat(each).to(where) for each in (payloads[::2], payloads[1::2])]
    types = [GRAD_DTYPES[at % 3] for at in range(len(payloads) // 2)]
    outs = [torch.zeros(_NUMEL, dtype=dtype, device=where) for dtype in types]
    backend.sum_messages(messages, outs, 1 / 3)
    yield "", outs


def _changes(backend: Backend, where: torch.device) -> Results:
    """Write what changed in 16-bit weights, and move weights by it."""
    held = _random(6).to(torch.bfloat16)
    wanted = (held + 1e-3 * _random(7) * (_random(8) > 0.5)).to(torch.bfloat16)
    writer, bits = MessageWriter(where), held.to(where).view(torch.int16)
    with backend.batched():
        backend.encode_changes(wanted.to(where), bits.view(torch.bfloat16), writer)
    message = writer.message.clone()
    backend.sum_messages([message], [bits] * len(BANDS))
    yield "", [message, bits]


def _batches(backend: Backend, where: torch.device) -> Results:
    """Write a batch of tensors whose thresholds stay on the device; and the message in a slot."""
    writer, figures = MessageWriter(where), []
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
    outs = [torch.zeros(grad.numel(), device=where, dtype=torch.float32) for grad, _ in tensors]
    if not backend.lengths_on_host:
        slot = torch.zeros(PREFIX + 16_384, dtype=torch.uint8, device=where)
        backend.write_slots(writer, slot, [(0, slot.numel())], 7)
        heads = backend.prepare_sum(slot, [(0, slot.numel())], outs, 1.0)()
        if int(heads[0, -1]):
            raise _Difference(f"a message in a slot is refused: {heads.tolist()}")
    message = writer.message
    if backend.lengths_on_host:
        backend.sum_messages([message], outs)
    numbers = [number for each in figures for number in (*each.counts, each.tau)]
    yield "", [message, *itertools.chain(*tensors), *outs, *numbers]


def _thresholds(backend: Selection, where: torch.device) -> Results:
    """Find sampled and exact thresholds."""
    for number, dtype in enumerate(GRAD_DTYPES):
        grad, residual = _random(number).to(dtype).to(where), _random(9 + number).to(where)
        taus = [backend.sample_threshold(grad, each, 0.05, 500, number) for each in (None, residual)]
        yield str(dtype), [*map(float, taus), float(backend.exact_threshold(grad, residual, 77))]


def _residuals(backend: Backend, where: torch.device) -> Results:
    """Pack residuals, and find differences of weights."""
    for dtype in (torch.bfloat16, torch.int8):
        out, unpacked = (
            torch.zeros(_NUMEL, dtype=dtype, device=where),
            torch.zeros(_NUMEL, device=where, dtype=torch.float32),
        )
        blocks = torch.zeros(-(-_NUMEL // PACK_BLOCK), dtype=torch.int8, device=where)
        exponents = blocks if dtype == torch.int8 else None
        backend.pack(_random(3).to(where), out, exponents, seed=5)
        backend.unpack(out, exponents, unpacked)
        yield str(dtype), [out, blocks, unpacked]
    for dtype in GRAD_DTYPES:
        difference = torch.zeros(_NUMEL, device=where, dtype=torch.float32)
        backend.difference(_random(5).to(where), _random(4).to(dtype).to(where), difference)
        yield f"difference, {dtype}", [difference]


def _step_ahead(backend: Residuals, where: torch.device) -> Results:
    """Find moments of gradients and displaced weights; sums of another order differ in their last bits."""
    shapes = itertools.product(GRAD_DTYPES, ((1, 1), (3, 700), (700, 3)))
    for number, (dtype, (rows, columns)) in enumerate(shapes):
        numel = rows * columns if columns > 1 else _NUMEL
        sums = (
            torch.ones(rows, device=where, dtype=torch.float32),
            torch.ones(columns, device=where, dtype=torch.float32),
        )
        backend.add_squares([Squares(_random(number, numel).to(dtype).to(where), *sums)])
        weight = _random(50 + number, numel).to(dtype).to(where)
        residual, out = _random(90 + number, numel).to(where), torch.zeros_like(weight)
        moment = SecondMoment(*sums, 0.5, 0, 0.7, 1e-3)
        backend.displace([Displacement(weight, out, residual, -0.1, moment, 5.0)])
        yield f"{dtype}, {rows} x {columns}", [*sums, out.float()]


#: Everything that is compared, by the name of the kernels.
CHECKS: dict[str, Callable[[Backend, torch.device], Results]] = {
    "selection": _selection,
    "decoding": _decoding,
    "sums": _sums,
    "changes of weights": _changes,
    "batches and slots": _batches,
    "thresholds": _thresholds,
    "residuals": _residuals,
    "step-ahead": _step_ahead,
}
#: The share by which numbers may differ; of all others the bits are the same.
_TOLERANCES = {"step-ahead": 1e-2}


@torch.no_grad()
def first_difference(backend: Backend, device: torch.device) -> str | None:
    """Return where a backend on ``device`` first differs from the reference, or fails; None: nowhere."""
    reference = ReferenceBackend()
    for name, check in CHECKS.items():
        what = ""
        try:
            both = zip(check(reference, _HOST), check(backend, device), strict=True)
            for (what, expected), (_, found) in both:  # noqa: B007 - for the message
                for pair in zip(expected, found, strict=True):
                    one, other = (torch.as_tensor(each).to(_HOST) for each in pair)
                    _compare(one, other, _TOLERANCES.get(name, 0.0))
        except _Difference as difference:
            return f"{name}: {what + ': ' if what else ''}{difference}"
        except Exception as error:  # what it may be, a compiler's or a driver's, no one can list
            return f"{name}: {type(error).__name__}: {error}"
    return None
