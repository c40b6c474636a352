"""A table of a bounded size, from which all ranks drop the same entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_Value = TypeVar("_Value")

#: Sets of tensors that are remembered. A model has as many as it has buckets.
CAPACITY = 1024


class BoundedTable(OrderedDict[int, _Value]):
    """A table of the last :data:`CAPACITY` fingerprints that were asked for or entered.

    Ranks that ask and enter in the same order, as they do in collectives, hold the same entries.
    """

    def has(self, fingerprint: int) -> bool:
        """Return whether there is an entry, which then is the last one to be dropped."""
        found = fingerprint in self
        if found:
            self.move_to_end(fingerprint)
        return found

    def __setitem__(self, fingerprint: int, value: _Value) -> None:
        super().__setitem__(fingerprint, value)
        self.move_to_end(fingerprint)
        if len(self) > CAPACITY:
            self.popitem(last=False)
