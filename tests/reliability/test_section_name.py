"""A mistyped section is an error, and keys that nothing reads are named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support import CONFIGS
from support.forked import forked_interpreters

from dct_plugin.config import DCTConfig
from dct_plugin.integrations.deepspeed import engine_hook, file_check, parser
from dct_plugin.integrations.deepspeed.section import KEYS, near_misses, unread
from dct_plugin.integrations.host.versions import installed


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


def test_keys_that_nothing_reads() -> None:
    known = ("dct", "optimizer", "train_batch_size")
    found = unread(["optimzer", "train_batch_size", "dct", "_comment", "something"], known)
    assert found == ["'optimzer' (did you mean 'optimizer'?)", "'something'"]


@pytest.mark.slow
def test_ready_files_are_taken() -> None:
    if installed("deepspeed") is None:
        pytest.skip("without DeepSpeed")
    contents = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
    files = {name: content for name, content in contents.items() if file_check.for_deepspeed(content)}
    with forked_interpreters():
        answers = parser.ask([*files.values()])
    for (name, content), answer in zip(files.items(), answers, strict=True):
        report = file_check.check(content, answer)
        assert (name, report.faults) == (name, [])
        assert not any("nothing reads" in warning for warning in report.warnings)


@pytest.mark.slow
def test_the_installed_deepspeed_tells_its_keys() -> None:
    pytest.importorskip("deepspeed")
    settings = {"train_batch_size": 4, "dct": {}, "optimizer": {"type": "AdamW"}, "optimzer": 1}
    if installed("deepspeed") == "0.19.8":
        settings |= {"managed_gradient_accumulation": True, "log_level": "info", "vocabulary_size": 3}
    settings |= {"sequence_parallel_size": 1, "aio": {}, "scheduler": {}, "flops_profiler": {}}
    typo = {"train_batch_size": 2, "dit": {}}
    misfit = {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}
    with forked_interpreters():
        found = parser.ask([settings, typo, misfit, {"train_batch_size": 4, "dct": {}}], ranks=2)
    warning = "'optimzer' (did you mean 'optimizer'?): nothing reads it"
    assert file_check.check(settings, found[0]).warnings == [warning]
    assert "did you mean 'dct'" in file_check.check(typo, found[1]).faults[0]
    assert "Gradient accumulation steps: 0" in found[2].faults[0]
    assert found[3].faults == ()
