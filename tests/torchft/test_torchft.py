"""torchft with thresholded all-reduces: real lighthouse and managers, replicas as threads or processes."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import fork, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("RUST_LOG", "error")  # which torchft reads when it is imported
pytest.importorskip("torchft.coordination", reason="torchft is not installed")

import torchft
from support.torchft_replicas import LIMIT, in_threads, lighthouse, manager_of
from support.torchft_worker import Job, batch, model_of, work
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import WorldSizeMode
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroupWrapper,
)

from dct_plugin.errors import ConfigError
from dct_plugin.policy import memory
from dct_plugin.torchft import ProcessGroupGloo, ProcessGroupNCCL

pytestmark = pytest.mark.slow

SPARSE = {"data_parallel": {"sparsity": 0.9, "feedback": "local", "min_numel": 512}}
EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "feedback": "local", "min_numel": 16}}


def group_of(section: dict[str, Any] | None, **options: Any) -> Any:
    if section is None:
        return torchft.ProcessGroupGloo(timeout=LIMIT)
    return ProcessGroupGloo(section, timeout=LIMIT, **options)


def outcome(model: nn.Module, pg: Any) -> dict[str, Any]:
    found = {"weights": torch.cat([p.detach().reshape(-1) for p in model.parameters()])}
    if isinstance(pg, ProcessGroupGloo):
        found |= {"classes": pg.metrics.summary().classes, "counts": pg.counts}
    return found


def check_same(found: list[Any]) -> None:
    for each in found:
        assert not isinstance(each, BaseException), each
        assert torch.equal(each["weights"], found[0]["weights"])
        assert each["weights"].isfinite().all()


def train(model: nn.Module, stepper: Any, wrapped: Any, manager: Any, steps: int, seed: int) -> None:
    while manager.current_step() < steps:
        stepper.zero_grad()
        points, wanted = batch(manager.current_step(), seed)
        F.mse_loss(wrapped(points), wanted).backward()
        stepper.step()


def _ddp(name: str, address: str, section: Any, steps: int = 12) -> dict[str, Any]:
    model, pg = model_of(), group_of(section)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = manager_of(
        pg, name, address, state={"model": model, "optimizer": optimizer}, min_replicas=3, init_sync=False
    )
    wrapped = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=0.1)
    train(model, torchft.Optimizer(manager, optimizer), wrapped, manager, steps, ord(name))
    manager.shutdown(wait=False)
    return outcome(model, pg)


def _local_sgd(
    name: str, address: str, section: Any, averaged: threading.Event | None = None, *, joins: bool = False
) -> dict[str, Any]:
    """Train one replica; one that ``joins`` waits until the others have ``averaged``."""
    if joins:
        assert averaged is not None
        assert averaged.wait(300)
    model, pg = model_of(), group_of(section, averages="weights")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = manager_of(pg, name, address, state={"model": model, "optimizer": optimizer}, init_sync=False)
    with LocalSGD(manager, model, optimizer, sync_every=4):
        while manager.current_step() < (8 if averaged is None else 40) or manager.num_participants() < 3:
            optimizer.zero_grad()
            points, wanted = batch(manager.current_step(), ord(name))
            F.mse_loss(model(points), wanted).backward()
            optimizer.step()
            if averaged is not None and manager.current_step():
                averaged.set()
    manager.shutdown(wait=False)
    return outcome(model, pg)


def _averages_by_hand(name: str, address: str) -> list[float]:
    """Average three vectors of weights in each step, and in every other step a loss before or behind them."""
    section = {"data_parallel": {**EXACT["data_parallel"], "min_numel": 512}}
    pg, losses = group_of(section, averages="weights"), []
    manager = manager_of(pg, name, address, state={}, init_sync=False)
    for step in range(8):
        assert manager.current_step() == step
        manager.start_quorum()
        weights = [torch.full((size,), float(step)) for size in (600, 30, 40)]
        loss = torch.tensor(float(ord(name)))
        sent = [[*weights, loss], weights, [loss, *weights], weights][step % 4]
        for pending in [manager.allreduce(tensor) for tensor in sent]:
            pending.wait()
        assert manager.should_commit()
        assert all(torch.equal(each, torch.full_like(each, step)) for each in weights)
        losses.append(float(loss))
    manager.shutdown(wait=False)
    return losses[::2]


def test_other_averages_beside_those_of_local_sgd() -> None:
    with lighthouse(2) as address:
        assert in_threads(_averages_by_hand, [(name, address) for name in "ab"]) == [[97.5] * 4] * 2


def _diloco(name: str, address: str, section: Any) -> dict[str, Any]:
    model, pg = model_of(), group_of(section)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    parts = [nn.Sequential(model[0]), nn.Sequential(model[2], model[4])]
    outer = [torch.optim.SGD(p.parameters(), lr=0.7, momentum=0.9, nesterov=True) for p in parts]
    manager = manager_of(pg, name, address, state={"model": model}, init_sync=False, use_async_quorum=False)
    with DiLoCo(manager, parts, optimizer, outer, sync_every=4, fragment_sync_delay=1):
        for step in range(24):
            optimizer.zero_grad()
            points, wanted = batch(step, ord(name))
            F.mse_loss(model(points), wanted).backward()
            optimizer.step()
    found = outcome(model, pg)
    found["weights"] = torch.cat([t.reshape(-1) for t in outer_weights(manager)])
    found["streams"] = sorted(pg._residuals._tensors)
    manager.shutdown(wait=False)
    return found


def outer_weights(manager: Any) -> list[torch.Tensor]:
    """DiLoCo's weights at its last synchronisation, which all replicas share."""
    states = [s() for k, s in sorted(manager._user_state_dicts.items()) if k.startswith("Streaming")]
    return [tensor for state in states for tensor in state["original_parameters"].values()]


def test_sparsity_zero_is_as_torchft() -> None:
    with lighthouse(3) as address:
        plain = in_threads(_ddp, [(name, address, None) for name in "abc"])
        check_same(plain)
    with lighthouse(3) as address:
        ours = in_threads(_ddp, [(name, address, EXACT) for name in "abc"])
        check_same(ours)
    torch.testing.assert_close(ours[0]["weights"], plain[0]["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("host", [_ddp, _local_sgd, _diloco])
def test_hosts(host: Any) -> None:
    with lighthouse(3) as address:
        found = in_threads(host, [(name, address, SPARSE) for name in "abc"])
    check_same(found)
    for each in found:
        assert each["counts"].steps_rolled_back == 0
        assert each["classes"]["gradient"].ratio > 4
    if host is _diloco:
        assert {name.rsplit(" all-reduce")[0].rsplit(" small")[0] for name in found[0]["streams"]} == {
            "fragment 0", "fragment 1"
        }  # fmt: skip


def test_a_replica_joins_local_sgd() -> None:
    """It has no last average of its own: all send their weights once."""
    averaged = threading.Event()
    with lighthouse(2, join_ms=100) as address:
        found = in_threads(
            lambda name: _local_sgd(name, address, {**SPARSE}, averaged, joins=name == "c"), ["a", "b", "c"]
        )
    check_same(found)
    assert found[2]["counts"].times_healed >= 1


def _hsdp(rank: int, world_size: int, address: str) -> dict[str, Any]:
    """Two replicas of two shards: the first process group's ranks 0, 1 and 2, 3."""
    replica, shard = divmod(rank, 2)
    ports: list[Any] = [None] * 4
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.all_gather_object(ports, server.port)
    model, pg = model_of(), group_of(SPARSE)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))["shard"]
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
            layer.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = manager_of(
        pg, f"replica{replica}", address, state={}, store=(ports[2 * replica], shard, 2), init_sync=False
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.set_all_reduce_hook(lambda flat: manager.allreduce(flat).wait())
    stepper = torchft.Optimizer(manager, optimizer)
    train(model, stepper, model, manager, 10, rank)
    found = {"weights": torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()])}
    dist.barrier()
    manager.shutdown(wait=False)
    return found | {"ratio": pg.metrics.summary().classes["gradient"].ratio, "server": str(server)}


def test_hsdp() -> None:
    with lighthouse(2) as address:
        found = run(4, _hsdp, address)
    for shard in range(2):
        assert torch.equal(found[shard]["weights"], found[2 + shard]["weights"])
        assert found[shard]["ratio"] > 4


def _refused(
    name: str, address: str, section: Any, together: threading.Barrier | None = None
) -> dict[str, Any]:
    return _steps(name, address, section, 6, together=together)


def _steps(
    name: str,
    address: str,
    section: Any,
    steps: int,
    wrap: Any = None,
    together: threading.Barrier | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train without DDP: an all-reduce for each gradient.

    Args:
        wrap: Makes the manager's group of ours.
        together: No replica trains before all of them have a manager.
    """
    model, pg = model_of(), group_of(section)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    manager = manager_of(
        pg if wrap is None else wrap(pg), name, address, state=state, init_sync=False, **options
    )
    if wrap is not None:
        pg.follow(manager)
    stepper, residuals = torchft.Optimizer(manager, optimizer), []
    try:
        if together is not None:
            together.wait()
        for attempt in range(20):
            if manager.current_step() >= steps:
                break
            stepper.zero_grad()
            points, wanted = batch(manager.current_step(), ord(name))
            F.mse_loss(model(points), wanted).backward()
            works = []
            for parameter in model.parameters():
                works.append(manager.allreduce(parameter.grad))
                if attempt == 3 and wrap is not None:
                    works[-1].wait()
                    pg._peers.close()  # as if the connection were lost in mid-step
            if wrap is None:  # while gradients travel
                counts = torch.ones(2500, dtype=torch.int64)
                works.append(manager.allreduce(counts, reduce_op=dist.ReduceOp.SUM))
            for work in works:
                work.wait()
            assert wrap is not None or counts.unique().item() in (1, manager.num_participants())
            if attempt == 3 and "fails" in (section or {}).get("metrics", {}).get("path", ""):
                manager.report_error(RuntimeError("a gradient was damaged"))
            stepper.step()
            if wrap is None:
                pg._settle()
            residuals.append(residuals_of(pg))
    finally:
        manager.shutdown(wait=False)
        pg.shutdown()
    return outcome(model, pg) | {"residuals": residuals}


def residuals_of(pg: Any) -> torch.Tensor:
    reducer = pg._residuals._reducer
    streams = (
        [] if reducer is None else [s.residual.current for n, s in sorted(reducer.group.streams.items())]
    )
    return torch.cat(streams) if streams else torch.zeros(0)


def test_other_settings_are_refused() -> None:
    other = {"data_parallel": {**SPARSE["data_parallel"], "sparsity": 0.5}}
    together = threading.Barrier(3, timeout=300)
    with lighthouse(2, join_ms=3000) as address:
        *others, refused = in_threads(
            _refused, [(name, address, SPARSE if name < "c" else other, together) for name in "abc"]
        )
    check_same(others)
    assert isinstance(refused, ConfigError)
    assert "replica 'c'" in str(refused)
    # On a busy machine one replica comes after the quorum of two.
    ranks = "(0.9 on ranks 0-1; 0.5 on rank 2|0.9 on rank 0; 0.5 on rank 1)"
    assert re.search(f"dct.data_parallel.sparsity differs: {ranks}", str(refused))


def test_steps_that_are_not_committed_leave_residuals_alone(tmp_path: Path) -> None:
    # The path of the metrics is what tells the replicas to fail.
    section = {**SPARSE, "metrics": {"path": str(tmp_path / "fails.jsonl")}}
    with lighthouse(2) as address:
        found = in_threads(_refused, [("a", address, section), ("b", address, section)])
    check_same(found)
    for each in found:
        assert each["counts"].steps_rolled_back == 1
        dense = each["classes"]["uncompressed/gradient/other_types"]
        assert dense.sent_bytes >= 7 * 20_000  # six steps and one that was rolled back
        before, after = each["residuals"][2:4]
        assert torch.equal(before, after)
        assert not torch.equal(each["residuals"][1], before)
        assert before.any()


@pytest.mark.parametrize(
    "wrap",
    [
        ErrorSwallowingProcessGroupWrapper,
        lambda pg: ProcessGroupWrapper(pg=FakeProcessGroupWrapper(pg)),
    ],
    ids=["swallowing", "twice"],
)
def test_wrappers_of_torchft(wrap: Any) -> None:
    """Rounds end, so that tensors keep their streams, and a step with an error is not committed."""
    with lighthouse(2) as address:
        found = in_threads(lambda name: _steps(name, address, SPARSE, 6, wrap), [("a",), ("b",)])
    check_same(found)
    for each in found:
        assert each["counts"].steps_rolled_back == 1
        assert {residual.numel() for residual in each["residuals"]} == {found[0]["residuals"][0].numel()}
        assert each["residuals"][-1].any()


class Holder(torchft.process_group.ProcessGroup):
    """A wrapper that does not say what it wraps."""

    def __init__(self, pg: Any) -> None:
        super().__init__(0, 1)
        self.held = pg


def test_a_manager_of_another_group_is_refused() -> None:
    with lighthouse(1) as address:
        pg = group_of(SPARSE)
        manager = manager_of(Holder(pg), "a", address, state={}, min_replicas=1)
        with pytest.raises(ConfigError, match="the manager's process group is Holder, which is no torchft"):
            pg.follow(manager)
        manager.shutdown(wait=False)


def test_a_group_can_be_shut_down_again() -> None:
    pg = group_of(SPARSE)
    for _ in range(2):
        pg.shutdown()
        assert pg.errored() is None


def test_a_group_without_a_manager_is_refused() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pg = group_of(SPARSE)
    with pytest.raises(ConfigError, match=r"call pg\.follow\(manager\) before the first step; without"):
        pg.allreduce([torch.ones(1000)], dist.ReduceOp.SUM)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"call pg\.follow\(manager\) before the first step; without"):
            pg.configure(f"127.0.0.1:{store.port}/prefix", "a", 0, 1)
    with pytest.raises(ConfigError, match=r"pg\.follow"):
        pg.allreduce([torch.ones(1000)], dist.ReduceOp.SUM)


def test_spares_keep_their_residuals() -> None:
    options = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}
    with lighthouse(3) as address:
        found = in_threads(lambda name: _steps(name, address, SPARSE, 4, **options), [("a",), ("b",), ("c",)])
    check_same(found)
    assert found[0]["classes"]["gradient"].sent_bytes > 5 * found[2]["classes"]["gradient"].sent_bytes


def test_integers_are_summed_while_dense_gradients_travel() -> None:
    section = {"data_parallel": {**SPARSE["data_parallel"], "warmup_steps": 4}}
    with lighthouse(2) as address:
        check_same(in_threads(lambda name: _steps(name, address, section, 6), [("a",), ("b",)]))


def test_order_of_all_reduces_is_checked() -> None:
    pg = group_of(SPARSE)
    residuals = pg._residuals
    residuals.name_of(torch.zeros(1000), step=0, fragments=1)
    residuals.settle(1)
    with pytest.raises(ConfigError, match=r"all-reduce 1 of step 1 has 2000 entries of .* and had 1000"):
        residuals.name_of(torch.zeros(2000), step=1, fragments=1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"feedback": "step_ahead"}, 'feedback = "step_ahead"'),
        ({"nodes": 2}, "nodes = 2"),
        ({"verify": {}}, "verify"),
    ],
)
def test_settings_that_need_parameters(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"dct.data_parallel.{expected}"):
        ProcessGroupGloo({"data_parallel": settings})


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_the_log_says_what_a_rank_keeps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "LARGE_SHARE", -1.0)  # else small models are not worth a line
    optimizer = torch.optim.SGD(nn.Linear(500, 500, bias=False).parameters(), lr=0.1)
    group_of(SPARSE, optimizer=optimizer)
    assert "dct: this rank keeps 1.0 MB of residual" in caplog.text
    caplog.clear()
    group_of(SPARSE)  # it does not know the weights
    assert "this rank keeps" not in caplog.text


def test_nccl_is_missing() -> None:
    with pytest.raises(ConfigError, match="this torch has no NCCL; take ProcessGroupGloo"):
        ProcessGroupNCCL(SPARSE)


def replica(job: dict[str, Any], log: Path) -> None:
    """Be a replica whose errors go to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.WARNING)
    work(Job(**job))


class Replicas:
    """Processes that are replicas and can be killed."""

    def __init__(self, folder: Path, address: str, **job: Any) -> None:
        self.folder, self.job = folder, {"lighthouse": address, "section": SPARSE, "seconds": 0.02, **job}
        self.processes: dict[str, Any] = {}

    def start(self, name: str, **job: Any) -> None:
        job = {**self.job, "name": name, "out": str(self.folder / name), **job}
        self.processes[name] = fork(replica, job, self.folder / f"{name}.log")

    def wait(self, name: str, seconds: float = 60) -> int | None:
        """Return the exit code of a process, which is forgotten; None if it does not end in time."""
        process = self.processes.pop(name)
        process.join(seconds)
        return process.exitcode

    def results(self, patience: float = 120) -> list[dict[str, Any]]:
        until = time.monotonic() + patience
        for name, process in self.processes.items():
            process.join(until - time.monotonic())
            assert process.exitcode == 0, name
        return [torch.load(self.folder / name) for name in self.processes]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def test_a_killed_replica_heals_and_another_joins(tmp_path: Path) -> None:
    with lighthouse(2) as address:
        replicas = Replicas(tmp_path, address, replicas=4)
        try:
            for name in "abc":
                replicas.start(name, die_at=5 if name == "c" else -1)
            assert replicas.wait("c") == -9
            replicas.start("other", version="0.0.1")
            assert replicas.wait("other") == 1
            replicas.start("c")
            replicas.start("0")  # the first in the order of quorums
            found = replicas.results()
        finally:
            replicas.close()
    refused = (tmp_path / "other.log").read_text()
    assert "replica 'other' (rank 2 of the quorum) is refused" in refused
    assert 'version of dct-plugin differs: "' in refused
    assert '"0.0.1" on rank 2; start it with the same' in refused
    assert sorted(each["rank"] for each in found) == [0, 1, 2, 3]
    for each in found:
        assert each["step"] == found[0]["step"]
        assert all(map(torch.equal, each["weights"], found[0]["weights"]))
        dense, sent = map(sum, zip(*each["classes"].values(), strict=True))
        assert dense > 5 * sent
    a, b, c, d = [each["counts"] for each in found]
    assert max(a["replicas_left"], b["replicas_left"]) >= 1
    assert a["steps_rolled_back"] + b["steps_rolled_back"] <= 6
    assert c["times_healed"] >= 1
    assert d["times_healed"] >= 1
