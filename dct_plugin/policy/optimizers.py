"""Families of optimizers, by the names of their classes and of DeepSpeed's types: the one table of names.

What thresholds cost, and in which unit an optimizer steps, depends on the family.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from ..errors import ConfigError


class OptimizerFamily(Enum):
    """The kind of an optimizer, by what it makes of gradients."""

    ADAM = "Adam"
    RMSPROP = "RMSprop"
    MOMENTUM = "SGD with momentum"
    SGD = "SGD"
    ADAGRAD = "Adagrad"
    MUON = "Muon"
    OTHER = "an optimizer whose step is not known"
    UNTOLD = "an optimizer that the plugin was not told"

    @property
    def loses_by_delay(self) -> bool:
        """Return whether entries that arrive late cost quality (measured: docs/quality.md)."""
        return self in (OptimizerFamily.ADAM, OptimizerFamily.RMSPROP, OptimizerFamily.MOMENTUM)


_NAMES = {
    # torch; apex and DeepSpeed; bitsandbytes
    OptimizerFamily.ADAM: (
        "Adam", "AdamW", "NAdam", "FusedAdam", "DeepSpeedCPUAdam", "FusedMixedPrecisionAdam",
        "SparseAdam",
        "Adam8bit", "Adam32bit", "PagedAdam", "PagedAdam8bit", "PagedAdam32bit",
        "AdamW8bit", "AdamW32bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit",
    ),
    OptimizerFamily.RMSPROP: ("RMSprop",),
    OptimizerFamily.ADAGRAD: ("Adagrad", "FusedAdagrad", "DeepSpeedCPUAdagrad"),
    OptimizerFamily.SGD: ("SGD", "FusedSGD"),
    # torch; the author's; Megatron-core
    OptimizerFamily.MUON: (
        "Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam", "TensorParallelMuon",
    ),
}  # fmt: skip
_FAMILIES = {name.lower(): family for family, names in _NAMES.items() for name in names}


def family_of(names: Iterable[str], *, momentum: float = 0.0) -> OptimizerFamily:
    """Return the family of an optimizer.

    Args:
        names: The name of its class and those of its base classes, or its type in DeepSpeed's JSON; the first
            known one counts, in upper or lower case. None at all: the optimizer was not told.
        momentum: Its momentum, the largest of its parameter groups.
    """
    given = [name.lower() for name in names]
    found = next((_FAMILIES[name] for name in given if name in _FAMILIES), None)
    if found is None:
        return OptimizerFamily.OTHER if given else OptimizerFamily.UNTOLD
    return OptimizerFamily.MOMENTUM if found is OptimizerFamily.SGD and momentum else found


def unknown_step(name: str) -> ConfigError:
    """Return the error for step-ahead with an optimizer whose step is not known."""
    known = ", ".join(
        each for family, names in _NAMES.items() if family is not OptimizerFamily.MUON for each in names
    )
    return ConfigError(
        f"dct.data_parallel.feedback = 'step_ahead': the step of {name} is not known; known are "
        f"{known}; give it a method step_unit(group), or leave feedback out"
    )
