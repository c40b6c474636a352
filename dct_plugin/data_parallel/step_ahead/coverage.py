"""The guard of step-ahead: were all gradients taken at displaced weights that should have been?"""

from __future__ import annotations

from collections.abc import Iterable


class Coverage:
    """Counts the tensors whose gradients were reduced in steps in which their weights were displaced.

    Attributes:
        shown: Names of the parameters that were displaced in this step.
        reduced: Names of the gradients that were reduced in this step.
        missed: Those of them whose weights should have been displaced, and were not.
    """

    def __init__(self) -> None:
        self.shown: set[str] = set()
        self.reduced: set[str] = set()
        self.missed: set[str] = set()

    def end_step(self, *, shown: Iterable[str]) -> tuple[int, list[str]]:
        """Close an optimizer step.

        Args:
            shown: Names of parameters that are displaced in a pass that runs now.

        Returns:
            The number of gradients that were taken at displaced weights, and the names of the others.
        """
        found = len(self.reduced & self.shown), sorted(self.missed - self.shown)
        self.shown = set(shown)
        self.reduced, self.missed = set(), set()
        return found
