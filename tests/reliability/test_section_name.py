"""A mistyped section is an error, and keys that nothing reads are named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support import CONFIGS

from dct_plugin.config import DCTConfig
from dct_plugin.integrations.deepspeed import activation, file_check, parser
from dct_plugin.integrations.deepspeed.section import KEYS
from dct_plugin.integrations.host.deepspeed_keys import near_misses, unread
from dct_plugin.integrations.host.versions import installed


def said(content: dict[str, Any], caplog: pytest.LogCaptureFixture, **more: Any) -> list[str]:
    caplog.clear()
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=content), **more)
    activation.engine_ready(engine)
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


def test_keys_that_nothing_reads() -> None:
    known = ("dct", "optimizer", "train_batch_size")
    found = unread(["optimzer", "train_batch_size", "dct", "_comment", "something"], known)
    assert found == ["'optimzer' (did you mean 'optimizer'?)", "'something'"]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_ready_files_have_no_unread_keys(path: object) -> None:
    pytest.importorskip("deepspeed")
    content = json.loads(path.read_text())  # type: ignore[attr-defined]
    if "data_parallel" not in content and "metrics" not in content:
        answer = parser.ask()
        assert answer is not None
        ours = ("dct", "dlrm", "enabled", "model_parallel", "embedding", "kernels")
        assert unread(content, {*answer.keys, *ours}) == []


@pytest.mark.slow
def test_the_installed_deepspeed_tells_its_keys() -> None:
    pytest.importorskip("deepspeed")
    settings = {"train_batch_size": 4, "dct": {}, "optimizer": {"type": "AdamW"}, "optimzer": 1}
    if installed("deepspeed") == "0.19.8":
        settings |= {"managed_gradient_accumulation": True, "log_level": "info", "vocabulary_size": 3}
    settings |= {"sequence_parallel_size": 1, "aio": {}, "scheduler": {}, "flops_profiler": {}}
    assert file_check.check(settings).warnings == ["'optimzer' (did you mean 'optimizer'?): nothing reads it"]
    assert "did you mean 'dct'" in file_check.check({"train_batch_size": 2, "dit": {}}).faults[0]
    answer = parser.ask({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, ranks=2)
    assert answer is not None
    assert answer.fault.startswith("AssertionError: Gradient accumulation steps: 0")
    assert parser.ask({"train_batch_size": 4, "dct": {}}, ranks=2).fault == ""  # type: ignore[union-attr]
