"""The predicted time of a training step with each setting, from measured times of codings, link and step:

    step = rest + reductions * (coding + decoding + rounds * latency + bytes / rate) + step_ahead

``rest`` is the dense step without its reductions. :class:`DecisionRules` say which settings are timed, and
which of the timed ones stays. A setting is *gentler* than another if its sparsity is lower or, at the same
sparsity, its values are wider.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...policy.rules import Setting


class Coding(NamedTuple):
    """The time and size of one entry of a tensor in a setting's code."""

    encode: float
    """Seconds."""
    decode: float
    """Seconds."""
    nbytes: float
    per_tensor: float = 0.0
    """Seconds for a tensor, however many entries it has: to encode it, and to decode the messages of all."""


class Link(NamedTuple):
    """The measured speed of the link."""

    latency: float
    """Seconds of a round of small messages."""
    seconds_per_byte: float
    """Seconds for one more byte to every other rank."""

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a round of messages of ``nbytes`` bytes."""
        return self.latency + nbytes * self.seconds_per_byte


class Prediction(NamedTuple):
    """The predicted time of a step with one setting, in seconds, by its parts."""

    setting: Setting
    rest: float
    coding: float
    exchange: float

    @property
    def total(self) -> float:
        return self.rest + self.coding + self.exchange


class CostModel(NamedTuple):
    """Measured figures of a training, the same on all ranks, that predict the time of a step.

    Attributes:
        rest: Seconds of a step without its reductions.
        dense_reduction: Seconds of the dense reductions of a step; None: computed from ``link``.
        codings: Times and sizes for every setting but the dense one.
        link: Speed of the link.
        large_entries: Entries of the tensors that are thresholded.
        small_bytes: Bytes of the tensors that are never thresholded.
        ranks: Ranks that exchange messages.
        is_direct: True if the topology is the direct one: every rank sends its messages to all.
        server_density: In the two-phase exchange, the density of what owners send, as a multiple of the
            density of what they receive.
        weight_gathers: How often a step gathers all weights, where only owners get the sums; else 0.
        entry_bytes: Bytes of an entry of gradients and weights.
        reductions: How often a step reduces all gradients: with ZeRO-2 and accumulation for each micro-batch.
        step_ahead: Seconds of a step for second moments and displaced weights.
        large_tensors: Tensors that are thresholded.
        steps: The settings whose steps were timed: seconds without the time of the bytes, and bytes that a
            rank sends. Empty where all is predicted.
    """

    rest: float
    dense_reduction: float | None
    codings: dict[Setting, Coding]
    link: Link
    large_entries: int
    small_bytes: int
    ranks: int
    is_direct: bool
    server_density: float = 1.0
    weight_gathers: int = 0
    entry_bytes: float = 4.0
    reductions: int = 1
    step_ahead: float = 0.0
    large_tensors: int = 0
    steps: Mapping[Setting, tuple[float, float]] = {}

    def at_rate(self, rate: float) -> CostModel:
        """Return the model of the same training on links of ``rate`` bits per second. The part of the dense
        reduction that latency and bytes do not explain takes as long there as it does here.
        """
        link = Link(self.link.latency, 8.0 * (self.ranks - 1) / rate)
        slower = link.seconds_per_byte - self.link.seconds_per_byte
        there = self._replace(
            link=link, rest=max(self.rest + self._per_rank(self.gathered_bytes) * slower, 0.0)
        )
        if self.dense_reduction is None:
            return there
        unexplained = max(self.dense_reduction - self._exchange_seconds(Setting()), 0.0)
        return there._replace(dense_reduction=there._exchange_seconds(Setting()) + unexplained)

    @property
    def link_rate(self) -> float:
        """Bytes that a rank sends per second, where the link sets the pace; infinite if it has no limit."""
        return (self.ranks - 1) / self.link.seconds_per_byte if self.link.seconds_per_byte else math.inf

    def sent_bytes(self, setting: Setting) -> float:
        """Return the bytes that a rank sends in a step, without the headers of the transport."""
        if setting in self.steps:
            return self.steps[setting][1]
        return self.reductions * self._gradient_bytes(setting) + self.gathered_bytes

    @property
    def gathered_bytes(self) -> float:
        """Bytes of weights that a rank sends in a step, the same with every setting of gradients."""
        return self.weight_gathers * (self.ranks - 1) / self.ranks * self._dense_bytes

    @property
    def _dense_bytes(self) -> float:
        return self.entry_bytes * self.large_entries + self.small_bytes

    def _per_rank(self, nbytes: float) -> float:
        """Return the bytes for each of the other ranks."""
        return nbytes / (self.ranks - 1)

    def _gradient_bytes(self, setting: Setting) -> float:
        """Return the bytes of gradients that a rank sends in one reduction of them."""
        share = (self.ranks - 1) / self.ranks
        if setting.is_dense:
            return 2.0 * share * self._dense_bytes
        copies = share * (1.0 + self._server_density(setting))
        if self._is_direct(setting):
            copies = self.ranks - 1
        return copies * self.codings[setting].nbytes * self.large_entries + 2.0 * share * self.small_bytes

    def predict(self, setting: Setting) -> Prediction:
        """Return the predicted time of a step with a setting."""
        if setting in self.steps:
            rest, sent = self.steps[setting]
            return Prediction(setting, rest, 0.0, self._per_rank(sent) * self.link.seconds_per_byte)
        exchange = self._exchange_seconds(setting)
        if setting.is_dense:
            exchange = exchange if self.dense_reduction is None else self.dense_reduction
            return Prediction(setting, self.rest, 0.0, exchange)
        coding, server_density = self.codings[setting], self._server_density(setting)
        # How often a rank encodes and decodes the entries of a model.
        encoded, decoded = 1.0 + (server_density > 0) / self.ranks, 1.0 + server_density
        if self._is_direct(setting):
            encoded, decoded = 1.0, self.ranks
        seconds = self.large_entries * (coding.encode * encoded + coding.decode * decoded)
        seconds = self.reductions * (seconds + self.large_tensors * coding.per_tensor) + self.step_ahead
        return Prediction(setting, self.rest, seconds, exchange)

    def _server_density(self, setting: Setting) -> float:
        """Return the density of what owners send, as a multiple of that of what they receive."""
        if setting.is_dense:
            return 1.0
        return 0.0 if self.weight_gathers else min(self.server_density, 1.0 / (1.0 - setting.sparsity))

    def _is_direct(self, setting: Setting) -> bool:
        return self.is_direct and not (setting.is_dense or self.weight_gathers)

    def _exchange_seconds(self, setting: Setting) -> float:
        """Return the seconds of a step's exchanges, from their rounds and bytes."""
        has_one_round = setting.is_dense or self._is_direct(setting) or not self._server_density(setting)
        sent = self._per_rank(self._gradient_bytes(setting)) * self.link.seconds_per_byte
        return self.reductions * ((1.0 if has_one_round else 2.0) * self.link.latency + sent)


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
