"""The ``dct`` section: what is accepted, and what an error says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_page import updated
from support import CONFIGS, ROOT

from dct_plugin import ConfigError, DCTConfig
from dct_plugin.config import (
    AccordionConfig,
    AutoFeedback,
    DataParallelConfig,
    ExpertSettings,
    KernelConfig,
    MetricsConfig,
    TensorConfig,
    options,
)
from dct_plugin.config.data_parallel import VerifyConfig
from dct_plugin.config.options import documentation, models

FEEDBACK = 'one of "auto", "local", "step_ahead", "none", or an object with "kind" and settings'
READY_MADE = sorted(CONFIGS.glob("*.json"))

slow_to_draw = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

DATA_PARALLEL = {
    "enabled": st.booleans(),
    "sparsity": st.floats(0, 1, exclude_max=True) | st.just(0),
    "feedback": st.sampled_from(["auto", "none", "local", "step_ahead"])
    | st.fixed_dictionaries({"kind": st.just("step_ahead")}),
    "parameters": st.none() | st.just(False) | st.fixed_dictionaries({}, optional={"sparsity": st.just(0.5)}),
    "verify": st.none() | st.fixed_dictionaries({"every": st.integers(1, 10**9)}),
    "expert": st.fixed_dictionaries(
        {},
        optional={
            "threshold": st.sampled_from(["sample", "topk", "fixed"]),
            "threshold_lifespan": st.integers(1, 10**9),
            "server_density": st.none() | st.floats(1, 1e6) | st.integers(1, 100),
        },
    ),
    "min_numel": st.integers(0, 10**12),
    "value_dtype": st.sampled_from(["fp32", "bf16", "fp16", "int8", "int4", "int2", "log4"]),
    "residual_dtype": st.sampled_from(["auto", "fp32"]),
    "exchange": st.sampled_from(["auto", "direct", "two_phase"]),
    "warmup_steps": st.integers(0, 10**9),
    "sparsity_warmup_steps": st.integers(0, 10**9),
}
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        "data_parallel": st.fixed_dictionaries({}, optional=DATA_PARALLEL),
        "metrics": st.fixed_dictionaries(
            {},
            optional={
                "path": st.none() | TEXTS,
                "every": st.integers(1, 10**9),
                "tensorboard": st.none() | TEXTS,
            },
        ),
        "kernels": st.fixed_dictionaries(
            {},
            optional={
                "backend": st.sampled_from(["auto", "reference", "cpu", "someones_gpu-2"]),
            },
        ),
    },
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def faults(section: Any, **keywords: Any) -> list[str]:
    """The lines of the error for a faulty section, without its head."""
    with pytest.raises(ConfigError) as caught:
        DCTConfig.parse(section, **keywords)
    head, *lines = str(caught.value).splitlines()
    assert f"({len(lines)} fault" in head
    return [line.strip() for line in lines]


def data_parallel_fault(key: str, value: Any) -> str:
    (line,) = faults({"data_parallel": {key: value}})
    return line


def test_defaults_are_those_of_the_documentation() -> None:
    config = DCTConfig.parse({})
    assert config == DCTConfig()
    assert config.enabled
    assert config.data_parallel.sparsity == 0.99
    assert config.data_parallel.density == pytest.approx(0.01)
    assert config.data_parallel.feedback == AutoFeedback()
    assert config.data_parallel.dense_steps == config.data_parallel.ramp_steps == 0
    assert config.data_parallel.expert == ExpertSettings(threshold="sample", threshold_lifespan=1000)
    assert config.data_parallel.parameters is config.data_parallel.adaptive is None
    assert config.data_parallel.verify == VerifyConfig(action="warn")
    assert not config.data_parallel.asks_to_verify
    assert not config.model_parallel.pipeline.compresses
    assert config.data_parallel.min_numel == 4096
    assert config.data_parallel.value_dtype == "bf16"
    assert config.metrics == MetricsConfig(path=None, every=50, tensorboard=None)
    assert config.kernels == KernelConfig(backend="auto")


def test_no_section_is_disabled_and_a_parsed_one_passes() -> None:
    assert not DCTConfig.parse(None).enabled
    config = DCTConfig.parse({"data_parallel": {"sparsity": 0.5}})
    assert DCTConfig.parse(config) is config


@slow_to_draw
@given(SECTIONS)
def test_valid_sections_round_trip(section: dict[str, Any]) -> None:
    config = DCTConfig.parse(section)
    for name, values in section.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            got = getattr(getattr(config, name), key)
            if isinstance(value, dict):
                assert got.model_dump() == {**got.model_dump(), **value}
            elif key == "feedback":
                assert got.label() == value
            else:
                assert got == (None if value is False and key == "parameters" else value)
    again = DCTConfig.parse(json.loads(config.model_dump_json()))
    assert again == config
    assert again.fingerprint() == config.fingerprint()


@slow_to_draw
@given(st.dictionaries(st.sampled_from([*DataParallelConfig.model_fields, "sparse"]), JSON_VALUES))
def test_any_json_is_accepted_or_refused_readably(values: dict[str, Any]) -> None:
    try:
        config = DCTConfig.parse({"data_parallel": values})
    except ConfigError as error:
        for line in str(error).splitlines()[1:]:
            assert line.strip().startswith("dct.data_parallel")
            known = (
                "must be ",
                "unknown key",
                "missing",
                "does not go",
                "has nothing",
                "is above",
            )
            assert any(words in line for words in known)
    else:
        assert DCTConfig.parse(json.loads(config.model_dump_json())) == config


@slow_to_draw
@given(JSON_VALUES.filter(lambda value: value is not None))
def test_any_json_as_section(section: Any) -> None:
    if isinstance(section, dict):
        section = {**section, "dct": 1}  # at least one fault
    assert all(line.startswith("dct") for line in faults(section))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("sparsity", 1, "a number in [0, 1)"),
        ("sparsity", -0.1, "a number in [0, 1)"),
        ("sparsity", "0.9", "a number in [0, 1)"),
        ("sparsity", True, "a number in [0, 1)"),
        ("sparsity", None, "a number in [0, 1)"),
        ("sparsity", math.nan, "a number in [0, 1)"),
        ("sparsity", math.inf, "a number in [0, 1)"),
        ("exchange", ["direct"], 'one of "auto", "direct", "two_phase"'),
        ("min_numel", 10.0, "an integer >= 0"),
        ("min_numel", True, "an integer >= 0"),
        ("enabled", 1, "true or false"),
        ("enabled", "true", "true or false"),
        ("min_numel", -1, "an integer >= 0"),
        ("value_dtype", "fp8", 'one of "fp32", "bf16", "fp16", "int8", "int4", "int2", "log4", "sign"'),
        ("feedback", "global", FEEDBACK),
        ("feedback", {"kind": "global"}, FEEDBACK),
        ("feedback", {"every": 5}, FEEDBACK),
        ("feedback", None, FEEDBACK),
        ("adaptive", "elastic", 'one of "accordion", or an object with "kind" and settings or null'),
        ("verify", 5, "a JSON object or null"),
        ("expert", None, "a JSON object"),
        ("exchange", "ring", 'one of "auto", "direct", "two_phase"'),
        ("warmup_steps", "5", "an integer >= 0 or null"),
    ],
)
def test_fault_names_path_value_and_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    expected = f"dct.data_parallel.{key} = {json.dumps(value)}: must be {allowed}"
    assert data_parallel_fault(key, value) == expected


def test_faults_inside_an_object_name_their_own_key() -> None:
    fault = data_parallel_fault("adaptive", {"kind": "accordion", "interval": 0})
    assert fault == "dct.data_parallel.adaptive.interval = 0: must be an integer >= 1"


def test_a_setting_that_is_required_and_missing_is_named() -> None:
    for forward in ("threshold", {"method": "threshold"}):
        (line,) = faults({"model_parallel": {"pipeline": {"forward": forward}}})
        assert line == "dct.model_parallel.pipeline.forward.sparsity: missing; must be a number in [0, 1)"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"data_parallel": {"sparsitty": 1}}, "did you mean dct.data_parallel.sparsity?"),
        ({"data_paralel": {}}, "did you mean dct.data_parallel?"),
        ({"Enabled": True}, "did you mean dct.enabled?"),
        ({"sparsity": 0.9}, "did you mean dct.data_parallel.sparsity?"),
        ({"metrics": {"evry": 1}}, "did you mean dct.metrics.every?"),
        ({"kernels": {"xyz": 1}}, "allowed are backend"),
        (
            {"data_parallel": {"adaptive": {"kind": "accordion", "intrval": 2}}},
            "did you mean dct.data_parallel.adaptive.interval?",
        ),
        ({"data_parallel": {"server_densty": 4}}, "did you mean dct.data_parallel.expert.server_density?"),
        (
            {"model_parallel": {"pipeline": {"forward": {"method": "transform", "rte": 4}}}},
            "did you mean dct.model_parallel.pipeline.forward.rate?",
        ),
        ({"metrics ": {}}, "did you mean dct.metrics?"),
        ({"enabled\n": True}, "did you mean dct.enabled?"),
        ({"": 1}, "allowed are enabled, data_parallel, model_parallel, embedding, metrics, kernels"),
        ({"qqq": 1}, "allowed are enabled, data_parallel, model_parallel, embedding, metrics, kernels"),
    ],
)
def test_unknown_key_gets_a_suggestion(section: dict[str, Any], expected: str) -> None:
    (line,) = faults(section)
    assert line.endswith(f"unknown key; {expected}")


@pytest.mark.parametrize("shares", [[0.5, "0.3"], [0.5, True], [0.5, 1], 1, "abc", None])
def test_a_fault_in_a_list_shows_the_whole_list(shares: Any) -> None:
    (line,) = faults({"model_parallel": {"pipeline": {"boundary_sparsity": shares}}})
    key = "dct.model_parallel.pipeline.boundary_sparsity"
    assert line == f"{key} = {json.dumps(shares)}: must be a list of numbers in [0, 1)"


def test_all_faults_in_one_error_with_the_rank() -> None:
    section = {
        "data_parallel": {"sparsity": 2, "min_numel": "3"},
        "metrics": {"every": 0},
        "kernels": 7,
        "x": 1,
    }
    lines = faults(section, rank=3)
    assert [line.split(" = ")[0] for line in lines] == [
        "dct.data_parallel.sparsity",
        "dct.data_parallel.min_numel",
        "dct.metrics.every",
        "dct.kernels",
        "dct.x",
    ]
    with pytest.raises(ConfigError, match=r"on rank 3 \(5 faults\)"):
        DCTConfig.parse(section, rank=3)


@pytest.mark.parametrize("section", [7, "dct", [], True])
def test_section_must_be_an_object(section: Any) -> None:
    assert faults(section) == [f"dct = {json.dumps(section)}: must be a JSON object"]


def test_long_values_are_shortened() -> None:
    assert len(data_parallel_fault("value_dtype", "x" * 10_000)) < 250


def test_small_residuals_need_a_residual_alone() -> None:
    (line,) = faults({"data_parallel": {"feedback": "none", "residual_dtype": "int8"}})
    assert line.startswith("dct.data_parallel: ")
    assert "residual_dtype = 'int8'" in line
    assert "feedback = 'none'" in line
    DCTConfig.parse({"data_parallel": {"feedback": "none", "residual_dtype": "fp32"}})


def test_a_name_stands_for_an_object_without_settings() -> None:
    for name in ("none", "local", "step_ahead"):
        short = DataParallelConfig.of(feedback=name)
        assert short == DataParallelConfig.of(feedback={"kind": name})
        assert short.feedback.short() == name
    assert DataParallelConfig.of(adaptive="accordion").adaptive == AccordionConfig()
    interval = {"kind": "accordion", "interval": 4}
    adaptive = DataParallelConfig.of(adaptive=interval).adaptive
    assert adaptive is not None
    assert adaptive.short() == interval


@pytest.mark.parametrize(
    "values",
    [
        {"sparsity": 0, "expert": {"threshold": "topk"}},
        {"feedback": "none", "verify": {}},
        {"sparsity": 0, "warmup_steps": 3, "sparsity_warmup_steps": 3},
        {"min_numel": 0, "sparsity": 0.9999},
    ],
)
def test_combinations_that_make_sense(values: dict[str, Any]) -> None:
    DCTConfig.parse({"data_parallel": values})


def test_other_mappings_and_tuples_are_fine() -> None:
    section = MappingProxyType({"data_parallel": MappingProxyType({"sparsity": 0})})
    config = DCTConfig.parse(section)
    assert isinstance(config.data_parallel.sparsity, float)
    adaptive = MappingProxyType({"kind": "accordion", "interval": 5})
    assert DataParallelConfig.of(adaptive=adaptive).adaptive == AccordionConfig(interval=5)
    pipeline = DCTConfig.parse(
        {
            "model_parallel": {
                "pipeline": {
                    "forward": {"method": "threshold", "sparsity": 0.5},
                    "boundary_sparsity": (0, 0.5),
                }
            }
        }
    ).model_parallel.pipeline
    assert pipeline.boundary_sparsity == (0.0, 0.5)


def test_sections_are_frozen_and_hashable() -> None:
    config = DCTConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.data_parallel.sparsity = 0.5
    assert hash(config) == hash(DCTConfig())


def test_of_raises_config_errors() -> None:
    assert DataParallelConfig.of(sparsity=0.5) == DataParallelConfig(sparsity=0.5)
    with pytest.raises(ConfigError, match=r"dct\.data_parallel\.sparsity = 2"):
        DataParallelConfig.of(sparsity=2)


def test_updated_merges_and_validates() -> None:
    config = DCTConfig.parse({"data_parallel": {"value_dtype": "int8"}})
    changed = config.updated({"data_parallel": {"sparsity": 0}, "metrics": {"every": 1}})
    assert changed.data_parallel.value_dtype == "int8"
    assert changed.data_parallel.sparsity == 0
    assert changed.metrics.every == 1
    with pytest.raises(ConfigError, match="unknown key"):
        config.updated({"data_parallel": {"sparse": 1}})
    for ahead in ("step_ahead", {"kind": "step_ahead"}):
        assert changed.updated({"data_parallel": {"feedback": ahead}}).data_parallel.feedback.looks_ahead


def test_fingerprint() -> None:
    config = DCTConfig()
    same = DCTConfig.parse({"data_parallel": {"sparsity": 0.99, "feedback": {"kind": "auto"}}})
    assert same.fingerprint() == config.fingerprint()
    assert re.fullmatch(r"[0-9a-f]{12}", config.fingerprint())
    other = config.updated({"data_parallel": {"sparsity": 0.9}, "kernels": {"backend": "cpu"}})
    assert other.fingerprint() != config.fingerprint()


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def test_from_file_takes_a_deepspeed_json_or_the_bare_section(tmp_path: Path) -> None:
    section = {"data_parallel": {"sparsity": 0.5}}
    bare = write(tmp_path / "bare.json", json.dumps(section))
    full = write(tmp_path / "full.json", json.dumps({"train_batch_size": 8, "dct": section}))
    assert DCTConfig.from_file(bare) == DCTConfig.from_file(str(full)) == DCTConfig.parse(section)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"train_batch_size": 8}', 'without a "dct" section'),
        ('{"dct": {"enabled": 1}}', "dct.enabled = 1: must be true or false"),
        ('{"dct": null}', "dct = null: must be a JSON object"),
        ('{"enable": true}', "did you mean dct.enabled?"),
        ('{"dct": {"enabled": true, "enabled": false}}', "key 'enabled' is given twice"),
        ("[1]", "must hold a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_from_file_faults_name_the_file(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "broken.json", content)
    with pytest.raises(ConfigError) as caught:
        DCTConfig.from_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_from_file_refuses_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"section\.yaml: is YAML, .* write JSON"):
        DCTConfig.from_file(write(tmp_path / "section.yaml", "dct:\n  data_parallel:\n    sparsity: 0.9\n"))
    assert DCTConfig.from_file(write(tmp_path / "json.yaml", ' {"dct": {}}')) == DCTConfig()


def test_from_file_reads_a_byte_order_mark(tmp_path: Path) -> None:
    assert DCTConfig.from_file(write(tmp_path / "mark.json", "\ufeff{}")) == DCTConfig()


def test_from_file_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        DCTConfig.from_file(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        DCTConfig.from_file(tmp_path)


@pytest.mark.parametrize("path", READY_MADE, ids=lambda path: path.stem)
def test_ready_made_files(path: Path) -> None:
    config = DCTConfig.from_file(path)
    assert config.enabled
    hybrid = path.stem.startswith("hybrid_")
    assert config.data_parallel.enabled or (hybrid and config.embedding.enabled)
    content = json.loads(path.read_text())
    assert content["optimizer"]["type"]
    assert f"`{path.name}`" in (path.parent / "README.md").read_text()


def test_there_are_ready_made_files() -> None:
    assert len(READY_MADE) >= 6


def test_the_page_is_generated_from_the_models() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert updated(page) == page, "run python docs/reference_page.py"


def test_every_option_is_documented_with_default_and_range() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    given: dict[str, Any] = {"parameters": {}, "verify": {}, "adaptive": "accordion"}
    found = list(options(DCTConfig.parse({"data_parallel": given})))
    found += options(DCTConfig.parse({"data_parallel": {"local_steps": {}}}))
    absent = {f"dct.data_parallel.{key}" for key in [*given, "local_steps"]}
    for option in (each for each in found if each.value is not None or each.path not in absent):
        path, _, key = option.path.rpartition(".")
        assert option.description
        if key == "adaptive":
            assert f"### `{option.path}`" in text
            continue
        rows = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
        if key not in ("forward", "backward"):  # each place has its own methods
            assert any(f"| `{json.dumps(option.default)}` | {option.allowed} |" in row for row in rows), (
                option.path
            )
        assert f"{option.allowed}" in text
        assert f"`{path}`" in text


def test_every_setting_is_documented() -> None:
    for model in (DataParallelConfig.model_fields["feedback"], TensorConfig.model_fields["forward"]):
        for kind in models(model):
            for name in kind.model_fields:
                assert name == kind.selector or documentation(kind, name)[0]
