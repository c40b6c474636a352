"""The rules of the automatic mode: which settings it times, and which of the timed ones it keeps.

A setting is *gentler* than another if its sparsity is lower or, at the same sparsity, its values are wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...policy.settings import Setting
from .cost_model import Prediction


class DecisionRules(NamedTuple):
    """Numbers of steps, and the ratios of times that count as a difference."""

    dense_steps: int = 12
    """The least number of timed dense steps at the start."""
    settling_steps: int = 2
    """Steps after a change of the setting that are not timed."""
    trial_steps: int = 8
    """Timed steps of a setting in each round of trials."""
    rounds: int = 2
    """Rounds of trials. All settings run in each, so that a slow spell of the machine affects all of them."""
    most_sparsities: int = 3
    """Most sparsities that one decision tries."""
    trial_ratio: float = 1.2
    """A setting is tried if its predicted time is at most so many times the least one."""
    window_steps: int = 25
    """Steps from one comparison with the decision to the next."""
    windows_per_probe: int = 8
    """Comparisons from one probe of the link to the next."""
    step_ratio: float = 1.25
    """The ranks decide again when steps of two successive windows are slower or faster by this factor."""
    link_ratio: float = 2.0
    """The ranks decide again when a probe of the link is slower or faster by this factor."""
    equal_ratio: float = 1.03
    """Settings that take at most so many times as long as the fastest count as equally fast."""


def settings_to_try(predictions: Sequence[Prediction], rules: DecisionRules) -> list[Setting]:
    """Return the settings that are worth a trial: the fastest one of each sparsity, if it is predicted to be
    nearly as fast as the best. The gentlest of the equally fast ones comes first.
    """
    by_sparsity: dict[tuple[bool, float], Prediction] = {}
    for each in sorted(predictions, key=lambda prediction: prediction.total):
        by_sparsity.setdefault((each.setting.is_dense, each.setting.sparsity), each)
    best = min(each.total for each in predictions)
    near = [each for each in by_sparsity.values() if each.total <= rules.trial_ratio * best]
    first = gentlest_of_fastest({each.setting: each.total for each in near}, rules)
    return [first, *(each.setting for each in near if each.setting != first)][: rules.most_sparsities]


def gentlest_of_fastest(seconds: Mapping[Setting, float], rules: DecisionRules) -> Setting:
    """Return the gentlest of the settings that are as fast as the fastest one."""
    least = min(seconds.values())
    fastest = [setting for setting, measured in seconds.items() if measured <= rules.equal_ratio * least]
    return min(fastest, key=lambda setting: setting.strength)
