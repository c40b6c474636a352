"""A mistyped section is named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support import CONFIGS

from dct_plugin.config import DCTConfig
from dct_plugin.integrations.deepspeed import engine_hook, file_check
from dct_plugin.integrations.deepspeed.section import KEYS, near_misses


def said(content: dict[str, Any], caplog: pytest.LogCaptureFixture, **more: Any) -> list[str]:
    caplog.clear()
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=content), **more)
    engine_hook.engine_ready(engine)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "key", ["dctt", "DCT", "Dct", "dct ", "dtc", "dct_plugin", "ddct", "DCT-plugin", "dc", "dt", "dcf"]
)
def test_near_misses_of_the_section(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert near_misses(["optimizer", key], "dct") == [key]
    (line,) = said({key: {"data_parallel": {}}}, caplog)
    assert f"has a section {key!r}, which nothing reads; did you mean 'dct'" in line
    assert line.endswith("this job trains without dct")
    assert said({key: {"data_parallel": {}}}, caplog, global_rank=1) == []


@pytest.mark.parametrize(
    "content",
    [{}, 3, "on", ["data_parallel"], {"size": 3}, {"enabled": True, "size": 3}, {"encoder": {"metrics": 1}}],
)
def test_a_section_of_somebody_else_is_left(content: Any, caplog: pytest.LogCaptureFixture) -> None:
    for key in ("dict", "dit", "det", "dst", "dpt", "dt"):
        assert said({key: content}, caplog) == []
    assert said({"my_tool": {"dct": content}}, caplog) == []


def test_the_keys_of_the_section() -> None:
    """They are read without the configuration's models, which take time to import."""
    assert set(DCTConfig.model_fields) == KEYS


def test_a_section_inside_another_object(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = said({"bf16": {"enabled": True, "dct": {"enabled": True}}}, caplog)
    assert "bf16.dct: nothing reads the section there; move it one level up" in line


@pytest.mark.parametrize("key", ["_dct", "#dct", "dct_off", "fp16", "data_types", "act", "dict_of", ""])
def test_other_keys_are_left(key: str) -> None:
    assert near_misses([key], "dct") == []


def test_ready_files_are_taken() -> None:
    for path in sorted(CONFIGS.glob("*.json")):
        assert (path.stem, file_check.check(json.loads(path.read_text())).faults) == (path.stem, [])
