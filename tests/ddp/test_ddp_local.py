"""Local updates (``update: "local"``) on torch's DistributedDataParallel, in real processes."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import launch, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dct_plugin.data_parallel import DCTState, dct_hook

pytestmark = pytest.mark.slow

EVERY_2, EVERY_4 = ({"kind": "local_updates", "every": every} for every in (2, 4))
LOCAL = {"feedback": "local_updates", "sparsity": 0.95, "min_numel": 1000, "verify": {"every": 1}}
SOME = {
    "SGD": {"lr": 0.005},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.02},
    "Momentum": {"lr": 0.001, "momentum": 0.9},
}


class Net(nn.Module):
    """Tied, frozen and at times unused parameters, a buffer, and one parameter in another layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(100, 300)
        self.norm = nn.BatchNorm1d(300)
        self.image = nn.Conv2d(3, 48, 5, padding=2).to(memory_format=torch.channels_last)
        self.narrow = nn.Linear(300, 100)
        self.frozen = nn.Linear(100, 20).requires_grad_(False)
        self.unused = nn.Linear(40, 40)
        self.last = nn.Linear(100, 1)

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = torch.tanh(self.narrow(h) + nn.functional.linear(h, self.first.weight.t()))
        h = h + self.image(x[:, :48].view(-1, 3, 4, 4)).mean((1, 2, 3))[:, None] + self.frozen(h).mean()
        if step % 3 == 1:
            h = h + self.unused(h[:, :40]).sum(1, keepdim=True)
        return self.last(h).squeeze(1)


def made(section: dict[str, Any] | None, kind: str = "AdamW", **more: Any) -> tuple[Any, Any, Any, Any]:
    model = Net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1, find_unused_parameters=True, **more)
    optimizer = getattr(torch.optim, "SGD" if kind == "Momentum" else kind)(
        [p for p in model.parameters() if p.requires_grad], **SOME[kind]
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    state = None
    if section is not None:
        state = DCTState({"data_parallel": section}, named_parameters=model.named_parameters())
        ddp.register_comm_hook(state, dct_hook)
        if state.config.data_parallel.feedback.steps_locally:
            state.local(model, optimizer)
    return ddp, state, optimizer, schedule


def steps(
    parts: tuple[Any, Any, Any, Any],
    rank: int,
    which: range,
    *,
    accumulate: int = 1,
    clip: float | None = None,
) -> list[torch.Tensor]:
    """Local weights as the optimizer saw them, step by step."""
    ddp, _, optimizer, schedule = parts
    seen: list[torch.Tensor] = []
    for step in which:
        for micro in range(accumulate):
            seed = 1000 * rank + 10 * step + micro
            x = torch.randn(32, 100, generator=torch.Generator().manual_seed(seed))
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                (ddp(x, step) - x[:, 0]).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        seen.append(flat(ddp))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return seen


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _trains(
    rank: int, world_size: int, section: dict[str, Any], kind: str, accumulate: int
) -> dict[str, Any]:
    parts = made(section, kind)
    ddp, state, *_ = parts
    before = flat(ddp)
    seen = steps(parts, rank, range(12), accumulate=accumulate, clip=1.0)
    after = flat(ddp)
    ddp.eval()
    with torch.no_grad():
        loss = float(ddp(torch.ones(4, 100)).sum())
    twin = copy.deepcopy(ddp.module)
    with torch.no_grad():
        assert float(twin(torch.ones(4, 100)).sum()) == loss
    twin.train()
    twin(torch.ones(4, 100))
    assert torch.equal(flat(ddp), after)
    saved = torch.cat(
        [ddp.module.state_dict()[name].reshape(-1) for name, _ in ddp.module.named_parameters()]
    )
    total = state.metrics.summary()
    return {
        "before": before,
        "after": after,
        "saved": saved,
        "seen": seen,
        "frozen": ddp.module.frozen.weight.detach().clone(),
        "ratio": total.ratio,
        "steps": total.steps,
        "classes": sorted(total.classes),
        "dense": total.dense_bytes,
    }


@pytest.mark.parametrize(
    ("world_size", "more", "kind", "accumulate"),
    [
        (2, {}, "AdamW", 1),
        (2, {"feedback": EVERY_4, "value_dtype": "int8"}, "Adagrad", 2),
        (3, {"warmup_steps": 3, "sparsity_warmup_steps": 3, "feedback": EVERY_2}, "Momentum", 1),
        (3, {"exchange": "two_phase"}, "AdamW", 1),
    ],
)
def test_anchors_are_equal_and_local_weights_are_not(
    world_size: int, more: dict[str, Any], kind: str, accumulate: int
) -> None:
    first, *others = run(world_size, _trains, {**LOCAL, **more}, kind, accumulate)
    warm = more.get("warmup_steps", 0)
    assert not torch.equal(first["after"], first["before"])
    assert torch.equal(first["after"], first["saved"])
    assert first["steps"] == 12
    for other in others:
        assert torch.equal(first["after"], other["after"])
        for step, (mine, theirs) in enumerate(zip(first["seen"], other["seen"], strict=True)):
            assert torch.equal(mine, theirs) == (step <= warm), step


def _ends(rank: int, world_size: int, section: dict[str, Any] | None, kind: str) -> torch.Tensor:
    parts = made(section, kind)
    steps(parts, rank, range(8))
    return flat(parts[0])


@pytest.mark.parametrize("kind", ["SGD", "Momentum"])
def test_dense_local_steps_of_a_linear_optimizer_are_plain_ddp(kind: str) -> None:
    """Up to rounding: ``mean(w - step(g_i))`` is ``w - step(mean g_i)``, and anchors are bitwise equal."""
    plain = run(2, _ends, None, kind)[0]
    first, second = run(2, _ends, {**LOCAL, "sparsity": 0.0, "value_dtype": "fp32"}, kind)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, plain, rtol=1e-5, atol=2e-6)


def test_a_dense_start_is_plain_ddp_bitwise_and_one_rank_is_left_alone() -> None:
    for world_size, warm in ((2, 8), (1, 0)):
        plain = run(world_size, _ends, None, "AdamW")[0]
        assert torch.equal(run(world_size, _ends, {**LOCAL, "warmup_steps": warm}, "AdamW")[0], plain)


def _exchanges(rank: int, world_size: int) -> dict[str, Any]:
    """One exchange: nothing is lost, little is sent, and a parameter that thaws takes part."""
    parts = made({**LOCAL, "value_dtype": "bf16"})
    ddp, state, optimizer, _ = parts
    steps(parts, rank, range(3))
    updates = state._local
    x = torch.randn(32, 100, generator=torch.Generator().manual_seed(rank))
    (ddp(x) - x[:, 0]).square().mean().backward()
    optimizer.register_step_pre_hook(lambda *_: None)
    anchor = {name: pair.anchor.clone() for name, pair in updates._pairs.items()}
    exchange, before = updates._average, {}

    def looking(changes: Any) -> None:
        before.update({c.name: c.tensor.clone() for c in changes})
        exchange(changes)

    updates._average = looking
    optimizer.step()

    def in_order(weight: torch.Tensor) -> torch.Tensor:
        """As they lie in memory."""
        return weight.permute(0, 2, 3, 1).reshape(-1) if weight.dim() == 4 else weight.view(-1)

    result = {}
    for name, pair in updates._pairs.items():
        new, local, old = in_order(pair.anchor), in_order(pair.master), in_order(anchor[name])
        result[name] = {"owed": before[name], "moved": new - old, "left": local - new}
    return result


def test_what_is_sent_and_what_is_left_add_up() -> None:
    """``sum of owed = ranks * mean sent + sum of left``, for every entry, also of a channels-last tensor."""
    ranks = run(2, _exchanges)
    assert ranks[0].keys() == {
        "first.weight", "first.bias", "norm.weight", "norm.bias", "image.weight", "image.bias",
        "narrow.weight", "narrow.bias", "unused.weight", "unused.bias", "last.weight", "last.bias",
    }  # fmt: skip
    for name, first in ranks[0].items():
        second = ranks[1][name]
        owed, left = first["owed"] + second["owed"], first["left"] + second["left"]
        torch.testing.assert_close(owed, 2 * first["moved"] + left, rtol=1e-4, atol=1e-6)
        if owed.numel() >= LOCAL["min_numel"]:
            assert 0 < float((first["moved"] != 0).float().mean()) < 0.3, name
            assert float(left.abs().sum()) > 0
        else:
            assert not left.any()


def _resumes(rank: int, world_size: int, folder: str, section: dict[str, Any], save: bool) -> dict[str, Any]:
    """Ten steps; with ``save`` what the first five left is loaded into new objects on the way."""
    whole = made(section)
    steps(whole, rank, range(5))
    at = flat(whole[0])
    if save:
        whole[1].save(folder)
        if rank == 0:
            torch.save(
                [whole[0].module.state_dict(), *(part.state_dict() for part in whole[2:])], f"{folder}/model"
            )
    torch.distributed.barrier()
    seen = steps(whole, rank, range(5, 10))
    rest = made(section)
    steps(rest, rank, range(20, 21))  # what was trained before is forgotten
    for part, content in zip((rest[0].module, *rest[2:]), torch.load(f"{folder}/model"), strict=True):
        part.load_state_dict(content)
    found = rest[1].load(folder)
    loaded = flat(rest[0])
    again = steps(rest, rank, range(5, 10))
    return {
        "found": found,
        "at": at,
        "loaded": loaded,
        "seen": seen,
        "again": again,
        "end": flat(whole[0]),
        "end again": flat(rest[0]),
        "norm": torch.equal(whole[0].module.norm.running_mean, rest[0].module.norm.running_mean),
    }


@pytest.mark.parametrize(
    "more", [{}, {"feedback": {"kind": "local_updates", "every": 3}}, {"warmup_steps": 5}]
)
def test_a_resumed_run_goes_on_bitwise(tmp_path: Path, more: dict[str, Any]) -> None:
    """Also between two exchanges, and from a checkpoint of the dense start."""
    section = {**LOCAL, **more}
    two = run(2, _resumes, str(tmp_path), section, True)
    for done in two:
        assert done["found"]
        assert done["norm"]
        assert torch.equal(done["at"], done["loaded"])
        assert torch.equal(done["end"], done["end again"])
        for step, (mine, again) in enumerate(zip(done["seen"], done["again"], strict=True)):
            assert torch.equal(mine, again), step
    if more:
        return
    for file in tmp_path.glob("dct_rank_*.pt"):  # each rank's own
        assert torch.load(file, weights_only=True)["state"]["local"]["optimizer"]
    # Three ranks: all start at the mean of the two ranks' weights.
    ranks = run(3, _resumes, str(tmp_path), section, False)
    for done in ranks:
        assert done["found"]
        assert torch.equal(done["loaded"], two[0]["loaded"])
        assert torch.equal(done["again"][0], ranks[0]["again"][0])
        assert torch.equal(done["end again"], ranks[0]["end again"])
        assert not torch.equal(done["again"][0], done["loaded"])
        assert not torch.equal(done["again"][-1], ranks[0]["again"][-1]) or done is ranks[0]


def _without_files(rank: int, world_size: int, folder: str) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """From another kind of run: local weights start at what the model has loaded."""
    parts = made({"sparsity": 0.95, "min_numel": 1000})
    steps(parts, rank, range(4))
    parts[1].save(folder)
    weights = flat(parts[0])
    rest = made(LOCAL)
    steps(rest, rank, range(4))
    rest[0].module.load_state_dict(parts[0].module.state_dict())
    found = rest[1].load(folder)
    assert torch.equal(flat(rest[0]), weights)
    assert rest[1].reducer(torch.device("cpu")).step == 4
    seen = steps(rest, rank, range(4, 7))
    assert torch.equal(seen[0], weights)
    return found, seen[-1], flat(rest[0])


def test_other_checkpoints_start_at_the_loaded_model(tmp_path: Path) -> None:
    (found, mine, first), (_, theirs, second) = run(2, _without_files, str(tmp_path))
    assert found
    assert torch.equal(first, second)
    assert not torch.equal(mine, theirs)


def _bf16(rank: int, world_size: int) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 1)).bfloat16()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    state = DCTState({"data_parallel": {**LOCAL, "feedback": EVERY_2}})
    ddp.register_comm_hook(state, dct_hook)
    state.local(model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(30):
        x = torch.randn(64, 100, generator=generator).bfloat16()
        loss = (ddp(x)[:, 0] - x[:, 0]).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert state.state_dict()["reducer"]["local"]["anchors"].keys() == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    return flat(ddp), sum(losses[-5:]) / sum(losses[:5])


def test_weights_in_bf16_have_an_anchor_in_fp32() -> None:
    (first, ratio), (second, _) = run(2, _bf16)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second)
    assert ratio < 0.7


def _refused(rank: int, world_size: int, case: str) -> None:
    model = nn.Sequential(nn.Linear(10, 300), nn.Linear(300, 10))
    if case == "half":
        model.half()
    ddp = DistributedDataParallel(model)
    section = {**LOCAL, "feedback": "local"} if case == "shared" else LOCAL
    scaler = torch.amp.GradScaler("cpu") if case == "scaler" else None
    state = DCTState({"data_parallel": section}, scaler=scaler, time_limit=30)
    ddp.register_comm_hook(state, dct_hook)
    part = model[0].parameters() if case == "part" else model.parameters()
    if case == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(part, lr=0.1)
    if case != "nobody" and (case != "one" or rank == 0):
        state.local(model, optimizer)
    ddp(torch.ones(2, 10)).sum().backward()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("half", "parameter 0.weight: its type is float16, and weights are exchanged in fp32 or bf16"),
        ("shared", "local updates need dct.data_parallel.feedback = 'local_updates', it is 'local'"),
        (
            "scaler",
            "dct.data_parallel.feedback = 'local_updates': a gradient scaler skips steps on single ranks",
        ),
        ("part", "the optimizer does not have 1.weight, 1.bias: ranks would drift apart there"),
        ("zero", "ZeroRedundancyOptimizer has a part of the weights on each rank"),
        ("nobody", "dct.data_parallel.feedback = 'local_updates' needs the model and its optimizer"),
        ("one", "dct.data_parallel.feedback = 'local_updates' needs the model and its optimizer"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(case: str, words: str) -> None:
    for kind, text in launch(2, _refused, case):
        assert kind == "error"
        assert words in text
