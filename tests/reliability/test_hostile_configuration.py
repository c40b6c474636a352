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
        ("data_parallel", "capacity", 1e308),
        ("data_parallel", "min_numel", 10**30),
        ("data_parallel", "threshold_lifespan", 2**63),
        ("data_parallel", "warmup_steps", 10**400),
        ("data_parallel", "density_band", [0.5, 1e300]),
        ("embedding", "error_bound", 1e300),
        ("embedding", "bound_classes", [1, 1, 1e300]),
        ("metrics", "path", "\0"),
        ("metrics", "tensorboard", "a\0b"),
        ("metrics", "every", 10**30),
        ("kernels", "threads", 10**12),
    ],
)
def test_what_cannot_make_sense_is_a_fault(part: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"dct\.{part}\.{key} = .*: must be "):
        DCTConfig.parse({part: {key: value}})


@pytest.mark.parametrize("depth", [50, 5_000, 200_000])
def test_deep_nesting(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "deep.json"
    file.write_text('{"dct": ' * depth + "{}" + "}" * depth)
    with pytest.raises(ConfigError, match="nested too deeply"):
        DCTConfig.from_file(file)
    file.write_text('{"dct": {"metrics": ' + "[" * depth + "]" * depth + "}}")
    with pytest.raises(ConfigError, match="nested too deeply"):
        DCTConfig.from_file(file)
