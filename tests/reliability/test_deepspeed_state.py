"""Residuals are tied to the state of DeepSpeed that they were saved with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.deepspeed_launch import run_script

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

WORKER = Path(__file__).parents[1] / "support" / "deepspeed_mixed.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mixed")
    run_script(2, WORKER, folder, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", ["0", "1"])
def test_what_belongs_together_loads(ranks: list[dict[str, Any]], stage: str) -> None:
    for rank in ranks:
        assert rank[stage]["whole"] == {"loaded": True, "mine": 5, "ours": [], "step": 3}
        assert rank[stage]["one missing"]["step"] == 0  # with a warning, residuals of zero
        assert rank[stage]["written over"]["mine"] == 6
        assert rank[stage]["written over"]["latest"] == "a"


@pytest.mark.parametrize("stage", ["0", "1"])
def test_what_does_not_stops_all_ranks(ranks: list[dict[str, Any]], stage: str) -> None:
    for rank in ranks:
        newer, unfinished = (rank[stage][name]["error"] for name in ("newer residuals", "unfinished"))
        for number in (0, 1):
            assert f"rank {number}: " in newer
            assert f"rank {number}: " in unfinished
        assert "the files are of another save (step 5, dct-plugin" in newer
        assert "a save over an older checkpoint did not end" in unfinished
        assert rank[stage]["unfinished"]["latest"] == "b"


@pytest.mark.parametrize("stage", ["0", "1"])
def test_residuals_outlive_another_sparsity(ranks: list[dict[str, Any]], stage: str) -> None:
    for rank in ranks:
        changed = rank[stage]["another sparsity"]
        assert (changed["loaded"], changed["same"]) == (True, True)
        assert changed["density"] == pytest.approx(0.5, abs=0.1)
