"""Residuals are tied to the state of DeepSpeed that they were saved with."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.deepspeed_launch import run_ranks
from torch import nn

from dct_plugin.checkpoint import StateFiles, in_unit
from dct_plugin.errors import DCTError, DesyncError

deepspeed = pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

#: The results of every rank, by stage and scenario.
Ranks = list[dict[int, dict[str, Any]]]


def made(stage: int, sparsity: float, **keys: Any) -> Any:
    """An engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "dct": {"data_parallel": {"sparsity": sparsity, "min_numel": 100, **keys}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(dist.get_rank() + 10 * engine.global_steps)
        engine.backward(engine(torch.randn(4, 64, generator=generator)).square().mean())
        engine.step()


def interrupt_save(engine: Any, folder: Path) -> None:
    """Save over "a"; the save ends where DeepSpeed would write its first file."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise InterruptedError

    engine._save_checkpoint = interrupted
    with contextlib.suppress(InterruptedError):
        engine.save_checkpoint(str(folder), tag="a")
    del engine._save_checkpoint


def residuals(engine: Any) -> dict[str, list[float]]:
    """The unsent gradients of this rank, by parameter."""
    streams = engine.dct.reducer.state_dict()["streams"]
    return {name: stream["residual"].tolist() for name, stream in streams.items()}


def scenarios(folder: Path, stage: int) -> dict[str, Any]:
    engine, rank = made(stage, 0.9), dist.get_rank()
    results: dict[str, Any] = {}

    def prepared(action: Callable[[], Any]) -> None:
        dist.barrier()
        if rank == 0:
            action()
        dist.barrier()

    def attempt(name: str) -> None:
        try:
            path, client = engine.load_checkpoint(str(folder), tag="a")
            results[name] = {
                "loaded": path is not None,
                "mine": client.get("mine"),
                "ours": [key for key in client if "dct" in key],
                "step": engine.dct.reducer.group.step,
            }
        except DCTError as error:
            results[name] = {"error": str(error)}

    train(engine, 3)
    engine.save_checkpoint(str(folder), tag="a", client_state={"mine": 5})
    train(engine, 2)
    engine.save_checkpoint(str(folder), "b")
    attempt("whole")
    files = sorted((folder / "b").glob("dct_rank_*.pt"))
    kept = folder / "kept"
    prepared(lambda: shutil.copytree(folder / "a", kept))
    # A save over "a" that ended before DeepSpeed's own files were written, without its mark.
    prepared(lambda: [shutil.copy(file, folder / "a") for file in files])
    attempt("newer residuals")
    prepared(lambda: [shutil.copy(kept / file.name, folder / "a") for file in files])
    prepared((folder / "a" / files[1].name).unlink)
    attempt("one missing")
    interrupt_save(engine, folder)
    attempt("unfinished")
    results["unfinished"]["latest"] = (folder / "latest").read_text()
    train(engine, 2)  # from residuals of zero
    engine.save_checkpoint(str(folder), tag="a", client_state={"mine": 6})
    attempt("written over")
    results["written over"]["latest"] = (folder / "latest").read_text()
    other = made(stage, 0.5)
    path, _ = other.load_checkpoint(str(folder), tag="a")
    same = residuals(other) == residuals(engine) != {}
    results["another sparsity"] = {"loaded": path is not None, "same": same}
    # A run in fp16 would have saved this.
    scaled = {**in_unit(engine.dct.reducer.state_dict(), 1024.0), "loss_scale": 1024.0}
    StateFiles(rank, 2, unit=1.0 if stage == 0 else 0.5).save(folder / "fp16", lambda: scaled)
    other.dct.load_residuals(folder / "fp16")
    results["without a loss scale"] = {"same": residuals(other) == residuals(engine)}
    train(other, 2)  # in the first the thresholds of before may still hold
    results["another sparsity"]["density"] = other.dct.metrics.summary().classes["gradient"].density
    compared = made(stage, 0.9, verify={"action": "stop"})
    train(compared, 1)
    compared.save_checkpoint(str(folder), tag="c")
    compared.module[0].bias.data += rank
    with pytest.raises(DesyncError):  # before a file is written
        compared.save_checkpoint(str(folder), tag="c")
    path, _ = compared.load_checkpoint(str(folder), tag="c")
    results["stopped"] = {"loaded": path is not None}
    for each in (engine, other, compared):
        each.destroy()
    prepared(lambda: (folder / "a" / files[0].name).write_bytes(b"damaged"))
    path, _ = made(stage, 0.9, enabled=False).load_checkpoint(str(folder), tag="a")
    results["switched off"] = {"loaded": path is not None}
    return results


def _both_stages(folder: str) -> dict[int, dict[str, Any]]:
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    return {stage: scenarios(Path(folder, f"stage{stage}"), stage) for stage in (0, 1)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("mixed")
    return run_ranks(2, _both_stages, folder, str(folder))


@pytest.mark.parametrize("stage", [0, 1])
def test_what_belongs_together_loads(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        assert rank[stage]["whole"] == {"loaded": True, "mine": 5, "ours": [], "step": 3}
        assert rank[stage]["one missing"]["step"] == 0  # with a warning, residuals of zero
        assert rank[stage]["written over"]["mine"] == 6
        assert rank[stage]["written over"]["latest"] == "a"
        assert rank[stage]["stopped"]["loaded"]
        assert rank[stage]["switched off"]["loaded"]  # although the file of rank 0 is damaged


@pytest.mark.parametrize("stage", [0, 1])
def test_what_does_not_stops_all_ranks(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        newer, unfinished = (rank[stage][name]["error"] for name in ("newer residuals", "unfinished"))
        for number in (0, 1):
            assert f"rank {number}: " in newer
            assert f"rank {number}: " in unfinished
        assert "the files are of another save (step 5, dct-plugin" in newer
        assert "a save over an older checkpoint did not end" in unfinished
        assert rank[stage]["unfinished"]["latest"] == "b"


@pytest.mark.parametrize("stage", [0, 1])
def test_residuals_of_a_run_with_a_loss_scale(ranks: Ranks, stage: int) -> None:
    assert all(rank[stage]["without a loss scale"]["same"] for rank in ranks)


@pytest.mark.parametrize("stage", [0, 1])
def test_residuals_outlive_another_sparsity(ranks: Ranks, stage: int) -> None:
    for rank in ranks:
        changed = rank[stage]["another sparsity"]
        assert (changed["loaded"], changed["same"]) == (True, True)
        assert changed["density"] == pytest.approx(0.5, abs=0.1)
