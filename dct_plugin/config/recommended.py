"""Which settings to take, by optimizer, link, ranks and ZeRO stage: the table behind ``dct config suggest``.

``docs/settings.md`` shows the same table. A row stands for runs that were measured, and names the section of
the results that has them; a test holds the figures against these pages. What was not measured has no row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .optimizers import OptimizerFamily

#: The links of the table, in bits per second.
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
#: Rates that are at most this factor from one of them are taken for it.
_LIKE = 10**0.5
_SLOW, _GIGABIT, _FAST = LINKS


class Measured(NamedTuple):
    """A measured figure, and the section of the results that has it."""

    what: str
    source: str
    """Page and section: ``quality.md#zero-3``."""


class Recommendation(NamedTuple):
    """A row of the table."""

    family: OptimizerFamily
    links: tuple[str, ...]
    ranks: tuple[int, int]
    """The least and the greatest number of ranks; measured with the greatest."""
    stages: tuple[int, ...]
    data_parallel: Mapping[str, Any] | None
    """The section ``dct.data_parallel``; None: nothing that was measured keeps the quality."""
    fewer_bytes: Measured
    quality: Measured
    step: Measured | None
    """Times of a step; None: not measured."""
    if_worse: str

    @property
    def section(self) -> dict[str, Any]:
        """The section as it is pasted."""
        return {} if self.data_parallel is None else {"data_parallel": dict(self.data_parallel)}

    @property
    def where(self) -> str:
        """The training that the row was measured in, in words."""
        stages = " and ".join(f"ZeRO-{stage}" for stage in self.stages) if any(self.stages) else "no ZeRO"
        links = " to ".join(dict.fromkeys((self.links[0], self.links[-1])))
        return f"{self.family.value} on {self.ranks[1]} ranks at {links}, {stages}"

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the measurements of the settings, each with its label."""
        fewer = ("fewer bytes than fp32", self.fewer_bytes)
        for label, measured in (fewer, ("quality", self.quality), ("step", self.step)):
            yield label, "not measured" if measured is None else f"{measured.what} (docs/{measured.source})"
        yield "if worse", self.if_worse

    def suits(self, training: Wanted) -> bool:
        """Return whether the row was measured for a training."""
        return (
            self.family is training.family
            and self._link_ratio(training) <= _LIKE
            and self.ranks[0] <= training.ranks <= self.ranks[1]
            and training.stage in self.stages
        )

    def distance(self, training: Wanted) -> tuple[bool, bool, float, float]:
        """Return how far the row is from a training; stage and family count most."""
        return (
            training.stage not in self.stages,
            self.family is not training.family,
            abs(math.log(self.ranks[1] / training.ranks)),
            self._link_ratio(training),
        )

    def _link_ratio(self, training: Wanted) -> float:
        """Return how many times faster or slower a link is than the nearest one of this row."""
        return min(max(training.rate / LINKS[link], LINKS[link] / training.rate) for link in self.links)


class Wanted(NamedTuple):
    """A training that settings are wanted for."""

    family: OptimizerFamily
    rate: float
    """Bits per second of the link between the ranks."""
    ranks: int
    stage: int


def suggestion(training: Wanted) -> tuple[Recommendation | None, bool]:
    """Return the row for a training and whether it was measured there; else the nearest row.

    A nearest row has settings that the ZeRO stage can have. It is None if no optimizer like it was measured.
    """
    for row in RECOMMENDATIONS:
        if row.suits(training):
            return row, True
    relatives = _RELATIVES.get(training.family, (training.family,))
    near = [row for row in RECOMMENDATIONS if row.family in relatives and _fits(row, training.stage)]
    return min(near, key=lambda row: row.distance(training), default=None), False


def _fits(row: Recommendation, stage: int) -> bool:
    """Return whether a ZeRO stage can have the settings of a row: step-ahead and updates depend on it."""
    settings = row.data_parallel or {}
    if stage in row.stages:
        return True
    ahead = row.family.loses_by_delay and settings.get("feedback") != "local"
    return row.data_parallel is not None and "parameters" not in settings and not (stage == 3 and ahead)


#: Families whose rows are the nearest where a family has none for a ZeRO stage, or none at all.
_RELATIVES = {OptimizerFamily.RMSPROP: (OptimizerFamily.ADAM,)}

_AHEAD = "quality.md#step-ahead-adam-at-99-"
_COMPRESSORS = "quality.md#many-compressors"
_UPDATES = "quality.md#updated-weights-under-zero-1"
_VALUES = "quality.md#int8-int4-and-int2-values"
_OPTIMIZERS = "quality.md#error-feedback-and-the-optimizer"
_ZERO3 = "quality.md#zero-3"
_DDP = "performance.md#torch-ddp"
_DEEPSPEED = "performance.md#deepspeed"
_WIRE = "performance.md#bytes-of-a-ten-million-parameter-model"

_LONGER = "a longer start, then `sparsity` 0.9"
_GENTLER = "`parameters.sparsity` 0.9, then leave `parameters` out"
_ADAM, _MOMENTUM = OptimizerFamily.ADAM, OptimizerFamily.MOMENTUM
_ADAGRAD, _SGD = OptimizerFamily.ADAGRAD, OptimizerFamily.SGD

#: The first row that suits is the one to take.
RECOMMENDATIONS = (
    Recommendation(
        _ADAM, (_SLOW,), (2, 2), (0,), {"sparsity": 0.99, "value_dtype": "int4"},
        Measured("55.8x", _VALUES), Measured("-0.0058 ± 0.0138 nats", _VALUES),
        Measured("100 Mbit/s: 137 ms, fp32 3700, bf16 1935", _DDP),
        "`value_dtype` bf16, then " + _LONGER,
    ),
    Recommendation(
        _ADAM, (_GIGABIT,), (2, 2), (0,), {"sparsity": 0.99},
        Measured("46.0x", _AHEAD), Measured("-0.0052 ± 0.0126 nats", _AHEAD),
        Measured("1 Gbit/s: 150 ms, fp32 525, bf16 334", _DDP),
        _LONGER,
    ),
    Recommendation(
        _ADAM, (_FAST,), (2, 2), (0,), {"sparsity": 0.9},
        Measured("12.7x", _AHEAD), Measured("-0.0185 ± 0.0123 nats", _AHEAD),
        Measured("10 Gbit/s: 154 ms, fp32 186, bf16 161", _DDP),
        "a longer start; first see whether it pays (`dct advise`)",
    ),
    Recommendation(
        _ADAM, (_SLOW,), (3, 4), (0,), {"sparsity": 0.99, "exchange": "two_phase"},
        Measured("32.9x", _AHEAD), Measured("+0.0035 ± 0.0164 nats", _AHEAD), None,
        "leave `exchange` out (23.7x), then " + _LONGER,
    ),
    Recommendation(
        _ADAM, (_GIGABIT, _FAST), (3, 4), (0,), {"sparsity": 0.99},
        Measured("23.7x", _AHEAD), Measured("+0.0005 ± 0.0104 nats", _AHEAD),
        Measured("1 Gbit/s: 305 ms, fp32 899, bf16 561", _DDP),
        _LONGER,
    ),
    Recommendation(
        _ADAM, tuple(LINKS), (5, 8), (0,),
        {"sparsity": 0.96, "value_dtype": "int4", "expert": {"server_density": 1.65}},
        Measured("50.0x", _COMPRESSORS),
        Measured("+0.0028 ± 0.0110 nats", _COMPRESSORS), None,
        _LONGER,
    ),
    Recommendation(
        _ADAM, tuple(LINKS), (9, 16), (0,),
        {"sparsity": 0.96, "value_dtype": "int4", "expert": {"server_density": 1.65}},
        Measured("49.0x", _COMPRESSORS),
        Measured("+0.0154 ± 0.0101 nats", _COMPRESSORS), None,
        _LONGER,
    ),
    Recommendation(
        _ADAM, (_SLOW,), (2, 2), (1, 2),
        {"sparsity": 0.99, "parameters": {"sparsity": 0.97, "value_dtype": "int4"}},
        Measured("65.1x", _UPDATES), Measured("-0.0046 ± 0.0120 nats", _UPDATES), None,
        "`parameters.value_dtype` bf16, then " + _GENTLER,
    ),
    Recommendation(
        _ADAM, (_GIGABIT,), (2, 2), (1, 2), {"sparsity": 0.99, "parameters": {"sparsity": 0.97}},
        Measured("52.4x", _UPDATES), Measured("-0.0038 ± 0.0099 nats", _UPDATES),
        Measured("ZeRO-1, 1 Gbit/s: 268 ms, fp32 1121, bf16 914", _DEEPSPEED),
        _GENTLER,
    ),
    Recommendation(
        _ADAM, (_FAST,), (2, 2), (1, 2), {"sparsity": 0.99, "parameters": {"sparsity": 0.9}},
        Measured("29.9x", _UPDATES), Measured("-0.0054 ± 0.0111 nats", _UPDATES), None,
        "leave `parameters` out",
    ),
    Recommendation(
        _ADAM, tuple(LINKS), (3, 4), (1, 2), {"sparsity": 0.99, "parameters": {"sparsity": 0.97}},
        Measured("51x", _UPDATES), Measured("+0.0094 ± 0.0055 nats", _UPDATES), None,
        _GENTLER,
    ),
    Recommendation(
        _ADAM, tuple(LINKS), (5, 8), (1, 2),
        {
            "sparsity": 0.96, "value_dtype": "int4",
            "parameters": {"sparsity": 0.9, "value_dtype": "int4"},
        },
        Measured("60.7x", _COMPRESSORS), Measured("-0.0018 ± 0.0072 nats", _COMPRESSORS), None,
        "leave `parameters` out",
    ),
    Recommendation(
        _ADAM, tuple(LINKS), (2, 2), (3,), None,
        Measured("2.7x at 0.9", _ZERO3), Measured("+0.0528 nats at 0.9 (one seed)", _ZERO3), None,
        "take ZeRO stage 1 or 2, which have step-ahead, where the memory allows it; with several ranks per "
        "node `zero_hpz_partition_size` and `parameters`",
    ),
    Recommendation(
        _MOMENTUM, (_SLOW, _GIGABIT), (2, 2), (0,), {"sparsity": 0.99},
        Measured("118x (another model)", _WIRE), Measured("-0.0025 ± 0.0063 AUC", _AHEAD),
        Measured("ZeRO-0, 1 Gbit/s: 174 ms, fp32 687, bf16 466", _DEEPSPEED),
        '`sparsity` 0.9, `feedback` "local"',
    ),
    Recommendation(
        _MOMENTUM, (_FAST,), (2, 2), (0,), {"sparsity": 0.9, "feedback": "local"},
        Measured("5.6 MB per step, fp32 85.8 MB (another model)", _DDP),
        Measured("-0.0013 ± 0.0027 AUC", _OPTIMIZERS), None,
        "leave the plugin out",
    ),
    Recommendation(
        _ADAGRAD, tuple(LINKS), (2, 2), (0,), {"sparsity": 0.99},
        Measured("92x (another run)", _AHEAD), Measured("+0.0010 ± 0.0011 AUC", _OPTIMIZERS),
        Measured("1 Gbit/s: 44.7 ms, fp32 85.6, bf16 67.4", "performance.md#the-demo"),
        "`sparsity` 0.9, in runs of some hundred steps too: Criteo lost 0.001 to 0.003 AUC in 125 steps",
    ),
    Recommendation(
        _SGD, tuple(LINKS), (2, 2), (0,), {"sparsity": 0.99},
        Measured("118x (another model)", _WIRE), Measured("+0.0082 ± 0.0017 AUC", _OPTIMIZERS), None,
        "`sparsity` 0.9; the gain says that the dense run was under-trained",
    ),
)  # fmt: skip
