"""The worked example of docs/extending.md does what its page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.processes import run

from dct_plugin import detach
from dct_plugin.errors import ConfigError

pytestmark = pytest.mark.slow

EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 16}}
SPARSE = {"data_parallel": {"sparsity": 0.9, "min_numel": 16}}


def example() -> str:
    """The training loop's code; the page's other block is of another chapter."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (code,) = (code for code in codes if "class AveragedGradients" in code)
    return str(code)


def _train(rank: int, world_size: int, section: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(example(), names)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    host = None if section is None else names["AveragedGradients"](model, optimizer, section)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(12):
        x = torch.randn(16, 12, generator=generator)
        loss = (model(x) - x[:, :3].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if host is not None:
            host.average()
        else:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        optimizer.step()
        if host is not None:
            host.end_step()
        losses.append(float(loss))
    if host is not None:
        host.save(folder)
        host.steps.step = 0
        assert host.load(folder)
        assert host.steps.step == 12
        detach(host)
        host.average()
        held = [
            stream.residual for stream in host.reducer.group.streams.values() if stream.residual is not None
        ]
        assert held
        assert not any(bool(residual.current.any()) for residual in held)
        host.end_step()
        assert host.reducer.flushed
        for option in ({"nonfinite_action": "skip"}, {"verify": {}}, {"nodes": 2}, {"parameters": {}}):
            with pytest.raises(ConfigError, match=next(iter(option))):
                names["AveragedGradients"](model, optimizer, {"data_parallel": option})
    return {"weights": torch.cat([p.detach().view(-1) for p in model.parameters()]), "losses": losses}


def test_a_framework_in_thirty_lines(tmp_path: Path) -> None:
    """At sparsity 0 two ranks train bitwise as with torch's all-reduce; at 0.9 they stay equal and learn."""
    plain = run(2, _train, None, str(tmp_path))
    exact = run(2, _train, EXACT, str(tmp_path))
    sparse = run(2, _train, SPARSE, str(tmp_path))
    assert torch.equal(exact[0]["weights"], plain[0]["weights"])
    assert torch.equal(sparse[0]["weights"], sparse[1]["weights"])
    assert sparse[0]["losses"][-1] < sparse[0]["losses"][0]
    assert {path.name for path in tmp_path.iterdir()} == {"dct_rank_00000.pt", "dct_rank_00001.pt"}
