"""The guard of step-ahead: were all gradients taken at displaced weights that should have been?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...console import listed, logger
from ...metrics import Record
from ...metrics.summary import DISPLACED
from ..stream_group import StreamGroup


class Coverage:
    """Counts the tensors whose gradients were reduced in steps in which their weights were displaced.

    Args:
        is_displaceable: Returns whether a pass with gradients would have displaced a parameter, by name.
    """

    def __init__(self, is_displaceable: Callable[[str], bool]) -> None:
        self._is_displaceable = is_displaceable
        self._shown: set[str] = set()
        self._reduced: set[str] = set()
        self._missed: set[str] = set()
        """Names of gradients of this step whose weights should have been displaced, and were not."""
        self._steps_missed = 0

    def show(self, names: Iterable[str]) -> None:
        """Note the parameters that are displaced in this step."""
        self._shown.update(names)

    def reduce(self, names: Iterable[str]) -> None:
        """Note the gradients that are reduced in this step."""
        # A residual that the first reduction of this step has made is none that its passes could know.
        new = set(names) - self._reduced
        self._missed.update(filter(self._is_displaceable, new - self._shown))
        self._reduced |= new

    def end_step(self, *, shown: Iterable[str]) -> tuple[int, list[str]]:
        """Close an optimizer step.

        Args:
            shown: Names of parameters that are displaced in a pass that runs now.

        Returns:
            The number of gradients that were taken at displaced weights, and the names of the others.
        """
        found = len(self._reduced & self._shown), sorted(self._missed - self._shown)
        self._shown, self._reduced, self._missed = set(shown), set(), set()
        return found

    def report(
        self, group: StreamGroup, displaced: int, missed: Sequence[str], why: Callable[[str], str]
    ) -> None:
        """Record how many tensors were displaced in a step, and say once that some were not, and why."""
        tensors = displaced + len(missed)
        if group.metrics is not None and tensors:
            group.metrics.record(Record(DISPLACED, numel=tensors, nnz=displaced, target_density=1 - 1e-9))
        self._steps_missed += bool(missed)
        # A residual may begin between two passes of one step.
        if missed and self._steps_missed == 2 and not group.group_rank:
            logger.warning(
                f"dct: step-ahead: step {group.step}: {len(missed)} of {tensors} tensors were trained at "
                f"weights that were not displaced ({listed(missed)}): {why(missed[0])}. Adam and momentum "
                "lose quality without it; 'feedback': 'local' in dct.data_parallel is the same without this "
                "line"
            )
