"""The predicted time of a training step with each setting, from measured times of coding, link and step:

    step = rest + exposed * (coding + decoding + rounds * latency + bytes / rate)

``rest`` is the dense step without its exposed reduction. ``exposed`` is the share of the dense reduction that
the backward pass did not hide.
"""

from __future__ import annotations

from typing import NamedTuple

from ..config.automatic import Setting


class Coding(NamedTuple):
    """Seconds and bytes of a setting for one entry of a tensor."""

    encode: float
    decode: float
    nbytes: float


class Link(NamedTuple):
    """The speed of the link, as the probe found it."""

    latency: float
    """Seconds of a round of small messages."""
    byte: float
    """Seconds for one more byte to every other rank."""

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a round of messages of ``nbytes`` bytes."""
        return self.latency + nbytes * self.byte


class Prediction(NamedTuple):
    """The predicted time of a step in seconds, by its parts, with one setting."""

    setting: Setting
    rest: float
    coding: float
    exchange: float

    @property
    def total(self) -> float:
        return self.rest + self.coding + self.exchange


class CostModel(NamedTuple):
    """Figures of a training, the same on all ranks, from which the time of a step is predicted.

    Attributes:
        rest: Seconds of a step without the exposed part of its reduction.
        exposed: Share of a reduction that the backward pass does not hide.
        dense: Seconds of a dense reduction; None: computed from ``link``.
        codings: Figures of every setting.
        link: Figures of the link.
        large, small: Entries that are thresholded, and bytes of tensors that never are.
        ranks: Ranks that exchange messages.
        direct: Whether every rank sends its messages to all others, by rule.
        answers: In two phases, density of what owners send as a multiple of what they receive.
        gathers: Gathers of all weights in a step, where owners alone get the sums; else 0.
        width: Bytes of an entry of gradients and weights.
    """

    rest: float
    exposed: float
    dense: float | None
    codings: dict[Setting, Coding]
    link: Link
    large: int
    small: int
    ranks: int
    direct: bool
    answers: float = 1.0
    gathers: int = 0
    width: float = 4.0

    def at(self, rate: float) -> CostModel:
        """Return the model of the same training on links of so many bits per second. What the dense exchange
        takes here beyond its latency and bytes, it takes there, too.
        """
        link = Link(self.link.latency, 8.0 * (self.ranks - 1) / rate)
        gathering = self.gathered / (self.ranks - 1) * (link.byte - self.link.byte)
        there = self._replace(link=link, rest=max(self.rest + gathering, 0.0))
        if self.dense is None:
            return there
        beyond = max(self.dense - self._exchange(Setting()), 0.0)
        return there._replace(dense=there._exchange(Setting()) + beyond)

    def nbytes(self, setting: Setting) -> float:
        """Return the bytes that a rank sends in a step, headers of the transport left out."""
        return self._reduced(setting) + self.gathered

    @property
    def gathered(self) -> float:
        """Bytes of weights that a rank sends in a step, with every setting."""
        share = (self.ranks - 1) / self.ranks
        return self.gathers * share * (self.width * self.large + self.small)

    def _reduced(self, setting: Setting) -> float:
        """Return the bytes of gradients that a rank sends in a step."""
        share = (self.ranks - 1) / self.ranks
        if setting.is_dense:
            return 2.0 * share * (self.width * self.large + self.small)
        crossing = share * (1.0 + self._answers(setting))
        if self._is_direct(setting):
            crossing = self.ranks - 1
        return crossing * self._coding(setting).nbytes * self.large + 2.0 * share * self.small

    def predict(self, setting: Setting) -> Prediction:
        """Return the prediction for a setting."""
        exchange = self._exchange(setting)
        if setting.is_dense:
            exchange = exchange if self.dense is None else self.dense
            return Prediction(setting, self.rest, 0.0, self.exposed * exchange)
        coding, answers = self._coding(setting), self._answers(setting)
        encoded, decoded = 1.0 + (answers > 0) / self.ranks, 1.0 + answers
        if self._is_direct(setting):
            encoded, decoded = 1.0, self.ranks
        per_entry = coding.encode * encoded + coding.decode * decoded
        return Prediction(setting, self.rest, self.exposed * per_entry * self.large, self.exposed * exchange)

    def _coding(self, setting: Setting) -> Coding:
        return self.codings[setting._replace(exchange=None)]

    def _answers(self, setting: Setting) -> float:
        """Return what owners send of a tensor, as a multiple of what they receive."""
        if setting.is_exact:
            return 1.0
        return 0.0 if self.gathers else min(self.answers, 1.0 / (1.0 - setting.sparsity))

    def _is_direct(self, setting: Setting) -> bool:
        direct = self.direct if setting.exchange is None else setting.exchange == "direct"
        return direct and not (setting.is_exact or self.gathers)

    def _exchange(self, setting: Setting) -> float:
        """Return the seconds of an exchange by its rounds and bytes."""
        rounds = 1.0 if setting.is_dense or self._is_direct(setting) or not self._answers(setting) else 2.0
        return rounds * self.link.latency + self._reduced(setting) / (self.ranks - 1) * self.link.byte
