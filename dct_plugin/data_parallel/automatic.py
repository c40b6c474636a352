"""Sparsity chosen by measurement: the gentlest setting that makes a step fastest, on this link and processor.

The first steps are dense and timed. Then every setting that the quality class allows is timed on random
entries (coding, decoding, bytes), the link is probed in the job's own exchange, and the time of a step is
predicted:

    step = rest + exposed * (coding + decoding + rounds * latency + bytes / rate)

``rest`` is the dense step without its exposed reduction. ``exposed`` is the share of the dense reduction that
the backward pass did not hide. The settings with the least predicted times then run for some steps each, in
turns, and then the best one's other types of values and its other topology. The fastest of these and of the
current setting stays. Later steps and probes of the link are compared with those of the decision: when they
differ, the ranks decide again. Source of the idea: Espresso (Wang et al., EuroSys 2023), which decides from a
measured timeline.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.message import MessageWriter
from ..config.automatic import LOSSLESS, Setting, settings_within
from ..host_traffic import own_traffic
from ..metrics import Metrics, format_bytes
from ..stream import Compressor
from . import lossless
from .add_on import AddOn, ReducerContext
from .stream_group import Sparsity, StreamGroup
from .topologies import Topologies

logger = logging.getLogger("dct_plugin")

#: Entries on which a setting is timed, and bytes of the link's probe.
_ENTRIES, _PROBE = 1 << 17, 1 << 17
#: Repetitions of each; the least time counts.
_REPEATS = 3


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

    @property
    def seconds(self) -> float:
        """Seconds of a probe."""
        return self.latency + _PROBE * self.byte


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


class AutomaticSparsity(AddOn):
    """Chooses sparsity, value type and topology for all tensors of a reducer, or the dense exchange.

    Args:
        group: Streams and process group.
        settings: What the quality class allows; the first one is the dense exchange.
        topologies: Those of the reducer.
    """

    key = "automatic"
    pace = Pace()
    observer: ClassVar[Callable[[CostModel], None] | None] = None
    """Called with the first model on every rank, in place of a decision: all steps then stay dense."""

    def __init__(self, group: StreamGroup, settings: Sequence[Setting], topologies: Topologies) -> None:
        self._group, self._settings, self._topologies = group, settings, topologies
        # On a device slots are laid out for one type of values; else every entry is sent exactly.
        self._flush = Setting(0.0, group.settings.value_dtype if group.fixed_size else "fp32")
        self.current = settings[0]
        """The setting of the coming step, the same on all ranks."""
        self._holds_residuals = False
        """True if residuals may hold something; the same on all ranks."""
        self._sizes: dict[str, tuple[int, int]] = {}
        """Entries and bytes of each tensor."""
        self._seconds: list[float] = []
        self._began = 0.0
        self._steps_left = -1
        """Steps until the next decision; negative: there is none."""
        self._start(None)

    @classmethod
    def configured(cls, context: ReducerContext) -> AutomaticSparsity | None:
        config, group = context.config, context.group
        if config.quality is None or group.world_size == 1:
            return None
        # On a device slots are laid out for one type of values.
        allowed = settings_within(config, all_types=not group.fixed_size)
        return cls(group, allowed, context.topologies)

    @property
    def dense(self) -> bool:
        return self.current.is_exact

    @property
    def lossless(self) -> bool:
        return self.current.value_dtype == LOSSLESS

    def observe(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        self._sizes.update((name, (tensor.numel(), tensor.nbytes)) for name, tensor in entries)

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        if self.current.sparsity == 0.0:
            return Sparsity(1.0)
        return Sparsity(max(1.0 - self.current.sparsity, self._group.schedule.density(self._group.step)))

    def end_step(self, *, skipped: bool) -> None:
        """Time the step. If a decision is due, decide, which is a collective of the host's group."""
        now = time.perf_counter()
        if self._began:
            self._seconds.append(now - self._began)
        self._steps_left -= 1
        if self._steps_left == 0:
            with own_traffic(recorded=False):
                self._steps_left = next(self._decisions, -1)
        self._began = time.perf_counter()  # a decision is no part of the next step

    def state_dict(self) -> Any:
        topology = self._topologies.exchange
        return {"current": tuple(self.current), "is_decided": self._has_decided, "exchange": topology}

    def load_state_dict(self, state: Any, *, step: int) -> None:
        # Residuals of another number of ranks come without a setting.
        saved = {"current": (), "is_decided": state is not None, "exchange": None} | (state or {})
        known = Setting(*saved["current"]) if saved["is_decided"] else None
        if self._has_decided and known == self.current:
            return  # the host loads what it saved in this run, in another unit
        self._holds_residuals = step > 0
        self._topologies.use(saved["exchange"])  # of which the residuals are, whatever may be chosen now
        self._start(known if known is not None and self._is_allowed(known) else None)

    def _is_allowed(self, setting: Setting) -> bool:
        is_known = setting._replace(exchange=None) in self._settings
        return is_known and setting.exchange in (None, self._topologies.alternative)

    # -- decisions ---

    def _start(self, known: Setting | None) -> None:
        self._use(self._settings[0] if known is None else known)
        self._seconds.clear()
        self._has_decided = known is not None
        self._decisions = self._decide(is_known=known is not None)
        self._steps_left = next(self._decisions, -1)

    def _decide(self, *, is_known: bool) -> Iterator[int]:
        """Yield the number of steps until the next decision; on all ranks alike.

        Args:
            is_known: Whether a training goes on with its setting; otherwise the first steps are dense.
        """
        pace, group = self.pace, self._group
        if len(self._settings) == 1:
            if self._holds_residuals:
                yield max(1, group.schedule.warmup_steps - group.step)
                yield from self._change_to(self.current)
            return
        began, waited, hidden = group.reduce_seconds, group.exchange.waited_ms, _hidden_seconds(group.metrics)
        steps = pace.settle + pace.trial
        if not is_known:
            steps = max(group.schedule.warmup_steps - group.step, pace.settle + pace.measured)
        yield steps
        reduction = (group.reduce_seconds - began) / steps
        exposed = 1.0 - (_hidden_seconds(group.metrics) - hidden) / steps / reduction if reduction else 1.0
        # With any setting a rank waits for slower ones.
        waited = 1e-3 * (group.exchange.waited_ms - waited) / steps
        measured = max(reduction - waited, 0.0) if self.current.is_dense else None
        now, link, why = self._median(), self._probe(), "measured"
        while True:
            model = self._model(now, measured, exposed, link)
            if AutomaticSparsity.observer is not None:
                AutomaticSparsity.observer(model)
                return
            seconds = {self.current: now}
            chosen = yield from self._chosen(model, seconds)
            yield from self._change_to(chosen)
            self._has_decided = True
            self._report(chosen, seconds, model.predict(chosen), link, why)
            now, link, why = yield from self._watch(seconds[chosen], link)
            measured = None

    def _chosen(self, model: CostModel, seconds: dict[Setting, float]) -> Generator[int, None, Setting]:
        """Try settings and return the best one; ``seconds`` gets those of a step with each."""
        pace, current = self.pace, self.current.exchange
        settings = [each if each.is_exact else each._replace(exchange=current) for each in self._settings]
        seconds |= yield from self._tried(likely([model.predict(each) for each in settings], pace))
        chosen = fastest(seconds, pace)
        if not chosen.is_dense:
            seconds |= yield from self._tried(
                [each for each in settings[1:] if each.sparsity == chosen.sparsity and each not in seconds]
            )
            chosen = fastest(seconds, pace)
        alternative = self._topologies.alternative
        if alternative is None or chosen.is_exact or self._topologies.sums_at_owners:
            return chosen
        other = chosen._replace(exchange=alternative if chosen.exchange is None else None)
        if model.predict(other).total <= pace.likely * model.predict(chosen).total:
            seconds |= yield from self._tried([other])
        return fastest(seconds, pace)

    def _tried(self, settings: Sequence[Setting]) -> Generator[int, None, dict[Setting, float]]:
        """Run settings in turns; return the seconds of a step with each."""
        pace = self.pace
        if list(settings) == [self.current]:
            return {}
        found: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for _ in range(pace.rounds):
            for setting in settings:
                yield from self._change_to(setting)
                yield pace.settle + pace.trial
                found[setting].append(self._median())
        return {setting: statistics.fmean(medians) for setting, medians in found.items()}

    def _change_to(self, setting: Setting) -> Iterator[int]:
        """Take a setting: the dense one after a step that sends all residuals, others after the start."""
        schedule, step = self._group.schedule, self._group.step
        if setting.is_exact and self._holds_residuals:
            self._use(self._flush._replace(exchange=self.current.exchange))
            yield 1
            self._holds_residuals = False
        self._use(setting)
        if not setting.is_exact and schedule.starting(step):
            yield schedule.warmup_steps + schedule.ramp_steps - step

    def _watch(self, reference: float, link: Link) -> Generator[int, None, tuple[float, Link, str]]:
        """Go on until steps or link differ from the decision; return both, and the reason in words."""
        pace, departures = self.pace, 0
        for window in itertools.count(1):
            yield pace.window
            now = self._median()
            departures += 1
            if 1 / pace.departs < now / reference < pace.departs:
                departures = 0
            if departures >= 2 or window % pace.probes == 0:
                found = self._probe()
                change = found.seconds / link.seconds
                if departures >= 2:
                    return now, found, f"steps take {1e3 * now:.0f} ms, were {1e3 * reference:.0f}"
                if not 1 / pace.link_departs < change < pace.link_departs:
                    return now, found, f"the link takes {change:.2g} times as long"
        raise AssertionError("unreachable")

    def _use(self, setting: Setting) -> None:
        self.current, group = setting, self._group
        self._holds_residuals |= not setting.is_exact
        self._topologies.use(setting.exchange)
        if setting.value_dtype not in (None, LOSSLESS, group.settings.value_dtype):
            group.set_value_dtype(setting.value_dtype)

    # -- measurements, the same on all ranks ---

    def _median(self) -> float:
        """Return the median seconds of the last steps, of the slowest rank; a collective."""
        last, self._seconds = self._seconds[-self.pace.trial :], []
        return self._agreed([statistics.median(last)])[0]

    def _agreed(self, figures: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' figures; a collective of the host's group."""
        agreed = torch.tensor(figures, dtype=torch.float64, device=self._group.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group.group)
        return agreed.tolist()

    def _probe(self) -> Link:
        """Time small and large messages in the job's own exchange; a collective."""
        exchange, found = self._group.exchange, []
        for size in (1, _PROBE):
            message = torch.zeros(size, dtype=torch.uint8, device=self._group.device)
            times = []
            for _ in range(_REPEATS + 1):
                began = time.perf_counter()
                exchange.all_gather(message)
                times.append(time.perf_counter() - began)
            found.append(min(times[1:]))  # the first waits for other ranks
        latency, large = self._agreed(found)
        return Link(latency, max(large - latency, 0.0) / _PROBE)

    def _model(self, now: float, reduction: float | None, exposed: float, link: Link) -> CostModel:
        """Return the model of a training whose steps take ``now`` seconds; a collective.

        Args:
            now: Seconds of a step with the current setting.
            reduction: Seconds of a dense reduction; None: follows from the link.
            exposed: Share of reductions that the backward pass does not hide.
            link: Figures of the link.
        """
        group, names = self._group, [each for each in self._settings if not each.is_dense]
        timed = self._agreed(
            [figure for setting in names for figure in _time_coding(group, setting)]
            + [exposed, reduction or 0.0]
        )
        codings = {setting: Coding(*timed[3 * i : 3 * i + 3]) for i, setting in enumerate(names)}
        sizes = [(group.is_small(name, size[0]), *size) for name, size in self._sizes.items()]
        small = sum(nbytes for is_small, _, nbytes in sizes if is_small)
        large = sum(numel for is_small, numel, _ in sizes if not is_small)
        width = (sum(nbytes for *_, nbytes in sizes) - small) / large if large else 4.0
        exposed, reduction = min(max(timed[-2], 0.05), 1.0), timed[-1] if reduction is not None else None
        topologies = self._topologies
        model = CostModel(
            0.0,
            exposed,
            reduction,
            codings,
            link,
            large,
            small,
            group.world_size,
            direct=topologies.by_rule == "direct",
            answers=group.settings.server_density,
            gathers=int(topologies.sums_at_owners),
            width=width,
        )
        return model._replace(rest=max(now - model.predict(self.current).total, 0.0))

    def _report(
        self,
        chosen: Setting,
        seconds: Mapping[Setting, float],
        predicted: Prediction,
        link: Link,
        why: str,
    ) -> None:
        """Log a decision with its reason in milliseconds, on the first rank; write it to the metrics."""
        if self._group.metrics is not None:
            self._group.metrics.event(
                "decision",
                step=self._group.step,
                setting=str(chosen),
                reason=why,
                predicted_ms=1e3 * predicted.total,
                measured_ms=1e3 * seconds[chosen],
                tried_ms={str(setting): 1e3 * measured for setting, measured in seconds.items()},
            )
        if dist.get_rank():
            return
        others = ", ".join(
            f"{setting} {1e3 * measured:.1f}" for setting, measured in seconds.items() if setting != chosen
        )
        logger.warning(
            "dct: step %d: %s: %.1f ms a step%s; predicted %.1f (coding %.1f, exchange %.1f); link %s, "
            "%.2f ms (%s)",
            self._group.step,
            chosen,
            1e3 * seconds[chosen],
            f" ({others})" if others else "",
            1e3 * predicted.total,
            1e3 * predicted.coding,
            1e3 * predicted.exchange,
            f"{format_bytes((self._group.world_size - 1) / link.byte)}/s" if link.byte else "without limit",
            1e3 * link.latency,
            why,
        )


def _hidden_seconds(metrics: Metrics | None) -> float:
    """Return the seconds so far that reductions passed beside the backward pass."""
    if metrics is None:
        return 0.0
    summary = metrics.summary()
    return 1e-3 * summary.hidden_ms * summary.steps


def _time_coding(group: StreamGroup, setting: Setting) -> Coding:
    """Time the coding and decoding of random entries, the least of some repetitions."""
    data = torch.randn(_ENTRIES, device=group.device)
    if setting.is_exact:
        return _time_lossless(data * torch.rand(_ENTRIES))  # exponents as varied as a gradient's
    stream = Compressor(
        group.settings, sparsity=setting.sparsity, value_dtype=setting.value_dtype, kernels=group.kernels
    )
    total, found = torch.zeros_like(data), []
    for _ in range(_REPEATS):
        writer, began = MessageWriter(group.device), time.perf_counter()
        stream.observe(stream.encode(data, [(0, _ENTRIES, writer)], 1.0 - setting.sparsity))
        encoded = time.perf_counter()
        group.backend.decode_add(writer.message, total)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        found.append((encoded - began, time.perf_counter() - encoded, writer.message.numel()))
    return Coding(*(min(figures) / _ENTRIES for figures in zip(*found, strict=True)))


def _time_lossless(data: Tensor) -> Coding:
    found = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        message = lossless.encode(data)
        encoded = time.perf_counter()
        lossless.decode(message, data)
        found.append((encoded - began, time.perf_counter() - encoded, message.numel()))
    return Coding(*(min(figures) / _ENTRIES for figures in zip(*found, strict=True)))
