"""How a DeepSpeed job starts: launchers, ways to activate, and everything that stops it with a message."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.deepspeed_launch import WORKER, Results, Run, config, execute, launch, torchrun
from support.forked import forked_interpreters

from dct_plugin.integrations.host import startup
from dct_plugin.recommender.links.team import free_port

pytest.importorskip("deepspeed")
from support import deepspeed_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def section(**keys: Any) -> dict[str, Any]:
    return {"data_parallel": {"sparsity": 0.9, "min_numel": 100, **keys}}


def start(name: str, first: Any, second: Any, **more: Any) -> Run:
    """A run that rank 0 starts with one ``dct`` section and rank 1 with another; nothing is trained."""
    run = {"id": name, "config": config(0, dct=first), "steps": 0, "expect_error": True, **more}
    return {**run, "ranks": {1: {"config": config(0, dct=second)}}}


def _join_within_a_second(run: Run, result: Run) -> None:
    with patch.dict(startup.join.__kwdefaults__, limit=1.0):
        deepspeed_worker.execute(run, result)
    # Such a job ends; here the next run begins, and all ranks must have joined as often.
    dist.distributed_c10d._get_default_store().add(f"dct_plugin/deepspeed/joined/{dist.get_rank()}", 1)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Failing starts, one after the other; a good one at the end shows that nothing is left of them."""
    good = section()
    everywhere = {"expect_error": True, "steps": 1}
    offload = {"device": "cpu"}
    client = config(2, dct=good, zero={"offload_optimizer": offload}, zero_force_ds_cpu_optimizer=False)
    del client["optimizer"]
    plan = [
        start("sparsity", good, section(sparsity=0.8)),
        start("two-keys", good, {**section(value_dtype="fp32"), "metrics": {"every": 7}}),
        start("absent", good, None, execute=_join_within_a_second),
        start("absent-on-0", None, good, execute=_join_within_a_second),
        start("disabled", good, {"enabled": False}),
        start("invalid", good, section(sparsety=0.5)),
        start("both-invalid", section(sparsity=2), section(sparsity=2)),
        {"id": "offload", "config": client, "client_optimizer": "SGD", **everywhere},
        {"id": "unmanaged", "config": config(0, dct=good, managed_gradient_accumulation=False), **everywhere},
        {"id": "good", "config": config(1, dct=good), "steps": 2},
    ]
    return launch(2, plan, tmp_path_factory.mktemp("started"))


def errors(started: Results, name: str) -> list[str]:
    return [rank[name].get("error", "") for rank in started]


def test_other_configurations_stop_every_rank(started: Results) -> None:
    for number, error in enumerate(errors(started, "sparsity")):
        assert error.startswith(f"DesyncError: rank {number}: ")
        assert "dct.data_parallel.sparsity differs: 0.9 on rank 0; 0.8 on rank 1" in error


def test_every_differing_key_is_named(started: Results) -> None:
    for error in errors(started, "two-keys"):
        assert 'dct.data_parallel.value_dtype differs: "bf16" on rank 0; "fp32" on rank 1' in error
        assert "dct.metrics.every differs: 50 on rank 0; 7 on rank 1" in error


def test_a_rank_that_is_switched_off_is_named_at_once(started: Results) -> None:
    first, second = errors(started, "disabled")
    assert second == ""
    assert not started[1]["disabled"]["attached"]
    assert "rank 1 has no dct section" in first


@pytest.mark.parametrize(("name", "without"), [("absent", 1), ("absent-on-0", 0)])
def test_a_rank_without_the_section_is_named_after_the_time_limit(
    started: Results, name: str, without: int
) -> None:
    """It is not touched, and says nothing."""
    found = errors(started, name)
    assert found[without] == ""
    assert not started[without][name]["attached"]
    silent = f"rank {without} did not report within 1 s: crashed, or its configuration has no 'dct' section"
    assert silent in found[1 - without]


def test_a_fault_on_one_rank_stops_the_others(started: Results) -> None:
    first, second = errors(started, "invalid")
    assert second.startswith("ConfigError: invalid dct configuration on rank 1")
    assert "did you mean dct.data_parallel.sparsity?" in second
    assert first.startswith("DesyncError: rank 0: rank 1 failed at start-up: ConfigError")


def test_a_fault_on_all_ranks_is_each_ones_own(started: Results) -> None:
    for error in errors(started, "both-invalid"):
        assert error.startswith("ConfigError: invalid dct configuration on rank")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("offload", "dct does not support offloading (zero_optimization.offload_optimizer.device = cpu)"),
        ("unmanaged", "dct does not support managed_gradient_accumulation = false: a step ends where step()"),
    ],
)
def test_unsupported_combinations(started: Results, name: str, words: str) -> None:
    for number, error in enumerate(errors(started, name)):
        assert error.startswith(f"ConfigError: rank {number}: {words}")
        assert "ZeRO stage 0 to 3" in error


def test_nothing_is_left_of_failed_starts(started: Results) -> None:
    first, second = (rank["good"] for rank in started)
    assert first["attached"]
    assert first["hash"] == second["hash"]
    assert "active on ZeRO stage 1, fp32, reduce-scatter" in first["log"][0]


def job(folder: Path, *, dct: Any, **more: Any) -> tuple[str, str]:
    """Arguments of the training script for one short run."""
    plan = folder / "plan"
    torch.save([{"id": "job", "config": config(0, dct=dct), "steps": 2, **more}], plan)
    return str(plan), str(folder)


def results(folder: Path) -> list[Run]:
    return [torch.load(folder / str(rank), weights_only=False)["job"] for rank in (0, 1)]


def test_the_whole_job_stops(tmp_path: Path) -> None:
    arguments = job(tmp_path, dct=section(), ranks={1: {"config": config(0, dct=section(sparsity=0.5))}})
    with forked_interpreters():
        done = execute(torchrun(2, str(WORKER), *arguments), tmp_path)
    assert done.returncode != 0
    assert "dct.data_parallel.sparsity differs: 0.9 on rank 0; 0.5 on rank 1" in done.stderr
    assert "DesyncError: rank 0" in done.stderr
    assert "DesyncError: rank 1" in done.stderr


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_deepspeed_launcher(tmp_path: Path, forks: bool) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", "2", "--master_port", str(free_port())]
    with forked_interpreters() if forks else nullcontext():
        command = [sys.executable, str(launcher), *options, str(WORKER), *job(tmp_path, dct=section())]
        done = execute(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = results(tmp_path)
    assert first["attached"]
    assert first["hash"] == second["hash"]


@pytest.fixture
def support(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from dct_plugin.integrations.deepspeed import engine as support

    return support


def test_this_deepspeed_is_supported(support: Any) -> None:
    import deepspeed

    support.check_version(deepspeed.__version__)


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "1.0", "0.16.4+cu12", "unknown"])
def test_other_versions_are_refused(support: Any, version: str) -> None:
    from dct_plugin import VersionError

    with pytest.raises(VersionError) as caught:
        support.check_version(version)
    first, *others = str(caught.value).splitlines()
    assert first == f"DeepSpeed {version} is not supported"
    assert others[0].startswith("  supported: 0.19.0 up to, not including, 0.20.0 (tested: 0.19.0")
    assert others[1].startswith("  what to do: install a supported DeepSpeed")


def test_a_changed_signature_is_refused(support: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    from dct_plugin import VersionError

    name = deepspeed.runtime.engine.DeepSpeedEngine.allreduce_and_copy
    monkeypatch.setattr(
        deepspeed.runtime.engine.DeepSpeedEngine,
        "allreduce_and_copy",
        lambda self, tensors, group: name(self, tensors, group),
    )
    monkeypatch.delattr(deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer, "average_tensor")
    from dct_plugin.integrations.deepspeed.attachment import GRADIENT_PATHS

    with pytest.raises(VersionError) as caught:
        support.require_targets([target for path in GRADIENT_PATHS for target in path.targets])
    assert "expected: (self, small_bucket, dp_group, dp_world_size, ...)" in str(caught.value)
    assert "found:    (self, tensors, group): does not start with" in str(caught.value)
    assert (
        "missing: deepspeed.runtime.zero.stage_1_and_2 has no DeepSpeedZeroOptimizer.average_tensor"
        in str(caught.value)
    )


@pytest.mark.parametrize("owner", ["engine", "optimizer"])
def test_a_missing_attribute_is_named(support: Any, owner: str) -> None:
    from dct_plugin import VersionError

    class Engine:
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

        def __getattr__(self, name: str) -> Any:  # as DeepSpeed's engine, which asks the user's model
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    engine = Engine(optimizer=Engine())
    with pytest.raises(VersionError) as caught, support.supported(engine):
        _ = engine.monitor if owner == "engine" else engine.optimizer.monitor
    first, *missing, supported, remedy = str(caught.value).splitlines()
    assert first.endswith(" lacks what dct-plugin reads")
    assert missing == [f"  {owner}.monitor"]
    with pytest.raises(AttributeError, match="'int' object"), support.supported(engine):
        _ = (1).monitor  # type: ignore[attr-defined]
    assert supported.startswith("  supported: 0.19.0 up to, not including, 0.20.0 (tested: 0.19.0")
    assert remedy.startswith("  what to do: install a supported DeepSpeed")
