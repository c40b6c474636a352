"""``"comm_backend_name": "dct"``: the momentum of DeepSpeed's 1-bit optimizers through the plugin.

DeepSpeed has them up to 0.19.6; ``make test-onebit`` installs that version beside the one of the suite and
runs the tests that need it.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.deepspeed_launch import Results, Run, config, launch, launch_with_torchrun
from support.processes import run
from torch import Tensor

from dct_plugin.config import DataParallelConfig

pytest.importorskip("deepspeed")
from support import deepspeed_worker
from support.deepspeed_worker import Net

pytestmark = pytest.mark.slow

#: A folder with DeepSpeed 0.19.6 and nothing else, and the operator that it compiled.
OLDER = Path(os.environ.get("DCT_ONEBIT_DEEPSPEED", ROOT / ".venv" / "onebit"))

EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}}
SPARSE = {"data_parallel": {"sparsity": 0.9, "min_numel": 100}}
#: The steps after which momentum is exchanged instead of gradients, in time for the tests.
PARAMETERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 8},
    "OneBitLamb": {"freeze_step": 8},
    "ZeroOneAdam": {
        "var_freeze_step": 8,
        "var_update_scaler": 2,
        "local_step_scaler": 6,
        "local_step_clipper": 2,
    },
}


def onebit(
    name: str,
    dct: dict[str, Any] | None,
    *,
    optimizer: str = "OneBitAdam",
    precision: str = "fp32",
    steps: int = 16,
    backend: str = "dct",
    **more: Any,
) -> Run:
    settings = config(0, precision, dct=dct)
    parameters = {"lr": 0.002, "comm_backend_name": backend, **PARAMETERS[optimizer]}
    settings["optimizer"] = {"type": optimizer, "params": parameters}
    if optimizer == "OneBitLamb":
        more["model"] = functools.partial(Net, unused=False)  # it divides by the norm of every momentum
    return {"id": name, "config": settings, "steps": steps, **more}


KINDS = [
    ("OneBitAdam", "fp32"),
    ("OneBitAdam", "bf16"),
    ("OneBitAdam", "fp16"),
    ("OneBitLamb", "fp32"),
    ("ZeroOneAdam", "fp32"),
]
#: 0/1 Adam steps locally and takes these steps back by subtraction: its ranks are equal up to rounding.
IDENTICAL = [kind for kind in KINDS if kind[0] != "ZeroOneAdam"]
REFUSED = {
    "disabled": ({"enabled": False}, "dct.enabled = false: optimizer.params.comm_backend_name"),
    "ahead": ({"data_parallel": {"feedback": "step_ahead"}}, 'feedback = "step_ahead": optimizer.params.'),
    "accordion": ({"data_parallel": {"adaptive": "accordion"}}, 'adaptive = "accordion": optimizer.params.'),
    "gradients": (
        {"data_parallel": {"enabled": False}},
        "dct.data_parallel.enabled = false: optimizer.params.",
    ),
    "weights": ({"data_parallel": {"parameters": {}}}, "ZeRO stage 0"),
}


class MeanBackend:
    """A backend that loses nothing, in the place of DeepSpeed's own ``compressed``: torch's all-reduce."""

    def __init__(self, mpu: Any = None) -> None:
        self.size = dist.get_world_size()

    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int
    ) -> Tensor:
        dist.all_reduce(buffer_m)
        return buffer_m.mul_(1.0 / self.size)


def _execute_with_the_mean(run: Run, result: Run) -> None:
    """Execute a run whose momentum is that which ``"comm_backend_name": "dct"`` exchanges at sparsity 0."""
    module: Any = ModuleType("deepspeed.runtime.comm.compressed")
    module.CompressedBackend = MeanBackend
    sys.modules[module.__name__] = module
    deepspeed_worker.execute({**run, "prepare": _started}, result)


def _started(engine: Any) -> None:
    """Take the first step for a step: DeepSpeed would try its backend out in it."""
    getattr(engine.optimizer, "optimizer", engine.optimizer).initialize = True


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if not (OLDER / "deepspeed").is_dir():
        pytest.skip(f"no DeepSpeed 0.19.6 in {OLDER}: make test-onebit")
    folder = tmp_path_factory.mktemp("onebit")
    plan = [onebit("defaults", None)]
    for optimizer, precision in KINDS:
        kind: dict[str, Any] = {"optimizer": optimizer, "precision": precision}
        name = f"{optimizer}-{precision}"
        plan += [
            onebit(f"mean/{name}", None, **kind, backend="compressed", execute=_execute_with_the_mean),
            onebit(f"exact/{name}", EXACT, **kind),
            onebit(f"sparse/{name}", SPARSE, **kind, steps=40),
        ]
    for optimizer in ("OneBitAdam", "OneBitLamb"):
        save = str(folder / optimizer)
        plan += [
            onebit(f"whole/{optimizer}", SPARSE, optimizer=optimizer),
            onebit(f"half/{optimizer}", SPARSE, optimizer=optimizer, steps=10, save=save),
            onebit(f"rest/{optimizer}", SPARSE, optimizer=optimizer, load=save, seed=2),
        ]
    plan += [onebit(name, section, expect_error=True) for name, (section, _) in REFUSED.items()]
    plan += [onebit("other", SPARSE, backend="compressed", execute=_execute_with_the_mean, expect_error=True)]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(OLDER), *sys.path]),
        "TORCH_EXTENSIONS_DIR": str(OLDER / "torch_extensions"),
        "DCT_TEST_FP16_ON_CPU": "1",
    }
    return launch_with_torchrun(2, plan, folder, **variables)


@pytest.mark.parametrize(("optimizer", "precision"), KINDS)
def test_exact_at_sparsity_0(results: Results, optimizer: str, precision: str) -> None:
    """Bitwise what the optimizer trains with a backend that averages the whole momentum."""
    for rank in results:
        mean, exact = rank[f"mean/{optimizer}-{precision}"], rank[f"exact/{optimizer}-{precision}"]
        assert exact["attached"]
        assert not mean["attached"]
        assert exact["losses"] == mean["losses"]
        assert exact["hash"] == mean["hash"]


@pytest.mark.parametrize(("optimizer", "precision"), KINDS)
def test_thresholded_momentum_trains(results: Results, optimizer: str, precision: str) -> None:
    for rank in results:
        sparse = rank[f"sparse/{optimizer}-{precision}"]
        assert sparse["density"] == pytest.approx(0.1, rel=0.1)
        assert sum(sparse["losses"][-5:]) / 5 < 0.8 * sparse["losses"][0], sparse["losses"]
        # Errors lie in the optimizer's buffers, and are not lost with them.
        assert any(sparse["residual"].values())
    first, second = (rank[f"sparse/{optimizer}-{precision}"] for rank in results)
    if (optimizer, precision) in IDENTICAL:
        assert first["hash"] == second["hash"]
    assert first["sums"] == pytest.approx(second["sums"], rel=1e-5)


def test_the_section_has_defaults(results: Results) -> None:
    for rank in results:
        assert rank["defaults"]["attached"]
        assert rank["defaults"]["density"] == pytest.approx(0.01, rel=0.2)
    (line,) = results[0]["defaults"]["log"]
    assert re.search(
        r"active on the momentum of OnebitAdam, fp32, (\d+) of \1 parameters, 2 ranks, sparsity", line
    )


@pytest.mark.parametrize("optimizer", ["OneBitAdam", "OneBitLamb"])
def test_a_resumed_run_goes_on_bitwise(results: Results, optimizer: str) -> None:
    for rank in results:
        whole, half, rest = (rank[f"{part}/{optimizer}"] for part in ("whole", "half", "rest"))
        assert half["losses"] + rest["losses"] == whole["losses"]
        assert rest["hash"] == whole["hash"]
        assert any(rest["restored"].values())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(results: Results, name: str) -> None:
    for rank in results:
        assert REFUSED[name][1] in rank[name]["error"]


def test_gradients_beside_another_backend_are_refused(results: Results) -> None:
    assert all("exchanges its momentum by itself" in rank["other"]["error"] for rank in results)


def test_a_deepspeed_without_the_slot_says_what_does_the_same_job(tmp_path: Path) -> None:
    import deepspeed

    (rank,) = launch(1, [onebit("none", None, expect_error=True)], tmp_path)
    assert rank["none"]["error"].startswith(f"VersionError: DeepSpeed {deepspeed.__version__} has no 1-bit")
    assert '"dct": {"data_parallel": {' in rank["none"]["error"]


def _averaged(rank: int, world_size: int, exchange: str, numel: int) -> dict[str, Any]:
    from dct_plugin.integrations.deepspeed.onebit import MomentumReducer

    reducer = MomentumReducer(DataParallelConfig.of(sparsity=0.9, min_numel=100, exchange=exchange))
    unit = world_size * world_size * 8  # as the optimizers round up
    padded = -(-numel // unit) * unit
    worker, server = torch.zeros(padded), torch.zeros(padded // world_size)
    given, taken = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        momentum = torch.randn(numel, generator=generator)
        given += momentum
        reducer.average("weight", momentum, worker, server)
        taken += momentum
        reducer.end_step()
    return {"given": given, "taken": taken, "worker": worker, "server": server}


@pytest.mark.parametrize(
    ("ranks", "exchange", "numel"), [(2, "auto", 5000), (3, "auto", 5001), (3, "direct", 700)]
)
def test_nothing_is_lost(ranks: int, exchange: str, numel: int) -> None:
    """What was put in is what came out on all ranks and what lies in the two errors."""
    parts = run(ranks, _averaged, exchange, numel)
    given = sum(part["given"] for part in parts)
    unsent = sum(part["worker"][:numel].double() for part in parts)
    # In parts of equal size, as the optimizers lay them out; the last ones are shorter.
    unsent += torch.cat([part["server"] for part in parts])[:numel].double()
    assert all(torch.equal(part["taken"], parts[0]["taken"]) for part in parts)
    assert torch.allclose(ranks * parts[0]["taken"] + unsent, given, atol=1e-4)
    assert not any(part["worker"][numel:].any() for part in parts)
    if ranks == 3 and exchange == "auto":
        assert all(part["server"].any() for part in parts)
