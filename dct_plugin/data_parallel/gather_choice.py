"""The choice between whole gathers of updated weights and exact updates: the faster way on this link.

Both leave the same bits, so that a measured time may decide. A *trial* has two steps with whole gathers, then
three with exact updates. The least time per weight of each way, over steps and ranks, decides for many steps.
A way that is in use stays unless the other one is clearly faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..codecs.copies import await_device
from ..console import logger
from ..host_traffic import own_traffic
from ..transport import lost_ranks
from .stream_group import StreamGroup

#: Returns the time in seconds. Tests give their own figures.
clock = time.perf_counter
#: Steps of a trial with whole gathers, and with exact updates; steps from a decision to the next trial.
WHOLE, EXACT, PERIOD = 2, 3, 1024
#: The way in use stays while it takes at most so many times the time of the other one.
_HYSTERESIS = 1.1


class GatherChoice:
    """Decides in which steps the host gathers updated weights whole, on all ranks alike.

    Args:
        group: The ranks of the host's gathers.
    """

    def __init__(self, group: StreamGroup) -> None:
        self._group = group
        self.clear()

    def clear(self) -> None:
        """Forget all: weights were loaded."""
        self._step, self._next_trial = -1, 0
        self._whole: bool | None = None
        """The decision; None before the first one."""
        self._times: dict[bool, dict[int, tuple[float, int]]] = {True: {}, False: {}}
        """Each way (True: whole gathers) has the seconds and the weights of every step of a trial."""

    def is_whole(self, step: int) -> bool:
        """Return whether weights are to be gathered whole in a step; a collective in the step after a trial.

        True in the first steps, since weights may have been loaded.
        """
        if step != self._step:
            self._step = step
            if len(self._times[False]) == EXACT:
                self._decide()
        on_trial = step >= self._next_trial
        return len(self._times[True]) < WHOLE if on_trial else bool(self._whole)

    @contextmanager
    def timed(self, weights: int, *, whole: bool) -> Iterator[bool]:
        """Surround a gather or an exact update of so many weights; give whether its time is measured."""
        measured = self._step >= self._next_trial and weights > 0
        began = self._now() if measured else 0.0
        yield measured
        if measured:
            seconds, count = self._times[whole].get(self._step, (0.0, 0))
            self._times[whole][self._step] = seconds + self._now() - began, count + weights

    def _now(self) -> float:
        await_device(self._group.device)
        return clock()

    @own_traffic(recorded=False)
    def _decide(self) -> None:
        """Compare the times of a trial; a collective."""
        group, step = self._group, self._step
        least = [min(s / count for s, count in self._times[way].values()) for way in (True, False)]
        agreed = torch.tensor(least, dtype=torch.float64, device=group.device)
        with lost_ranks.reported("choice between gathers and exact updates", group.process_group, step):
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group.process_group)
        whole, exact = agreed.tolist()
        before, factor = bool(self._whole), {None: 1.0, True: 1 / _HYSTERESIS, False: _HYSTERESIS}
        self._whole, self._next_trial = exact > whole * factor[self._whole], step + PERIOD
        self._times = {True: {}, False: {}}
        if self._whole == before:
            return
        way = "whole gathers" if self._whole else "exact updates"
        why = f"a million weights take {1e9 * whole:.3g} ms whole, {1e9 * exact:.3g} ms by what changed"
        if group.metrics is not None:
            group.metrics.event("decision", step=step, setting=way, reason=why)
        if dist.get_rank() == 0:
            said = f"dct: from step {step} on updated weights cross in {way}: {why}; compared again after"
            logger.warning("%s %d steps", said, PERIOD)
