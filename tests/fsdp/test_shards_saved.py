"""Saved states of FSDP2 on one mesh: resumed runs, and saves in which a rank is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.one_mesh import adamw, gathered, same, sharded, train
from support.processes import launch, run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

import dct_plugin
from dct_plugin import DCTError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("shared_ranks"),
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_custom_all_gather"), reason="this torch has no seam for the collectives"
    ),
]


def _start(nodes: int, **keys: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = sharded()
    optimizer = adamw(model)
    return model, optimizer, dct_plugin.attach(model, optimizer, {"data_parallel": {"nodes": nodes, **keys}})


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _saved(folder: str, nodes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer, attached = _start(nodes)
    train(model, optimizer, 3)
    dcp.save({**_states(model, optimizer), "dct": attached}, checkpoint_id=folder)
    return model, optimizer


def _loaded(folder: str, nodes: int) -> tuple[nn.Module, torch.optim.Optimizer, bool, int]:
    model, optimizer, attached = _start(nodes)
    state = _states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = attached.load(folder)
    return model, optimizer, loaded, attached.steps.step


def _resumed(rank: int, world_size: int, folder: str, nodes: int) -> tuple[bool, bool, int]:
    model, optimizer = _saved(folder, nodes)
    train(model, optimizer, range(3, 6))
    again, its_optimizer, loaded, steps = _loaded(folder, nodes)
    train(again, its_optimizer, range(3, 6))
    return loaded, same(model, again), steps


@pytest.mark.parametrize("nodes", [2, 1], ids=["exact copies", "int8 copies"])
def test_resumed_on_the_same_mesh(tmp_path: Path, nodes: int) -> None:
    assert run(4, _resumed, str(tmp_path / "saved"), nodes) == [(True, True, 3)] * 4


def _resumed_with_the_copies_switched(rank: int, world_size: int, folder: str) -> list[tuple[bool, int]]:
    found = []
    for number, (before, after) in enumerate([(None, "int8"), ("int8", None)]):
        model, optimizer, attached = _start(1, parameters=before)
        train(model, optimizer, 2)
        attached.save(f"{folder}/{number}")
        model, optimizer, attached = _start(1, parameters=after)
        found.append((attached.load(f"{folder}/{number}"), attached.steps.step))
        train(model, optimizer, range(2, 4))
    return found


def test_resumed_with_copies_switched_on_or_off(tmp_path: Path) -> None:
    assert run(2, _resumed_with_the_copies_switched, str(tmp_path)) == [[(True, 2)] * 2] * 2


def _killed_in_a_save(rank: int, world_size: int, folder: str, last: str, nodes: int) -> None:
    """Save after 3 steps and, into ``last``, after 5, where rank 1 is killed before it opens its file."""
    model, optimizer, attached = _start(nodes)
    train(model, optimizer, 3)
    dcp.save({**_states(model, optimizer), "dct": attached}, checkpoint_id=f"{folder}/first")
    train(model, optimizer, range(3, 5))
    if rank == 1:
        Path.open = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    dcp.save({**_states(model, optimizer), "dct": attached}, checkpoint_id=f"{folder}/{last}")


def _resumed_after_it(rank: int, world_size: int, folder: str, nodes: int) -> tuple[bool, int] | str:
    model, optimizer, _ = _start(nodes)
    train(model, optimizer, 6)
    complete = max(path.parent for path in Path(folder).glob("*/.metadata"))  # "second" is after "first"
    again, its_optimizer, _, steps = _loaded(str(complete), nodes)
    try:
        train(again, its_optimizer, range(3, 6))
    except DCTError as error:
        return str(error)
    return same(model, again), steps


@pytest.mark.parametrize("nodes", [2, 1], ids=["exact copies", "int8 copies"])
def test_a_kill_during_a_save_leaves_the_last_complete_one(tmp_path: Path, nodes: int) -> None:
    found = launch(4, _killed_in_a_save, str(tmp_path), "second", nodes, killed=1)
    assert [kind for kind, _ in found] == ["error", "killed", "error", "error"]
    assert run(4, _resumed_after_it, str(tmp_path), nodes) == [(True, 3)] * 4


def test_a_kill_while_a_save_is_overwritten_is_found(tmp_path: Path) -> None:
    launch(4, _killed_in_a_save, str(tmp_path), "first", 2, killed=1)
    for found in run(4, _resumed_after_it, str(tmp_path), 2):
        assert "optimizer steps" in str(found)


def _whole(model: nn.Module) -> list[list[float]]:
    return [p.full_tensor().flatten().tolist() for p in model.parameters()]  # type: ignore[attr-defined]


def _saved_by_four(rank: int, world_size: int, folder: str, nodes: int) -> list[list[float]]:
    return _whole(_saved(folder, nodes)[0])


def _loaded_by_two(
    rank: int, world_size: int, folder: str, nodes: int
) -> tuple[list[list[float]], int, tuple[bool, bool]]:
    model, optimizer, _, steps = _loaded(folder, nodes)
    masters = _whole(model)
    train(model, optimizer, range(3, 5))
    return masters, steps, gathered(model, 0.016)


@pytest.mark.parametrize("nodes", [2, 1], ids=["exact copies", "int8 copies"])
def test_resumed_on_another_mesh_with_the_same_masters(tmp_path: Path, nodes: int) -> None:
    folder = str(tmp_path / "saved")
    saved = run(4, _saved_by_four, folder, nodes)[0]
    assert run(2, _loaded_by_two, folder, 1) == [(saved, 3, (True, True))] * 2
