"""Residuals through DeepSpeed's universal checkpoints: other numbers of ranks, other stages of ZeRO."""

from __future__ import annotations

import functools
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.deepspeed_launch import Results, Run, config, launch
from typer.testing import CliRunner

from dct_plugin import checkpoint
from dct_plugin.cli import app

pytest.importorskip("deepspeed")
from support.deepspeed_worker import restored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DCT = {"data_parallel": {"sparsity": 0.97, "min_numel": 100}}
#: ZeRO-3 on two nodes of two ranks, with copies of the weights.
COPIES = {
    "zero": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100},
    "dct": {"data_parallel": {**DCT["data_parallel"], "nodes": 2, "parameters": {}}},
}
STEPS = 6


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return config(stage, **{"optimizer": "AdamW", "dct": DCT, **more})


def _converts(rank: int, world_size: int, arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")


def converted(folder: Path) -> str:
    """A checkpoint's folder with a universal one in it, and the residuals in that."""
    name = f"global_step{STEPS}"
    source, target = folder / name, folder / f"{name}_universal"
    arguments = ["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    processes.run(1, _converts, arguments)
    result = CliRunner().invoke(app, ["universal", str(source), str(target)])
    assert result.exit_code == 0, result.output
    assert checkpoint.GATHERED in result.output
    (folder / "latest_universal").write_text(target.name)
    return str(folder)


def _load_residuals(tag: str, engine: Any) -> dict[str, Any]:
    assert engine.dct.load_residuals(tag)
    return {"restored": restored(engine)}


def _load_without_optimizer_states(folder: str, engine: Any) -> dict[str, Any]:
    engine.load_checkpoint(folder, load_optimizer_states=False)
    return _load_residuals(f"{folder}/global_step{engine.global_steps}", engine)


def unsent(results: Results, what: str, run: str, per_node: int = 1) -> dict[str, float]:
    """The sum of unsent gradients by parameter: the mean over the ranks, or nodes. DeepSpeed has divided
    the gradients of runs of ZeRO-1 and 2 by their number.
    """
    unit = 1 if run[0] in "12" else len(results) // per_node
    totals: dict[str, float] = {}
    for rank in results:
        for parameter, value in rank[run][what].items():
            totals[parameter] = totals.get(parameter, 0.0) + value / unit
    return totals


def test_other_ranks_and_stages_keep_residuals(tmp_path: Path) -> None:
    """ZeRO-1 on 2 ranks, ZeRO-2 on 4, ZeRO-1 on 2 again; ZeRO-3 on 2, on 2 nodes of 2, on 2 again."""
    universal = {"checkpoint": {"load_universal": True}}

    def start(stage: int, folder: Path) -> Run:
        return {"id": f"{stage}", "config": settings(stage), "steps": STEPS, "save": str(folder)}

    def load(stage: int, source: str, steps: int, special: dict[str, Any] | None = None, **more: Any) -> Run:
        return {
            "id": f"{stage}",
            "config": settings(stage, **universal, **(special or {})),
            "load": source,
            "steps": steps,
            **more,
        }

    folders = [tmp_path / name for name in ("first", "second", "sharded", "copies")]
    started = launch(2, [start(1, folders[0]), start(3, folders[2])], tmp_path / "a")
    wide = launch(
        4,
        [
            load(2, converted(folders[0]), STEPS, save=str(folders[1])),
            load(3, converted(folders[2]), STEPS, COPIES, save=str(folders[3])),
        ],
        tmp_path / "b",
    )
    plan = [load(1, converted(folders[1]), STEPS + 2), load(3, converted(folders[3]), STEPS + 2)]
    shutil.copytree(folders[1], tmp_path / "bare")
    next((tmp_path / "bare").glob(f"*/{checkpoint.GATHERED}")).unlink()
    plan.append({**load(1, str(tmp_path / "bare"), STEPS + 2), "id": "bare"})
    back = launch(2, plan, tmp_path / "c")

    found = ("1", wide, "2", 1), ("1", back, "1", 1), ("3", wide, "3", 2), ("3", back, "3", 1)
    for first, results, run, per_node in found:
        before, after = unsent(started, "residual", first), unsent(results, "restored", run, per_node)
        assert any(abs(value) > 1e-4 for value in before.values())
        assert after.keys() == before.keys()
        for parameter, value in before.items():
            assert after[parameter] == pytest.approx(value, rel=1e-6, abs=1e-6)
        assert len({rank[run]["hash"] for rank in results}) == 1
    assert back[0]["1"]["steps"] == STEPS + 2
    assert any("dct universal SAVED UNIVERSAL" in line for line in back[0]["bare"]["log"])
    start = f"dct: resumed at step {STEPS} with the residuals of "
    for results, run in (wide, "2"), (wide, "3"), (back, "1"), (back, "3"):
        assert sum(line.startswith(start) for line in results[0][run]["log"]) == 1
        assert not any(line.startswith(start) for line in results[1][run]["log"])


def test_exact_updates_on_other_ranks_begin_with_whole_gathers(tmp_path: Path) -> None:
    """ZeRO-1 in bf16 on 2 ranks, then on 3."""
    folder, gradients = tmp_path / "saved", {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}

    def job(parameters: str | None, **more: Any) -> dict[str, Any]:
        dct = {"data_parallel": {**gradients, "parameters": parameters}}
        return config(1, "bf16", optimizer="AdamW", dct=dct, **more)

    start = {"id": "first", "config": job("exact"), "steps": STEPS, "save": str(folder)}
    launch(2, [start], tmp_path / "a")
    rest = {"load": converted(folder), "steps": STEPS + 4, "seed": 2}
    universal = {"checkpoint": {"load_universal": True}}
    plan = [{"id": str(kind), "config": job(kind, **universal), **rest} for kind in ("exact", None)]
    for rank in launch(3, plan, tmp_path / "b"):
        exact, gathered = rank["exact"], rank["None"]
        assert exact["losses"] == gathered["losses"]
        assert exact["hash"] == gathered["hash"]
        whole, changed = (exact["classes"][f"parameter_{kind}"] for kind in ("full", "exact"))
        assert whole["dense"] == pytest.approx(changed["dense"], rel=0.01)  # two steps of four


def test_other_stages_without_optimizer_states_keep_residuals(tmp_path: Path) -> None:
    """ZeRO-0, ZeRO-1, ZeRO-2, by DeepSpeed's ordinary checkpoints; and ZeRO-2's residuals alone into ZeRO-3,
    into which DeepSpeed does not load, ZeRO-3's into ZeRO-1.
    """
    folders = [str(tmp_path / name) for name in ("first", "second", "third")]

    def load(stage: int, which: int) -> Run:
        return {
            "id": f"{stage}",
            "config": settings(stage),
            "prepare": functools.partial(_load_without_optimizer_states, folders[which]),
        }

    def residuals(stage: int, which: int) -> Run:
        tag = f"{folders[which]}/global_step{STEPS if which < 2 else 0}"
        return {"config": settings(stage), "prepare": functools.partial(_load_residuals, tag)}

    plan = [
        {"id": "0", "config": settings(0), "steps": STEPS, "save": folders[0]},
        {**load(1, 0), "steps": STEPS, "save": folders[1]},
        {**load(2, 1), "steps": STEPS + 1},
        {**residuals(3, 1), "id": "3", "steps": 0, "save": folders[2]},
        {**residuals(1, 2), "id": "1 of 3", "steps": 0},
    ]
    results = launch(2, plan, tmp_path / "runs")

    before = unsent(results, "residual", "0")
    assert any(abs(value) > 1e-4 for value in before.values())
    for run in "1", "2", "3", "1 of 3":
        after = unsent(results, "restored", run)
        assert after.keys() == before.keys()
        for parameter, value in before.items():
            assert after[parameter] == pytest.approx(value, rel=1e-6, abs=1e-6)
    assert results[0]["2"]["hash"] == results[1]["2"]["hash"]


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["universal", str(tmp_path), str(tmp_path)])
    assert result.exit_code
    assert "no universal checkpoint" in str(result.exception)
    (tmp_path / "zero").mkdir()
    result = CliRunner().invoke(app, ["universal", str(tmp_path), str(tmp_path)])
    assert result.exit_code
    assert "the checkpoint holds no dct_rank_*.pt files" in str(result.exception)
