"""Values that were accepted and crashed later, and files that are not configurations at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dct_plugin.config import DCTConfig
from dct_plugin.errors import ConfigError


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("data_parallel", "min_numel", 10**30),
        ("data_parallel", "sparsity_warmup_steps", 2**63),
        ("data_parallel", "warmup_steps", 10**400),
        ("embedding", "error_bound", 1e300),
        ("metrics", "path", "\0"),
        ("metrics", "tensorboard", "a\0b"),
        ("metrics", "every", 10**30),
    ],
)
def test_what_cannot_make_sense_is_a_fault(part: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"dct\.{part}\.{key} = .*: must be "):
        DCTConfig.parse({part: {key: value}})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"data_parallel": {"adaptive": {"kind": "accordion", "interval": 2**63}}}, "adaptive.interval"),
        ({"data_parallel": {"expert": {"threshold_lifespan": 2**63}}}, "expert.threshold_lifespan"),
        ({"data_parallel": {"expert": {"server_density": 1e300}}}, "expert.server_density"),
        (
            {"model_parallel": {"tensor": {"forward": {"method": "bound", "error_bound": 1e300}}}},
            "error_bound",
        ),
        ({"data_parallel": {"feedback": {"kind": ["local"]}}}, "feedback"),
        ({"data_parallel": {"feedback": {"kind": {}}}}, "feedback"),
        ({"data_parallel": {"feedback": []}}, "feedback"),
        ({"data_parallel": {"feedback": "\0"}}, "feedback"),
        ({"data_parallel": {"verify": True}}, "verify"),
        ({"model_parallel": {"pipeline": {"forward": 7}}}, "forward"),
        ({"model_parallel": {"pipeline": {"forward": None}}}, "forward"),
    ],
)
def test_what_cannot_make_sense_inside_an_object(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"dct\.\S*{key} = .*: must be "):
        DCTConfig.parse(section)


@pytest.mark.parametrize("depth", [50, 5_000, 100_000])
def test_deep_nesting(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "deep.json"
    file.write_text('{"dct": ' * depth + "{}" + "}" * depth)
    with pytest.raises(ConfigError, match="nested too deeply"):
        DCTConfig.from_file(file)
    file.write_text('{"dct": {"metrics": ' + "[" * depth + "]" * depth + "}}")
    with pytest.raises(ConfigError, match="nested too deeply"):
        DCTConfig.from_file(file)


def test_a_file_that_is_too_long_for_a_configuration_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"dct": {}, "x": "' + 5_000_000 * "y" + '"}')
    with pytest.raises(ConfigError, match=r"ds\.json: a configuration has 1 MB at most"):
        DCTConfig.from_file(path)
