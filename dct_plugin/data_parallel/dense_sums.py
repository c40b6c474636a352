"""Steps in which nothing is thresholded: warm-up, a group of one rank, and those that an add-on wants."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..compression.feedback import unpacked
from ..kernels.reference import has_overflow, overflow_flags
from ..metrics import Record
from .plan import BoundedTable, PlannedTensor, ReductionPlan
from .stream_group import StreamGroup


class DenseSums:
    """Sums gradients as the host framework would.

    Args:
        group: Streams and process group.
    """

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self._agreed: BoundedTable[int, None] = BoundedTable()
        """Fingerprints of what all ranks were found to sum densely."""
        self._suspects: list[tuple[list[str], Tensor]] = []
        """Names of tensors that were summed, and flags of those that are not finite."""
        self._flushed: set[str] = set()
        """Names of tensors whose loaded residual was added in this step."""

    def reduce(self, plan: ReductionPlan, exchange_record: Record) -> None:
        """Sum the tensors of ``plan`` over the ranks; a collective."""
        if self._group.world_size == 1:
            self._add_loaded_residuals(plan)
            for each in plan.tensors if plan.scale != 1.0 else ():
                each.tensor.mul_(plan.scale)
        else:
            # Nothing is selected: copies and checks are part of the exchange.
            watch = self._group.dense_sums_watch or contextlib.nullcontext()
            with exchange_record.timed("exchange"), watch:
                self._agree(plan)
                for dtype in dict.fromkeys(each.tensor.dtype for each in plan.tensors):
                    same = [each for each in plan.tensors if each.tensor.dtype == dtype]
                    self._sum(same, plan.scale, exchange_record)

    def end_step(self, *, skipped: bool) -> None:
        """Name gradients that were not finite; loaded residuals that were used are gone."""
        suspects, self._suspects = self._suspects, []
        if suspects:
            names = [name for names, _ in suspects for name in names]
            flags = torch.cat([flags for _, flags in suspects])
            found = self._group.exchange.received(flags, "dense all-reduce").tolist()
            if (name := next(itertools.compress(names, found), None)) is not None:
                self._group.report_nonfinite(name)
        if not skipped:
            for name in self._flushed:
                del self._group.streams.loaded[name]
        self._flushed.clear()

    def forget(self) -> None:
        """Another state is loaded: what was added in this step belongs to the state before."""
        self._flushed.clear()

    def _agree(self, plan: ReductionPlan) -> None:
        # A rank whose warm-up is over would wait in another collective for ever.
        exchange, fingerprint = self._group.exchange, plan.fingerprint + self._group.step
        if self._group.backend.lengths_on_host:
            exchange.agree(fingerprint)
        elif not self._agreed.has(plan.fingerprint):  # waits for a device: once
            exchange.agree(fingerprint)
            self._agreed[plan.fingerprint] = None

    def _sum(self, planned: Sequence[PlannedTensor], scale: float, exchange_record: Record) -> None:
        """Replace tensors of one type by ``scale`` times their sums."""
        group, same = self._group, [each.tensor for each in planned]
        adjoined = _adjoined(same)
        flat = torch.cat(same) if adjoined is None else adjoined
        if not group.nonfinite_reported:
            self._look_for_nonfinite(planned, flat)
        # A sum of fp16 overflows where its mean does not.
        before, after = (scale, 1.0) if flat.dtype == torch.float16 else (1.0, scale)
        if before != 1.0:
            flat.mul_(before)
        sent = group.exchange.all_reduce(flat)
        if after != 1.0:
            flat.mul_(after)
        exchange_record.sent_bytes -= sent
        if group.metrics is not None:
            group.metrics.record(Record("gradient_warmup", sent, sent, flat.numel()))
        if adjoined is not None:
            return
        for tensor, reduced in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(reduced)

    def _look_for_nonfinite(self, planned: Sequence[PlannedTensor], flat: Tensor) -> None:
        if not self._group.backend.lengths_on_host:
            flags = overflow_flags([each.tensor for each in planned])
            self._suspects.append(([each.name for each in planned], flags))
        elif has_overflow(flat):
            self._group.report_nonfinite(next(each.name for each in planned if has_overflow(each.tensor)))

    def _add_loaded_residuals(self, plan: ReductionPlan) -> None:
        """Add what a checkpoint of several ranks had not sent: a single rank thresholds nothing."""
        for each in plan.tensors:
            saved = self._group.streams.loaded.get(each.name)
            if saved is not None and saved["residual"] is not None and each.name not in self._flushed:
                each.tensor.add_(unpacked(saved["residual"]).to(each.tensor))
                self._flushed.add(each.name)


def _adjoined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return all tensors as one, of the same memory, if they lie one behind the other as in a bucket.

    Not in another order: the tensors of another rank may lie elsewhere, and are summed in the order given.
    """
    filled = [each for each in tensors if each.numel()]
    if not filled:
        return None
    storage = filled[0].untyped_storage().data_ptr()
    for each, following in itertools.pairwise(filled):
        end = each.data_ptr() + each.nbytes
        if end != following.data_ptr() or following.untyped_storage().data_ptr() != storage:
            return None
    return filled[0].as_strided((sum(each.numel() for each in filled),), (1,))
