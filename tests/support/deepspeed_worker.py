"""Training of the DeepSpeed tests: many small runs in one process per rank.

What a run does follows from its DeepSpeed configuration, as for any user. A plan is a list of runs
``{"id", "config", "steps", ...}``; the results have an entry for each. A run may also have

    model                a function that returns the model
    client_optimizer     the name of an optimizer of torch that the script makes
    times                a function of :mod:`.given_times`
    prepare              a function of the engine, called before the training, which may return results
    before_step          a function of the engine and the number of a step
    report               a function of the engine, called after the training, which returns results
    execute              a function of the run and its results, in place of :func:`execute`
    ranks                changes of the run on single ranks, by rank
    expect_error         whether an error is a result

    torchrun --nproc-per-node 2 tests/support/deepspeed_worker.py plan folder

reads the plan as torch saves it, and writes the results of every rank to ``folder/<rank>``.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from dct_plugin.compression.feedback import unpacked
from dct_plugin.kernels import register_backend
from dct_plugin.metrics import HOST
from dct_plugin.metrics.summary import Summary

sys.path.insert(0, str(Path(__file__).parents[1]))  # for torchrun
from support import given_times
from support.deferred_backend import DeferredBackend
from support.processes import logged


class Net(nn.Module):
    """Odd sizes, so that partitions cut parameters; one parameter larger than the reduction buckets."""

    def __init__(self, *, sparse: bool = False, unused: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 33, sparse=sparse)
        self.hidden = nn.Linear(33, 161)
        self.middle = nn.Linear(161, 47)
        if unused:
            self.unused = nn.Linear(47, 5)
        self.norm = nn.LayerNorm(47)
        self.head = nn.Linear(47, 1)
        self.experts: nn.Module | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x).mean(dim=1)
        h = torch.relu(self.middle(torch.relu(self.hidden(h))))
        if self.experts is not None:
            h = h + self.of_experts(h)
        out = self.head(self.norm(h)).squeeze(-1)
        return nn.functional.mse_loss(out.float(), y)

    def of_experts(self, h: torch.Tensor) -> torch.Tensor:
        """Return what the experts add."""
        assert self.experts is not None
        added: torch.Tensor = self.experts(h)[0]
        return added


class NetOfExperts(Net):
    """Experts behind the layers, all of them on every rank."""

    def __init__(self, **placement: Any) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(47, 20), nn.ReLU(), nn.Linear(20, 47))
        everywhere: dict[str, Any] = {"num_experts": 2, "ep_size": 1, "k": 1, "min_capacity": 4}
        self.experts = MoE(47, expert, **(placement or everywhere))


def batch(step: int, rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Training data by step and rank: the same in every run, and after a restart."""
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + 1)
    x = torch.randint(0, 64, (size, 6), generator=generator)
    y = torch.sin(x.float()).sum(dim=1)
    return x, y


def weights(model: nn.Module) -> list[torch.Tensor]:
    """All parameters, whole also under ZeRO-3."""
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters([p for p in parameters if hasattr(p, "ds_id")]):
        return [parameter.detach().clone() for parameter in parameters]


def digest(model: nn.Module) -> str:
    flat = torch.cat([weight.float().flatten() for weight in weights(model)])
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


def make_engine(run: dict[str, Any]) -> Any:
    torch.default_generator.manual_seed(run.get("seed", 1))  # alone: for absent devices a stack is formatted
    model = run.get("model", Net)()
    parameters: Any = model.parameters()
    if model.experts is not None:
        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
    arguments: dict[str, Any] = {}
    if run.get("client_optimizer"):
        kind = getattr(torch.optim, run["client_optimizer"])
        arguments["optimizer"] = kind(parameters, lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=run["config"], **arguments
    )
    return engine


def train(engine: Any, run: dict[str, Any], first: int, last: int, result: dict[str, Any]) -> None:
    """Optimizer steps ``first`` to ``last``: losses (mean over ranks), norms, what overflow steps did."""
    accumulation = engine.gradient_accumulation_steps()
    losses, norms, scales, followed = [], [], [], []
    kept, moments_kept, looked = [], [], Look(engine)
    groups = len(torch.distributed.distributed_c10d._world.pg_names)
    for step in range(first, last):
        before, skipped = residuals(engine), engine.skipped_steps
        if "before_step" in run:
            run["before_step"](engine, step)
        moments = looked.moments()
        scale = float(getattr(engine.optimizer, "loss_scale", None) or 1.0)
        if "dct" in engine.__dict__:
            followed.append(engine.dct.reducer.group.loss_scale)
        scale_before = engine.dct.reducer.group.loss_scale if before else 1.0
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        for micro in range(accumulation):
            x, y = batch(step * accumulation + micro, dist.get_rank())
            if step in run.get("poison", ()) and dist.get_rank() == 0:
                y = y + float("inf")
            loss = engine(x.to(engine.device), y.to(engine.device))
            looked.after_forward()
            if run.get("between"):
                evaluate(engine)
            # DeepSpeed 0.19.8 divides by the loss scale at stage 0, but does not multiply (its issue tracker:
            # #8393).
            unscaled = engine.fp16_enabled() and engine.zero_optimization_stage() == 0
            engine.backward(loss * engine.optimizer.loss_scale if unscaled else loss)
            looked.after_backward()
            engine.step()
            total += loss.detach().double() / accumulation
        if engine.skipped_steps > skipped and before:
            factor = engine.dct.reducer.group.loss_scale / scale_before
            after = residuals(engine)
            kept.append(all(torch.equal(after[name], before[name] * factor) for name in before))
            after = looked.moments()
            moments_kept.append(all(torch.equal(after[name], moments[name] * factor**2) for name in moments))
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        scales.append(scale)
    result.update(
        losses=losses, norms=norms, scales=scales, residuals_kept=kept, scales_of_residuals=followed
    )
    result["groups_made"] = len(torch.distributed.distributed_c10d._world.pg_names) - groups
    if state := looked.state():
        moments = looked.moments()
        result.update(
            displaced=looked.displaced,
            displacement=looked.displacement,
            storages_kept=looked.kept,
            moments_kept=moments_kept,
            moments={name: float(moment.double().sum()) for name, moment in moments.items()},
            moments_finite=all(bool(moment.isfinite().all()) for moment in moments.values()),
            coefficients=state["products"],
        )


class Look:
    """Where the parameters' data are, and what step-ahead knows; empty without it."""

    def __init__(self, engine: Any) -> None:
        self.parameters = list(engine.module.parameters())
        self.storages = [parameter.data_ptr() for parameter in self.parameters]
        self.engine, self.kept, self.displaced, self.displacement = engine, True, 0, 0.0

    def after_forward(self) -> None:
        moved = [p for p, at in zip(self.parameters, self.storages, strict=True) if p.data_ptr() != at]
        if self.engine.zero_optimization_stage() == 3:  # copies are displaced, not parameters
            return
        self.displaced += len(moved)
        passes = [p.detach().clone() for p in moved]
        if moved and getattr(self.engine.__dict__.get("dct"), "ahead", None) is not None:
            self.engine.dct.ahead.restore()
            self.displacement = sum(
                float((p.detach() - seen).double().norm()) for p, seen in zip(moved, passes, strict=True)
            )
            self.engine.dct.ahead.displace()

    def after_backward(self) -> None:
        self.kept &= [parameter.data_ptr() for parameter in self.parameters] == self.storages

    def moments(self) -> dict[str, torch.Tensor]:
        state = self.state()
        return {
            f"{name} {part}": saved[part].clone()
            for name, saved in (state["moments"].items() if state else ())
            for part in ("rows", "columns")
        }

    def state(self) -> Any:
        attached = self.engine.__dict__.get("dct")
        return None if attached is None else attached.reducer.state_dict().get("ahead")


def evaluate(engine: Any) -> float:
    """Loss on data that is not trained on."""
    engine.eval()
    with torch.no_grad():
        x, y = batch(-1, 0, 256)
        loss = float(engine.module(x.to(engine.device), y.to(engine.device)))
    engine.train()
    return loss


def exactness(engine: Any) -> dict[str, Any]:
    """Return losses of an engine that trains with copies of its weights, each with that of the weights."""
    x, y = batch(-1, 0, 256)

    def of_weights() -> float:
        model = Net()
        for parameter, weight in zip(model.parameters(), weights(engine.module), strict=True):
            parameter.data = weight.float()
        with torch.no_grad():
            return float(model(x, y))

    found = {"evaluated": [evaluate(engine), of_weights()], "trained": [float(engine(x, y)), of_weights()]}
    found["evaluated again"] = [evaluate(engine), of_weights()]
    head = engine.module.head.weight
    with deepspeed.zero.GatheredParameters([head], modifier_rank=0):
        head.data.mul_(2.0)
    found["written"] = [float(engine(x, y)), of_weights()]
    return {"exact": found}


def residuals(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's residuals; empty without the plugin."""
    if "dct" not in engine.__dict__:
        return {}
    streams = engine.dct.reducer.group.streams.items()
    return {name: s.residual.current.clone() for name, s in streams if s.residual is not None}


def execute(run: dict[str, Any], result: dict[str, Any]) -> None:
    """Train, and write what came of it into the second argument."""
    engine = make_engine(run)
    if "prepare" in run:
        result.update(run["prepare"](engine) or {})
    if "load" in run:
        loaded, _ = engine.load_checkpoint(run["load"])
        result.update(loaded=loaded is not None, restored=restored(engine))
    first = engine.global_steps
    result["before"] = evaluate(engine)
    if "save_after" in run:  # and go on
        train(engine, run, first, run["save_after"], result)
        first = run["save_after"]
        engine.save_checkpoint(run["save"])
    train(engine, run, first, run["steps"], result)
    if "report" in run:
        result.update(run["report"](engine))
    result["after"] = evaluate(engine)
    if "save" in run and "save_after" not in run:
        engine.save_checkpoint(run["save"])
    result["hash"] = digest(engine.module)
    result["sums"] = [float(weight.double().abs().sum()) for weight in weights(engine.module)]
    result["skipped"] = engine.skipped_steps
    result["attached"] = "dct" in engine.__dict__
    if result["attached"]:
        reducer, total = engine.dct.reducer, engine.dct.metrics.summary()
        own = [part for name, part in total.classes.items() if "/" not in name and not name.startswith(HOST)]
        result.update(
            streams=sorted(reducer.group.streams),
            experts=sorted(name for each in engine.dct.experts.values() for name in each.group.streams),
            sent=sum(part.sent_bytes for part in own),
            dense=sum(part.dense_bytes for part in own),
            density=total.density,
            steps=reducer.group.step,
            classes=sent_by_class(total),
        )
        left = residuals(engine)
        result["residual"] = {name: float(residual.double().sum()) for name, residual in left.items()}
        result["finite"] = all(bool(residual.isfinite().all()) for residual in left.values())
    engine.destroy()


def sent_by_class(total: Summary) -> dict[str, dict[str, float | None]]:
    return {
        name: {"sent": part.sent_bytes, "dense": part.dense_bytes, "density": part.density}
        for name, part in total.classes.items()
    }


def restored(engine: Any) -> dict[str, float]:
    """Return the sums of the residuals that a checkpoint brought, whether or not their streams have run
    again.
    """
    if "dct" not in engine.__dict__:
        return {}
    streams = engine.dct.reducer.state_dict()["streams"].items()
    found = {name: stream["residual"] for name, stream in streams if stream["residual"] is not None}
    return {name: float(unpacked(saved).double().sum()) for name, saved in found.items()}


def main(plan: list[dict[str, Any]]) -> dict[str, Any]:
    """Execute all runs of a plan; return their results."""
    torch.set_num_threads(1)
    register_backend("deferred", DeferredBackend)
    if os.environ.get("DCT_TEST_FP16_ON_CPU"):
        # DeepSpeed's CPU accelerator does not offer fp16; torch's CPU kernels are good enough for this model.
        accelerator = get_accelerator()
        accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
        accelerator.is_fp16_supported = lambda: True
    deepspeed.init_distributed()
    rank = dist.get_rank()
    results = {}
    for run in plan:
        run = {**run, **run.get("ranks", {}).get(rank, {})}
        results[run["id"]] = result = dict[str, Any]()
        run.get("times", given_times.exact_updates_are_faster)()
        given_times.time_codings_briefly()
        with logged() as result["log"]:
            try:
                run.get("execute", execute)(run, result)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"
                if not run.get("expect_error"):
                    raise
        dist.barrier()
    return results


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start this with torchrun")
    from support import deepspeed_worker  # which the plan refers to by this name

    plan, folder = (Path(argument) for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    results = deepspeed_worker.main(torch.load(plan, weights_only=False))
    torch.save(results, folder / str(dist.get_rank()))
    dist.barrier()  # a rank that takes down its connections while others still use them can abort them
    dist.destroy_process_group()
