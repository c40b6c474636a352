"""The automatic mode: times settings while the job trains, and keeps the gentlest one of the fastest.

1. The first steps are dense and timed.
2. Codings and the link are measured (:mod:`.measurements`) for every setting that the quality class allows.
3. The time of a step is predicted with each setting (:mod:`.cost_model`).
4. The settings with the least predicted times run for some steps each, in turns. Then the best one's other
   types of values run.
5. The gentlest one of the fastest stays (:class:`.cost_model.DecisionRules`).
6. Later steps, and probes of the link, are compared with those of the decision. When they differ, the ranks
   decide again.

With ``quality: "if_faster"``, which a section without density gets, the ranks decide once, when the dense
start is over: they stay dense, send all entries in int8, or take the settings as they are. Thresholds have no
trial, since a trial before the ramp costs quality: their predicted time decides, and their steps are compared
with dense steps during and after the ramp. A training that stays dense keeps no residuals.

Source of the idea: Espresso (Wang et al., EuroSys 2023), which decides from a measured timeline.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ...codecs.copies import Stopwatch
from ...console import logger
from ...host_traffic import own_traffic
from ...metrics import format_bytes
from ...policy.rules import Setting, every_default, settings_within
from ..add_on import AddOn, ReducerContext
from ..plan import Sparsity
from ..stream_group import StreamGroup
from ..topologies import Topologies
from .cost_model import CostModel, DecisionRules, Link, gentlest_of_fastest, settings_to_try
from .measurements import (
    PROBE_BYTES,
    gradient_sizes,
    largest,
    probe_link,
    reduction_seconds,
    time_codings,
    time_step_ahead,
    unmeasured,
)


class AutomaticSparsity(AddOn):
    """Chooses one setting (sparsity and value type, or the dense exchange) for all tensors.

    Args:
        group: The streams of the reducer, and its process group.
        settings: The settings that the quality class allows. The first one is the dense exchange.
        topologies: The topologies of the reducer.
    """

    key, option = "automatic", "quality"
    rules = DecisionRules()
    observer: ClassVar[Callable[[CostModel], None] | None] = None
    """Called with the first cost model on every rank, in place of a decision. All steps then stay dense."""

    def __init__(self, group: StreamGroup, settings: Sequence[Setting], topologies: Topologies) -> None:
        self._group, self._settings, self._topologies = group, settings, topologies
        # Sends all that residuals hold: in fp32, so that nothing is rounded, unless lengths stay on a device:
        # capacities of slots are agreed for one type of values.
        self._flush = Setting(0.0, "fp32" if group.backend.lengths_on_host else group.settings.value_dtype)
        self.current = settings[0]
        """The setting of the coming step, the same on all ranks."""
        self._holds_residuals = False
        """True if residuals may hold something; the same on all ranks."""
        self._once = group.settings.quality == "if_faster"
        self._looks_ahead = group.settings.feedback.looks_ahead or AutomaticSparsity.observer is not None
        self._sizes: dict[str, tuple[int, int]] = {}
        """Entries and bytes of each tensor."""
        self._seen: Counter[str] = Counter()
        """Number of reductions of each tensor in this step."""
        self._reductions = 1
        self._seconds: list[float] = []
        self._began = 0.0
        self._steps_left = -1
        """Steps until the decision goes on (see :meth:`_decide`); negative: it is over for good."""
        self._start(None)

    @classmethod
    def configured(cls, context: ReducerContext) -> AutomaticSparsity | None:
        config, group = context.config, context.group
        if group.world_size == 1:
            return None
        if cls.observer is not None:
            return cls(group, every_default(), context.topologies)
        # Capacities of slots are agreed for one type of values.
        settings = settings_within(config, all_types=group.backend.lengths_on_host)
        return cls(group, settings, context.topologies)

    @property
    def dense(self) -> bool:
        return self.current.is_dense

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        self._sizes.update((name, (tensor.numel(), tensor.nbytes)) for name, tensor in entries)
        self._seen.update(name for name, _ in entries)

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        if self.current.sparsity == 0.0:
            return Sparsity(1.0)
        density = 1.0 - self.current.sparsity
        return Sparsity(max(density, self._group.schedule.density(self._group.step)))

    def end_step(self, *, skipped: bool) -> None:
        """Time the step. In some steps, the same on all ranks, go on with the decision: a collective."""
        now = time.perf_counter()
        if self._began:
            self._seconds.append(now - self._began)
        self._reductions = statistics.median_low(self._seen.values() or [1])
        self._seen.clear()
        self._steps_left -= 1
        if self._steps_left == 0:
            with own_traffic(recorded=False):
                self._steps_left = next(self._decisions, -1)
        self._began = time.perf_counter()  # a decision is no part of the next step

    def state_dict(self) -> Any:
        return {"current": tuple(self._chosen), "is_decided": self._has_decided}

    def load_state_dict(self, state: Any, *, step: int) -> None:
        # A state of another number of ranks has residuals, and no setting.
        known = Setting(*state["current"][:2]) if state is not None and state["is_decided"] else None
        if self._has_decided and known == self._chosen:
            return  # the host loads what it saved in this run, in another unit
        self._holds_residuals = step > 0
        self._start(known if known in self._settings else None)

    # -- decisions ---

    def _start(self, known: Setting | None) -> None:
        self._chosen = self._settings[0] if known is None else known
        """The last decision; in a ramp that does not pay yet, dense steps precede it."""
        self._has_decided = known is not None
        self._switch_to(self._chosen)
        if known is None:
            self._group.send_all(wanted=False, dense=False)
        self._seconds.clear()
        self._decisions = self._decide(is_known=known is not None)
        self._steps_left = next(self._decisions, -1)

    def _decide(self, *, is_known: bool) -> Iterator[int]:
        """Run, measure and choose settings for the rest of the training, the same on all ranks.

        A generator: it yields the number of steps to make before it goes on.

        Args:
            is_known: True if a resumed training has a setting already. Otherwise the first steps are dense.
        """
        rules, group = self.rules, self._group
        if self._once and is_known:
            return
        if len(self._settings) == 1:
            if self._holds_residuals:
                yield max(1, group.schedule.warmup_steps - group.step)
                yield from self._change_to(self.current)
            return
        group.dense_sums_watch = Stopwatch(group.device)
        before = reduction_seconds(group)
        steps = rules.settling_steps + rules.trial_steps
        if not is_known:
            dense_steps = rules.settling_steps + rules.dense_steps
            steps = max(group.schedule.warmup_steps - group.step, dense_steps)
        yield steps
        reduction = largest(group, [max((reduction_seconds(group) - before) / steps, 0.0)])[0]
        group.dense_sums_watch = None
        dense = reduction if self.current.is_dense else None
        now, link, why = self._median(), probe_link(group), "measured"
        while True:
            model = self._model(now, dense, link)
            if AutomaticSparsity.observer is not None:
                AutomaticSparsity.observer(model)
                return
            seconds = {self.current: now}
            chosen = yield from self._choose(model, seconds)
            yield from self._change_to(chosen)
            self._has_decided, self._chosen = True, chosen
            self._report(chosen, seconds, model, why)
            if self._once:
                yield from self._follow_ramp(chosen, seconds, model)
                return
            now, link, why = yield from self._wait_for_change(seconds[chosen], link)
            dense = None  # was measured on another link

    def _choose(self, model: CostModel, seconds: dict[Setting, float]) -> Generator[int, None, Setting]:
        """Time some settings and return the best one; ``seconds`` gets the time of a step with each."""
        rules, settings = self.rules, self._settings
        predictions = [model.predict(each) for each in settings]
        untried = {each.setting: each.total for each in predictions if self._once and each.setting.sparsity}
        predictions = [each for each in predictions if each.setting not in untried]
        seconds |= yield from self._time_in_turns(settings_to_try(predictions, rules))
        # A compressed step that takes less time than predicted says the same of the others. Of one that takes
        # more that is not taken over: steps of thresholds are compared with dense ones later, dense ones not.
        compressed = [each for each in predictions if not each.setting.is_dense and each.setting in seconds]
        less = max((each.total - seconds[each.setting] for each in compressed), default=0.0)
        untried = {setting: total - max(less, 0.0) for setting, total in untried.items()}
        chosen = gentlest_of_fastest(seconds | untried, rules)
        if self._once or chosen.is_dense:
            return chosen
        seconds |= yield from self._time_in_turns(
            [each for each in settings[1:] if each.sparsity == chosen.sparsity and each not in seconds]
        )
        return gentlest_of_fastest(seconds, rules)

    def _time_in_turns(self, settings: Sequence[Setting]) -> Generator[int, None, dict[Setting, float]]:
        """Run each setting for some steps, in rounds; return the seconds of a step with each."""
        if list(settings) == [self.current]:
            return {}  # its steps are timed already
        medians: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for _ in range(self.rules.rounds):
            for setting in settings:
                yield from self._change_to(setting)
                yield self.rules.settling_steps + self.rules.trial_steps
                medians[setting].append(self._median())
        return {setting: statistics.fmean(each) for setting, each in medians.items()}

    def _change_to(self, setting: Setting) -> Iterator[int]:
        """Switch to a setting. A step that sends all residuals precedes the dense exchange; with others, wait
        until the dense start and the ramp are over.
        """
        schedule, step = self._group.schedule, self._group.step
        if setting.is_dense and self._holds_residuals:
            self._switch_to(self._flush)
            yield 1
            self._holds_residuals = False
        self._switch_to(setting)
        if not (setting.is_dense or self._once) and schedule.starting(step):
            yield schedule.warmup_steps + schedule.ramp_steps - step

    def _follow_ramp(self, chosen: Setting, seconds: dict[Setting, float], model: CostModel) -> Iterator[int]:
        """Compare the steps of thresholds with the fastest of the other settings. Run that one while the
        density of the ramp is too high to pay; for good, if the final one is.

        Args:
            chosen: The setting of the training.
            seconds: Seconds of a step with each setting that was timed, the dense exchange among them.
            model: Predicts the time of a step.
        """
        schedule, rules, slow = self._group.schedule, self.rules, 0
        while chosen.sparsity:
            otherwise = gentlest_of_fastest({s: t for s, t in seconds.items() if s != chosen}, rules)
            is_over = not schedule.starting(self._group.step)
            allowed = 1 / rules.equal_ratio if is_over else rules.equal_ratio
            yield rules.window_steps
            seconds[chosen] = self._median()
            slow = slow + 1 if seconds[chosen] > allowed * seconds[otherwise] else 0
            if is_over and not slow:
                return
            if slow < 2:
                continue
            # The other one is timed anew: since its trial the machine or the link may have become slower.
            yield from self._change_to(otherwise)
            step, slow = self._group.step, 0
            target = max(schedule.density(step) / 2, 1.0 - chosen.sparsity)
            end = next(later for later in itertools.count(step) if schedule.density(later) <= target)
            yield max(rules.settling_steps + rules.trial_steps, end - step)
            seconds[otherwise] = self._median()
            if is_over and seconds[chosen] > allowed * seconds[otherwise]:
                self._chosen = otherwise
                self._report(otherwise, seconds, model, "after the ramp")
                return
            yield from self._change_to(chosen)
            if is_over:
                return

    def _wait_for_change(self, reference: float, link: Link) -> Generator[int, None, tuple[float, Link, str]]:
        """Wait until the time of a step differs from ``reference``, or the speed of the link from ``link``;
        return both as they are then, and the reason in words.
        """
        rules, slow_or_fast = self.rules, 0
        for window in itertools.count(1):
            yield rules.window_steps
            now = self._median()
            slow_or_fast += 1
            if 1 / rules.step_ratio < now / reference < rules.step_ratio:
                slow_or_fast = 0
            if slow_or_fast >= 2 or window % rules.windows_per_probe == 0:
                found = probe_link(self._group)
                change = found.seconds(PROBE_BYTES) / link.seconds(PROBE_BYTES)
                if slow_or_fast >= 2:
                    return now, found, f"steps take {1e3 * now:.0f} ms, were {1e3 * reference:.0f}"
                if not 1 / rules.link_ratio < change < rules.link_ratio:
                    return now, found, f"the link takes {change:.2g} times as long"
        raise AssertionError("unreachable")

    def _switch_to(self, setting: Setting) -> None:
        self.current, group = setting, self._group
        self._holds_residuals |= not setting.is_dense
        if self._once:
            group.send_all(wanted=setting.sparsity == 0.0, dense=setting.is_dense)
        if setting.value_dtype not in (None, group.settings.value_dtype):
            group.set_value_dtype(setting.value_dtype)

    # -- measurements, the same on all ranks ---

    def _median(self) -> float:
        """Return the median seconds of the last steps, on the slowest rank; a collective."""
        last, self._seconds = self._seconds[-self.rules.trial_steps :], []
        return largest(self._group, [statistics.median(last)])[0]

    def _model(self, now: float, dense: float | None, link: Link) -> CostModel:
        """Measure the codings, and return the cost model of the training; a collective.

        Args:
            now: Seconds of a step with the current setting.
            dense: Seconds of the dense reductions of a step; None: computed from the link.
            link: The speed of the link.
        """
        group, ahead = self._group, 0.0
        tensors, entries, small_bytes, entry_bytes = gradient_sizes(group, self._sizes)
        if self._looks_ahead:
            cost = time_step_ahead(group)
            ahead = tensors * cost.per_tensor + entries * cost.per_entry
        model = CostModel(
            0.0,
            dense,
            time_codings(group, [each for each in self._settings if not each.is_dense]),
            link,
            entries,
            small_bytes,
            group.world_size,
            is_direct=self._topologies.is_direct,
            server_density=group.settings.server_density,
            weight_gathers=int(self._topologies.sums_at_owners),
            entry_bytes=entry_bytes,
            reductions=self._reductions,
            step_ahead=ahead,
            large_tensors=tensors,
        )
        return model._replace(rest=max(now - model.predict(self.current).total, 0.0))

    def _report(self, chosen: Setting, seconds: Mapping[Setting, float], model: CostModel, why: str) -> None:
        """Log a decision with its reason on the first rank; write it to the metrics of every rank.

        Args:
            chosen: The setting that was chosen.
            seconds: Seconds of a step with each setting that was timed; maybe not with the chosen one.
            model: Predicts the time of a step.
            why: The reason of the decision.
        """
        group, predicted, link = self._group, model.predict(chosen), model.link
        tried_ms = {str(setting): 1e3 * measured for setting, measured in seconds.items()}
        chosen_ms = tried_ms.get(str(chosen))
        if group.metrics is not None:
            times = {"predicted_ms": 1e3 * predicted.total, "measured_ms": chosen_ms, "tried_ms": tried_ms}
            group.metrics.event("decision", step=group.step, setting=str(chosen), reason=why, **times)
        if dist.get_rank():
            return
        others = ", ".join(f"{name} {ms:.1f}" for name, ms in tried_ms.items() if name != str(chosen))
        what = str(chosen)
        if chosen.is_dense and (rest := self._settings[1:]):
            least, name = min((seconds.get(each, model.predict(each).total), str(each)) for each in rest)
            what = f"this link needs no compression: {seconds[chosen] / least:.2f}x with {name}; dense"
        took = "a step is not timed yet" if chosen_ms is None else f"{chosen_ms:.1f} ms a step"
        rate = f"{format_bytes(model.link_rate)}/s" if link.seconds_per_byte else "without limit"
        logger.warning(
            f"dct: step {group.step}: {what}: {took}{f' ({others})' if others else ''}; "
            f"predicted {1e3 * predicted.total:.1f} (coding {1e3 * predicted.coding:.1f}, exchange "
            f"{1e3 * predicted.exchange:.1f}); link {rate}, {1e3 * link.latency:.2f} ms ({why})"
            + (f"; {note}" if (note := unmeasured(group.device.type)) else "")
        )
