"""``dct dlrm``: what can be known before the ranks start is said before, the rest in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deepspeed_launch import environment
from support.forked import forked_interpreters
from typer.testing import CliRunner

from dct_plugin.cli import app
from dct_plugin.errors import ConfigError
from dct_plugin.recommender import runner
from dct_plugin.recommender.commands.dlrm import configurations
from dct_plugin.recommender.data import (
    DIABETES_FILE,
    ClickDataset,
    DataFormatError,
    check_parts,
    load,
)


@pytest.mark.parametrize(
    "option", [["--report", "/proc/x"], ["--plot", "/proc/x/y.png"], ["--out", "/proc/x"], ["--report", "/"]]
)
def test_paths_that_cannot_be_written(option: list[str]) -> None:
    found = CliRunner().invoke(app, ["dlrm", *option])
    assert found.exit_code == 2
    assert "cannot be written" in found.output
    assert option[0] in found.output


@pytest.mark.slow  # DeepSpeed tells its keys in a process of its own
@pytest.mark.parametrize("key", ["optimzer", "dctt", "DCT", "dlmr"])
def test_mistyped_sections(tmp_path: Path, key: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(f'{{"{key}": {{}}}}')
    with forked_interpreters(), pytest.raises(ConfigError, match=f"{key}.*did you mean"):
        configurations([file], ranks=2)


def test_deep_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": ' * 5000 + "1" + "}" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        configurations([file], ranks=2)


def test_data_without_numeric_columns(tmp_path: Path) -> None:
    with np.load(DIABETES_FILE) as archive:
        columns = dict(archive)
    columns["numeric_names"] = np.array([], dtype=str)
    path = tmp_path / "none.npz"
    np.savez(path, **columns)
    with pytest.raises(DataFormatError, match="expected at least one name in 'numeric_names'"):
        load("diabetes", path)


def test_gzip_that_is_damaged_at_its_start(tmp_path: Path) -> None:
    path = tmp_path / "train.txt.gz"
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(DataFormatError, match="expected gzip data, as its name says"):
        load("criteo", path)


def test_a_part_with_one_label() -> None:
    clicks = load("diabetes", max_rows=100)
    values: dict[str, Any] = {**clicks.__dict__, "label": np.ones(100, dtype=np.float32)}
    with pytest.raises(DataFormatError, match="with label 0 and with label 1 in the training part"):
        check_parts(ClickDataset(**values))


def line(label: int = 0) -> str:
    return "\t".join([str(label), *["1"] * 13, *["ab"] * 26])


@pytest.mark.slow
def test_faults_that_the_ranks_find_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("\n".join([*(line(i % 2) for i in range(1100)), "broken", *[line()] * 50]) + "\n")
    with forked_interpreters():
        command = [sys.executable, "-m", "dct_plugin.cli", "dlrm", "--data", str(path)]
        command += ["--out", str(tmp_path)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path}: line 1101: expected 40 tab-separated fields")
    assert done.stderr.count("\n") == 1
    assert runner.SLOW_START_SECONDS == 10
