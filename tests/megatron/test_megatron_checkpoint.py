"""The plugin's files beside Megatron's checkpoints: what is found, spread anew, left, and refused."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import processes

from dct_plugin import checkpoint
from dct_plugin.checkpoint import NoState
from dct_plugin.config import DCTConfig
from dct_plugin.errors import DCTError
from dct_plugin.integrations.megatron.checkpoint import RankCoordinates, files_of, load, save

#: Of the model's parameters.
SIZES = {"w": 4}
LAYOUT = {"tensor": 2, "pipeline": 1, "virtual pipeline": 1, "expert": 2, "expert tensor": 2}


def rank(
    data: int, replicas: int, *, tensor: int = 0, layout: dict[str, int] | None = None
) -> RankCoordinates:
    """Expert-parallel ranks are neighbours among the replicas, as in Megatron's default order."""
    return RankCoordinates(LAYOUT if layout is None else layout, tensor, 0, data % 2, data, replicas)


def stream(value: float) -> dict[str, Any]:
    threshold = {
        "tau": 0.5, "step": 7, "age": 1, "refreshes": 3, "density": 0.1, "out_of_band": False,
    }  # fmt: skip
    return {
        "threshold": threshold, "residual": torch.full((4,), value), "shape": None,
    }  # fmt: skip


def write(folder: Path, where: RankCoordinates, dense: float, expert: float) -> None:
    reducers = {
        name: {"unit": 1 / count, "state": {"step": 7, "loss_scale": 1.0, "streams": {"w": stream(value)}}}
        for name, value, count in (("dense", dense, where.replicas), ("expert", expert, where.replicas))
    }
    state = {"step": 7, "streams": {"pipeline boundary 0": {}}, "reducers": reducers}
    checkpoint.write(file_of(where, folder), files_of(where).content(state, "one"))


def file_of(where: RankCoordinates, folder: Path) -> Path:
    return files_of(where).file(folder)


def _read(where: RankCoordinates, folder: Path, sizes: dict[str, int]) -> checkpoint.Loaded:
    return replace(files_of(where), sizes=sizes).read(folder)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    for data in range(4):
        write(tmp_path, rank(data, 4), dense=float(data), expert=10.0 * data)
    return tmp_path


def residual(state: dict[str, Any], kind: str) -> list[float]:
    values: list[float] = state["reducers"][kind]["state"]["streams"]["w"]["residual"].tolist()
    return values


def test_the_same_ranks_get_their_own_files_back(four: Path) -> None:
    for data in range(4):
        state = _read(rank(data, 4), four, SIZES).state
        assert residual(state, "dense") == [float(data)] * 4
        assert state["streams"]


def test_another_number_of_replicas_gets_the_mean(four: Path) -> None:
    for data in (0, 1, 5):
        state = _read(rank(data, 6), four, SIZES).state
        assert residual(state, "dense") == [1.5] * 4
        # Those with the same experts: old ranks 0 and 2, or 1 and 3.
        assert residual(state, "expert") == ([20.0] * 4 if data % 2 else [10.0] * 4)
        assert state["step"] == 7
        assert state["streams"] == {"pipeline boundary 0": {}}
        assert state["reducers"]["dense"]["unit"] == 0.25
        assert state["reducers"]["dense"]["state"]["streams"]["w"]["threshold"]["tau"] == 0


def test_files_of_an_earlier_version_are_read(four: Path) -> None:
    """They say less about the rank that wrote them."""
    known = ("save", "configuration", "layout", "expert", "world_size", "state")
    for data in range(4):
        file = file_of(rank(data, 4), four)
        content = checkpoint.read(file)
        checkpoint.write(file, {key: content[key] for key in known})
    assert residual(_read(rank(3, 4), four, SIZES).state, "dense") == [3.0] * 4
    assert residual(_read(rank(5, 6), four, SIZES).state, "expert") == [20.0] * 4


def test_what_is_missing_is_said(four: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")

    def reason(where: RankCoordinates, folder: Path = four) -> str:
        with pytest.raises(NoState) as nothing:
            _read(where, folder, SIZES)
        return str(nothing.value)

    assert reason(rank(0, 4), empty) == "the checkpoint holds no dct_tp*_pp*_dp*.pt files"
    other = {**LAYOUT, "tensor": 1, "pipeline": 2}
    assert "tensor 2 -> 1, pipeline 1 -> 2" in reason(rank(0, 4, layout=other))
    assert "tensor 2 -> 1, pipeline 1 -> 2" in reason(rank(0, 4, tensor=1, layout=other))
    assert reason(rank(0, 4, tensor=1)) == "dct_tp01_pp000_dp00000.pt is missing"
    file_of(rank(2, 4), four).unlink()
    assert reason(rank(2, 4)) == "dct_tp00_pp000_dp00002.pt is missing"
    assert reason(rank(0, 6)) == "dct_tp00_pp000_dp00002.pt is missing"
    assert _read(rank(1, 4), four, SIZES)


def test_damaged_and_foreign_files_are_refused(four: Path) -> None:
    own = file_of(rank(1, 4), four)
    own.write_bytes(file_of(rank(2, 4), four).read_bytes())
    with pytest.raises(DCTError, match=r"dct_tp00_pp000_dp00001.pt: written as dct_tp00_pp000_dp00002.pt"):
        _read(rank(1, 4), four, SIZES)
    own.write_bytes(own.read_bytes()[:200])
    with pytest.raises(DCTError, match=r"dct_tp00_pp000_dp00001.pt: not a readable state"):
        _read(rank(1, 4), four, SIZES)
    with pytest.raises(DCTError, match=r"dct_tp00_pp000_dp00001.pt: not a readable state"):
        _read(rank(5, 6), four, SIZES)


def test_residuals_of_another_size_are_refused(four: Path) -> None:
    """Also where another number of replicas reads all files."""
    for own in rank(1, 4), rank(3, 6):
        with pytest.raises(DCTError, match=r"dct_tp00_pp000_dp0000\d.pt: the residual of w has shape \(4,\)"):
            _read(own, four, {"w": 5})
        assert _read(own, four, {"other": 5})


class _Session:
    """Holds a state, as the hooks' session does."""

    step = 3
    config = DCTConfig()
    reductions = None

    def __init__(self) -> None:
        self.state: Any = "untouched"

    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "streams": {}, "reducers": {}}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _round_trips(rank: int, world_size: int, folder: str) -> list[Any]:
    session: Any = _Session()
    messages: list[str] = []
    handler = SimpleNamespace(level=0, handle=lambda record: messages.append(record.getMessage()))
    log = logging.getLogger("dct_plugin")
    log.addHandler(handler)  # type: ignore[arg-type]
    found: list[Any] = [load(session, folder), session.state]
    save(session, folder)
    found += [load(session, folder), session.state]
    # One rank's file is damaged, and one rank cannot write: all ranks stop and name it.
    if rank == 1:
        file_of(RankCoordinates.of_this_rank(), folder).write_bytes(b"nothing")
    for action in (
        lambda: load(session, folder),
        lambda: save(session, folder if rank == 0 else "/proc/nowhere"),
    ):
        try:
            action()
        except DCTError as error:
            found.append(str(error))
    log.removeHandler(handler)  # type: ignore[arg-type]
    return [*found, messages]


@pytest.mark.slow
def test_all_ranks_go_on_or_stop_together(tmp_path: Path) -> None:
    for rank, found in enumerate(processes.run(2, _round_trips, str(tmp_path / "iter_0000003"))):
        nothing, fresh, something, state, damaged, unwritable, messages = found
        assert nothing is False
        assert fresh is None
        assert something is True
        assert state["step"] == 3
        assert damaged.startswith("cannot load residuals\n  rank 1: ")
        assert "dp00001.pt" in damaged
        assert unwritable.startswith("cannot save residuals\n  rank 1: /proc/nowhere")
        warnings = [text for text in messages if "residuals of zero" in text]
        assert len(warnings) == (rank == 0)


def _goes_on_without_a_loss_scale(rank: int, world_size: int) -> list[list[float]]:
    """Losses of a run in fp32, and of one that takes over the states of a run in fp16 on its way."""
    from support.megatron_gpt import Job, train

    from dct_plugin.integrations.megatron import hooks

    def take_over(training: Any, step: int) -> None:
        session = hooks.current()
        assert session is not None
        reductions = session.hooks[0].reductions  # type: ignore[attr-defined]
        states = reductions.state_dict()
        for each in states.values():
            each["state"] = {**checkpoint.in_unit(each["state"], 1024.0), "loss_scale": 1024.0}
        if step == 3:
            reductions.load_state_dict(states)

    torch.set_num_threads(1)
    keys = {"sparsity": 0.9, "min_numel": 256, "warmup_steps": 0, "sparsity_warmup_steps": 0}
    job = Job(layers=1, steps=7).with_dct({"data_parallel": {**keys, "feedback": "local"}})
    return [
        [float(loss) for loss in train(each).losses] for each in (job, replace(job, after_step=take_over))
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_residuals_of_a_run_with_a_loss_scale() -> None:
    for undisturbed, found in processes.run(2, _goes_on_without_a_loss_scale):
        assert found == pytest.approx(undisturbed)
