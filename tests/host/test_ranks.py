"""What the ranks of a host do together: agree at start-up, write and read their files, count steps."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.processes import launch, logged, run
from support.state_files import save_state

from dct_plugin import checkpoint
from dct_plugin.config import DCTConfig, MetricsConfig
from dct_plugin.integrations.host import startup
from dct_plugin.integrations.host.attachment import start_reporting
from dct_plugin.integrations.host.steps import StepHooks
from dct_plugin.metrics import Metrics
from dct_plugin.transport import agreement

pytestmark = pytest.mark.slow


# -- start-up ---


def _limits(rank: int, world_size: int) -> list[float]:
    """The limits of starts, in a group that waits ten seconds; the last two on GPUs."""
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    limits = [startup.join("test", group=pair).limit]
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(dist, "get_backend", "nccl".lower),
    ):
        limits += [startup.join("test", group=pair, limit=limit).limit for limit in (5.0, None)]
    return limits


def test_a_rank_that_compiles_kernels_first_is_waited_for() -> None:
    assert run(2, _limits) == [[10.0, 5.0, startup.COLD_START]] * 2


def _agrees_several_times(rank: int, world_size: int) -> bool:
    startup.join("test", limit=20).confirm({"a": 1})
    startup.join("test", limit=20).confirm({"a": 2})
    pair = dist.new_group([0, 2])
    if rank != 1:
        startup.join("test", group=pair, limit=20).confirm({"only": "two"})
    return True


def test_a_topic_can_be_agreed_on_again_and_in_groups() -> None:
    assert all(run(3, _agrees_several_times))


def _disagrees(rank: int, world_size: int, silent: bool) -> None:
    dist.barrier()  # a process may take a second to start
    if not silent or rank != 1:
        agreement = startup.join("test", limit=1 if silent else 60, hint="it is tired")
        agreement.confirm({"a": rank == 1})


def test_the_differing_rank_is_named() -> None:
    for rank, (kind, text) in enumerate(launch(3, _disagrees, False)):
        assert kind == "error"
        assert f"DesyncError: rank {rank}: a differs: false on ranks 0, 2; true on rank 1" in text


def _comes_late(rank: int, world_size: int) -> list[str]:
    """Rank 1 prepares data until rank 0 has warned."""
    store, lines = dist.distributed_c10d._get_default_store(), list[str]()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            store.set("warned", "1")

    logging.getLogger("dct_plugin").addHandler(Told())
    with patch.object(agreement, "PATIENCE", 0.0):
        if rank == 1:
            store.get("warned")
        startup.join("test").confirm({"a": 1})
    return lines


def test_a_rank_that_comes_late_is_waited_for_as_long_as_the_group_waits() -> None:
    first, second = run(2, _comes_late)
    assert second == []
    (line,) = first
    assert "rank 0 has waited for 0 s at start-up: rank 1 did not report yet" in line
    assert line.endswith("The ranks wait for 600 s in all")  # as their group does


def test_a_silent_rank_is_named_within_the_limit() -> None:
    outcomes = launch(3, _disagrees, True)
    assert [kind for kind, _ in outcomes] == ["error", "value", "error"]
    for rank in (0, 2):
        assert "rank 1 did not report within 1 s: crashed, or it is tired" in outcomes[rank][1]


def _fails_before(rank: int, world_size: int) -> None:
    agreement = startup.join("test", limit=60)
    with agreement:
        if rank == 1:
            raise ValueError("no such key")
    agreement.confirm({})


def test_a_failure_before_the_agreement_reaches_all() -> None:
    outcomes = launch(2, _fails_before)
    assert outcomes[1][1].startswith("ValueError: no such key")
    assert "rank 1 failed at start-up: ValueError: no such key" in outcomes[0][1]


# -- files ---


def state_of(rank: int) -> dict[str, Any]:
    return {"step": 7, "loss_scale": 1.0, "streams": {}, "own": torch.full((3,), rank)}


def _writes_and_reads(rank: int, world_size: int, folder: str) -> bool:
    files = checkpoint.StateFiles(rank, world_size)
    files.save(folder, lambda: state_of(rank))
    found = files.load(folder)
    assert found is not None
    return torch.equal(found["own"], torch.full((3,), rank))


def test_every_rank_gets_its_own_state(tmp_path: Path) -> None:
    assert all(run(3, _writes_and_reads, str(tmp_path / "new")))
    assert [path.name for path in sorted((tmp_path / "new").iterdir())] == [
        f"dct_rank_{rank:05d}.pt" for rank in range(3)
    ]


def _cannot_write(rank: int, world_size: int, folder: str, how: str) -> None:
    def state() -> dict[str, Any]:
        if how == "content" and rank == 1:
            raise MemoryError("no room for a copy")
        return state_of(rank)

    name = "a file/state.pt" if how == "folder" and rank == 1 else f"{rank}.pt"
    checkpoint.StateFiles(rank, world_size, name=name).save(folder, state)


@pytest.mark.parametrize(
    ("how", "words"), [("folder", "a file/state.pt: "), ("content", "MemoryError: no room for a copy")]
)
def test_a_rank_that_cannot_write_stops_all(tmp_path: Path, how: str, words: str) -> None:
    (tmp_path / "a file").write_text("")
    for kind, text in launch(3, _cannot_write, str(tmp_path), how):
        assert kind == "error"
        assert text.startswith("DCTError: cannot save residuals\n  rank 1: ")
        assert words in text
        assert "rank 0:" not in text


def _reads(rank: int, world_size: int, folder: str) -> tuple[bool, list[str]]:
    with logged() as lines:
        return checkpoint.StateFiles(rank, world_size).load(folder) is not None, lines


def written(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        save_state(folder, state_of(rank), rank=rank, world_size=ranks)


def test_a_rank_without_its_file_means_none_for_all(tmp_path: Path) -> None:
    written(tmp_path, 3)
    checkpoint.StateFiles(2, 0).file(tmp_path).unlink()
    results = run(3, _reads, str(tmp_path))
    assert [found for found, _ in results] == [False] * 3
    assert [len(lines) for _, lines in results] == [1, 0, 0]
    assert "no residuals for 1 of 3 ranks (rank 2: dct_rank_00002.pt is missing)" in results[0][1][0]


def test_an_empty_folder_is_said_so_once(tmp_path: Path) -> None:
    results = run(2, _reads, str(tmp_path / "none"))
    assert [len(lines) for _, lines in results] == [1, 0]
    assert "(rank 0: the checkpoint holds no dct_rank_*.pt files)" in results[0][1][0]


def test_a_damaged_file_stops_all_before_anything_is_loaded(tmp_path: Path) -> None:
    written(tmp_path, 2)
    file = checkpoint.StateFiles(1, 0).file(tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    for kind, text in launch(2, _reads, str(tmp_path)):
        assert kind == "error"
        assert text.startswith(f"DCTError: cannot load residuals\n  rank 1: {file}: not a readable state")


def _unexpected(rank: int, world_size: int) -> None:
    class Files(checkpoint.StateFiles):
        def read(self, folder: checkpoint.Folder) -> checkpoint.Loaded:
            if rank == 0:
                raise PermissionError("not yours")
            return checkpoint.Loaded({}, "", "")

    Files(rank, world_size).load("checkpoint")


def test_whatever_reading_raises_reaches_all() -> None:
    for _, text in launch(2, _unexpected):
        assert text.startswith("DCTError: cannot load residuals\n  rank 0: checkpoint: PermissionError")


# -- steps and reports ---


class Member:
    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []

    def end_step(self, **how: Any) -> None:
        self.ended.append(how)


def test_steps_reach_every_member_and_close_the_metrics_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(MetricsConfig(), rank=0, world_size=2)
    members = [Member(), Member()]
    steps = StepHooks(members, metrics)
    steps.step = 4
    for _ in range(2):
        steps.begin()
        assert steps.open
    steps.end(skipped=True, loss_scale=2.0)
    assert not steps.open
    assert steps.step == 5
    for member in members:
        assert member.ended == [{"skipped": True, "loss_scale": 2.0}]
    assert metrics.summary().steps == 1
    assert not caplog.records


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_steps_without_gradients_are_warned_about_once(
    rank: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    steps = StepHooks([], rank=rank)
    steps.end()
    steps.end()
    assert len([r for r in caplog.records if "without passing gradients" in r.getMessage()]) == count


@pytest.mark.parametrize("rank", [0, 1])
def test_the_report_is_finished_once(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(MetricsConfig(every=1), rank=rank, world_size=2)
    finished: list[str] = []
    finish = start_reporting(metrics, lambda events: None, before_finish=lambda: finished.append("once"))
    metrics.step(1)
    finish()
    finish()
    assert finished == ["once"]
    assert capsys.readouterr().out.count("dct: 1 step") == (rank == 0)


def test_ranks_state_the_kernels_of_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose kernels fail their self-check sends other messages: all stop and name it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("DCT_KERNELS", "reference")
    assert startup.facts_of(DCTConfig(), {})["kernels of CUDA tensors"] == "reference"
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert "kernels of CUDA tensors" not in startup.facts_of(DCTConfig(), {})


def test_groups_of_any_nccl_take_tensors_of_their_device() -> None:
    of_gpus = ("cuda:nccl", "cuda:nccl2", "cuda:nccl-legacy")
    assert {checkpoint.device_of(backends) for backends in of_gpus} == {"cuda"}
    assert {checkpoint.device_of(backends) for backends in ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl")} == {
        "cpu"
    }
