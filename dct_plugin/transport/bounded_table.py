"""A table of a bounded size, from which all ranks drop the same entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

#: Sets of tensors that are remembered. A model has as many as it has buckets.
CAPACITY = 1024


class BoundedTable(OrderedDict[_Key, _Value]):
    """A table of the last :data:`CAPACITY` keys that were asked for or entered: fingerprints, most often.

    Ranks that ask and enter in the same order, as they do in collectives, hold the same entries.
    """

    def has(self, key: _Key) -> bool:
        """Return whether there is an entry, which then is the last one to be dropped."""
        found = key in self
        if found:
            self.move_to_end(key)
        return found

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > CAPACITY:
            self.popitem(last=False)
