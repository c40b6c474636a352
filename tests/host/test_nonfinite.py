"""Where ranks agree on a step that is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.config import DataParallelConfig
from dct_plugin.integrations.host.gradient_use import collective_device
from dct_plugin.integrations.host.steps import PoisonedSteps
from dct_plugin.transport import lost_ranks


@pytest.mark.parametrize(
    ("backends", "expected"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda:3")],
)
def test_the_group_says_where(backends: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert collective_device() == torch.device(expected)


@pytest.mark.parametrize("gradients", [[], [("a", torch.ones(3))]])
def test_a_rank_without_gradients_asks_on_the_same_device(
    gradients: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group has no CPU transport; ``meta`` stands for its device."""
    asked = []

    def all_reduce(tensor: Tensor, *_: Any) -> None:
        asked.append(tensor.device.type)

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "meta:nccl")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: torch.cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(lost_ranks, "received", lambda speaker, group: torch.tensor(2))
    steps = PoisonedSteps(DataParallelConfig(nonfinite_action="skip"), lambda: gradients, agree=True)
    assert not steps.found(0)
    assert asked == ["meta"]
