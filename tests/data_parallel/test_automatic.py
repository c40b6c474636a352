"""The automatic mode: what it may choose and predicts; ranks switch alike and lose nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import add_on_of
from support.processes import run

from dct_plugin.codecs import copies
from dct_plugin.compression.feedback import unpacked
from dct_plugin.config import DataParallelConfig, DCTConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.autotune import add_on, measurements
from dct_plugin.data_parallel.autotune.add_on import AutomaticSparsity
from dct_plugin.data_parallel.autotune.cost_model import (
    Coding,
    CostModel,
    DecisionRules,
    Link,
    gentlest_of_fastest,
    settings_to_try,
)
from dct_plugin.data_parallel.autotune.measurements import largest
from dct_plugin.data_parallel.plan import Sparsity
from dct_plugin.data_parallel.stream_group import StreamGroup
from dct_plugin.errors import ConfigError
from dct_plugin.metrics import Metrics
from dct_plugin.policy import Training, resolve
from dct_plugin.policy.rules import Setting, settings_within

DENSE, GENTLE, STRONG = Setting(), Setting(0.9, "bf16"), Setting(0.99, "bf16")


def _config(**settings: Any) -> DataParallelConfig:
    return DataParallelConfig.of(settings)


# -- what may be chosen ---


def test_auto_stands_for_the_class_safe_and_a_class_given_beside_it_wins() -> None:
    assert _config(sparsity="auto") == _config(sparsity=0.99, quality="safe")
    assert _config(sparsity="auto", quality="bytes") == _config(quality="bytes")
    with pytest.raises(ConfigError, match=r'dct\.data_parallel\.sparsity = "often"'):
        _config(sparsity="often")
    with pytest.raises(ConfigError, match=r"quality = 'bytes' does not go with adaptive"):
        _config(quality="bytes", adaptive="accordion")


def test_a_changed_section_keeps_what_was_written() -> None:
    changed = DCTConfig.parse({"data_parallel": {"feedback": "step_ahead"}}).updated(
        {"data_parallel": {"min_numel": 5}}
    )
    assert changed.data_parallel == _config(feedback="step_ahead", min_numel=5)
    assert changed.updated({"metrics": {"path": "m.jsonl"}}).metrics.model_fields_set == {"path"}


def test_settings_are_within_the_class_the_sparsity_and_the_value_type() -> None:
    assert settings_within(_config(quality="dense")) == [DENSE]
    found = settings_within(_config(quality="bytes"))
    assert found[:2] == [DENSE, Setting(0.0, "bf16")]
    assert set(found[2:]) == {
        Setting(*each) for each in itertools.product((0.9, 0.97, 0.99), ("bf16", "int8", "int4"))
    }
    gentle = settings_within(_config(quality="bytes", sparsity=0.95, value_dtype="int8"))
    assert gentle == [DENSE, Setting(0.0, "int8")] + [
        Setting(s, values) for s in (0.9, 0.95) for values in ("int8", "int4")
    ]
    assert {each.value_dtype for each in settings_within(_config(quality="bytes", value_dtype="int2"))} == {
        None,
        "int2",
    }
    on_a_device = settings_within(_config(quality="bytes", value_dtype="fp32"), all_types=False)
    assert on_a_device[1:] == [Setting(each, "fp32") for each in (0.0, 0.9, 0.97, 0.99)]
    nothing_left_out = settings_within(_config(quality="bytes", sparsity=0))
    assert nothing_left_out == [DENSE, Setting(0.0, "bf16")]


@pytest.mark.parametrize(
    ("optimizer", "ranks", "stage", "most"),
    [
        (["Adagrad"], 8, 0, 0.99),
        (["AdamW"], 4, 1, 0.99),
        (["AdamW"], 8, 0, 0.96),
        (["RMSprop"], 8, 0, 0.0),
        (["AdamW"], 16, 1, 0.0),
        (["Lion"], 2, 0, 0.0),
        ([], 2, 0, 0.0),
    ],
)
def test_safe_takes_only_what_lost_nothing(optimizer: list[str], ranks: int, stage: int, most: float) -> None:
    training = Training(optimizer, ranks=ranks, stage=stage)
    assert resolve(_config(sparsity="auto"), training).settings.sparsity == most
    assert resolve(_config(quality="bytes"), training).settings.sparsity >= 0.9


def test_a_training_without_a_safe_sparsity_is_told_so() -> None:
    made = resolve(_config(sparsity="auto"), Training(["Lion"], ranks=2))
    assert "no sparsity is known to lose nothing with Lion on 2 ranks" in made.line
    assert (made.settings.feedback.label(), made.settings.dense_steps) == ("local", 0)


def test_safe_sends_every_entry_where_step_ahead_cannot_be_had() -> None:
    training = Training(["AdamW"], ranks=2, stage=3, step_ahead_unavailable="ZeRO-3")
    assert resolve(_config(sparsity="auto"), training).settings.sparsity == 0.0


# -- predictions ---


def _model(rate: float, **changes: Any) -> CostModel:
    codings = {
        GENTLE: Coding(4e-9, 1e-9, 0.3),
        STRONG: Coding(3e-9, 1e-10, 0.03),
    }
    model = CostModel(0.1, None, codings, Link(1e-4, 8 / rate), 10_000_000, 4_000, 2, True)
    return model._replace(**changes)


def test_the_faster_the_link_the_less_is_left_out() -> None:
    def best(rate: float) -> Setting:
        model = _model(rate)
        return min((DENSE, GENTLE, STRONG), key=lambda each: model.predict(each).total)

    assert [best(rate) for rate in (1e8, 1e12)] == [STRONG, DENSE]


def test_a_prediction_is_the_sum_of_its_parts_and_a_measured_reduction_counts() -> None:
    made = _model(1e9).predict(STRONG)
    assert made.coding == pytest.approx(1e7 * (3e-9 + 2 * 1e-10))
    assert made.exchange == pytest.approx(1e-4 + 8e-9 * (0.03 * 1e7 + 4_000))
    assert made.total == pytest.approx(0.1 + made.coding + made.exchange)
    assert _model(1e9, dense_reduction=0.5).predict(DENSE).total == pytest.approx(0.6)
    many = _model(1e9, large_tensors=500, reductions=2, step_ahead=0.01)
    slower = many._replace(codings={STRONG: Coding(3e-9, 1e-10, 0.03, per_tensor=1e-5)}).predict(STRONG)
    assert slower.coding == pytest.approx(2 * made.coding + 2 * 500 * 1e-5 + 0.01)
    two_phase = _model(1e9, is_direct=False, ranks=8).predict(STRONG)
    assert two_phase.exchange == pytest.approx(2e-4 + 8e-9 * (0.03 * 1e7 + 4_000) / 4)
    answered = _model(1e9, is_direct=False, ranks=8, server_density=3.0).predict(STRONG)
    assert answered.exchange == pytest.approx(2e-4 + 8e-9 * (2 * 0.03 * 1e7 + 4_000) / 4)


def test_likely_settings_are_tried_and_the_gentlest_of_the_fast_ones_stays() -> None:
    rules = DecisionRules(most_sparsities=2)

    def tried(rate: float) -> list[Setting]:
        return settings_to_try(
            [_model(rate, rest=0.3).predict(each) for each in (DENSE, GENTLE, STRONG)], rules
        )

    assert tried(1e12) == [DENSE, STRONG]
    assert tried(2e9) == [STRONG, GENTLE]
    assert tried(1e8) == [STRONG]
    assert gentlest_of_fastest({STRONG: 1.0, GENTLE: 1.02, DENSE: 1.5}, rules) == GENTLE
    assert gentlest_of_fastest({STRONG: 1.0, GENTLE: 1.05, DENSE: 1.5}, rules) == STRONG
    log4, int8 = Setting(0.0, "log4"), Setting(0.0, "int8")
    assert gentlest_of_fastest({log4: 1.0, int8: 1.0, DENSE: 1.5}, rules) == int8


@pytest.mark.parametrize("optimizer", [["AdamW"], ["Lion"], []])
def test_exact_needs_no_feedback_and_no_start(optimizer: list[str]) -> None:
    made = resolve(_config(quality="dense"), Training(optimizer, ranks=16))
    assert (made.settings.feedback.label(), made.settings.dense_steps, made.line) == ("local", 0, "")


def _reductions_of_a_step(rank: int, world_size: int) -> list[int]:
    """Reduce all gradients to their owners once and three times a step."""
    reducer, found = GradientReducer(_config(quality="bytes", min_numel=10)), []
    automatic = add_on_of(reducer, AutomaticSparsity)
    for micro_batches in (1, 3):
        for _ in range(micro_batches):
            for name in ("a", "b"):
                shards = [Shard(0, 0, 50), Shard(1, 50, 100)]
                reducer.reduce_scatter([(name, torch.ones(100), shards)])
        reducer.end_step()
        found.append(automatic._model(1.0, 0.1, Link(1e-4, 1e-9)).reductions)
    return found


@pytest.mark.slow
def test_a_step_has_as_many_reductions_as_micro_batches_under_zero_2() -> None:
    assert run(2, _reductions_of_a_step) == [[1, 3], [1, 3]]


# -- in a reducer ---

#: Seconds of a step with each setting, on a slow link, and on a fast one.
_SLOW, _FAST = {DENSE: 2.0, GENTLE: 1.5, STRONG: 1.0}, {DENSE: 1.0, GENTLE: 1.5, STRONG: 2.0}
_STEPS = 60


def _trained(rank: int, world_size: int) -> dict[str, Any]:
    """Reduce gradients while the link gets fast in mid-run; the times of steps are told, not measured."""
    config = _config(sparsity=0.99, quality="bytes", value_dtype="bf16", min_numel=10)
    rules = DecisionRules(
        dense_steps=2,
        settling_steps=1,
        trial_steps=2,
        rounds=1,
        most_sparsities=2,
        window_steps=3,
        windows_per_probe=2,
    )

    def median(self: AutomaticSparsity) -> float:
        times = _SLOW if reducer.group.step < _STEPS // 2 else _FAST
        # The first rank is the slowest one: all must follow it.
        return largest(reducer.group, [times.get(self.current, 3.0) / (1 + rank)])[0]

    def probe(_: StreamGroup) -> Link:
        return Link(1e-4, 1e-6 if reducer.group.step < _STEPS // 2 else 1e-12)

    allowed = [DENSE, GENTLE, STRONG]
    with (
        patch.multiple(AutomaticSparsity, rules=rules, _median=median),
        patch(f"{add_on.__name__}.probe_link", probe),
        patch(f"{add_on.__name__}.settings_within", lambda config, **_: allowed),
    ):
        metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
        events: list[dict[str, Any]] = []
        metrics.event = lambda name, **figures: name == "decision" and events.append(figures)  # type: ignore
        reducer = GradientReducer(config, metrics=metrics)
        automatic = add_on_of(reducer, AutomaticSparsity)
        generator = torch.Generator().manual_seed(rank)
        given, got, used, states = torch.zeros(5_000), torch.zeros(5_000), [], None
        for step in range(_STEPS):
            gradient = torch.randn(5_000, generator=generator)
            given += gradient
            reducer.all_reduce([("weight", gradient)])
            got += gradient
            used.append(automatic.current)
            reducer.end_step()
            if step == _STEPS // 2 - 1:
                states = reducer.state_dict()
        resumed = GradientReducer(config)
        resumed.load_state_dict(states)
        # As after re-sharding, where no setting is known: the fast link is dense, and the residuals are sent.
        spread = GradientReducer(config)
        assert states is not None
        spread.load_state_dict({**states, "automatic": None})
        loaded, arrived = states["streams"]["weight"]["residual"], torch.zeros(5_000)
        for _ in range(20):
            zeros = torch.zeros(5_000)
            spread.all_reduce([("weight", zeros)])
            arrived += zeros
            spread.end_step()
        residual = reducer.group.streams["weight"].residual
        return {
            "loaded": unpacked(loaded),
            "arrived": arrived,
            "spread": add_on_of(spread, AutomaticSparsity).current,
            "used": used,
            "decisions": [each["setting"] for each in events],
            "reasons": [each["reason"] for each in events],
            "given": given,
            "got": got,
            "unsent": 0.0 if residual is None else float(residual.current.abs().max()),
            "resumed": add_on_of(resumed, AutomaticSparsity).current,
        }


@pytest.mark.slow
def test_ranks_switch_alike_and_send_their_residuals() -> None:
    ranks = run(2, _trained)
    first = ranks[0]["used"]
    assert all(each["used"] == first for each in ranks)
    assert torch.equal(ranks[0]["got"], ranks[1]["got"])
    assert first[0] == DENSE
    assert first[_STEPS // 2 - 1] == STRONG  # the slow link
    assert first[-1] == DENSE  # the fast one
    assert ranks[0]["decisions"] == [str(STRONG), str(DENSE)]
    assert ranks[0]["reasons"][1].startswith(("the link takes", "steps take"))
    assert all(each["resumed"] == STRONG for each in ranks)
    # No residual is left once the exchange is dense again: all gradients have arrived.
    assert all(each["unsent"] == 0.0 for each in ranks)
    assert all(each["spread"] == DENSE for each in ranks)
    given = sum(each["loaded"] for each in ranks)
    assert given.abs().max() > 1.0
    assert torch.allclose(ranks[0]["arrived"], given, atol=0.01)
    total = sum(each["given"] for each in ranks)
    assert torch.allclose(ranks[0]["got"], total, atol=0.05)


# -- once, with nothing written ---

INT8 = Setting(0.0, "int8")
#: By what is fastest, seconds of a step with each setting.
_FASTEST = {
    "dense": {DENSE: 1.0, INT8: 1.1, STRONG: 1.05},
    "int8": {DENSE: 2.0, INT8: 1.0, STRONG: 1.1},
    "thresholds": {DENSE: 2.0, INT8: 1.8, STRONG: 1.0},
    "equal": {DENSE: 1.02, INT8: 1.01, STRONG: 1.0},
    "late": {DENSE: 1.4, INT8: 1.5, STRONG: 1.0},
    "predicted slower": {DENSE: 1.0, INT8: 1.1, STRONG: 0.5},
    "less than predicted": {DENSE: 2.0, INT8: 1.0, STRONG: 0.6},
    "on a machine that slows down": {DENSE: 2.0, INT8: 1.8, STRONG: 1.0},
}
#: Of the seconds of a dense step, those in its reductions, where they are not half of them.
_IN_REDUCTIONS = {"predicted slower": 0.0, "less than predicted": 0.2}


def test_the_cost_of_a_tensor_and_of_an_entry_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is told: 50 us a tensor and 1 ns an entry, of which the bucket has several."""
    now = [0.0]
    monkeypatch.setattr(copies.time, "perf_counter", lambda: now[0])

    def work(entries: int) -> Callable[[], object]:
        return lambda: now.__setitem__(0, now[0] + measurements.TENSORS * (5e-5 + 1e-9 * entries))

    cost = measurements._cost(SimpleNamespace(device=torch.device("cpu")), work)  # type: ignore[arg-type]
    assert cost == pytest.approx((5e-5, 1e-9))


def test_codings_are_timed_on_fp32_whatever_the_default() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        entries = measurements._random(SimpleNamespace(device=torch.device("cpu")), 10)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)
    assert entries.dtype == torch.float32


def test_sizes_of_gradients_are_those_of_tensors_that_are_thresholded() -> None:
    group = SimpleNamespace(is_small=lambda name, numel: numel < 10)
    tensors = {"a": (100, 400), "b": (50, 100), "bias": (5, 20)}
    assert measurements.gradient_sizes(group, tensors) == (2, 150, 20, 500 / 150)  # type: ignore[arg-type]
    assert measurements.gradient_sizes(group, {"bias": (5, 20)}) == (0, 0, 20, 4.0)  # type: ignore[arg-type]


def _decided_once(rank: int, world_size: int, fastest: str) -> dict[str, Any]:
    """Reduce gradients with the settings of a job that writes none; the times of steps are told."""
    config = _config(
        quality="if_faster", min_numel=10, warmup_steps=4, sparsity_warmup_steps=40, feedback="local"
    )
    rules = DecisionRules(
        dense_steps=2, settling_steps=1, trial_steps=2, rounds=1, trial_ratio=3.0, window_steps=5
    )

    def median(self: AutomaticSparsity) -> float:
        ramp = 1.0 if fastest == "late" and self._has_decided and reducer.group.step < 35 else 0.0
        slower = 3.0 if fastest == "on a machine that slows down" and reducer.group.step > 35 else 1.0
        return largest(reducer.group, [slower * (ramp + _FASTEST[fastest][self.current]) / (1 + rank)])[0]

    share, random = _IN_REDUCTIONS.get(fastest, 0.5), torch.get_rng_state()
    link = Link(1e-4, 1e-4 if fastest == "less than predicted" else 1e-6)
    with (
        patch.multiple(AutomaticSparsity, rules=rules, _median=median),
        patch(f"{add_on.__name__}.probe_link", lambda _: link),
        patch(f"{add_on.__name__}.reduction_seconds", lambda group: share * group.step),
    ):
        metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
        events: list[dict[str, Any]] = []
        metrics.event = lambda name, **figures: name == "decision" and events.append(figures)  # type: ignore
        reducer = GradientReducer(config, metrics=metrics)
        automatic = add_on_of(reducer, AutomaticSparsity)
        generator = torch.Generator().manual_seed(rank)
        given, got, densities, most = torch.zeros(5_000), torch.zeros(5_000), [], 0.0
        for step in range(80):
            gradient = torch.randn(5_000, generator=generator)
            given += gradient * (step >= 60)
            densities.append(automatic.sparsity("weight", Sparsity(1.0)).density)
            reducer.all_reduce([("weight", gradient)])
            got += gradient * (step >= 60)
            most = max(most, float(gradient.abs().max())) if densities[-1] == 1.0 else most
            reducer.end_step()
        resumed = GradientReducer(config)
        resumed.load_state_dict(reducer.state_dict())
        return {
            "setting": automatic.current,
            "resumed": (add_on_of(resumed, AutomaticSparsity).current, resumed.group.stays_dense),
            "dense": reducer.group.stays_dense,
            "streams": len(reducer.group.streams) + len(resumed.group.streams.loaded),
            "decisions": [event["setting"] for event in events],
            "densities": densities,
            "given": given,
            "got": got,
            "most": most,
            "random": torch.equal(random, torch.get_rng_state()),
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fastest", "setting"),
    [
        ("dense", DENSE),
        ("int8", INT8),
        ("thresholds", STRONG),
        ("late", STRONG),
        ("equal", DENSE),
        ("predicted slower", DENSE),
        ("less than predicted", STRONG),
        ("on a machine that slows down", STRONG),
    ],
)
def test_a_job_that_writes_no_density_takes_once_what_is_not_slower_than_dense(
    fastest: str, setting: Setting
) -> None:
    ranks = run(2, _decided_once, fastest)
    for rank in ranks:
        assert rank["setting"] == setting
        assert rank["random"]  # ranks may rely on drawing the same numbers
        # Thresholds that are predicted to be faster, and are not, end with the ramp.
        is_taken_back = fastest in ("dense", "equal")
        assert rank["decisions"] == [*[str(STRONG)] * is_taken_back, str(setting)]
        assert rank["resumed"] == (setting, setting.is_dense)
        assert rank["dense"] == setting.is_dense
        assert bool(rank["streams"]) == (not setting.is_dense)
        assert rank["densities"] == ranks[0]["densities"]
    assert torch.equal(ranks[0]["got"], ranks[1]["got"])
    densities = ranks[0]["densities"]
    assert min(densities[:40]) > 0.01  # thresholds have no trial before the end of the ramp
    if fastest == "predicted slower":
        assert set(densities) == {1.0}
    if setting == STRONG:  # the ramp goes on, or steps are dense until it pays
        assert densities[-1] == pytest.approx(0.01)
        # The other setting runs again before it is preferred.
        assert (1.0 in densities[20:]) == (fastest in ("late", "on a machine that slows down"))
        if fastest == "thresholds":
            ramp = densities[30:43]
            assert ramp == sorted(ramp, reverse=True)
            assert 0.01 < ramp[-1] < ramp[0] < 0.2
    if setting.is_dense:  # the ramp left nothing behind
        total = sum(rank["given"] for rank in ranks)
        assert torch.allclose(ranks[0]["got"], total, atol=1e-4)
        assert is_taken_back or ranks[0]["most"] < 8.0


def test_a_section_without_density_chooses_among_three() -> None:
    assert settings_within(_config(quality="if_faster")) == [DENSE, INT8, STRONG]
    assert settings_within(_config(quality="if_faster", sparsity=0, value_dtype="int8")) == [DENSE, INT8]
    on_a_device = settings_within(_config(quality="if_faster"), all_types=False)
    assert on_a_device == [DENSE, Setting(0.0, "bf16"), STRONG]
