"""Loops under Lightning, its Fabric and Accelerate with step-ahead, after a start of two steps; as in
``test_ddp_loops``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.processes import run
from support.watched import AHEAD, Watched, equal_on_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import dct_plugin
from dct_plugin.data_parallel import weights

pytestmark = pytest.mark.slow

SECTION = {"data_parallel": AHEAD}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))


def data(number: int) -> torch.utils.data.DataLoader[Any]:
    torch.manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randn(number, 16))
    return torch.utils.data.DataLoader(rows, batch_size=8)


def _lightning(rank: int, world_size: int) -> dict[str, list[str]]:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from dct_plugin.lightning import DCTCallback

    class Averaging(LightningModule):
        """An average of the weights that follows them before gradients are cleared."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.average: Any = None

        def training_step(self, batch: Any, _: int) -> Tensor:
            return (self.net(batch[0]) - batch[0]).square().mean()

        def on_before_zero_grad(self, _: Any) -> None:
            if self.average is None:
                self.average = [AveragedModel(self.net)]  # no part of the module
            self.average[0].update_parameters(self.net)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    class Manual(LightningModule):
        """Two parts that are trained in turn, each by an optimizer of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = net(), net()
            self.automatic_optimization = False
            self.displaced: list[int] = []

        def training_step(self, batch: Any, _: int) -> None:
            for part, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
                other = self.two if part is self.one else self.one
                self.toggle_optimizer(optimizer)
                own, saved = part[0].weight.detach().clone(), part.state_dict()["0.weight"]
                self.displaced.append(int((own != saved).sum()))
                loss = (part(batch[0]) - other(batch[0])).square().mean() + part(batch[0]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=3e-3) for part in (self.one, self.two)]

    wrong = {}
    for make in (Averaging, Manual):
        torch.manual_seed(0)
        model: Any = make()
        callback = DCTCallback(SECTION)
        trainer = Trainer(
            accelerator="cpu", strategy="ddp_find_unused_parameters_true" if make is Manual else "ddp",
            devices=world_size, max_steps=16, logger=False, enable_checkpointing=False, callbacks=[callback],
            enable_progress_bar=False, enable_model_summary=False, plugins=[TorchElasticEnvironment()],
        )  # fmt: skip
        trainer.fit(model, data(512))
        ends = list(model.parameters())
        if make is Averaging:
            ends += list(model.average[0].parameters())
        faults = [] if equal_on_ranks(ends) else ["ranks differ"]
        if make is Manual and not all(model.displaced[-6:]):
            faults.append(f"displaced entries by phase: {model.displaced}")
        if faults:
            wrong[make.__name__] = faults
    return wrong


def test_lightning() -> None:
    assert run(2, _lightning) == [{}, {}]


def _fabric(rank: int, world_size: int) -> list[str]:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    plugins = [TorchElasticEnvironment()]
    fabric = lightning.Fabric(accelerator="cpu", devices=world_size, strategy="ddp", plugins=plugins)
    fabric.launch()
    torch.manual_seed(0)
    plain = net()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3))
    state: Any = dct_plugin.attach(model, optimizer, SECTION)
    watched = Watched(plain, lambda: state._ahead, state.metrics)
    for (x,) in data(8 * 12):
        optimizer.zero_grad()
        fabric.backward((model(x) - x).square().mean())
        optimizer.step()
    faults = watched.faults()
    dct_plugin.detach(state)
    return faults if equal_on_ranks(list(plain.parameters())) else [*faults, "ranks differ"]


def test_fabric() -> None:
    assert run(2, _fabric) == [[], []]


def _accelerate(rank: int, world_size: int) -> list[str]:
    from accelerate import Accelerator

    from dct_plugin.accelerate import attach

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    ddp, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), data(8 * 26)
    )
    state: Any = attach(accelerator, ddp, optimizer, SECTION)
    watched, faults = Watched(model, lambda: state._ahead, state.metrics), []
    ddp.eval()  # as after from_pretrained without train()
    for (x,) in loader:  # the last step has one micro-batch
        with accelerator.accumulate(ddp):
            accelerator.backward((ddp(x) - x).square().mean())
            with weights(ddp):
                other = copy.deepcopy(model)
            with torch.no_grad():
                if not torch.equal(ddp(x), other(x)):
                    faults.append("evaluated at displaced weights")
            optimizer.step()
            optimizer.zero_grad()
    faults += watched.faults()
    state.close()
    return faults if equal_on_ranks(list(model.parameters())) else [*faults, "ranks differ"]


def test_accelerate() -> None:
    assert run(2, _accelerate) == [[], []]


#: A state in which ranks train alone, and where the weights of a rank are no weights of the model.
ALONE = (
    {"local_steps": {"every": 3}, "warmup_steps": 2},
    {"exchange_of": "updates", "min_numel": 16, "sparsity": 0.75},
)


def _accelerate_resumes(rank: int, world_size: int, folder: str) -> list[str]:
    """Train 12 steps, and the last six again from the files of a script that trains two models."""
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from dct_plugin.accelerate import attach

    def made() -> tuple[Any, list[Any], list[Any], list[Any]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        modules = [net(), nn.Linear(16, 16)]
        models = [accelerator.prepare(each) for each in modules]
        optimizers = [accelerator.prepare(torch.optim.AdamW(each.parameters(), lr=3e-3)) for each in models]
        states = [
            attach(accelerator, each, optimizer, {"data_parallel": section})
            for each, optimizer in zip(models, optimizers, strict=True)
        ]
        return accelerator, models, optimizers, states

    def train(accelerator: Any, models: list[Any], optimizers: list[Any], steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            for model, optimizer in zip(models, optimizers, strict=True):
                accelerator.backward((model(x) - x.roll(1, 1)).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    def weights_of(models: list[Any]) -> list[Tensor]:
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]

    faults = []
    for number, section in enumerate((*ALONE, AHEAD)):
        place = f"{folder}/{number}"
        accelerator, models, optimizers, states = made()
        train(accelerator, models, optimizers, range(6))
        accelerator.save_state(place)
        shown = {name: each.clone() for name, each in models[0].module.state_dict().items()}
        accelerator.wait_for_everyone()
        saved = load_file(f"{place}/model.safetensors")
        if saved.keys() != shown.keys() or not all(torch.equal(saved[name], shown[name]) for name in shown):
            faults.append(f"{section}: the file has {sorted(saved)}")
        train(accelerator, models, optimizers, range(6, 12))
        ends = weights_of(models)
        for state in states:
            state.close()
        accelerator.free_memory()
        accelerator, models, optimizers, states = made()
        train(accelerator, models, optimizers, range(1))
        accelerator.load_state(place)
        train(accelerator, models, optimizers, range(6, 12))
        if not all(map(torch.equal, weights_of(models), ends)):
            faults.append(f"{section}: the resumed run has other weights")
        for state in states:
            state.finish()
    return faults


def test_accelerate_saves_two_models_and_resumes(tmp_path: Any) -> None:
    assert run(2, _accelerate_resumes, str(tmp_path)) == [[], []]


class Regression(nn.Module):
    """A model for the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def _resumes_from_the_model_alone(rank: int, world_size: int, folder: str) -> list[str]:
    from transformers import Trainer, TrainingArguments

    from dct_plugin.transformers import DCTCallback

    rows = [{"x": x, "labels": x.roll(1)} for x in torch.randn(256, 16)]
    faults = []
    for section in ALONE:
        arguments = TrainingArguments(
            f"{folder}/{section}", max_steps=9, per_device_train_batch_size=4, use_cpu=True, save_steps=6,
            ddp_backend="gloo", report_to=[], disable_tqdm=True, save_only_model=True,
        )  # fmt: skip
        for last in (None, True):
            trainer = Trainer(Regression(), arguments, train_dataset=rows)
            trainer.add_callback(DCTCallback({"data_parallel": section}, trainer=trainer))
            trainer.train(resume_from_checkpoint=last and f"{folder}/{section}/checkpoint-6")
            if not equal_on_ranks(list(trainer.model.parameters())):
                faults.append(f"{section}: ranks differ")
    return faults


def test_trainer_resumes_from_a_checkpoint_of_the_model_alone(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    assert run(2, _resumes_from_the_model_alone, str(tmp_path)) == [[], []]


def _searches(rank: int, world_size: int, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    from dct_plugin.transformers import DCTCallback

    class Search(Trainer):
        """Gives each run a folder of its own, as the Trainer does for the trials of a search."""

        run = 0

        def _get_output_dir(self, trial: Any) -> str:
            return f"{self.args.output_dir}/run-{self.run}"

    rows = [{"x": x, "labels": x.roll(1)} for x in torch.randn(64, 16)]
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, use_cpu=True, save_steps=4,
        ddp_backend="gloo", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Search(Regression(), arguments, train_dataset=rows)
    trainer.add_callback(DCTCallback(SECTION, trainer=trainer))
    for trainer.run in range(2):
        trainer.train()


def test_residuals_are_in_the_folder_of_the_trial(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    run(2, _searches, str(tmp_path))
    folders = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("dct_rank_*.pt")}
    assert folders == {"run-0/checkpoint-4", "run-1/checkpoint-4"}
