"""Error averaging: residuals of the ranks become their mean, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run

from dct_plugin.config import DataParallelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.errors import ConfigError
from dct_plugin.metrics import Metrics

SIZES = {"embedding": 60_000, "layer": 40_001, "bias": 64}
LARGE = ("embedding", "layer")
INTERVAL = 4  # averages at steps 2, 6, 10, ...


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"feedback": "none"}, "expert.error_averaging needs residuals"),
        ({"feedback": "local_updates"}, "expert.error_averaging does not go with feedback = 'local_updates'"),
    ],
)
def test_what_keeps_no_residuals_cannot_average_them(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        DataParallelConfig.of(expert={"error_averaging": INTERVAL}, **settings)


class Run:
    """A rank's reducer, with all that was put in and all that arrived."""

    def __init__(self, rank: int, world_size: int, kind: str, **settings: Any) -> None:
        self.rank, self.world_size, self.kind = rank, world_size, kind
        self.metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
        config = DataParallelConfig.of(
            sparsity=0.95,
            exchange="auto" if kind == "reduce_scatter" else kind,
            expert={"error_averaging": INTERVAL},
            **settings,
        )
        self.reducer = GradientReducer(config, metrics=self.metrics, transactional=True)
        self.owed = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}

    def reduce(self, step: int, *, again: int = 0) -> list[torch.Tensor]:
        """Gradients of a step; what this rank has of the sum."""
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * step + again)
        mine = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
        for name, tensor in mine.items():
            self.owed[name] += tensor
        parts = {
            name: [
                Shard(r, n * r // self.world_size, n * (r + 1) // self.world_size)
                for r in range(self.world_size)
            ]
            for name, n in SIZES.items()
        }
        if self.kind == "reduce_scatter":
            self.reducer.reduce_scatter([(name, tensor, parts[name]) for name, tensor in mine.items()])
        else:
            self.reducer.all_reduce(list(mine.items()))
        for name, tensor in mine.items():
            own = parts[name][self.rank]  # each entry of the sum counts once over all ranks
            self.owed[name][own.start : own.stop] -= tensor[own.start : own.stop]
        return list(mine.values())

    def residuals(self) -> dict[str, torch.Tensor]:
        return {n: self.reducer.streams[n].residual.current.clone() for n in LARGE}  # type: ignore[union-attr]

    def missing(self) -> float:
        """Largest entry that was put in anywhere, did not arrive, and is in nobody's residual."""
        worst = 0.0
        for name, owed in self.owed.items():
            left = owed.clone()
            for key, stream in self.reducer.streams.items():
                base, _, part = key.partition("[")
                if base == name and stream.residual is not None:
                    start = int(part.split(":")[0]) if part else 0
                    left[start : start + stream.residual.current.numel()] -= stream.residual.current
            dist.all_reduce(left)
            worst = max(worst, float(left.abs().max()))
        return worst


def _averaged(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    own = Run(rank, world_size, kind)
    apart, results = [], []
    for step in range(8):
        results += own.reduce(step)
        if kind != "reduce_scatter" and step % 3 == 0:  # a second micro-batch averages nothing again
            results += own.reduce(step, again=1)
        spread = []
        for residual in own.residuals().values():
            mean = residual.clone()
            dist.all_reduce(mean)
            spread.append(float((residual - mean / world_size).square().mean() / mean.square().mean()))
        apart.append(max(spread))
        own.reducer.end_step()
        own.metrics.step(step)
    sent = own.metrics.summary().classes["error_averaging"].sent_bytes
    return {"missing": own.missing(), "apart": apart, "sent": sent, "results": results}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), [("direct", 2), ("two_phase", 3), ("reduce_scatter", 3)])
def test_residuals_become_alike_and_nothing_is_lost(kind: str, world_size: int) -> None:
    found = run(world_size, _averaged, kind)
    each = (1 + 4 / 256) * sum(SIZES[name] for name in LARGE)
    for result in found:
        assert result["missing"] < 2e-5
        # In the step that averages, what tells ranks apart is that step's gradient alone.
        for step in (2, 6):
            assert result["apart"][step] < 0.75 * result["apart"][step - 1]
        if kind != "reduce_scatter":
            assert all(map(torch.equal, result["results"], found[0]["results"]))
    # Two averages: to the owners, and back from them.
    total = sum(result["sent"] for result in found)
    assert total == pytest.approx(2 * 2 * (world_size - 1) * each, rel=0.01)


def _taken_back(rank: int, world_size: int) -> list[bool]:
    """A skipped step that averages, and one that averages right after a saved state was loaded."""
    own, checks = Run(rank, world_size, "direct"), []
    for step in range(6):
        before = own.reducer.state_dict()
        own.reduce(step)
        own.reducer.end_step(skipped=step == 2)
        if step == 2:
            after = own.reducer.state_dict()["streams"]
            checks += [torch.equal(after[n]["residual"], before["streams"][n]["residual"]) for n in LARGE]
    other = Run(rank, world_size, "direct")
    other.reducer.load_state_dict(own.reducer.state_dict())
    checks += list(map(torch.equal, own.reduce(6), other.reduce(6)))
    checks += [torch.equal(own.residuals()[n], other.residuals()[n]) for n in LARGE]
    checks += [run.metrics.summary().classes["error_averaging"].sent_bytes > 0 for run in (own, other)]
    return checks


@pytest.mark.slow
def test_a_skipped_average_leaves_no_trace_and_states_continue_bitwise() -> None:
    assert all(all(checks) for checks in run(2, _taken_back))
