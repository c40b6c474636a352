"""The automatic mode: the gentlest setting that makes a step fastest, on this link and processor.

The gentlest setting is the one of the lowest sparsity and, among those, of the widest values. The first steps
are dense and timed. Then every setting that the quality class allows is timed on random entries (coding,
decoding, bytes), the link is probed in the job's own exchange (:mod:`.measurements`), and the time of a step
is predicted (:mod:`.cost_model`). The settings with the least predicted times run for some steps each, in
turns; then the best one's other types of values, and its other topology. The fastest of these and of the
current setting stays (:mod:`.decision_rules`). Later steps and probes of the link are compared with those of
the decision: when they differ, the ranks decide again. Source of the idea: Espresso (Wang et al., EuroSys
2023), which decides from a measured timeline.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ..config.automatic import LOSSLESS, Setting, settings_within
from ..host_traffic import own_traffic
from ..metrics import format_bytes
from .add_on import AddOn, ReducerContext
from .cost_model import CostModel, Link, Prediction
from .decision_rules import Pace, fastest, likely
from .measurements import PROBE_BYTES, GradientSizes, ReductionTimer, largest, probe_link, time_codings
from .stream_group import Sparsity, StreamGroup
from .topologies import Topologies

logger = logging.getLogger("dct_plugin")


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
        reductions = ReductionTimer(group)
        steps = pace.settle + pace.trial
        if not is_known:
            steps = max(group.schedule.warmup_steps - group.step, pace.settle + pace.measured)
        yield steps
        reduction, exposed = reductions.per_step(steps)
        dense = reduction if self.current.is_dense else None
        now, link, why = self._median(), probe_link(group), "measured"
        while True:
            model = self._model(now, dense, exposed, link)
            if AutomaticSparsity.observer is not None:
                AutomaticSparsity.observer(model)
                return
            seconds = {self.current: now}
            chosen = yield from self._chosen(model, seconds)
            yield from self._change_to(chosen)
            self._has_decided = True
            self._report(chosen, seconds, model.predict(chosen), link, why)
            now, link, why = yield from self._watch(seconds[chosen], link)
            dense = None  # which follows from the link that it has now

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
                found = probe_link(self._group)
                change = found.seconds(PROBE_BYTES) / link.seconds(PROBE_BYTES)
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
        return largest(self._group, [statistics.median(last)])[0]

    def _model(self, now: float, dense: float | None, exposed: float, link: Link) -> CostModel:
        """Return the model of a training whose steps take ``now`` seconds; a collective.

        Args:
            now: Seconds of a step with the current setting.
            dense: Seconds of a dense reduction; None: computed from the link.
            exposed: Share of reductions that the backward pass does not hide.
            link: The speed of the link.
        """
        group, sizes = self._group, GradientSizes.of(self._group, self._sizes)
        model = CostModel(
            0.0,
            exposed,
            dense,
            time_codings(group, [each for each in self._settings if not each.is_dense]),
            link,
            sizes.large,
            sizes.small,
            group.world_size,
            direct=self._topologies.by_rule == "direct",
            answers=group.settings.server_density,
            gathers=int(self._topologies.sums_at_owners),
            width=sizes.width,
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
