"""The examples for Trainer, Accelerate and Lightning, with DeepSpeed and with torch's DDP."""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CONFIGS, ROOT, processes
from support.deepspeed_launch import run_ranks
from support.processes import logged as logged_lines
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from dct_plugin import DCTState
from dct_plugin.data_parallel.passes import ModuleHook, calls_of
from dct_plugin.errors import DCTError
from dct_plugin.integrations.ddp import state as ddp_state

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _examples(plan: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run examples one after the other; results by run."""
    from support.deepspeed_worker import digest

    sys.path.insert(0, str(ROOT / "examples"))
    results = {}
    for run in plan:
        with logged_lines() as lines:
            model, losses = importlib.import_module(run["example"]).main(run["arguments"])
        results[run["id"]] = {"hash": digest(model), "losses": [float(x) for x in losses], "log": lines}
    return results


def run(plan: list[dict[str, Any]], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Results by run, per rank; what was printed."""
    return run_ranks(2, _examples, folder, plan), (folder / "log").read_text()


def test_deepspeed_gets_the_section_of_the_json(tmp_path: Path) -> None:
    """Bitwise what the Trainer trains without a section, at sparsity 0; at 0.9 it learns."""
    config = json.loads((CONFIGS / "huggingface_zero1.json").read_text())
    sections = {
        "plain": None,
        "exact": {"data_parallel": {"sparsity": 0, "value_dtype": "fp32"}},
        "sparse": {"data_parallel": {"sparsity": 0.9}},
    }
    ready = str(CONFIGS / "deepspeed_zero1_dct.json")
    # First: the Trainer makes Accelerate's state anew, another Accelerator does not.
    plan = [
        {"id": "accelerate", "example": "hf_accelerate", "arguments": ["--deepspeed", ready, "--steps", "30"]}
    ]
    for name, section in sections.items():
        del config["dct"]
        if section is not None:
            config["dct"] = section
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config))
        config.setdefault("dct", None)
        plan.append(
            {
                "id": name,
                "example": "hf_trainer",
                "arguments": ["--deepspeed", str(file), "--steps", "18"],
            }
        )
    results, _ = run(plan, tmp_path)
    for rank in results:
        assert rank["exact"]["hash"] == rank["plain"]["hash"] != rank["sparse"]["hash"]
        assert rank["exact"]["losses"] == rank["plain"]["losses"]
        assert rank["sparse"]["losses"][-1] < rank["sparse"]["losses"][0]
        assert rank["accelerate"]["losses"][-1] < 0.5 * rank["accelerate"]["losses"][0]
    assert not results[0]["plain"]["log"]
    for name in ("exact", "sparse", "accelerate"):
        assert results[0][name]["hash"] == results[1][name]["hash"]
        assert "active on ZeRO stage 1" in results[0][name]["log"][0]


def resumed(example: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    arguments = ["--steps", str(steps), "--folder", str(folder / example)]
    return [
        {"id": f"{example} whole", "example": example, "arguments": arguments},
        {"id": f"{example} resumed", "example": example, "arguments": [*arguments, "--resume"]},
    ]


def logged(folder: Path, name: str) -> list[int]:
    """Steps at which TensorBoard's files in a folder have a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in sorted(folder.rglob("events.out.*"), key=lambda file: file.name):  # as they were begun
        found = EventAccumulator(str(file)).Reload()
        if name in found.Tags()["scalars"]:
            return [event.step for event in found.Scalars(name)]
    return []


def test_one_call_for_torch_ddp(tmp_path: Path) -> None:
    """The optimizer is found inside its wrappers, and checkpoints carry on bitwise."""
    plan = [*resumed("hf_accelerate", 30, tmp_path), *resumed("hf_trainer", 18, tmp_path)]
    log = tmp_path / "logs"
    for first in plan[0], plan[2]:
        first["arguments"] = [*first["arguments"], "--metrics-folder", str(log)]
    results, printed = run(plan, tmp_path)
    assert logged(log, "dct/gradient/sent_bytes")[:5] == [5, 10, 15, 20, 21]  # 21 ends the start
    assert len(logged(log, "train/dct/gradient/sent_bytes")) == 4
    events = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in events if each.get("event") == "loss"] == [3, 6, 9, 12, 15, 18]
    for name, steps in ("hf_trainer", 18), ("hf_accelerate", 30):
        whole, again = results[0][f"{name} whole"], results[0][f"{name} resumed"]
        assert whole["hash"] == results[1][f"{name} whole"]["hash"] == again["hash"]
        assert whole["losses"][-1] < whole["losses"][0]
        assert "active on torch DDP, " in whole["log"][0]
        assert "parameters, 2 ranks, sparsity 0.99, bf16 values, feedback step_ahead" in whole["log"][0]
        assert f"step-ahead for AdamW, after {steps // 10} dense steps" in whole["log"][1]
        assert f"(of {steps} steps)" in whole["log"][1]
        assert f"dct: {steps} steps, rank 0 sent" in printed


def _saves_alone(rank: int, world_size: int, folder: str) -> tuple[list[str], bool, list[str]]:
    """Save on the main process, then on both; load each; at last a mixture of two saves."""
    from accelerate import Accelerator

    from dct_plugin.accelerate import attach

    both, main, mixed = (f"{folder}/{name}" for name in ("both", "main", "mixed"))
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    section = {"data_parallel": {"sparsity": 0.9, "min_numel": 1, "feedback": "local", "warmup_steps": 0}}
    state = attach(accelerator, model, optimizer, section)
    assert isinstance(state, DCTState)

    def save(target: str) -> None:
        if accelerator.is_main_process:
            accelerator.save_state(target)

    def train(steps: int) -> None:
        for step in range(steps):
            accelerator.backward(model(torch.full((4, 64), step + rank + 1.0)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def residual() -> torch.Tensor:
        streams = state.state_dict()["reducer"]["streams"]
        return torch.cat([stream["residual"].view(-1).clone() for stream in streams.values()])

    save(f"{folder}/before")  # before the first step, too
    train(2)
    accelerator.save_state(mixed)
    train(2)
    save(main)
    save(mixed)
    accelerator.save_state(both)
    saved = residual()
    train(2)
    accelerator.wait_for_everyone()
    accelerator.load_state(both)
    is_same = torch.equal(residual(), saved)
    with logged_lines() as lines:
        accelerator.load_state(main)
    try:
        accelerator.load_state(mixed)
        error = ""
    except DCTError as found:
        error = str(found)
    return lines, is_same, error.splitlines()


def test_accelerate_saves_on_the_main_process_alone(tmp_path: Path) -> None:
    """As most scripts do; the residuals of the others are then missing, which the load says."""
    results = processes.run(2, _saves_alone, str(tmp_path))
    assert all(is_same for _, is_same, _ in results)
    assert "no residuals for 1 of 2 ranks (rank 1: dct_rank_00001.pt is missing)" in results[0][0][0]
    for _, _, error in results:
        assert error[0] == "cannot load residuals"
        assert "rank 0: " in error[1]
        assert "step 4" in error[1]
        assert "rank 1: " in error[2]
        assert "step 2" in error[2]


def _saves_alone_with_a_scaler(rank: int, world_size: int, folder: str) -> tuple[list[int], list[str]]:
    """The scaler's step is still open when a script saves: some settings end it with the other ranks."""
    errors, steps = [], []
    ddp_state._SAVE_LIMIT = 1.0
    keys = {"min_numel": 1, "feedback": "local", "warmup_steps": 0, "value_dtype": "fp32"}
    for section in ({"verify": {"every": 1}, "sparsity": 0.9}, {"quality": "safe"}):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        state = dct_plugin.attach(model, optimizer, {"data_parallel": {**keys, **section}}, scaler=scaler)
        assert isinstance(state, DCTState)

        def train(first: int, model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler) -> None:
            for step in (first, first + 1):
                x = torch.full((4, 64), step + rank + 1.0) / 8
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        train(0)
        if rank == 0:
            try:
                state.save_alone(f"{folder}/main")
            except DCTError as error:
                errors.append(str(error))
        train(2)
        state.save_alone(f"{folder}/both")
        weights = copy.deepcopy(model.state_dict())
        train(4)
        end = model.module.weight.detach().clone()
        model.load_state_dict(weights)
        assert state.load(f"{folder}/both")
        if "verify" in section:
            train(4)
            assert torch.equal(model.module.weight, end)
        steps.append(state.steps.step)
    return steps, errors


def test_a_save_on_one_rank_alone_with_a_scaler(tmp_path: Path) -> None:
    (steps, (error,)), (others, _) = processes.run(2, _saves_alone_with_a_scaler, str(tmp_path))
    assert steps == others == [5, 4]
    assert "rank 1 did not report within 1 s: crashed, or accelerator.save_state was called" in error
    assert "with a gradient scaler and nodes or quality call it on all ranks" in error


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    arguments = ["--steps", "20", "--folder", str(tmp_path)]
    plan = [
        {"id": "first", "example": "lightning_ddp", "arguments": arguments},
        {
            "id": "rest",
            "example": "lightning_ddp",
            "arguments": ["--steps", "30", *arguments[2:], "--resume"],
        },
    ]
    plan[0]["arguments"] = [*arguments, "--metrics-folder", str(tmp_path / "logs")]
    results, printed = run(plan, tmp_path)
    for name in ("first", "rest"):
        assert results[0][name]["hash"] == results[1][name]["hash"]
        assert any("step-ahead for AdamW" in line for line in results[0][name]["log"])
    assert results[0]["first"]["losses"][-1] < results[0]["first"]["losses"][0]
    assert len(results[0]["rest"]["losses"]) == 10
    assert "dct: 20 steps, rank 0 sent" in printed
    (table,) = (tmp_path / "logs").rglob("metrics.csv")
    rows = list(csv.DictReader(table.open()))
    assert [row["step"] for row in rows if row["dct/gradient/sent_bytes"]] == ["5", "10", "14", "19", "20"]
    events = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    losses = [each for each in events if each.get("event") == "loss"]
    assert [each["step"] for each in losses] == [5, 10, 15, 20]
    assert [each["loss"] for each in losses] == pytest.approx(results[0]["first"]["losses"][4::5])


class _Regression(torch.nn.Module):
    """Notes how far the weights of training passes were from those in the state of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.off: list[float] = []
        self.fails = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        held = [p.detach() for p in self.layers.parameters()]
        if self.training and torch.is_grad_enabled():
            saved = self.layers.state_dict().values()
            self.off.append(max(float((a - b).abs().max()) for a, b in zip(held, saved, strict=True)))
        loss = (self.layers(x).squeeze(1) - labels).square().mean()
        if self.fails and len(self.off) == 6:
            self.fails = False
            self.off.clear()
            raise RuntimeError("CUDA out of memory.")  # as a batch that is too large does
        return {"loss": loss}


def _hooks_on(model: torch.nn.Module) -> int:
    found = [hook for m in model.modules() for hook in m._state_dict_pre_hooks.values()]
    return sum(isinstance(hook, ModuleHook) for hook in found) + len(calls_of(model)._followers)


def _fits(rank: int, world_size: int, folder: str) -> tuple[list[list[float]], list[int], torch.Tensor]:
    """Several trainings of one model: displaced after the first steps of each, which are dense."""
    from transformers import Trainer, TrainingArguments

    from dct_plugin.transformers import DCTCallback

    data = [{"x": torch.randn(16), "labels": torch.randn(())} for _ in range(256)]
    model, found, hooks = _Regression(), [], []
    section = {
        "data_parallel": {"sparsity": 0.9, "min_numel": 16, "warmup_steps": 4, "feedback": "step_ahead"}
    }
    for number in range(3):
        model.off, model.fails = [], number == 2
        arguments = TrainingArguments(
            folder, max_steps=8, per_device_train_batch_size=8, use_cpu=True, ddp_backend="gloo",
            report_to=[], save_strategy="no", disable_tqdm=True, auto_find_batch_size=number == 2,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.add_callback(DCTCallback(section, trainer=trainer))
        if number == 1:
            trainer.train()
            model.off = []
        trainer.train()
        found.append(model.off)
        hooks.append(_hooks_on(model))
    return found, hooks, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_a_model_is_trained_several_times(tmp_path: Path) -> None:
    first, second = processes.run(2, _fits, str(tmp_path))
    for found, hooks, _ in (first, second):
        for off in found:
            assert not any(off[:4]), "the start is dense"
            assert all(off[5:8])
        assert hooks == [0, 0, 0]
    assert torch.equal(first[2], second[2])


def _lightning(world_size: int, section: dict[str, Any], **limits: int) -> tuple[Any, Any]:
    """A Trainer and a model for it."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from dct_plugin.lightning import DCTCallback

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _Regression()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.inner(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=world_size, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[TorchElasticEnvironment()],
        callbacks=[DCTCallback(section)], **limits,
    )  # fmt: skip
    return trainer, Regression()


def _lightning_fits(rank: int, world_size: int) -> tuple[list[list[float]], list[int], torch.Tensor]:
    """A training that fails, one with a new Trainer, and one that its Trainer goes on with."""
    data = [(torch.randn(16), torch.randn(())) for _ in range(512)]
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    found, hooks = [], []
    section = {
        "data_parallel": {"sparsity": 0.9, "min_numel": 16, "warmup_steps": 4, "feedback": "step_ahead"}
    }
    trainer, model = _lightning(world_size, section, max_steps=8)
    for number in range(3):
        model.inner.off, model.inner.fails = [], number == 0
        if number == 1:
            trainer, _ = _lightning(world_size, section, max_steps=8)
        trainer.fit_loop.epoch_loop.max_steps = 8 * (number or 1)
        with pytest.raises(RuntimeError) if number == 0 else contextlib.nullcontext():
            trainer.fit(model, loader)
        if number:
            found.append(model.inner.off)
        hooks.append(_hooks_on(model))
    return found, hooks, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_lightning_fits_a_model_several_times() -> None:
    pytest.importorskip("lightning")
    first, second = processes.run(2, _lightning_fits)
    for found, hooks, _ in (first, second):
        for off in found:
            assert len(off) == 8
            assert not any(off[:4]), "the start is dense"
            assert all(off[5:])
        assert hooks == [0, 0, 0]
    assert torch.equal(first[2], second[2])


class _Stream(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Data that do not say how many they are."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((torch.randn(16), torch.randn(())) for _ in range(24))


def _lightning_streams(rank: int, world_size: int) -> list[str]:
    with logged_lines() as lines:
        trainer, model = _lightning(world_size, {"data_parallel": {"min_numel": 16}}, max_epochs=1)
        trainer.fit(model, torch.utils.data.DataLoader(_Stream(), batch_size=8))
    return lines


def test_lightning_with_data_of_unknown_length() -> None:
    pytest.importorskip("lightning")
    lines, _ = processes.run(2, _lightning_streams)
    assert any("step-ahead for AdamW" in line and "length of the run is not known" in line for line in lines)
