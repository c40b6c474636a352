"""FSDP2 on one mesh: real processes on gloo, two nodes of two ranks or every rank a node."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.alone import everyones
from support.groups_made import groups_made
from support.one_mesh import Net, adamw, gathered, same, sharded, shards, train
from support.processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import dct_plugin
from dct_plugin import ConfigError, VersionError
from dct_plugin.codecs.values import ValueDtype, encode_values
from dct_plugin.config import MetricsConfig
from dct_plugin.fsdp import ShardCompression, compress_shards
from dct_plugin.metrics import Metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("shared_ranks"),
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_custom_all_gather"), reason="this torch has no seam for the collectives"
    ),
]

#: Dense gradients and copies of the weights' bits: plain FSDP2.
EXACT = {"value_dtype": "fp32", "parameters": "exact", "min_numel": 16}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "resharded": {"reshard": True},
    "kept": {"reshard": False},
    "averages": {"sums": False},
    "micro-batches": {"micro": 3},
    "micro-batches, one exchange": {"micro": 3, "syncs": False},
    "frozen": {"frozen": True},
    "activation checkpoints": {"checkpointed": True},
    "prefetch": {"prefetch": True, "reshard": True},
    "columns": {"by_columns": True},
    "fp16": {"param_dtype": torch.float16},
    "divide factor": {"factor": 4.0},
}


def _as_plain(rank: int, world_size: int) -> dict[str, tuple[bool, int]]:
    found = {}
    for name, case in CASES.items():
        loop = {key: case[key] for key in ("micro", "syncs") if key in case}
        options = {key: value for key, value in case.items() if key not in loop}
        plain = sharded(**{**options, "sums": True})
        train(plain, adamw(plain), 4, **loop)
        ours = sharded(**options)
        optimizer = adamw(ours)
        attached = dct_plugin.attach(ours, optimizer, {"data_parallel": EXACT})
        assert isinstance(attached, ShardCompression)
        train(ours, optimizer, 4, **loop)
        found[name] = same(plain, ours), attached.steps.step
        attached.close()
    return found


def test_exact_copies_and_dense_gradients_are_plain_fsdp2_on_two_ranks() -> None:
    for found in run(2, _as_plain):
        assert found == dict.fromkeys(CASES, (True, 4))


class _InTwoLevels:
    """A reduce-scatter by the book: sums inside the nodes, then sums of the nodes in their order."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **_: Any
    ) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        everyones = [torch.empty_like(input_tensor) for _ in range(ranks)]
        dist.all_gather(everyones, input_tensor)
        parts = [each.view(ranks, -1)[rank] for each in everyones]
        output_tensor.copy_((parts[0] + parts[1]) + (parts[2] + parts[3]))


def _checksum(module: nn.Module) -> float:
    whole = torch.cat([p.detach().float().view(-1) for p in module.parameters()]).double()
    return float((whole * torch.arange(1, len(whole) + 1)).sum())


class _Seen:
    """Checksums of the weights that blocks compute with, in each pass."""

    def __init__(self, model: nn.Module) -> None:
        self.sums: list[float] = []
        for block in model.blocks:  # type: ignore[union-attr]
            block[0].register_forward_hook(self._note)  # type: ignore[union-attr, index]

    def _note(self, module: Any, *_: Any) -> None:
        self.sums.append(_checksum(module))

    def alike(self) -> bool:
        return bool(self.sums) and all(each == self.sums for each in everyones(self.sums))


SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {**EXACT, "nodes": 2},
    "nothing written": {"nodes": 2, "min_numel": 16},
    "log4": {"nodes": 2, "min_numel": 16, "value_dtype": "log4"},
    "dense gathers": {"nodes": 2, "min_numel": 16, "parameters": None},
    "exact, every rank a node": EXACT,
    "int8": {"nodes": 1, "min_numel": 16},
    "int8 in nodes": {"nodes": 2, "min_numel": 16, "parameters": "int8"},
}


def _on_nodes(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    reference = sharded()
    for module in reference.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_InTwoLevels())  # type: ignore[arg-type]
    train(reference, adamw(reference), 6, micro=2, syncs=False)
    whole = torch.cat([each.view(-1) for each in shards(reference)])
    found = {}
    for name, settings in SETTINGS.items():
        model = sharded(reshard=True)
        optimizer, seen = adamw(model), _Seen(model)
        with groups_made() as made:
            attached: Any = dct_plugin.attach(model, optimizer, {"data_parallel": settings})
            train(model, optimizer, 6, micro=2, syncs=False)
        # Of the sums in nodes and between them, and of the copies.
        groups = 0 if settings.get("nodes") != 2 else 3 if attached.copies else 2
        assert made == {"before": groups, "in passes": 0}
        own = torch.cat([each.view(-1) for each in shards(model)])
        found[name] = (
            seen.alike(),
            torch.equal(own, whole),
            float((own - whole).abs().mean()) < 0.005,  # of steps of 0.01
            attached.config.data_parallel.parameters,
            attached.config.data_parallel.value_dtype,
        )
        attached.close()
    return found


def test_two_nodes_of_two_ranks_compute_with_the_same_weights() -> None:
    for found in run(4, _on_nodes):
        assert found == {
            "exact": (True, True, True, "exact", "fp32"),
            "nothing written": (True, False, True, "exact", "int8"),
            "log4": (True, False, True, "exact", "log4"),
            "dense gathers": (True, False, True, None, "int8"),
            "int8": (True, False, True, "int8", "int8"),
            "int8 in nodes": (True, False, True, "int8", "int8"),
            "exact, every rank a node": (True, found["exact, every rank a node"][1], True, "exact", "fp32"),
        }


def _weights_changed(rank: int, world_size: int, nodes: int) -> dict[str, tuple[bool, bool]]:
    model = sharded()
    optimizer, start = adamw(model), {name: each.clone() for name, each in model.state_dict().items()}
    attached: Any = dct_plugin.attach(model, optimizer, {"data_parallel": {"nodes": nodes}})
    rounding = 0.016 if nodes == 1 else 0.004  # of a kept scale; of bf16
    found = {"before the first pass": gathered(model, rounding)}
    train(model, optimizer, 7)
    found["after steps"] = gathered(model, rounding)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        model(torch.ones(2, 24))
    found["written"] = gathered(model, rounding)
    model.load_state_dict(start)
    found["loaded"] = gathered(model, rounding)
    model.blocks[1](torch.ones(2, 33))  # type: ignore[operator, index]
    train(model, optimizer, 1)
    found["trained again"] = gathered(model, rounding)
    if rank == 0:  # trains something of its own
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()
    with torch.no_grad():
        model(torch.ones(2, 24))
    found["evaluated"] = gathered(model, rounding)
    for parameter in model.parameters():  # an average is replaced by the weights, without a new version
        parameter.data.mul_(1.5)
    model(torch.ones(2, 24))
    found["written through data"] = gathered(model, rounding)
    attached.close()
    found["closed"] = gathered(model, rounding)
    return found


@pytest.mark.parametrize("nodes", [2, 1], ids=["exact copies", "int8 copies"])
def test_copies_follow_the_weights_whatever_changes_them(nodes: int) -> None:
    for found in run(4, _weights_changed, nodes):
        assert found == dict.fromkeys(found, (True, True))


class _BothPasses:
    """Checksums of the weights that blocks have in forward and in backward passes with gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        for block in model.blocks:  # type: ignore[union-attr]
            linear: Any = block[0]  # type: ignore[index]
            linear.register_forward_hook(self._note_forward)
            linear.register_full_backward_pre_hook(lambda module, _: self.backward.append(_checksum(module)))

    def _note_forward(self, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.forward.append(_checksum(module))

    def take(self) -> tuple[bool, bool]:
        """Return whether the passes had the same weights, and whether all ranks had the same."""
        forward, backward = sorted(self.forward), sorted(self.backward)
        self.forward, self.backward = [], []
        return bool(forward) and forward == backward, all(each == forward for each in everyones(forward))


def _passes(rank: int, world_size: int, nodes: int) -> dict[str, tuple[bool, bool]]:
    model = sharded(reshard=True)
    optimizer, start = adamw(model), {name: each.clone() for name, each in model.state_dict().items()}
    attached: Any = dct_plugin.attach(model, optimizer, {"data_parallel": {"nodes": nodes}})
    scaler, points, seen = torch.amp.GradScaler("cpu"), torch.ones(4, 24), _BothPasses(model)

    def evaluate() -> None:
        with torch.no_grad():
            model(points)

    def write() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)

    def skip() -> None:  # the loss is infinite on one rank
        scaler.scale(model(points).float().sum() * (torch.inf if rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.take()

    nothing, unshard = (lambda: None), (lambda: gathered(model, 0.016))
    events: dict[
        str, tuple[Callable[[], Any], Callable[[], Any]]
    ] = {  # before a step, and between its passes
        "nothing": (nothing, nothing),
        "a loaded state": (lambda: model.load_state_dict(start), nothing),
        "a skipped step": (skip, nothing),
        "written weights": (write, nothing),
        "weights written between passes": (nothing, write),
        "an evaluation": (evaluate, evaluate),
        "unshard()": (unshard, unshard),
        "all of it": (lambda: [each() for each in (skip, write, evaluate, unshard)], evaluate),
    }
    found = {}
    for name, (before, between) in events.items():
        train(model, optimizer, 2)
        seen.take()
        before()
        for _ in range(2):
            loss = model(points).float().square().mean()
            between()
            loss.backward()
        found[name] = seen.take()
        optimizer.step()
        optimizer.zero_grad()
    attached.close()
    return found


@pytest.mark.parametrize("nodes", [2, 1], ids=["exact copies", "int8 copies"])
def test_both_passes_use_the_same_weights_whatever_comes_between(nodes: int) -> None:
    for found in run(4, _passes, nodes):
        assert found == dict.fromkeys(found, (True, True))
        assert len(found) == 8


def _crossings(rank: int, world_size: int, nodes: int) -> tuple[list[list[bool]], set[int], int]:
    """Return whether bytes left a node in forward and backward passes of a step's micro-batches, and the
    sizes of the groups in which FSDP's own collectives ran.
    """
    model, sizes, patch = sharded(reshard=True), set(), pytest.MonkeyPatch()
    for name in (
        "all_gather_single",
        "reduce_scatter_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):
        if (original := getattr(dist, name, None)) is not None:

            def counted(*tensors: Any, original: Any = original, group: Any = None, **more: Any) -> Any:
                sizes.add(dist.get_world_size(group))
                return original(*tensors, group=group, **more)

            patch.setattr(dist, name, counted)
    optimizer = adamw(model)
    settings = {"nodes": nodes, "min_numel": 16, "verify": None}
    attached: Any = dct_plugin.attach(model, optimizer, {"data_parallel": settings})
    train(model, optimizer, 6)
    reducer, updates = attached.groups[0].reducer, attached.copies.updates
    found = []

    def crossed() -> int:
        return int(reducer.group.exchange.counters()[0] + updates.group.exchange.counters()[0])

    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
        before = crossed()
        loss = model(torch.ones(4, 24)).float().square().mean()
        between = crossed()
        loss.backward()
        found.append([between > before, crossed() > between])
    optimizer.step()
    patch.undo()
    return found, sizes, attached.steps.step


@pytest.mark.parametrize("nodes", [2, 1], ids=["exact copies", "int8 copies"])
def test_nothing_crosses_in_backward_passes_and_further_micro_batches(nodes: int) -> None:
    for found, sizes, steps in run(4, _crossings, nodes):
        assert found == [[True, False], [False, False], [False, True]]  # at last the gradients
        assert sizes == set()
        assert steps == 7


def _detached(rank: int, world_size: int) -> tuple[bool, bool]:
    plain, ours = sharded(), sharded()
    optimizers = adamw(plain), adamw(ours)
    attached: Any = dct_plugin.attach(ours, optimizers[1], {"data_parallel": EXACT})
    for model, optimizer in ((plain, optimizers[0]), (ours, optimizers[1])):
        train(model, optimizer, 2)
        if model is ours:
            attached.detach()
        train(model, optimizer, range(2, 5))
    with torch.no_grad():
        ours(torch.ones(2, 24))
    again = dct_plugin.attach(ours, optimizers[1], {"data_parallel": EXACT})
    with torch.inference_mode():  # makes the copies
        ours(torch.ones(2, 24))
    for model, optimizer in ((plain, optimizers[0]), (ours, optimizers[1])):
        train(model, optimizer, range(5, 7))
    again.close()
    kinds = {type(group.fsdp._all_gather_comm).__name__ for group in attached.groups}
    return same(plain, ours), kinds == {"DefaultAllGather"}


def test_a_detached_model_is_plain_again() -> None:
    assert run(2, _detached) == [(True, True)] * 2


def _said_of_replicas(rank: int, world_size: int) -> list[list[str]]:
    found, total, patch = [], sum(p.numel() for p in Net().parameters()), pytest.MonkeyPatch()
    for nodes, memory in (("auto", 18 * total), (1, 18 * total), (1, 18 * total - 1), (2, 18 * total)):
        memory_of_machine = SimpleNamespace(total=memory, available=memory)
        patch.setattr(psutil, "virtual_memory", lambda found=memory_of_machine: found)
        model = sharded()
        attached: Any = dct_plugin.attach(model, adamw(model), {"data_parallel": {"nodes": nodes}})
        found.append([line.split(":")[0] for line in attached.lines[len(attached.applied.lines) :]])
        attached.close()
    patch.undo()
    return found


def test_the_start_names_replicas_where_a_node_can_hold_one() -> None:
    for found in run(4, _said_of_replicas):
        assert found == [[], ["better"], ["one mesh"], ["better"]]


def _odd_operations(rank: int, world_size: int) -> tuple[list[float], bool]:
    model = sharded(factor=3.0, sums=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dct_plugin.attach(model, optimizer, {"data_parallel": {"nodes": 2}})
    model(torch.ones(4, 24)).float().sum().backward()
    bias: Any = model.last.bias.grad  # type: ignore[union-attr]
    bias = bias.full_tensor()
    optimizer.zero_grad()
    model(torch.ones(4, 24)).float().mul(torch.nan if rank == 1 else 1.0).sum().backward()
    gradients: list[Any] = [p.grad for p in model.blocks[0].parameters()]  # type: ignore[union-attr, index]
    return bias.tolist(), any(bool(each.to_local().isfinite().any()) for each in gradients)


def test_a_divide_factor_and_a_gradient_that_is_not_finite() -> None:
    for bias, any_finite in run(4, _odd_operations):
        assert bias == pytest.approx([4 * 4 / 3] * 3)  # four ranks, four rows, divided by 3
        assert not any_finite


def _small_in_bf16(rank: int, world_size: int) -> dict[str, list[bool]]:
    """Return whether gradients of biases are averages of what is rounded to bf16, and of what is not."""
    found = {}
    points = torch.randn(16, 24, generator=torch.Generator().manual_seed(rank))
    for name, value_dtype in (("int8", "int8"), ("log4", "log4"), ("fp32", "fp32")):
        model, plain = sharded(param_dtype=None), Net()
        section = {"nodes": 1, "value_dtype": value_dtype, "parameters": None, "min_numel": 0}
        attached: Any = dct_plugin.attach(model, adamw(model), {"data_parallel": section})
        for each in (model, plain):
            each(points).square().mean().backward()
        grads = [each.bias.grad for each in (model.first, plain.first)]  # type: ignore[union-attr]
        own = everyones(grads[1].tolist())  # type: ignore[union-attr]
        exact = torch.tensor(own)
        averages = [exact.bfloat16().float().sum(0) / 2, exact.sum(0) / 2]
        found[name] = [torch.equal(grads[0].full_tensor(), each) for each in averages]  # type: ignore
        attached.close()
    return found


def test_biases_cross_in_bf16_beside_entries_in_few_bits() -> None:
    for found in run(2, _small_in_bf16):
        assert found == {"int8": [True, False], "log4": [True, False], "fp32": [False, True]}


def _in_one_payload(rank: int, world_size: int, most: float) -> tuple[list[bool], dict[str, float]]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 3))
    model: Any = copy.deepcopy(plain)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    metrics = Metrics(MetricsConfig(), rank=rank, world_size=world_size)
    section = {"data_parallel": {"nodes": 1, "parameters": None, "min_numel": 0}}
    attached: Any = compress_shards(model, section, optimizer=adamw(model), metrics=metrics)
    attached.groups[0].reducer.group.backend.message_entries = most
    points = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    for each in (plain, model):
        each(points).square().mean().backward()
    found = []
    for own, ours in zip(plain.parameters(), model.parameters(), strict=True):
        gradients = [torch.tensor(each) for each in everyones(own.grad.tolist())]  # type: ignore[union-attr]
        mine = [each.chunk(world_size)[rank] for each in gradients]
        dtype = ValueDtype.INT8 if own.dim() > 1 else ValueDtype.BF16
        sent = [encode_values(each.flatten(), dtype)[1].view_as(each) for each in mine]
        found.append(torch.equal(ours.grad.to_local(), sum(sent) / world_size))
    classes = metrics.summary().classes
    return found, {name: classes[name].sent_bytes for name in ("gradient", "gradient_small")}


@pytest.mark.parametrize("most", [50_000, math.inf], ids=["as on CPUs", "as on GPUs"])
def test_parameters_share_a_header_and_have_scales_of_their_own(most: float) -> None:
    for found, sent in run(2, _in_one_payload, most):
        assert found == [True] * 6
        even, odd = 32 * 64 + 16 * 64, 2 * 32  # entries of the other rank's shards; the odd one is padded
        assert sent["gradient"] == 24 + 2 * 24 + even * (1 + 4 / 256) + odd + 4
        assert sent["gradient_small"] == 24 + 2 * (32 + 16 + 2)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sparsity": ({}, {"sparsity": 0.9}, "dct.data_parallel.sparsity = 0.9: FSDP2 on one mesh"),
    "feedback": ({}, {"feedback": "local"}, 'feedback = "local": FSDP2 on one mesh'),
    "quality": ({}, {"quality": "safe"}, 'dct.data_parallel.quality = "safe"'),
    "local steps": ({}, {"local_steps": 8}, "dct.data_parallel.local_steps"),
    "thresholded updates": ({}, {"parameters": {}}, "dct.data_parallel.parameters"),
    "fp32 gathers": (
        {"param_dtype": None},
        {"parameters": "exact"},
        "parameters = 'exact': FSDP gathers fp32, and nearly all fp32 weights change",
    ),
}

if hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):  # torch 2.15
    options = {"param_dtype_override_fn": lambda p: None if p.dim() > 1 else torch.float32}
    REFUSED["several types"] = (options, {}, "is gathered in several types (param_dtype_override_fn)")


def _refused(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, (options, settings, _) in REFUSED.items():
        model = sharded(**options)
        try:
            compress_shards(model, {"data_parallel": settings}, optimizer=adamw(model))
        except ConfigError as error:
            found[name] = str(error)
    model = sharded()
    model.blocks[0].set_custom_all_gather(_InTwoLevels())  # type: ignore[union-attr, index, operator]
    try:
        compress_shards(model, optimizer=adamw(model))
    except ConfigError as error:
        found["own collectives"] = str(error)
    model = sharded()
    attached: Any = dct_plugin.attach(model, adamw(model), {"data_parallel": EXACT})
    for group in attached.groups:  # as a model does whose gathers torch traces
        group.fsdp._all_gather_comm = type(group.fsdp._all_gather_comm._native)()
    try:
        model(torch.ones(2, 24))
    except ConfigError as error:
        found["another gather"] = str(error)
    return found


def test_what_cannot_work_is_refused_by_name() -> None:
    texts = {name: text for name, (*_, text) in REFUSED.items()}
    texts["own collectives"] = "has collectives of its own (_InTwoLevels"
    texts["another gather"] = "the weights were gathered without set_custom_all_gather"
    for rank, found in enumerate(run(2, _refused)):
        for name, text in texts.items():
            assert text in found[name], (name, found.get(name))
            assert f"rank {rank}" in found[name]


def test_an_older_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,)))
        monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
        with pytest.raises(VersionError, match=r"2\.9\.0"):
            ShardCompression(model)
    finally:
        dist.destroy_process_group()
