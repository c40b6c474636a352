"""Residuals on disk: the file, and how residuals are spread over another number of ranks."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes
from support.state_files import save_state

from dct_plugin import checkpoint
from dct_plugin.compression.stream import Compressor
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.errors import DCTError


def state(
    seed: int, *, step: int = 7, loss_scale: float = 1.0, answers: dict[str, Any] | None = None
) -> dict[str, Any]:
    """As of a reducer with two streams that have run."""
    generator = torch.Generator().manual_seed(seed)
    streams: dict[str, Any] = {}
    for name, numel in (("a", 1000), ("b.weight", 400)):
        stream = Compressor(sparsity=0.9, name=name, rank=seed)
        stream.compress(torch.randn(numel, generator=generator))
        streams[name] = stream.state_dict()
    for name, residual in (answers or {}).items():
        streams[name] = {**streams["a"], "residual": residual}
    return {"step": step, "loss_scale": loss_scale, "streams": streams}


def load(folder: Path, *, rank: int, world_size: int, **how: Any) -> dict[str, Any] | None:
    try:
        return checkpoint.StateFiles(rank, world_size, **how).read(folder).state
    except checkpoint.NoState:
        return None


def save_all(folder: Path, states: list[dict[str, Any]], unit: float = 1.0) -> None:
    for rank, saved in enumerate(states):
        save_state(folder, saved, rank=rank, world_size=len(states), unit=unit)


def test_the_same_number_of_ranks_gets_its_own_back(tmp_path: Path) -> None:
    states = [state(0), state(1)]
    save_all(tmp_path / "tag", states)
    assert sorted(path.name for path in (tmp_path / "tag").iterdir()) == [
        "dct_rank_00000.pt",
        "dct_rank_00001.pt",
    ]
    for rank, saved in enumerate(states):
        loaded = load(tmp_path / "tag", rank=rank, world_size=2)
        assert loaded is not None
        assert loaded["step"] == 7
        for name, stream in saved["streams"].items():
            assert loaded["streams"][name]["threshold"] == stream["threshold"]
            assert torch.equal(loaded["streams"][name]["residual"], stream["residual"])


def _loaded_by_one(rank: int, world_size: int, folder: Path) -> list[str]:
    with processes.logged() as lines:
        loaded = checkpoint.StateFiles(rank, world_size).load(folder)
        assert loaded is not None
        GradientReducer(DataParallelConfig()).load_state_dict(loaded)
    return lines


@pytest.mark.slow
def test_one_rank_is_told_that_residuals_are_not_used(tmp_path: Path) -> None:
    save_all(tmp_path, [state(0), state(1)])
    ((line,),) = processes.run(1, _loaded_by_one, tmp_path)
    assert line.endswith("the residuals of 2 ranks at step 7 are not used: one rank sends nothing")


def test_no_files(tmp_path: Path) -> None:
    assert load(tmp_path, rank=0, world_size=2) is None
    assert load(tmp_path / "nowhere", rank=1, world_size=2) is None


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_file(tmp_path: Path, missing: int) -> None:
    save_all(tmp_path, [state(0), state(1)])
    checkpoint.StateFiles(missing, 0).file(tmp_path).unlink()
    assert load(tmp_path, rank=missing, world_size=2) is None
    assert load(tmp_path, rank=1 - missing, world_size=2) is not None
    assert load(tmp_path, rank=1 - missing, world_size=3) is None


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_other_ranks_get_the_mean(tmp_path: Path, world_size: int) -> None:
    states = [state(0), state(1)]
    save_all(tmp_path, states)
    for rank in range(world_size):
        loaded = load(tmp_path, rank=rank, world_size=world_size)
        assert loaded is not None
        for name in ("a", "b.weight"):
            mean = (states[0]["streams"][name]["residual"] + states[1]["streams"][name]["residual"]) / 2
            assert torch.allclose(loaded["streams"][name]["residual"], mean)
            assert loaded["streams"][name]["threshold"]["tau"] == 0.0  # will be measured
            assert loaded["streams"][name]["threshold"]["step"] == 1
        Compressor(sparsity=0.9).load_state_dict(loaded["streams"]["a"])


def test_what_owners_owe_is_shared_out(tmp_path: Path) -> None:
    """Their residuals are of the sum over the ranks, so each rank takes over its share of the average."""
    first, second = torch.ones(600), torch.full((400,), 3.0)
    states = [state(0, answers={"a[0:600]": first}), state(1, answers={"a[600:1000]": second})]
    save_all(tmp_path, states)
    loaded = load(tmp_path, rank=2, world_size=3)
    assert loaded is not None
    assert set(loaded["streams"]) == {"a", "b.weight"}
    mean = (states[0]["streams"]["a"]["residual"] + states[1]["streams"]["a"]["residual"]) / 2
    assert torch.allclose(loaded["streams"]["a"]["residual"], mean + torch.cat([first, second]) / 2)


def test_gradients_that_were_divided_before(tmp_path: Path) -> None:
    """Residuals in units of 1/ranks: their sum is the unsent gradient, whatever the number of ranks."""
    states = [state(0), state(1)]
    save_all(tmp_path, states, unit=1 / 2)
    loaded = load(tmp_path, rank=0, world_size=4, unit=1 / 4)
    assert loaded is not None
    unsent = states[0]["streams"]["a"]["residual"] + states[1]["streams"]["a"]["residual"]
    assert torch.allclose(4 * loaded["streams"]["a"]["residual"], unsent)
    same = load(tmp_path, rank=1, world_size=2, unit=1.0)  # the host now divides afterwards
    assert same is not None
    assert torch.equal(same["streams"]["a"]["residual"], 2 * states[1]["streams"]["a"]["residual"])


def test_loss_scales_of_old_ranks(tmp_path: Path) -> None:
    states = [state(0, loss_scale=4.0), state(1, loss_scale=2.0)]
    save_all(tmp_path, states)
    loaded = load(tmp_path, rank=0, world_size=1)
    assert loaded is not None
    assert loaded["loss_scale"] == 4.0
    mean = (states[0]["streams"]["a"]["residual"] + 2 * states[1]["streams"]["a"]["residual"]) / 2
    assert torch.allclose(loaded["streams"]["a"]["residual"], mean)


def test_a_stream_that_only_one_rank_had(tmp_path: Path) -> None:
    states = [state(0), state(1)]
    only = states[0]["streams"]["b.weight"]["residual"]
    del states[1]["streams"]["b.weight"]
    save_all(tmp_path, states)
    loaded = load(tmp_path, rank=0, world_size=4)
    assert loaded is not None
    assert torch.allclose(loaded["streams"]["b.weight"]["residual"], only / 2)


def test_streams_without_residuals(tmp_path: Path) -> None:
    """Without feedback nothing is kept."""
    stream = Compressor(sparsity=0.9, feedback="none")
    stream.compress(torch.randn(1000))
    save_all(tmp_path, [{"step": 3, "loss_scale": 1.0, "streams": {"a": stream.state_dict()}}] * 2)
    assert load(tmp_path, rank=0, world_size=2, unit=0.5) is not None
    loaded = load(tmp_path, rank=0, world_size=3)
    assert loaded == {"step": 3, "loss_scale": 1.0, "streams": {}}


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = checkpoint.StateFiles(0, 0).file(tmp_path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(DCTError, match="not a readable state"):
        load(tmp_path, rank=0, world_size=1)
    torch.save({"format": 99, "world_size": 1}, path)
    with pytest.raises(DCTError, match="written in format 99"):
        load(tmp_path, rank=0, world_size=1)
    save_all(tmp_path, [state(0), state(1)])
    for rank in (0, 2):
        save_state(tmp_path, state(2), rank=rank, world_size=3)
    with pytest.raises(
        DCTError, match=r"dct_rank_00001.pt: written by a run of 2 ranks, the other files .* one of 3"
    ):
        load(tmp_path, rank=3, world_size=4)


def test_bytes_after_or_in_place_of_the_checksum(tmp_path: Path) -> None:
    save_all(tmp_path, [state(0)])
    path = checkpoint.StateFiles(0, 1).file(tmp_path)
    content = torch.load(path, weights_only=True)
    for extra in ({}, {"digest": "0" * 64}):  # as torch.save leaves a file, whatever it holds
        torch.save({**content, **extra}, path)
        with pytest.raises(DCTError, match="does not have the checksum it was written with"):
            load(tmp_path, rank=0, world_size=1)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    save_all(tmp_path, [state(0)])
    with pytest.raises(Exception, match="pickle"):
        save_state(tmp_path, {"streams": {"a": lambda: None}}, rank=0, world_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["dct_rank_00000.pt"]
    assert load(tmp_path, rank=0, world_size=1) is not None


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    path = tmp_path / "dct_rank_00000.pt"
    # A limit for files acts like a disk that fills up; at some sizes torch's writer has the last word.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in range(2_000, 40_000, 2_000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(OSError, match=re.escape(os.strerror(errno.EFBIG))):
                checkpoint.write(path, {"entries": torch.zeros(10_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_one_file_for_any_number_of_ranks(tmp_path: Path) -> None:
    source, target = tmp_path / "tag", tmp_path / "universal"
    states = [state(0), state(1)]
    save_all(source, states, unit=0.5)
    path = checkpoint.gather(source, target)
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            loaded = load(target, rank=rank, world_size=world_size, unit=1.0 / world_size)
            expected = load(source, rank=rank, world_size=3, unit=1.0 / world_size)
            assert loaded is not None
            assert expected is not None
            for name, stream in expected["streams"].items():
                torch.testing.assert_close(loaded["streams"][name]["residual"], stream["residual"])
    with pytest.raises(DCTError, match="the residual of a has shape"):
        load(target, rank=0, world_size=1, sizes={"a": 999, "b.weight": 400})
    (target / checkpoint.UNFINISHED).touch()
    with pytest.raises(DCTError, match="a save over an older checkpoint did not end"):
        load(target, rank=0, world_size=1)
    (target / checkpoint.UNFINISHED).unlink()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DCTError, match="not a readable state"):
        load(target, rank=0, world_size=1)
    with pytest.raises(DCTError, match=r"holds no dct_rank_\*.pt files"):
        checkpoint.gather(tmp_path / "nowhere", target)
