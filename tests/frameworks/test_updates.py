"""Exchange of updates: real processes whose optimizers step on their own gradients and exchange progress."""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.alone import everyones, loss_of, sharded, train
from support.processes import launch, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin.codecs.values import ValueDtype, encode_values
from dct_plugin.config import DataParallelConfig
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.integrations.host.refusals import refuse

pytestmark = pytest.mark.slow

LR, DECAY, TURNS = 1e-2, 0.1, 3
SECTION: dict[str, Any] = {
    "exchange_of": "updates",
    "sparsity": 1 - 1 / TURNS,
    "min_numel": 64,
    "verify": {"every": 1, "action": "stop"},
}
SIGNS = {**SECTION, "sparsity": 0, "value_dtype": "sign"}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 3))


def attached(section: dict[str, Any], **options: Any) -> tuple[nn.Module, Any, Any]:
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    return model, optimizer, dct_plugin.attach(model, optimizer, {"data_parallel": section}, **options)


def own(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


def common(model: nn.Module) -> Tensor:
    module = model.module
    state = module.state_dict()
    return torch.cat([state[name].view(-1) for name, _ in module.named_parameters()])


def add_on(state: Any) -> Any:
    (reducer,) = state.reducers
    return reducer.add_ons.local_steps


def _by_hand(rank: int, world_size: int, value: str, turns: int) -> None:
    """All ranks in plain torch, in this process, beside the real ones, with the factors that these have."""
    model, optimizer, state = attached({**SECTION, "sparsity": 1 - 1 / turns, "value_dtype": value})
    models = [model_of() for _ in range(world_size)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=LR, weight_decay=0.0) for each in models]
    weights = own(models[0])
    unsent = [torch.zeros_like(weights) for _ in models]
    sizes = [parameter.numel() for parameter in models[0].parameters()]
    share = -(-len(weights) // (256 * turns)) * 256
    for step in range(9):
        train(model, optimizer, rank, range(step, step + 1))
        factors = add_on(state).progress._factors
        spread = torch.cat([torch.full((n,), f) for n, f in zip(sizes, factors, strict=True)])
        first = step % turns * share
        part, total = slice(first, first + share), 0
        for number, each in enumerate(models):
            before = own(each)
            each.zero_grad()
            loss_of(each, step, number).backward()
            optimizers[number].step()
            unsent[number] += spread * (own(each) - before)
            if len(unsent[number][part]) < SECTION["min_numel"]:
                sent = unsent[number][part].clone()
            else:
                _, sent = encode_values(unsent[number][part], ValueDtype.parse(value))
            unsent[number][part] -= sent
            total = total + sent / world_size
        weights *= 1 - LR * DECAY
        weights[part] += total
        for number, each in enumerate(models):
            nn.utils.vector_to_parameters(weights + unsent[number], each.parameters())
        torch.testing.assert_close(common(model), weights, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(own(model), own(models[rank]), rtol=1e-5, atol=2e-6)
        assert all(torch.equal(each, common(model)) for each in everyones(common(model)))
    assert torch.equal(*everyones(own(model))) == (value == "fp32")


@pytest.mark.parametrize(("value", "turns"), [("int4", 3), ("sign", 1), ("fp32", 1)])
def test_two_ranks_do_what_plain_torch_does(value: str, turns: int) -> None:
    run(2, _by_hand, value, turns)


def _factors(rank: int, world_size: int) -> None:
    model, optimizer, state = attached({**SECTION, "sparsity": 0, "value_dtype": "fp32"})
    squares = {"own": 0.0, "mean": 0.0}
    for step in range(3):
        loss_of(model, step, rank).backward()
        shortened = add_on(state).progress.shortened
        named = model.module.named_parameters()
        gradients = everyones([parameter.grad / shortened[name] for name, parameter in named])
        for name, of in (
            ("own", lambda g: g.square().sum(1).mean()),
            ("mean", lambda g: g.mean(0).square().sum()),
        ):
            values = [of(torch.stack([g.view(-1) for g in each])) for each in zip(*gradients, strict=True)]
            squares[name] = squares[name] * 0.999 + 0.001 * torch.stack(values)
        optimizer.step()
        optimizer.zero_grad()
    exact = (squares["own"] / squares["mean"]).sqrt().clamp(1, world_size)
    found = torch.tensor(add_on(state).progress._factors)
    torch.testing.assert_close(found, exact, rtol=0.15, atol=0)
    assert 0.5 < add_on(state).progress.factors.ratio < 0.98  # by which gradients are shortened until then
    assert exact[0] > 1.05  # else this shows nothing
    torch.testing.assert_close(found[1:], exact[1:], rtol=1e-4, atol=0)  # their sketches are the tensors


def test_factors_are_those_of_exact_norms() -> None:
    run(2, _factors)


def resumed(
    made: Callable[[], tuple[nn.Module, Any, Any]],
    of_rank: Callable[[nn.Module], Tensor],
    rank: int,
    folder: str,
) -> tuple[Tensor, nn.Module, nn.Module, Any, Any]:
    """Train 14 steps, and the last seven again from files; both runs must have the same weights.

    Returns:
        The weights of this rank after seven steps, the model, and those of the second run: model, optimizer
        and state.
    """
    model, optimizer, state = made()
    train(model, optimizer, rank, range(7))
    mine = of_rank(model)
    state.save(f"{folder}/dct")
    torch.save(optimizer.state_dict(), f"{folder}/optimizer{rank}")
    of_model = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, rank, range(7, 14))
    model_again, optimizer_again, state_again = made()
    model_again.load_state_dict(of_model)
    optimizer_again.load_state_dict(torch.load(f"{folder}/optimizer{rank}", weights_only=False))
    assert state_again.load(f"{folder}/dct")
    assert torch.equal(of_rank(model_again), mine)
    train(model_again, optimizer_again, rank, range(7, 14))
    assert torch.equal(of_rank(model_again), of_rank(model))
    return mine, model, model_again, optimizer_again, state_again


def _resumes(rank: int, world_size: int, section: dict[str, Any], folder: str) -> None:
    made = functools.partial(attached, section)
    _, model, model_again, optimizer_again, state_again = resumed(made, own, rank, folder)
    assert torch.equal(common(model_again), common(model))
    # The end of a run: the mean of the ranks' own weights, and of what owners of sums had not sent.
    (reducer,) = state_again.reducers
    owns = any("[" in name for name in reducer.group.streams)
    assert any(everyones(owns)) == (world_size > 2)
    weights = own(model_again)
    for name, stream in reducer.group.streams.items():
        if "[" in name:
            start = int(name.split()[1].split(":")[0]) + int(name.split("[")[1].split(":")[0])
            weights[start : start + stream.residual.numel] += stream.residual.current
    mean = torch.stack(everyones(weights)).mean(0)
    state_again.detach()
    assert all(torch.equal(each, own(model_again)) for each in everyones(own(model_again)))
    torch.testing.assert_close(own(model_again), mean, rtol=0, atol=float((weights - mean).abs().max()) / 50)
    train(model_again, optimizer_again, rank, range(14, 17))
    assert all(torch.equal(each, own(model_again)) for each in everyones(own(model_again)))


#: The second of two parts of the progress is so small that it crosses dense.
SMALL = {**SECTION, "min_numel": 500}
PACKED = {"residual_dtype": "int8"}


@pytest.mark.parametrize(
    ("section", "ranks"),
    [(SECTION, 2), (SIGNS, 3), (SMALL, 2), ({**SMALL, **PACKED}, 2), ({**SIGNS, **PACKED}, 3)],
    ids=["int4", "sign", "dense part", "dense part, kept in int8", "sign, kept in int8"],
)
def test_resumes_bitwise_and_detaches(section: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    run(ranks, _resumes, section, str(tmp_path))


def _packed(rank: int, world_size: int, kept_in: str) -> None:
    """Beside progress that is kept in fp32: the same weights but for rounding, and its own memory."""
    model, optimizer, state = attached({**SECTION, "residual_dtype": kept_in})
    beside, beside_optimizer, _ = attached(SECTION)
    for step in range(6):
        train(model, optimizer, rank, range(step, step + 1))
        train(beside, beside_optimizer, rank, range(step, step + 1))
        assert all(torch.equal(each, common(model)) for each in everyones(common(model)))
        assert (own(model) - own(beside)).abs().mean() < LR / 20
    assert not torch.equal(own(model), own(beside))
    progress = add_on(state).progress
    assert progress._flat.untyped_storage().nbytes() == 0
    with torch.no_grad():  # what a script writes is kept, too
        model.module[0].weight += 1
    train(model, optimizer, rank, range(6, 6 + 2 * TURNS))
    assert (common(model) - common(beside))[: 24 * 33].mean() > 0.9
    # Other weights are the start of another run.
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, rank, range(1))
    assert torch.equal(own(model), common(model))


@pytest.mark.parametrize("kept_in", ["bf16", "int8"])
def test_progress_that_is_kept_in_fewer_bytes(kept_in: str) -> None:
    run(2, _packed, kept_in)


LOCAL = {"local_steps": {"every": 3}, "warmup_steps": 2}


def _loads_the_model_last(rank: int, world_size: int, section: dict[str, Any], folder: str) -> None:
    """Other weights are the start of another run, in which the ranks have common ones, too."""
    model, optimizer, state = attached(section)
    train(model, optimizer, rank, range(7))
    state.save(f"{folder}/dct")
    of_optimizer = copy.deepcopy(optimizer.state_dict())
    of_model = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, rank, range(7, 14))
    ends = own(model)
    model, optimizer, state = attached(section)
    optimizer.load_state_dict(of_optimizer)
    for changed in (0.0, 1.0):
        assert state.load(f"{folder}/dct")
        model.load_state_dict({name: tensor + changed for name, tensor in of_model.items()})
        train(model, optimizer, rank, range(7, 14))
        assert torch.equal(own(model), ends) == (not changed)
        assert all(torch.equal(common(model), each) for each in everyones(common(model)))


@pytest.mark.parametrize("section", [SECTION, LOCAL], ids=["updates", "local steps"])
def test_a_model_that_is_loaded_last(section: dict[str, Any], tmp_path: Path) -> None:
    run(2, _loads_the_model_last, section, str(tmp_path))


def _skips(rank: int, world_size: int) -> tuple[float, int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, _ = attached(SECTION, scaler=scaler)
    train(model, optimizer, rank, range(6), scaler)
    train(model, optimizer, rank, range(6, 12), scaler)  # step 6 overflows on the first rank
    model.eval()  # the step of the scaler has ended before the common weights are shown
    with torch.no_grad():
        losses = everyones(loss_of(model.module, 0, 0))
    assert torch.equal(*losses)
    assert torch.isfinite(own(model)).all()
    steps = next(iter(optimizer.state.values()))["step"]
    return scaler.get_scale(), int(steps)


def test_a_step_that_a_scaler_skips_on_one_rank_is_skipped_on_all() -> None:
    assert run(2, _skips) == [(512.0, 11)] * 2


def _writes(rank: int, world_size: int) -> None:
    model, optimizer, state = attached({**SECTION, "sparsity": 0, "value_dtype": "fp32"})
    train(model, optimizer, rank, range(2))
    optimizer.param_groups[0]["lr"] = 0.0
    before = common(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1 if rank == 0 else 0.3)  # leaves its version as it is
    train(model, optimizer, rank, range(2, 3))
    assert max(add_on(state).progress._factors) > 1.1
    torch.testing.assert_close(common(model), before + 0.2)


def test_what_a_script_writes_has_no_factor() -> None:
    run(2, _writes)


def _alternates(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(model_of())
    layers = [torch.optim.AdamW(model.module[at].parameters(), lr=LR) for at in (0, 2)]
    dct_plugin.attach(model, layers, {"data_parallel": {**SECTION, "sparsity": 0.5}})
    begun = common(model)
    for step in range(12):
        loss_of(model, step, rank).backward()
        layers[step % 2].step()
        model.zero_grad()
    assert (common(model) != begun).float().mean() > 0.9  # both halves have crossed


def test_all_turns_come_where_two_optimizers_alternate() -> None:
    run(2, _alternates)


class Lion(torch.optim.Optimizer):
    """Has the name of the real one, and its base class."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})


class AdamWScheduleFree(Lion):
    """As above."""


def _refuses(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(model_of())
    for kind in (torch.optim.Adafactor, Lion, AdamWScheduleFree, torch.optim.SGD):
        named = rf"exchange_of = 'updates' was not measured with {kind.__name__}"
        with pytest.raises(ConfigError, match=named):
            dct_plugin.attach(model, kind(model.parameters()), {"data_parallel": SECTION})


def test_what_does_not_go_with_updates_is_named() -> None:
    for other, value in {
        "parameters": {},
        "quality": "safe",
        "adaptive": "accordion",
        "nodes": 2,
        "feedback": "step_ahead",
    }.items():
        with pytest.raises(ConfigError, match=f"exchange_of = 'updates' does not go with {other}"):
            DataParallelConfig.of({"exchange_of": "updates", other: value})
    with pytest.raises(ConfigError, match="value_dtype = 'sign' does not go with exchange_of = 'gradients'"):
        DataParallelConfig.of({"value_dtype": "sign"})
    with pytest.raises(ConfigError, match="exchange_of"):
        DataParallelConfig.of({"exchange_of": "weights"})
    for framework in ("torchft", "Megatron"):
        with pytest.raises(ConfigError, match=rf'dct\.data_parallel\.exchange_of = "updates": {framework}'):
            refuse(framework, DataParallelConfig.of({"exchange_of": "updates"}))


def test_optimizers_that_were_not_measured_are_refused_by_name() -> None:
    run(2, _refuses)


def _engine(rank: int, world_size: int, folder: str) -> None:
    import deepspeed

    optimizer = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 16, "optimizer": optimizer, "dct": {"data_parallel": SECTION}}

    def made(**more: Any) -> Any:
        model = model_of()
        parameters = model.parameters()
        return deepspeed.initialize(model=model, model_parameters=parameters, config={**config, **more})[0]

    def steps(engine: Any, which: range) -> None:
        for step in which:
            engine.backward(loss_of(engine, step, rank))
            engine.step()

    engine = made()
    steps(engine, range(7))
    # The same as under torch DDP.
    model, adamw, _ = attached(SECTION)
    train(model, adamw, rank, range(7))
    torch.testing.assert_close(own(engine.module), own(model), rtol=1e-5, atol=1e-6)
    assert not torch.equal(*everyones(own(engine.module)))
    engine.save_checkpoint(folder, tag="saved")
    steps(engine, range(7, 14))
    again = made()
    again.load_checkpoint(folder, tag="saved")
    steps(again, range(7, 14))
    assert torch.equal(own(again.module), own(engine.module))
    assert torch.equal(*everyones(common(again)))
    dct_plugin.detach(again)
    steps(again, range(14, 17))
    assert torch.equal(*everyones(own(again.module)))
    stage_1 = {"zero_optimization": {"stage": 1}}
    for more in (stage_1, {**stage_1, "bf16": {"enabled": True}}):
        with pytest.raises(ConfigError, match=r"exchange_of = .* ZeRO stage 0 with fp32 weights"):
            made(**more)


def test_deepspeed_zero_0_does_what_ddp_does_and_resumes_bitwise(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run(2, _engine, str(tmp_path))


def _replicas(rank: int, world_size: int, folder: str) -> None:
    def made() -> tuple[nn.Module, Any, Any]:
        model = sharded(model_of())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
        return model, optimizer, dct_plugin.attach(model, optimizer, {"data_parallel": SECTION})

    def shards(model: nn.Module) -> Tensor:
        return torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()])

    def whole(model: nn.Module) -> list[Tensor]:
        return [each.full_tensor() for each in model.state_dict().values()]

    mine, _, model_again, optimizer_again, state_again = resumed(made, shards, rank, folder)
    assert not torch.equal(*[everyones(mine)[number] for number in (rank % 2, rank % 2 + 2)])
    saved = torch.cat([each.view(-1) for each in whole(model_again)])
    assert all(torch.equal(each, saved) for each in everyones(saved))
    state_again.detach()
    train(model_again, optimizer_again, rank, range(14, 17))
    found = everyones(shards(model_again))
    assert torch.equal(found[rank % 2], found[rank % 2 + 2])


def test_replicas_of_fsdp_exchange_updates_and_resume_bitwise(tmp_path: Path) -> None:
    run(4, _replicas, str(tmp_path))


def _two_optimizers(rank: int, world_size: int, value: str) -> None:
    """Muon and AdamW, whose steps cross together; with the data of one rank they do what it does alone."""

    def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() == 1]
        muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY)
        return [muon, torch.optim.AdamW(others, lr=LR, weight_decay=DECAY)]

    def step_all(model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, data: int) -> None:
        loss_of(model, step, data).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    section: dict[str, Any] = {"exchange_of": "updates", "min_numel": 64}
    model = DistributedDataParallel(model_of())
    optimizers = optimizers_of(model)
    state = dct_plugin.attach(model, optimizers, {"data_parallel": {**section, "value_dtype": value}})
    alone = model_of()
    alone_optimizers = optimizers_of(alone)
    for step in range(6):
        step_all(model, optimizers, step, 0 if value == "fp32" else rank)
        step_all(alone, alone_optimizers, step, 0)
        assert all(torch.equal(each, common(model)) for each in everyones(common(model)))
        if value == "fp32":
            torch.testing.assert_close(common(model), own(alone), rtol=1e-5, atol=1e-6)
    factors = add_on(state).progress._factors
    assert (max(factors) == 1.0) == (value == "fp32")
    assert max(factors) <= world_size


@pytest.mark.parametrize("value", ["fp32", "sign"])
def test_steps_of_muon_and_adamw_cross_together(value: str) -> None:
    run(2, _two_optimizers, value)


def _clips(rank: int, world_size: int) -> None:
    """Scripts clip by about the norm of the mean gradient, and the optimizer gets what they made of it."""
    model, optimizer, state = attached(SECTION)
    plain = model_of()
    for step in range(6):
        nn.utils.vector_to_parameters(own(model), plain.parameters())
        plain.zero_grad()
        loss_of(plain, step, rank).backward()
        gradients = torch.cat([parameter.grad.view(-1) for parameter in plain.parameters()])
        loss_of(model, step, rank).backward()
        seen = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        mean = torch.stack(everyones(gradients)).mean(0)
        if step:
            assert seen < 0.95 * gradients.norm()
            torch.testing.assert_close(seen, mean.norm(), rtol=0.35, atol=0)
        optimizer.step()
        used = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
        torch.testing.assert_close(used, gradients, rtol=1e-5, atol=1e-7)
        optimizer.zero_grad()
    for data in (6, 7):  # two passes that are reduced: their gradients stay as they are from then on
        loss_of(model, data, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not add_on(state).progress.shortens
    loss_of(model, 8, rank).backward()
    assert set(add_on(state).progress.shortened.values()) == {1.0}


def test_scripts_clip_by_the_norm_of_the_mean_gradient() -> None:
    run(2, _clips)


class Regression(nn.Module):
    """Notes what this rank holds before every step: its own weights, and those in ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()
        self.seen: list[tuple[float, Tensor, Tensor]] = []

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        loss = (self.inner(x) - x[:, :3].sin()).square().mean()
        state = [each.view(-1).clone() for each in self.inner.state_dict().values()]
        self.seen.append((float(loss), own(self.inner), torch.cat(state)))
        return {"loss": loss}


def rows(rank: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(24, generator=generator), "labels": torch.zeros(())} for _ in range(512)]


def _trainer(rank: int, folder: str, model: Regression) -> None:
    from transformers import Trainer, TrainingArguments

    from dct_plugin.transformers import DCTCallback

    arguments = TrainingArguments(
        folder, max_steps=12, per_device_train_batch_size=16, use_cpu=True, ddp_backend="gloo", report_to=[],
        save_strategy="no", disable_tqdm=True, learning_rate=LR,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows(0))
    trainer.add_callback(DCTCallback({"data_parallel": SECTION}, trainer=trainer))
    trainer.train()


def _accelerate(rank: int, folder: str, model: Regression) -> None:
    from accelerate import Accelerator

    from dct_plugin.accelerate import attach

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(rows(0), batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = attach(accelerator, ddp, optimizer, {"data_parallel": SECTION})
    for batch in loader:
        accelerator.backward(ddp(**batch)["loss"])
        accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state.detach()


def _lightning(rank: int, folder: str, model: Regression) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from dct_plugin.lightning import DCTCallback

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_steps=12, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[TorchElasticEnvironment()],
        callbacks=[DCTCallback({"data_parallel": SECTION})],
    )  # fmt: skip
    trainer.fit(Training(), torch.utils.data.DataLoader(rows(0), batch_size=16))


def _loop(rank: int, world_size: int, loop: Callable[..., None], folder: str) -> None:
    model = Regression()
    loop(rank, folder, model)
    assert len(model.seen) >= 12
    for step, (_, weights, common_weights) in enumerate(model.seen):
        assert torch.equal(*everyones(common_weights)), step
        assert torch.equal(*everyones(weights)) == (step == 0), step
    assert model.seen[-1][0] < 0.9 * model.seen[0][0]
    assert torch.equal(*everyones(own(model))), "after the training"
    assert not torch.equal(own(model), model.seen[-1][2])


@pytest.mark.parametrize(
    ("loop", "package"),
    [(_trainer, "transformers"), (_accelerate, "accelerate"), (_lightning, "lightning")],
    ids=["trainer", "accelerate", "lightning"],
)
def test_loops_of_other_packages_end_with_the_same_weights(
    loop: Callable[..., None], package: str, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    run(2, _loop, loop, str(tmp_path))


def _killed_in_a_save(rank: int, world_size: int, folder: str, last: str) -> None:
    """Save at step 5 and, into ``last``, at step 9, where rank 1 is killed before its file is there."""
    model, optimizer, state = attached({**SECTION, "verify": None})
    train(model, optimizer, rank, range(5))
    state.save(f"{folder}/first")
    torch.save([model.module.state_dict(), optimizer.state_dict(), own(model)], f"{folder}/script{rank}")
    train(model, optimizer, rank, range(5, 9))
    if rank == 1:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    state.save(f"{folder}/{last}")


def _resumes_after_it(rank: int, world_size: int, folder: str) -> str:
    model, optimizer, state = attached(SECTION)
    of_model, of_optimizer, weights = torch.load(f"{folder}/script{rank}", weights_only=False)
    model.module.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    try:
        assert state.load(f"{folder}/first")
    except DCTError as error:
        return str(error)
    assert torch.equal(own(model), weights)
    train(model, optimizer, rank, range(5, 9))
    assert torch.equal(*everyones(common(model)))
    return "resumed"


@pytest.mark.parametrize(("last", "said"), [("second", "resumed"), ("first", "its file is of step 5")])
def test_a_kill_during_a_save(last: str, said: str, tmp_path: Path) -> None:
    (kind, text), (ended, _) = launch(2, _killed_in_a_save, str(tmp_path), last, killed=1)
    assert (kind, ended) == ("error", "killed")
    assert text.startswith("DesyncError: rank 0: ")
    assert "[1]" in text.splitlines()[0]
    assert all(said in found for found in run(2, _resumes_after_it, str(tmp_path)))
