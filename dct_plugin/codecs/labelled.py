"""Numbers of the wire format that have names."""

from __future__ import annotations

import re
from enum import IntEnum

from typing_extensions import Self


class Labelled(IntEnum):
    """Base class of the enumerations in a payload's header."""

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, value: int | str) -> Self:
        """Return the member for a name (``"bf16"``) or a number; ``ValueError`` names the allowed ones."""
        try:
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            allowed = ", ".join(m.label for m in cls)
            what = re.sub(r"\B(?=[A-Z])", " ", cls.__name__).lower()
            raise ValueError(f"{what} {value!r} is unknown; allowed: {allowed}") from None
