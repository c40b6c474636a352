"""Batches of payloads: any number of tensors with one launch of every kernel.

A :class:`Batch` notes what is wanted and returns the places where figures and thresholds will be. Its launch
sorts the tensors by kind (types, with residual or without, ...), of which a bucket of gradients has
two or three, and goes through the kernels of :mod:`.selection_kernels` once for each kind.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...codecs.changes import BANDS
from ...codecs.copies import to_device
from ...codecs.message import ONE, Key, MessageWriter
from ...codecs.splitmix import signed
from ...codecs.stats import Figures, Stats
from ..job import GRAD_CODES, SMALLEST_TAU, Job, PartedJob, Parts, applied_tau, refuse_capture
from . import selection_kernels as device
from .launch import launch

#: Tensors of a batch, and entries from which on it is launched: residuals lie beside what they become until
#: then, and so many entries keep a device busy.
ROOM, MOST_ENTRIES = 256, 1 << 26

CHANGES = device.CHANGES.value
#: Bytes of an entry by the type of a gradient; of weights that changed.
_NBYTES = {**{code: dtype.itemsize for dtype, code in GRAD_CODES.items()}, CHANGES: 2}

_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")
_LANES = 1 << 14  # samples that the search for a threshold looks at in one step, at most
_ALIGNMENT = 16
TILE, BLOCK, CHUNK = device.TILE.value, device.BLOCK.value, device.CHUNK.value
STATE = device.STATE.value


def programs(count: int, each: int) -> int:
    """Return how many programs share so much work: at least one."""
    return max(1, -(-count // each))


def counts_and_sums(units: int, rows: int) -> int:
    """Return how many numbers the counts of so many units of work in so many rows, and their sums, are."""
    return units + units // device.COUNTED.value + rows


def table_of(rows: Iterable[Iterable[int]], width: int) -> np.ndarray:
    """Return numbers, int64 [rows, width]; ``np.array`` would look at their types first."""
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64).reshape(-1, width)


def readable(tensor: Tensor) -> Tensor:
    """Return a gradient as the kernels read it: bf16 as its bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


ROW, OUT_AT, NUMEL, START, TILES, CHUNKS, SLOT, *_SAMPLE = (
    each.value
    for each in (
        *(device.ROW, device.OUT_AT, device.NUMEL, device.START, device.TILES, device.CHUNKS, device.SLOT),
        *(device.NUMEL, device.SAMPLES, device.SEED, device.ALL, device.SHARE, device.RANK, device.SLOT),
    )
)
_NOTHING_ADDED = (0,) * ROW
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class _Variant(NamedTuple):
    """The constants that the kernels of a payload are compiled for."""

    selected: bool
    """True if the entries that pass the threshold are written, not all."""
    grad: int
    residual: bool
    left: bool
    """True if a new residual is written."""
    in_place: bool
    value: int
    clear: bool
    aligned: bool


_Write: TypeAlias = tuple[Job | PartedJob, Parts, Sequence[int]]
"""A tensor, its parts, and what the rows of its payloads have in common, in the order of the places in ROW:
addresses of the gradient, of both residuals, and of the first payload, behind whose bound the others follow;
their turn; the row of the first figures; slot and bits of the threshold; distances of changes.
:func:`_layout` has what is added for each payload.
"""


class _Entrywise(NamedTuple):
    """An operation on the entries of a tensor, or on samples of them."""

    key: tuple[Any, ...]
    """Operations of one key are launched together."""
    tensors: tuple[Tensor | None, ...]
    entries: int
    places: Sequence[int]
    numbers: Sequence[int]
    """They stand at these places of its row, which begins with the addresses of the tensors."""


class _Noted(NamedTuple):
    """Operations that were not launched yet, in their order."""

    before: list[_Entrywise]
    samples: list[_Entrywise]
    writes: dict[tuple[Any, ...], list[_Write]]
    """Keys are the fields of a :class:`_Variant`."""
    after: list[_Entrywise]
    behind: list[tuple[Callable[[], np.ndarray], Callable[[Tensor], None]]]
    """See :meth:`Batch.then`."""


class Batch:
    """Payloads and thresholds of tensors on one device, and the operations before and after them.

    Args:
        where: The device.
        errors: int64 [1], what was wrong with payloads read before. It goes to the host with the next
        figures.
        room: The most tensors, and the most thresholds, that the batch takes.
        at_once: Launch each operation when it is noted.
    """

    def __init__(self, where: torch.device, errors: Tensor, room: int, *, at_once: bool = False) -> None:
        self.where, self._at_once = where, at_once
        self.full = False
        """True if the batch should be launched, and another one begun."""
        self._errors = errors
        self._figures = Figures(_NOTHING, self.launch)
        self._taus = torch.empty(room, dtype=torch.float32, device=where)
        self._room = room
        self._tensors = self._thresholds = self._payloads = self._entries = 0
        self._noted = _Noted([], [], {}, [], [])

    def compress(self, job: Job) -> Stats:
        """See :meth:`.backend.Backend.compress`."""
        parts = Parts.whole(job.numel, job.capacity, job.value_dtype)
        return self._add(job, parts, job.start, out=job.out.data_ptr())

    def compress_parts(self, job: PartedJob, writer: MessageWriter, receivers: Key) -> list[Stats]:
        """See :meth:`.backend.Backend.compress_parts`."""
        return [self._add(job, job.parts, job.turn, writer, receivers)]

    def changes(self, wanted: Tensor, held: Tensor, writer: MessageWriter) -> list[Stats]:
        """See :meth:`.backend.Backend.encode_changes`."""
        numel, at, old = wanted.numel(), wanted.data_ptr(), held.data_ptr()
        aligned, bits, found, nearest = not (at | old) % _ALIGNMENT, _float_bits(SMALLEST_TAU), [], 1
        for band in BANDS:
            farthest, value = band
            parts = Parts.whole(numel, band.capacity(numel), value)
            stats = Stats.on_device(self._figures, self._payloads, tau=SMALLEST_TAU)
            out = writer.place(ONE, parts.nbytes, parts.total, stats)
            columns = [at, old, 0, out, 0, 0, 0, 0, 0, 0, 0, self._payloads, -1, bits, nearest, farthest]
            variant = True, CHANGES, False, False, False, int(value), False, aligned
            job = PartedJob(wanted, held, SMALLEST_TAU, None, parts)
            self._noted.writes.setdefault(variant, []).append((job, parts, columns))
            self._payloads += 1
            found.append(stats)
            nearest = farthest + 1
        self._tensors += len(BANDS)
        self._entries += len(BANDS) * numel
        self._after_noting()
        return found

    def _add(
        self,
        job: Job | PartedJob,
        parts: Parts,
        turn: int,
        writer: MessageWriter | None = None,
        receivers: Key = ONE,
        *,
        out: int = 0,
    ) -> Stats:
        """Note the payloads of a tensor, which a ``writer`` places, or which lie at the address ``out``."""
        count = len(parts.bounds)
        grad, residual = job.grad, job.residual
        left = residual if job.residual_out is None else job.residual_out
        at, source = grad.data_ptr(), 0 if residual is None else residual.data_ptr()
        target = source if left is residual else 0 if left is None else left.data_ptr()
        dense = job.dense
        variant = (  # a plain tuple, since it is made for each tensor
            not dense,
            GRAD_CODES[grad.dtype],
            residual is not None,
            left is not None,
            residual is not None and source == target,
            int(parts.value_dtype),
            job.clear,
            not (at | source | target) % _ALIGNMENT,
        )
        applied, slot, bits = (job.tau, -1, 0) if dense else self._tau(job.tau)
        stats = Stats.on_device(self._figures, self._payloads, count, tau=applied)
        if writer is not None:  # this may fail: nothing is noted then
            out = writer.place(receivers, parts.nbytes, parts.total, stats)
        columns = [at, source, target, out, 0, 0, turn, 0, 0, 0, 0, self._payloads, slot, bits, 0, 0]
        self._noted.writes.setdefault(variant, []).append((job, parts, columns))
        self._tensors += 1
        self._payloads += count
        self._entries += parts.numel
        self._after_noting()
        return stats

    def _after_noting(self) -> None:
        most = max(self._tensors, self._thresholds)
        self.full = most >= self._room or self._entries >= MOST_ENTRIES
        if self._at_once:
            self.launch()

    def threshold(
        self,
        grad: Tensor,
        residual: Tensor | None,
        samples: int,
        *,
        seed: int = 0,
        everything: bool = False,
        share: float = 0.0,
        rank: int = 0,
    ) -> Tensor:
        """Return fp32 []: the threshold that keeps a ``share``, or the ``rank``-th largest magnitude; of
        random positions, or of all.
        """
        slot, self._thresholds = self._thresholds, self._thresholds + 1
        (bits,) = struct.unpack("<q", struct.pack("<d", share))
        key, numbers = (GRAD_CODES[grad.dtype], residual is not None), (signed(seed), everything, bits, rank)
        sample = _Entrywise(key, (grad, residual), samples, _SAMPLE, (grad.numel(), samples, *numbers, slot))
        self._noted.samples.append(sample)
        self._after_noting()
        return self._taus[slot]

    def difference(self, wanted: Tensor, held: Tensor, out: Tensor) -> None:
        """See :meth:`.backend.Backend.difference`; before thresholds are found."""
        self._entries += (numel := held.numel())
        key, tensors = ("difference", "GRAD", GRAD_CODES[held.dtype]), (readable(held), wanted, out)
        self._noted.before.append(_Entrywise(key, tensors, numel, [NUMEL], [numel]))
        self._after_noting()

    def unpack(self, packed: Tensor, exponents: Tensor | None, out: Tensor) -> None:
        """See :meth:`.backend.Backend.unpack`; before thresholds are found."""
        packed = readable(packed)
        if any(_addresses(each.tensors)[1] == packed.data_ptr() for each in self._noted.after):
            self.launch()  # these are the values that are packed there now
        self._entries += (numel := out.numel())
        key, tensors = ("unpack", "GROUPED", exponents is not None), (out, packed, exponents)
        self._noted.before.append(_Entrywise(key, tensors, numel, [NUMEL], [numel]))
        self._after_noting()

    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        """See :meth:`.backend.Backend.pack`; when payloads are written."""
        key, tensors = ("pack", "GROUPED", exponents is not None), (values, readable(out), exponents)
        numel, places = values.numel(), [NUMEL, device.SEED.value]
        self._noted.after.append(_Entrywise(key, tensors, numel, places, [numel, signed(seed, 32)]))
        self._after_noting()

    def then(self, rows: Callable[[], np.ndarray], run: Callable[[Tensor], None]) -> None:
        """Upload a table with that of the batch, and call ``run`` with it behind all other operations.

        Args:
            rows: Returns the table, int64. It is called when figures have addresses.
            run: Launches kernels, or keeps the table for later ones: of this stream, or of one that waits for
                what this one does next.
        """
        self._noted.behind.append((rows, run))
        self._after_noting()

    def launch(self) -> None:
        """Do what was noted since the last launch."""
        if not any(self._noted):
            return
        noted, self._noted = self._noted, _Noted([], [], {}, [], [])
        payloads, self._entries, self._payloads = self._payloads, 0, 0
        figures, self._figures = self._figures, Figures(_NOTHING, self.launch)
        figures.started(torch.empty(4 * payloads, dtype=torch.int64, device=self.where))
        try:
            self._launch(figures.counts, noted)
        except BaseException:
            for job, *_ in itertools.chain.from_iterable(noted.writes.values()):
                _undo(job)
            raise

    def _launch(self, counts: Tensor, noted: _Noted) -> None:
        before, samples, writes, after, behind = noted
        variants = [*itertools.starmap(_Variant, writes)]
        laid = [_rows(*each) for each in zip(variants, writes.values(), strict=True)]
        first, drawn, last = (
            [(key, *_counted(group)) for key, group in grouped(each, lambda one: one.key).items()]
            if each
            else []
            for each in (before, samples, after)
        )
        every = [rows for _, rows, _ in first + drawn] + [rows for rows, _ in laid]
        every += [rows for _, rows, _ in last] + [rows() for rows, _ in behind]
        table = upload(np.concatenate([rows.ravel() for rows in every]), self.where)
        parts = iter(torch.split_with_sizes(table, [rows.size for rows in every]))
        with launched_on(self.where):
            for key, rows, chunks in first:
                self._pass(next(parts), len(rows) - 1, key, chunks)
            for key, rows, chunks in drawn:
                self._find(next(parts), len(rows) - 1, key, chunks, max(each.entries for each in samples))
            sizes = [_state_size(len(rows), units) for rows, units in laid]
            states = torch.zeros(sum(sizes), dtype=torch.int64, device=self.where)
            each = states.split(sizes) if len(sizes) > 1 else [states] * len(sizes)
            for variant, (rows, units), state in zip(variants, laid, each, strict=True):
                self._write(next(parts), len(rows) - 1, variant, units, state, counts)
            for key, rows, chunks in last:
                self._pass(next(parts), len(rows) - 1, key, chunks)
            for _, run in behind:
                run(next(parts))

    # -- inside ---

    def _tau(self, tau: float | Tensor) -> tuple[float | Tensor, int, int]:
        """Return a threshold that stays, its slot and 0, or -1 and its bits."""
        if not isinstance(tau, Tensor):
            if not SMALLEST_TAU <= tau <= 1.0:  # such numbers, the most frequent ones, are good as they are
                tau = float(applied_tau(tau))
            return tau, -1, _float_bits(tau)
        slot, beyond = divmod(tau.data_ptr() - self._taus.data_ptr(), 4)
        if not (0 <= slot < self._thresholds and beyond == 0):  # not one that is found here
            slot, self._thresholds = self._thresholds, self._thresholds + 1
            tau = torch.clamp(tau, min=SMALLEST_TAU, out=self._taus[slot])
        return tau, slot, 0

    def _pass(self, table: Tensor, count: int, key: tuple[Any, ...], chunks: int) -> None:
        kernel, constant, value = key
        launch(getattr(device, kernel), chunks, table, count, **{constant: value})

    def _find(self, table: Tensor, count: int, key: tuple[Any, ...], chunks: int, most: int) -> None:
        magnitudes = torch.empty(chunks * CHUNK, dtype=torch.int32, device=self.where)
        launch(device.sample, chunks, table, magnitudes, count, GRAD=key[0], HAS_RESIDUAL=key[1])
        lanes = min(_LANES, 1 << max(10, (most - 1).bit_length()))
        warps = min(32, lanes // 256)
        launch(device.kth_largest, count, table, magnitudes, self._taus, LANES=lanes, num_warps=warps)

    def _write(
        self,
        table: Tensor,
        count: int,
        variant: _Variant,
        units: Sequence[int],
        state: Tensor,
        counts: Tensor,
    ) -> None:
        tiles, blocks, chunks, room = units
        types = {"GRAD": variant.grad, "HAS_RESIDUAL": variant.residual}
        aligned = {**types, "ALIGNED": variant.aligned}
        scratch, words = None, 0
        if variant.in_place or not variant.selected:
            launch(device.overflow, tiles, table, state, count, GRAD=variant.grad, ALIGNED=variant.aligned)
        if variant.selected:
            words = blocks * (BLOCK // 32)
            scratch = torch.empty(words + room, dtype=torch.int32, device=self.where)
            options = {"HAS_LEFT": variant.left, "IN_PLACE": variant.in_place, **aligned}
            launch(device.select, tiles, table, scratch, state, self._taus, count, **options)
            launch(device.compact, blocks, table, scratch, state, words, count, num_warps=8)
        constants = {"SELECTED": variant.selected, "VALUE": variant.value}
        accumulated = variant.selected and variant.left
        if accumulated:  # one form of the kernel serves all types of gradients
            types = {"GRAD": 0, "HAS_RESIDUAL": False}
        written = table, scratch, state, words, count
        options = {"ACCUMULATED": accumulated, "HAS_LEFT": variant.left, **types, **constants}
        launch(device.write, chunks, *written, **options, num_warps=8)  # gathers: more warps hide their loads
        put_back = variant.left and not variant.in_place
        constants |= {"PUT_BACK": put_back, "CLEAR": variant.clear, **aligned}
        blocks = blocks if put_back or variant.clear else 0
        arguments = (table, state, counts, self._errors, count, blocks)
        launch(device.settle, blocks + count, *arguments, **constants)


def _undo(job: Job | PartedJob) -> None:
    """Copy the old residual to where the launch, which failed, should have written the new one."""
    residual, left = job.residual, job.residual_out
    if left is not None and residual is not None and left.data_ptr() != residual.data_ptr():
        left.copy_(residual)


def _state_size(rows: int, units: Sequence[int]) -> int:
    """Return the numbers of ``state``: even, as kernels are compiled for memory at multiples of 16 bytes."""
    return -(-(rows * STATE + counts_and_sums(units[1], rows)) // 2) * 2


def _rows(variant: _Variant, writes: Sequence[_Write]) -> tuple[np.ndarray, list[int]]:
    """Return the rows of payloads of one variant, and the totals of their units of work: tiles, blocks,
    chunks of the body, positions.
    """
    of, size = tuple([parts for _, parts, _ in writes]), _NBYTES[variant.grad]
    layout, units, which = _layout(of, size, dense=not variant.selected)
    return layout + table_of([*(columns for *_, columns in writes), _NOTHING_ADDED], ROW)[which], units


@functools.lru_cache(maxsize=4096)
def _layout(of: tuple[Parts, ...], size: int, *, dense: bool) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Return the numbers in the rows of payloads that are the same in every step.

    Args:
        of: Parts of each tensor.
        size: Bytes of an entry.
        dense: Whether the payloads hold every entry.

    Returns:
        The rows, with the bytes before each payload in place of addresses; the totals of units of work; for
        each row, the number of its tensor.
    """
    counts = [len(each.numbers) for each in of]
    start, numel, most = np.concatenate([each.numbers for each in of]).T
    # A chunk of the body is one of entries, of words of the bitmap, and of pairs of bytes behind it.
    chunks = _programs(numel if dense else np.maximum(most, -(-numel // 32)), CHUNK)
    rows = np.zeros((len(numel) + 1, ROW), dtype=np.int64)
    rows[:-1, NUMEL:START] = np.stack([numel, most], axis=1)
    room = 0 * most if dense else most
    work = np.stack([_programs(numel, TILE), _programs(numel, BLOCK), chunks, room], axis=1)
    rows[1:, TILES:SLOT] = np.cumsum(work, axis=0)
    rows[:-1, SLOT] = np.concatenate([*map(np.arange, counts)])
    rows[:-1, :OUT_AT] = np.outer(start, [size, 4, 4])
    rows[:-1, OUT_AT] = np.concatenate([np.cumsum(each.nbytes) - each.nbytes for each in of])
    return rows, rows[-1, TILES:SLOT].tolist(), np.repeat(np.arange(len(of) + 1), [*counts, 1])


def _programs(count: np.ndarray, each: int) -> np.ndarray:
    return np.maximum(1, -(-count // each))


@functools.lru_cache(maxsize=1024)
def _float_bits(number: float) -> int:
    """Return the bits of the fp32 number that ``number`` is rounded to."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items in groups of one key."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _counted(group: Sequence[_Entrywise]) -> tuple[np.ndarray, int]:
    """Return the rows of operations, and the chunks of all."""
    rows, places = np.zeros((len(group) + 1, ROW), dtype=np.int64), group[0].places
    numbers = [[*_addresses(each.tensors), *each.numbers] for each in group]
    rows[:-1, [*range(len(group[0].tensors)), *places]] = numbers
    rows[1:, CHUNKS] = np.cumsum([programs(each.entries, CHUNK) for each in group])
    return rows, int(rows[-1, CHUNKS])


# -- what goes to the device ---


def upload(table: np.ndarray, where: torch.device) -> Tensor:
    """Return a tensor of numbers that the host has; nobody waits for the copy.

    The pinned memory is fresh, of one call. torch gives it to the next one only after the copy, which it
    queues on the current stream, has run. So no thread or stream writes what another still copies.

    Raises:
        DCTError: A CUDA graph is recorded, which would replay the numbers of the recording.
    """
    refuse_capture(where)
    return to_device(torch.from_numpy(table), where)


def stream_number(where: torch.device) -> int:
    """Return the address of a device's current stream; 0 for the default one, and where there are none."""
    return torch.cuda.current_stream(where).cuda_stream if where.type == "cuda" else 0


def launched_on(where: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one, on which kernels are launched."""
    return torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
