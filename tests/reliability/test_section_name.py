"""A mistyped section is an error, and keys that nothing reads are named."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from support import CONFIGS

from dct_plugin.errors import ConfigError
from dct_plugin.integrations.deepspeed import activation
from dct_plugin.integrations.host.deepspeed_keys import near_misses, unread


@pytest.mark.parametrize(
    "key", ["dctt", "DCT", "Dct", "dct ", "dtc", "dct_plugin", "ddct", "DCT-plugin", "dc", "dt", "dcf"]
)
def test_near_misses_of_the_section(key: str) -> None:
    assert near_misses(["optimizer", key], "dct") == [key]
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict={key: {}}))
    with pytest.raises(ConfigError, match="which nothing reads; did you mean 'dct'"):
        activation.engine_ready(engine)


@pytest.mark.parametrize("key", ["_dct", "#dct", "dct_off", "fp16", "data_types", "act", "dict_of", ""])
def test_other_keys_are_left(key: str) -> None:
    assert near_misses([key], "dct") == []


def test_keys_that_nothing_reads() -> None:
    found = unread(["optimzer", "train_batch_size", "dct", "_comment", "something"], ("dct",))
    assert found == ["'optimzer' (did you mean 'optimizer'?)", "'something'"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_ready_files_have_no_unread_keys(path: object) -> None:
    content = json.loads(path.read_text())  # type: ignore[attr-defined]
    if "data_parallel" not in content and "metrics" not in content:
        assert unread(content, ("dct", "dlrm", "enabled", "model_parallel", "embedding", "kernels")) == []
