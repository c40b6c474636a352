"""The settings that are compared by measurement: those of the automatic mode, and of jobs that write none."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from ..config import DataParallelConfig
from .evidence import THRESHOLDS

#: Sparsities and value types that the automatic mode chooses from, within the limits of a configuration.
_SPARSITIES, _VALUES = (0.9, 0.97, 0.99), {"bf16": 16, "int8": 8, "int4": 4}
_BITS = {"sign": 1, "int2": 2, "log4": 4, "fp16": 16, "fp32": 32, **_VALUES}


class Setting(NamedTuple):
    """A sparsity and the type of its values, as the automatic mode chooses them."""

    sparsity: float = 0.0
    value_dtype: str | None = None
    """Type of the values; None: the dense exchange of the framework."""

    @property
    def is_dense(self) -> bool:
        return self.value_dtype is None

    @property
    def strength(self) -> tuple[float, int]:
        """Order from gentle to strong: by sparsity, then by bits left out."""
        return self.sparsity, -_BITS.get(self.value_dtype or "", 32)

    def __str__(self) -> str:
        if self.is_dense:
            return "dense"
        return f"sparsity {self.sparsity:g}, {self.value_dtype} values"


def settings_within(config: DataParallelConfig, *, all_types: bool = True) -> list[Setting]:
    """Return the settings that the automatic mode may choose, the dense exchange first.

    Args:
        config: Its sparsity is the highest one that its quality class allows, its value type the widest.
        all_types: Whether types of fewer bits may be chosen, too.
    """
    if config.quality == "dense":
        return [Setting()]
    if config.quality == "if_faster":
        all_entries = Setting(0.0, "int8" if all_types else config.value_dtype)
        return [*dict.fromkeys((Setting(), all_entries, Setting(config.sparsity, config.value_dtype)))]
    most_bits = bits_of(config)
    values = [name for name, bits in _VALUES.items() if bits <= most_bits]
    if not (values and all_types):
        values = [config.value_dtype]
    sparsities = [each for each in _SPARSITIES if each < config.sparsity]
    if not config.sparsity:
        return [Setting(), Setting(0.0, values[0])]
    sparsities.append(config.sparsity)
    return [Setting(), Setting(0.0, values[0]), *(Setting(*each) for each in product(sparsities, values))]


def every_default() -> list[Setting]:
    """Return the settings that sections without density may get, the dense exchange first."""
    rows = {Setting(row.sparsity, row.value_dtype): None for row in THRESHOLDS}
    return [Setting(), Setting(0.0, "int8"), *rows]


def compresses(settings: DataParallelConfig) -> bool:
    """Return whether fewer bytes cross than those of all entries in 16 bits, or may by measurement."""
    return bool(settings.sparsity or settings.quality is not None or bits_of(settings) < 16)


def bits_of(settings: DataParallelConfig) -> int:
    """Return the bits of a value on the wire."""
    return _BITS[settings.value_dtype]
