"""FSDP2 with replicas: real processes, as 2 replicas of 2 shards on gloo."""

from __future__ import annotations

import importlib.util
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from support.deferred_backend import DeferredBackend, OnDevice
from support.processes import launch, run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from dct_plugin import DCTState
from dct_plugin.fsdp import compress_replicas
from dct_plugin.kernels import register_backend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("shared_ranks"),
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on the CPU"
    ),
]

#: Sums of fp32, so that the result of two replicas is bitwise FSDP's own.
EXACT = {"sparsity": 0, "value_dtype": "fp32", "min_numel": 16}
SPARSE = {"sparsity": 0.9, "min_numel": 16}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    # 5 and 3 are odd: shards of a node differ in size.
    return nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 3))


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def other_mesh_of() -> Any:
    """Sharding of matrices over another mesh than vectors: two parameter groups in each module."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    info = common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda p: common.ShardPlacementResult(Shard(0), info) if p.ndim > 1 else None


def sharded(
    shape: tuple[int, int],
    *,
    force_sum: bool = False,
    factor: float | None = None,
    two_groups: bool = False,
    **policy: Any,
) -> nn.Module:
    model, mesh = model_of(), mesh_of(shape)
    mixed = MixedPrecisionPolicy(**policy)
    placement = other_mesh_of() if two_groups else None
    for layer in list(model)[:-1]:  # the root has parameters of its own
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=mixed, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if force_sum:
                module.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
    return model


def batch(step: int, rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    points = torch.randn(16, 24, generator=generator)
    return points, points[:, :3].sin()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range | int,
    *,
    accumulate: str = "",
    scaler: torch.amp.GradScaler | None = None,
) -> list[float]:
    """``accumulate``: how two micro-batches make a step, by the function of FSDP's that is called. With a
    ``scaler`` the gradients of step 2 are not finite.
    """
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        for micro in range(2 if accumulate else 1):
            for name in ("set_requires_all_reduce", "set_requires_gradient_sync"):
                if name in accumulate:
                    getattr(model, name)(micro == 1)
            points, wanted = batch(step, rank, micro)
            loss = F.mse_loss(model(points).float(), wanted)
            overflows = scaler.is_enabled() and step == 2 and rank == 0
            scaler.scale(loss * torch.inf if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]


def is_same_on_replicas(model: nn.Module, shape: tuple[int, int]) -> bool:
    own = torch.cat([shard.reshape(-1) for shard in shards(model)])
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    mine = dist.get_rank() % shape[1]
    return all(torch.equal(everyones[i * shape[1] + mine], own) for i in range(shape[0]))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


CASES: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"force_sum": True},
    "divide factor": {"factor": 4.0, "force_sum": True},
    "bf16 parameters": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16 reduction": {"reduce_dtype": torch.float16},
    "two parameter groups in a module": {"two_groups": True},
    "gradient scaler": {"has_scaler": True},
    "accumulated": {"accumulate": "every pass reduces"},
    "set_requires_all_reduce": {"accumulate": "set_requires_all_reduce"},
    "set_requires_gradient_sync": {"accumulate": "set_requires_gradient_sync"},
}


def streams_of(compression: Any) -> list[Any]:
    return [stream for group in compression.groups for stream in group.reducer.group.streams.values()]


def _as_native(rank: int, world_size: int) -> dict[str, tuple[bool, bool, int, int]]:
    found = {}
    for name, case in CASES.items():
        options = dict(case)
        accumulate, has_scaler = options.pop("accumulate", ""), options.pop("has_scaler", False)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) if has_scaler else None for _ in range(2)]
        native = sharded((2, 2), **options)
        train(native, adamw(native), rank, 4, accumulate=accumulate, scaler=scalers[0])
        ours = sharded((2, 2), **options)
        optimizer = adamw(ours)
        # What is sent in another type than it is reduced in would be rounded.
        reduced = options.get("reduce_dtype", torch.float32)
        value_dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(reduced, "fp32")
        settings = {"data_parallel": {**EXACT, "value_dtype": value_dtype}}
        compression = compress_replicas(ours, settings, optimizer=optimizer, scaler=scalers[1])
        train(ours, optimizer, rank, range(2), accumulate=accumulate, scaler=scalers[1])
        before = streams_of(compression)
        train(ours, optimizer, rank, range(2, 4), accumulate=accumulate, scaler=scalers[1])
        # A change of the loss scale makes no stream anew: its residual would pass through the host's memory.
        lasts = all(map(operator.is_, before, streams_of(compression)))
        compression.state_dict()  # what became of the last step is looked up now
        same = all(torch.equal(a, b) for a, b in zip(shards(native), shards(ours), strict=True))
        found[name] = same, lasts, compression.steps.step, compression.metrics.summary().steps
    return found


def test_as_native_at_sparsity_zero() -> None:
    for found in run(4, _as_native):
        assert found == dict.fromkeys(CASES, (True, True, 4, 4))


def _groups(rank: int, world_size: int) -> dict[str, set[tuple[int, ...]]]:
    """The ranks that each of FSDP's own collectives joins, without the plugin; names by the version."""
    found: dict[str, set[tuple[int, ...]]] = {}
    patch = pytest.MonkeyPatch()
    for name in (
        *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor"),
        *("reduce_scatter_single", "all_reduce"),
    ):
        if not hasattr(dist, name):
            continue
        groups, original = found.setdefault(name.split("_")[1], set()), getattr(dist, name)

        def recorded(*tensors: Any, groups: Any = groups, original: Any = original, **more: Any) -> Any:
            groups.add(tuple(dist.get_process_group_ranks(more["group"])))
            return original(*tensors, **more)

        patch.setattr(dist, name, recorded)
    model = sharded((2, 2))
    train(model, adamw(model), rank, 3)
    patch.undo()
    return found


def test_weights_are_gathered_inside_a_replica_alone() -> None:
    """So no update of weights could be left out between nodes: gradients alone cross there."""
    for rank, found in enumerate(run(4, _groups)):
        replica, position = (0, 1) if rank < 2 else (2, 3), (0, 2) if rank % 2 == 0 else (1, 3)
        assert found == {"gather": {replica}, "scatter": {replica}, "reduce": {position}}


def replicated() -> nn.Module:
    composable = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    model, mesh = model_of(), init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    for layer in list(model)[:-1]:
        if isinstance(layer, nn.Linear):
            composable.replicate(layer, mesh=mesh)
    composable.replicate(model, mesh=mesh)
    return model


def _as_ddp(rank: int, world_size: int, feedback: str, composable: bool) -> tuple[bool, float, float]:
    """Two replicas of one shard are two ranks of DDP."""
    config = {"data_parallel": {**SPARSE, "feedback": feedback, "warmup_steps": 2}}
    wrapped = nn.parallel.DistributedDataParallel(model_of())
    optimizer = adamw(wrapped)
    state = DCTState(config).register(wrapped)
    if feedback == "step_ahead":
        state.step_ahead(wrapped.module, optimizer)
    expected = train(wrapped, optimizer, rank, 12)
    model = replicated() if composable else sharded((2, 1))
    optimizer = adamw(model)
    compression = compress_replicas(model, config, optimizer=optimizer)
    found = train(model, optimizer, rank, 12)
    same = all(
        torch.equal(a, b.detach()) for a, b in zip(shards(model), wrapped.module.parameters(), strict=True)
    )
    ratio, ddp = (each.metrics.summary().classes["gradient"].ratio for each in (compression, state))
    return same and found == expected, ratio, ddp


@pytest.mark.parametrize(
    ("feedback", "composable"), [("local", False), ("step_ahead", False), ("step_ahead", True)]
)
def test_as_ddp(feedback: str, composable: bool) -> None:
    if composable and not importlib.util.find_spec("torch.distributed._composable.replicate_with_fsdp"):
        pytest.skip("this torch has no replicate on FSDP2")
    for same, ratio, expected in run(2, _as_ddp, feedback, composable):
        assert same
        assert ratio == pytest.approx(expected, rel=0.1)
        assert ratio > 3


def _sparse(rank: int, world_size: int, feedback: str, exchange: str) -> tuple[bool, list[float], int]:
    model = sharded((2, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    optimizer = adamw(model)
    config = {"data_parallel": {**SPARSE, "feedback": feedback, "exchange": exchange, "warmup_steps": 2}}
    compression = compress_replicas(model, config, optimizer=optimizer)
    losses = train(model, optimizer, rank, 30)
    held = [shard.clone() for shard in shards(model)]
    model.eval()
    with torch.no_grad():
        model(batch(0, rank)[0])
    model.train()
    train(model, optimizer, rank, 2)
    assert not all(torch.equal(a, b) for a, b in zip(held, shards(model), strict=True))
    return is_same_on_replicas(model, (2, 2)), losses, compression.steps.step


@pytest.mark.parametrize(("feedback", "exchange"), [("local", "two_phase"), ("step_ahead", "auto")])
def test_sparse(feedback: str, exchange: str) -> None:
    for same, losses, steps in run(4, _sparse, feedback, exchange):
        assert same
        assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
        assert steps == 32


#: Settings, and whether FSDP's gathers wait for the event that the user set.
EVENTS: dict[str, tuple[dict[str, Any], bool]] = {
    "local": ({**SPARSE, "feedback": "local"}, True),
    "step_ahead": ({**SPARSE, "feedback": "step_ahead"}, False),
    "local_steps": ({"local_steps": 2, "warmup_steps": 1, "min_numel": 16}, False),
}


def _trains_with_events(rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    """Weights without ``set_post_optim_event`` and with it. The events stand for those of a device, on which
    weights are displaced behind the optimizer's step, and behind the event of it.
    """
    found: dict[str, list[torch.Tensor]] = {}
    waited: list[Any] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cpu.Stream, "wait_event", lambda _, event: waited.append(event))
    for name, (settings, waits) in EVENTS.items():
        for events in (False, True):
            model: Any = sharded((2, 1))
            optimizer = adamw(model)
            compress_replicas(model, {"data_parallel": settings}, optimizer=optimizer)
            waited.clear()
            for step in range(5):
                train(model, optimizer, rank, range(step, step + 1))
                if events and step < 4:
                    model.set_post_optim_event(f"event of step {step}")
            of_steps = [event for event in waited if "event of step" in str(event)]
            expected = [f"event of step {step}" for step in range(4) for _ in range(2)]  # two streams
            assert of_steps == (expected if events and waits else [])
            found[f"{name} {events}"] = shards(model)
    patch.undo()
    return found


def test_gathers_wait_for_what_is_written_behind_the_event_of_a_step() -> None:
    for found in run(2, _trains_with_events):
        for name in EVENTS:
            pairs = zip(found[f"{name} False"], found[f"{name} True"], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), name


def _wait_for_device(rank: int, world_size: int, backend: str) -> tuple[list[torch.Tensor], list[int]]:
    """Gradients of step 3 are three times as large on rank 1, and more than messages hold."""
    register_backend("deferred", DeferredBackend)
    model = sharded((2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {**SPARSE, "feedback": "local", "warmup_steps": 0, "expert": {"threshold": "fixed"}}
    compress_replicas(
        model, {"data_parallel": settings, "kernels": {"backend": backend}}, optimizer=optimizer
    )
    found, reads = [], []
    for step in range(6):
        before = OnDevice.reads
        for micro in range(2 if step == 5 else 1):  # a second pass adds to gradients
            points, wanted = batch(step, rank, micro)
            loss = F.mse_loss(model(points), wanted)
            (loss * (3.0 if step == 3 and rank == 1 else 1.0)).backward()
        found += [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        reads.append(OnDevice.reads - before)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *shards(model)], reads


def test_waits_for_a_device_once_in_a_backward_pass() -> None:
    """Kernels that leave figures on a device, which is the CPU here: the bits of those that do not."""
    expected, found = (run(2, _wait_for_device, name) for name in ("reference", "deferred"))
    for (tensors, reads), (others, _) in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))
        assert reads == [1, 1, 1, 1, 1, 2]  # the last step has two passes


def _compressed(shape: tuple[int, int], feedback: str, exchange: str) -> tuple[Any, Any, Any]:
    model = sharded(shape)
    optimizer = adamw(model)
    config = {"data_parallel": {**SPARSE, "feedback": feedback, "exchange": exchange}}
    return model, optimizer, compress_replicas(model, config, optimizer=optimizer)


def _resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def _unsent(compression: Any) -> dict[str, torch.Tensor]:
    """Return the mean of the replicas' residuals, by parameter."""
    residuals = compression.state_dict()["residuals"]
    return {name: each.full_tensor() for name, each in residuals.items()}


def _save(rank: int, world_size: int, folder: str, feedback: str, exchange: str) -> dict[str, torch.Tensor]:
    """Save after 6 steps; go on for 4, and do so from the checkpoint."""
    model, optimizer, compression = _compressed((2, 2), feedback, exchange)
    train(model, optimizer, rank, 6)
    unsent = _unsent(compression)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "dct": compression}, checkpoint_id=folder)
    train(model, optimizer, rank, range(6, 8))
    for load in (lambda c: dcp.load({"dct": c}, checkpoint_id=folder), lambda c: c.load(folder)):
        again, optimizer, compression = _compressed((2, 2), feedback, exchange)
        _resume(again, optimizer, folder)
        load(compression)
        assert compression.steps.step == 6
        train(again, optimizer, rank, range(6, 8))
        for name, shard, expected in zip(model.state_dict(), shards(again), shards(model), strict=True):
            assert torch.equal(shard, expected), name
    _save_one_row(rank, f"{folder}/row")
    return unsent


def _save_one_row(rank: int, folder: str) -> None:
    """A weight of one row, of which one of two ranks has nothing."""
    ends = []
    for steps in (range(4), range(2), range(2, 4)):
        torch.manual_seed(1)
        model = fully_shard(nn.Linear(24, 1, bias=False), mesh=mesh_of((2, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compression = compress_replicas(model, {"data_parallel": SPARSE}, optimizer=optimizer)
        if steps.start:
            _resume(model, optimizer, f"{folder}/model")
            assert compression.load(folder)
        train(model, optimizer, rank, steps)
        ends.append(shards(model)[0])
        if len(steps) == 2 and not steps.start:
            compression.save(folder)
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/model")
    assert torch.equal(ends[0], ends[2])


def _reshard(
    rank: int, world_size: int, shape: tuple[int, int], folder: str, feedback: str, exchange: str
) -> tuple[dict[str, torch.Tensor], int, bool, list[float]]:
    model, optimizer, compression = _compressed(shape, feedback, exchange)
    _resume(model, optimizer, folder)
    assert compression.load(folder)
    unsent = _unsent(compression)
    losses = train(model, optimizer, rank, range(6, 8))
    return unsent, compression.steps.step, is_same_on_replicas(model, shape), losses


@pytest.mark.parametrize(("feedback", "exchange"), [("local", "two_phase"), ("step_ahead", "direct")])
def test_checkpoint(feedback: str, exchange: str, tmp_path: Any) -> None:
    folder = str(tmp_path)
    unsent = run(4, _save, folder, feedback, exchange)[0]
    assert unsent
    for each in unsent.values():
        assert each.abs().sum() > 0
    for shape in ((1, 2), (4, 1), (1, 4)):
        world_size = shape[0] * shape[1]
        for found, steps, same, _ in run(world_size, _reshard, shape, folder, feedback, exchange):
            assert same
            assert steps == 8
            assert "4.weight" in found  # of which the last of four ranks has no row
            for name, residual in found.items():
                torch.testing.assert_close(residual, unsent[name], rtol=1e-6, atol=1e-9)
            assert shape == (1, 4) or found.keys() == unsent.keys()  # smaller shards are sent dense


# -- what is refused ---


def _desync(rank: int, world_size: int, problem: str) -> None:
    model = sharded((2, 1))
    sparsity = 0.8 if problem == "configuration" and rank == 1 else 0.9
    if problem != "missing" or rank == 0:
        compress_replicas(model, {"data_parallel": {"sparsity": sparsity}}, time_limit=5)
    if problem == "late":
        model.append(fully_shard(nn.Linear(3, 3), mesh=mesh_of((2, 1))))
    train(model, adamw(model), rank, 1)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("configuration", "data_parallel.sparsity"),
        ("missing", "was not passed to compress_replicas"),
        ("late", "module 5 was passed to fully_shard after compress_replicas"),
    ],
)
def test_desync(problem: str, text: str) -> None:
    outcomes = launch(2, _desync, problem)
    assert outcomes[0][0] == "error"
    assert text in outcomes[0][1]


def _between(rank: int, world_size: int) -> list[torch.Tensor]:
    """Weights of trainings with something between each forward pass and its backward pass."""
    ends = []
    for between in ("nothing", "no_grad", "evaluation", "a gradient"):
        model = sharded((2, 1))
        optimizer = adamw(model)
        compress_replicas(model, {"data_parallel": {**SPARSE, "feedback": "step_ahead"}}, optimizer=optimizer)
        for step in range(6):
            points, wanted = batch(step, rank)
            out = model(points.requires_grad_())
            if between == "no_grad":
                with torch.no_grad():
                    model(points)
            if between == "evaluation":
                model.eval()
                model(points)
                model.train()
            if between == "a gradient":
                torch.autograd.grad(out.sum(), points, retain_graph=True)
            F.mse_loss(out, wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([shard.reshape(-1) for shard in shards(model)]))
    return ends


def test_backward_passes_use_the_weights_of_their_forward_pass() -> None:
    for ends in run(2, _between):
        assert all(torch.equal(end, ends[0]) for end in ends)
