"""Rules of the automatic mode: which settings are worth a trial, and which of those that were timed stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..config.automatic import Setting
from .cost_model import Prediction


class Pace(NamedTuple):
    """Numbers of steps, and ratios of times."""

    measured: int = 12
    """The least number of dense steps at the start."""
    settle: int = 2
    """Steps after a change that are not timed."""
    trial: int = 8
    """Timed steps of a setting that is tried, in each round."""
    rounds: int = 2
    """Rounds in which settings take turns, so that a slow spell of the machine meets all of them."""
    tried: int = 3
    """Most sparsities that are tried in one decision; the best one's other types of values follow."""
    likely: float = 1.2
    """Settings are tried whose prediction is at most so many times the best one."""
    window: int = 25
    """Steps from one comparison with the decision to the next."""
    probes: int = 8
    """Windows from one probe of the link to the next."""
    departs: float = 1.25
    """The ranks decide again when two successive windows differ from the decision by this factor."""
    link_departs: float = 2.0
    """The ranks decide again when a probe takes so many times as long, or as short, as before."""
    alike: float = 1.03
    """Settings within this factor of the fastest are as fast: the gentlest one is taken."""


def likely(predictions: Sequence[Prediction], pace: Pace) -> list[Setting]:
    """Return the settings worth a trial, one for each sparsity: those predicted to be fastest, the gentlest
    of the best first.
    """
    leading: dict[tuple[bool, float], Prediction] = {}
    for each in sorted(predictions, key=lambda prediction: prediction.total):
        leading.setdefault((each.setting.is_dense, each.setting.sparsity), each)
    best = min(each.total for each in predictions)
    near = [each for each in leading.values() if each.total <= pace.likely * best]
    alike = [each.setting for each in near if each.total <= pace.alike * best]
    first = min(alike, key=lambda setting: setting.strength)
    return [first, *(each.setting for each in near if each.setting != first)][: pace.tried]


def fastest(seconds: Mapping[Setting, float], pace: Pace) -> Setting:
    """Return the gentlest of the settings that are as fast as the fastest one."""
    least = min(seconds.values())
    alike = [setting for setting, measured in seconds.items() if measured <= pace.alike * least]
    return min(alike, key=lambda setting: setting.strength)
