"""Triton kernels for CUDA tensors (device code: :mod:`.selection_kernels` and :mod:`.message_kernels`).

Nothing here waits for the device. Thresholds and figures stay there; what is wrong with a payload that is
decoded is found there before anything is written, leaves the output alone, and raises
:class:`~dct_plugin.errors.PayloadError` where the figures of a later payload of the same stream are read
(:func:`~dct_plugin.codecs.stats.read_stats`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...codecs.message import Key, MessageWriter, order_of
from ...codecs.payload import Payload, naming_message, open_payload
from ...codecs.slots import first_words
from ...codecs.stats import KERNEL_ERRORS, Stats
from ...errors import PayloadError
from ..backend import Backend
from ..displacement import Displacement, Scratch, Squares, fresh
from ..job import GRAD_CODES, GRAD_DTYPES, OUT_CODES, SMALLEST_TAU, Job, PartedJob, Spans, check_vector
from ..reference import sample_positions

try:
    import triton  # noqa: F401  # fails where it is missing, also if the modules below are loaded already

    from . import message_kernels as reading
    from . import planes, step_ahead
    from .batch import ROOM, Batch, launched_on, stream_number, table_of
    from .launch import launch
    from .messages import OpenedMessages, prepared_sum
    from .selection_kernels import VALUE_DTYPES
except ImportError as error:  # no such package, or not for this platform
    raise OSError(f"triton cannot be imported: {error}") from error

_COPIED = reading.COPIED.value
_FIGURES_NBYTES = 32  # of a payload
_MOST_SAMPLES = 1 << 17  # that one program finds the threshold of


class _Waiting(threading.local):
    """The batches that are open in a thread, by device."""

    batches: dict[torch.device, Batch] | None = None

    def launch(self) -> None:
        """Launch them: the next kernel may need their results."""
        for batch in (self.batches or {}).values():
            batch.launch()


class TritonBackend(Backend):
    """Kernels that never wait for the host; see :class:`~dct_plugin.kernels.backend.Backend`.

    CPU tensors are taken under Triton's interpreter alone (``TRITON_INTERPRET=1``: tests).

    Raises:
        OSError: triton cannot be imported (by the import of this module), or torch is built for ROCm.
    """

    name = "triton"
    batches = True
    lengths_on_host = False
    message_entries = math.inf  # one launch writes the payloads of a whole bucket
    value_dtypes = VALUE_DTYPES
    planes = planes

    def __init__(self) -> None:
        if torch.version.hip is not None:
            raise OSError("torch is built for ROCm, for which the kernels were not made")
        self._errors: dict[tuple[torch.device, int], Tensor] = {}
        self._waiting = _Waiting()

    # -- writing ---

    @staticmethod
    def most_kept(wanted: int, *, of_part: bool) -> int:
        # Room for what a sampled threshold is off by, and for what a part has more than others: the place of
        # a payload in a slot costs bytes in every step, sent or not.
        return math.ceil((1.25 if of_part else 1.125) * wanted + 3.0 * math.sqrt(wanted)) + 1

    def compress(self, job: Job) -> Stats:
        return self._batch(job.grad.device).compress(job)

    def compress_parts(self, job: PartedJob, writer: MessageWriter, receivers: Key) -> list[Stats]:
        if not job.parts.aligned:  # kernels of some parts read fewer bytes at once
            return super().compress_parts(job, writer, receivers)
        return self._batch(job.grad.device).compress_parts(job, writer, receivers)

    def encode_changes(self, wanted: Tensor, held: Tensor, writer: MessageWriter) -> list[Stats]:
        return self._batch(wanted.device).changes(wanted, held, writer)

    def batched(self) -> contextlib.AbstractContextManager[None]:
        """See ``batched`` of :class:`.backend.Backend`."""
        return _Batched(self)

    def _batch(self, where: torch.device) -> Batch:
        """Return the open batch, or one that is launched at once."""
        batches = self._waiting.batches
        if batches is None:
            return Batch(where, self._error(where), 1, at_once=True)
        if where not in batches or batches[where].full:
            self._waiting.launch()
            batches[where] = Batch(where, self._error(where), ROOM)
        return batches[where]

    def _error(self, where: torch.device) -> Tensor:
        """Return what is wrong with payloads that were read on the current stream of a device, int64 [1]; the
        next payload that is written on that stream takes it to the host.
        """
        key = where, stream_number(where)
        if key not in self._errors:  # two threads of one stream get one tensor
            self._errors.setdefault(key, torch.zeros(1, dtype=torch.int64, device=where))
        return self._errors[key]

    # -- reading ---

    def decode_add(self, payload: Payload | Tensor, out: Tensor) -> int:
        check_vector("out", out, (torch.float32,))
        self._waiting.launch()
        opened = open_payload(payload, out.numel(), verify=False)
        with launched_on(out.device):
            OpenedMessages.of(opened, out).add(1.0, wrong=self._error(out.device))
        return opened.nnz

    def positions(self, payload: Payload | Tensor, numel: int) -> Tensor:
        self._waiting.launch()
        opened = open_payload(payload, numel, verify=False)
        with launched_on(opened.data.device):
            positions, wrong = OpenedMessages.of(opened).entries(opened)
        error = self._error(wrong.device)
        torch.maximum(error, wrong, out=error)
        return positions

    def sum_messages(self, messages: Sequence[Tensor], outs: Sequence[Tensor], scale: float = 1.0) -> None:
        for out in outs:
            check_vector("out", out, tuple(OUT_CODES))
        for message in messages:
            check_vector("message", message, (torch.uint8,))
        if not messages or not outs:
            return
        self._waiting.launch()
        ends = itertools.accumulate((message.numel() for message in messages), initial=0)
        batch, buffer = self._batch(outs[0].device), torch.cat([*messages])
        add_up = prepared_sum(batch, buffer, [*itertools.pairwise(ends)], outs, scale)
        for which, wrong in enumerate(add_up()[:, -1].cpu().tolist()):
            if wrong:
                with naming_message(which):
                    raise PayloadError(KERNEL_ERRORS[wrong])

    # -- slots ---

    def write_slots(
        self,
        writer: MessageWriter,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        fingerprint: int,
        nothing: Tensor | None = None,
    ) -> None:
        count, units = len(bounds), 0

        def rows() -> np.ndarray:
            nonlocal units
            layout, placed, units = _slots_of(writer.layout, count)
            table, where = layout.copy(), [(each.address, each.stats.address) for each in writer.placed]
            table[:count, 2:] = table_of(bounds, 2)
            table[count:, ::2] += table_of(where, 2)[placed]
            return table

        def fill(places: Tensor) -> None:
            arguments = places, buffer, nothing, count, fingerprint
            launch(reading.fill_slots, (max(units, 1), count), *arguments, EMPTY=nothing is not None)

        self._batch(buffer.device).then(rows, fill)

    def prepare_sum(
        self,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        outs: Sequence[Tensor],
        scale: float,
        spans: Spans | None = None,
        *,
        spare: bool = False,
        bits: int = 1,
    ) -> Callable[[], Tensor]:
        if not outs:
            return lambda: first_words(buffer, bounds)
        batch = self._batch(buffer.device)
        return prepared_sum(batch, buffer, bounds, outs, scale, spans, slots=True, spare=spare, bits=bits)

    # -- thresholds ---

    def sample_threshold(
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> Tensor:
        samples, everything = min(num_samples, grad.numel()), num_samples >= grad.numel()
        if samples > _MOST_SAMPLES:
            self._waiting.launch()
            if not everything:
                where = sample_positions(grad.numel(), samples, seed, grad.device)
                grad, residual = grad[where], None if residual is None else residual[where]
            return _kth_largest(grad, residual, share=keep_fraction)
        batch = self._batch(grad.device)
        return batch.threshold(grad, residual, samples, seed=seed, everything=everything, share=keep_fraction)

    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> Tensor:
        numel = grad.numel()
        k = min(k, max(numel, 1))
        if numel > _MOST_SAMPLES:
            self._waiting.launch()
            return _kth_largest(grad, residual, rank=k)
        return self._batch(grad.device).threshold(grad, residual, numel, everything=True, rank=k)

    # -- residuals ---

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        self._batch(values.device).pack(values, out, exponents, seed)

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        self._batch(out.device).unpack(packed, exponents, out)

    def difference(self, wanted: Tensor, held: Tensor, out: Tensor) -> None:
        if wanted.dtype != torch.float32 or held.dtype not in GRAD_DTYPES:
            self._waiting.launch()
            super().difference(wanted, held, out)
            return
        self._batch(held.device).difference(wanted, held, out)

    # -- step-ahead ---

    def add_squares(self, jobs: Sequence[Squares], scratch: Scratch = fresh) -> None:
        # A matrix of one column, whose rows all get one mean, is left to plain torch.
        takes = [
            j.gradient.dtype in GRAD_CODES and (j.columns.numel() > 1 or j.rows.numel() == 1) for j in jobs
        ]
        step_ahead.add_squares(itertools.compress(jobs, takes))
        super().add_squares([job for job, taken in zip(jobs, takes, strict=True) if not taken], scratch)

    def displace(self, jobs: Sequence[Displacement], scratch: Scratch = fresh) -> None:
        takes = [step_ahead.takes(job) for job in jobs]
        step_ahead.displace(itertools.compress(jobs, takes))
        super().displace([job for job, taken in zip(jobs, takes, strict=True) if not taken], scratch)


class _Batched:
    """See :meth:`TritonBackend.batched`; a class, since a generator takes three times as long."""

    __slots__ = ("_backend",)

    def __init__(self, backend: TritonBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        self._backend._waiting.batches = {}

    def __exit__(self, *_: object) -> None:
        try:  # after an exception, too: streams hold residuals that only the launch writes
            self._backend._waiting.launch()
        finally:
            self._backend._waiting.batches = None


@functools.lru_cache(maxsize=4096)
def _slots_of(placed: tuple[tuple[Key, Key], ...], count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return what the table of so many slots has in every step.

    Returns:
        The slots' rows, and those of their payloads, without addresses; for each payload, the number of what
        was placed; the programs that fill a slot, at most.
    """
    order = order_of(placed)
    parts = np.bincount(order.receivers, minlength=count)
    firsts, ends = parts.cumsum() - parts, np.cumsum(-(-order.sizes // _COPIED))
    begins = np.concatenate([[0], ends])
    before = begins[firsts][order.receivers]
    heads = np.stack([firsts, parts, 0 * parts, 0 * parts], axis=1)
    figures = _FIGURES_NBYTES * order.which
    rows = np.stack([order.offsets, begins[:-1] - before, figures, 0 * figures], axis=1)
    return np.concatenate([heads, rows]), order.placed, int((ends - before).max(initial=0))


def _kth_largest(
    grad: Tensor, residual: Tensor | None, *, share: float = 0.0, rank: int | None = None
) -> Tensor:
    """Return fp32 []: the ``rank``-th largest magnitude, or the one that keeps a ``share`` of the finite
    entries. torch sorts more entries than one program searches.
    """
    acc = grad.to(torch.float32) if residual is None else residual + grad
    bits = acc.view(torch.int32) & 0x7FFFFFFF
    ordered = torch.where(bits < 0x7F800000, bits, -1).sort(descending=True).values
    count = (ordered >= 0).sum()
    if rank is None:
        at = (count.to(torch.float64) * share + 0.5).to(torch.int64).clamp(min=1)
    else:
        at = torch.full_like(count, rank)
    found = ordered.gather(0, (torch.minimum(count, at) - 1).clamp(min=0).view(1)).clamp(min=0)
    return found.view(torch.float32).clamp(min=SMALLEST_TAU).view(())
