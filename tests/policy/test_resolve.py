"""The settings that a training gets: with nothing written, and where something is."""

from __future__ import annotations

from typing import Any

import pytest

from dct_plugin.config import DataParallelConfig
from dct_plugin.policy import Training, resolve
from dct_plugin.policy.rules import safe_sparsity

_UNAVAILABLE = {"step_ahead_unavailable": "no weights to displace"}
_INT8 = (0.0, "int8", "local")
#: Facts of a training, the number of compressors, and what it gets: sparsity, type of values, feedback.
NOTHING_WRITTEN: list[tuple[dict[str, Any], int, tuple[float, str, str]]] = [
    ({"optimizer": ["AdamW"]}, 2, (0.99, "bf16", "step_ahead")),
    ({"optimizer": ["AdamW"]}, 4, (0.99, "bf16", "step_ahead")),
    ({"optimizer": ["AdamW"]}, 5, (0.96, "int4", "step_ahead")),
    ({"optimizer": ["AdamW"]}, 8, (0.96, "int4", "step_ahead")),
    ({"optimizer": ["AdamW"]}, 9, _INT8),
    ({"optimizer": ["AdamW"]}, 64, _INT8),
    ({"optimizer": ["AdamW"], "lr": 1e-5}, 2, _INT8),
    ({"optimizer": ["AdamW"], **_UNAVAILABLE}, 2, _INT8),
    ({"optimizer": ["RMSprop"]}, 2, _INT8),
    ({"optimizer": ["SGD"], "momentum": 0.9}, 2, (0.99, "bf16", "step_ahead")),
    ({"optimizer": ["SGD"], "momentum": 0.9, "clips": True}, 2, _INT8),
    ({"optimizer": ["SGD"], "momentum": 0.9}, 16, _INT8),
    ({"optimizer": ["SGD"]}, 2, (0.99, "bf16", "local")),
    ({"optimizer": ["SGD"]}, 4, _INT8),
    ({"optimizer": ["Adagrad"]}, 32, (0.99, "bf16", "local")),
    ({"optimizer": ["Adagrad"]}, 33, _INT8),
    ({"optimizer": ["Lion"]}, 2, _INT8),
    ({"optimizer": ["Muon"]}, 2, _INT8),
    ({}, 2, _INT8),
]


def _of(**written: Any) -> DataParallelConfig:
    return DataParallelConfig.of(written)


@pytest.mark.parametrize(("facts", "compressors", "expected"), NOTHING_WRITTEN)
def test_nothing_written_takes_thresholds_only_where_their_loss_was_measured(
    facts: dict[str, Any], compressors: int, expected: tuple[float, str, str]
) -> None:
    for written in ({}, {"min_numel": 7}, {"parameters": None}, {"parameters": "int8"}, {"nodes": 1}):
        applied = resolve(_of(**written), Training(**facts, ranks=2 * compressors), compressors)
        settings = applied.settings
        assert (settings.sparsity, settings.value_dtype, settings.feedback.label()) == expected
        assert settings.min_numel == written.get("min_numel", 4096)
        assert not applied.warns
        assert applied.compressors == compressors
        if expected == _INT8:
            assert settings.dense_steps == 0
            assert "all entries are sent, in int8, 3.9x fewer bytes" in applied.line


def test_the_line_says_what_the_settings_follow() -> None:
    training = Training(["AdamW"], lr=1e-3, ranks=16, precision="bf16")
    assert resolve(_of(), training, 2).line.endswith(
        "; learning rate 0.001, 16 ranks, 2 nodes, bf16; measured with a GPT of 0.35M parameters"
    )
    line = resolve(_of(), training).line
    assert line.startswith(
        "thresholds lose quality or were not measured with AdamW, learning rate 0.001, 16 ranks"
    )


@pytest.mark.parametrize(
    ("written", "facts", "words"),
    [
        ({"sparsity": 0.99}, {"ranks": 16}, "0.016 nats on 16 ranks"),
        ({"sparsity": 0.99}, {"ranks": 8}, "0.017 nats on 8 ranks at 0.99"),
        ({"sparsity": 0.99}, {"ranks": 2, "lr": 1e-5}, "0.10 nats in fine-tuning at 1e-5"),
        ({"feedback": "local"}, {"ranks": 2}, "0.2 nats after 1,200 steps"),
        ({"sparsity": 0.9}, {"ranks": 2, "stage": 3, **_UNAVAILABLE}, "0.05 nats at 0.9"),
    ],
)
def test_a_written_value_that_is_known_to_lose_stays_and_says_so(
    written: dict[str, Any], facts: dict[str, Any], words: str
) -> None:
    training = Training(["AdamW"], **facts)
    applied = resolve(_of(**written), training)
    assert applied.settings.sparsity == written.get("sparsity", 0.99)
    assert applied.warns
    assert f"known to lose {words}" in applied.line
    default = resolve(_of(), training).settings
    assert f"with nothing written: {default.summary}" in applied.line


@pytest.mark.parametrize("written", [{"sparsity": 0.9}, {"sparsity": 0.99, "feedback": "local"}])
def test_what_is_better_can_be_had(written: dict[str, Any]) -> None:
    line = resolve(_of(**written), Training(["AdamW"], ranks=2, **_UNAVAILABLE)).line
    assert 'better: leave "sparsity" and "feedback" out, which sends all entries in int8' in line
    line = resolve(_of(sparsity=0.9, feedback="local"), Training(["AdamW"], ranks=2)).line
    assert 'better: leave "feedback" out, or set it to "step_ahead"' in line


@pytest.mark.parametrize(
    ("written", "count", "sparsity", "values"),
    [
        ({"feedback": "step_ahead"}, 4, 0.99, "bf16"),
        ({"feedback": "step_ahead"}, 5, 0.96, "int4"),
        ({"feedback": "step_ahead", "min_numel": 100}, 32, 0.96, "int4"),
        ({"feedback": "step_ahead"}, 33, 0.85, "int4"),
        ({"feedback": "step_ahead", "sparsity": 0.99}, 8, 0.99, "bf16"),
        ({"value_dtype": "int8"}, 8, 0.99, "int8"),
        ({"feedback": "local"}, 8, 0.99, "bf16"),
        ({"parameters": {"sparsity": 0.9}}, 8, 0.96, "int4"),
    ],
)
def test_what_is_written_stays_and_the_rest_follows_the_number_of_compressors(
    written: dict[str, Any], count: int, sparsity: float, values: str
) -> None:
    settings = resolve(_of(**written), Training(["AdamW"], ranks=count)).settings
    assert (settings.sparsity, settings.value_dtype) == (sparsity, values)


def test_off_and_zero_3() -> None:
    off = resolve(_of(enabled=False), Training(["AdamW"], ranks=16))
    assert (off.settings, off.lines) == (_of(enabled=False), [])
    zero3 = Training(["AdamW"], ranks=2, stage=3, **_UNAVAILABLE)
    assert resolve(_of(sparsity=0.9), zero3).settings.residual_dtype == "int8"
    assert resolve(_of(), zero3).settings.feedback.label() == "none"
    assert resolve(_of(residual_dtype="fp32"), zero3).settings.residual_dtype == "fp32"


def test_safe_and_nothing_written_agree() -> None:
    for facts, compressors, (sparsity, _, feedback) in NOTHING_WRITTEN:
        training = Training(**facts, ranks=compressors)
        settings = _of(feedback=feedback if feedback == "step_ahead" else "local")
        assert safe_sparsity(settings, training, compressors) == sparsity
