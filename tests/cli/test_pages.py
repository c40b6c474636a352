"""The three pages to a decision: their commands run as printed, and the last one prints a decision."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from support import ROOT
from support.deepspeed_launch import execute, torchrun
from support.forked import forked_commands, forked_interpreters

for package in ("deepspeed", "accelerate", "lightning"):  # once, for the forks that train
    with contextlib.suppress(ImportError):
        __import__(package)

_LOOP = """
for step in range(20):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_START = """
import torch
import torch.distributed as dist
from torch import nn
"""
_MODEL = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
"""
_GROUP = 'dist.init_process_group("gloo")\n'
_OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
_END = "dist.destroy_process_group()\n"
_DEEPSPEED = """
import argparse
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
model, optimizer, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=parser.parse_args().deepspeed_config
)
for step in range(20):
    loss = model(torch.randn(8, 64, dtype=torch.bfloat16)).float().square().mean()
    model.backward(loss)
    model.step()
"""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def script(page: str) -> str:
    """Return a training script around the block that a page prints."""
    if page == "deepspeed":
        return _START + _MODEL + _DEEPSPEED
    python = blocks(page, "python")
    if page == "ddp":
        wrap = "from torch.nn.parallel import DistributedDataParallel\n"
        return _START + wrap + _GROUP + _MODEL + _OPTIMIZER + python[0] + _LOOP + _END
    if page == "fsdp":
        own = "model.layers = list(model)[::2]\nnodes, ranks_per_node = 2, 1\n"
        return _START + _GROUP + _MODEL + own + python[0].replace('"cuda"', '"cpu"') + _LOOP + _END
    (block,) = (each for each in python if "accelerator" in each)
    own = "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\nloader = []\n"
    loop = _LOOP.replace("loss.backward()", "accelerator.backward(loss)")
    return _START + own + _MODEL + _OPTIMIZER + block + loop


@pytest.mark.slow
@pytest.mark.parametrize("page", ["ddp", "deepspeed", "fsdp", "huggingface"])
def test_the_commands_of_a_page_end_with_a_decision(page: str, tmp_path: Path) -> None:
    commands = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    install, *commands = [line.partition("  #")[0].strip() for line in commands]
    assert install.startswith("pip install ")
    assert len(commands) <= 3
    assert commands[-1].startswith("dct advise -- ")
    (tmp_path / "train.py").write_text(script(page))
    if page == "deepspeed":
        job = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}}
        job["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        job["zero_optimization"] = {"stage": 1}
        section = json.loads("{" + blocks(page, "json")[0] + "}")
        (tmp_path / "ds.json").write_text(json.dumps(job | section))
    said = ""
    with forked_commands("dct", "torchrun"):
        for command in commands:
            done = execute(command.split(), tmp_path, ACCELERATE_USE_CPU="true")
            assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-3000:])
            said += done.stderr + done.stdout
    assert "dct: active on " in said
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r'here: (take "dct": \{\}, which becomes .*|leave the plugin out, .*)', last), last


_TRAINER = """
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x, labels):
        return {"loss": (self.layer(x).sum(1) - labels).square().mean()}

data = [{"x": torch.randn(64), "labels": torch.randn(())} for _ in range(64)]
arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=8, use_cpu=True, ddp_backend="gloo", report_to=[],
    save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(Model(), arguments, train_dataset=data)
BLOCK
trainer.train()
"""
_LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

more = {"accelerator": "cpu", "devices": 2, "max_steps": 4, "logger": False, "enable_checkpointing": False}
more |= {"enable_progress_bar": False, "enable_model_summary": False}
BLOCK
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "around", "word"),
    [("transformers", _TRAINER, "add_callback"), ("lightning", _LIGHTNING, "strategy=")],
)
def test_the_other_blocks_of_hugging_face_run(package: str, around: str, word: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    (block,) = (each for each in blocks("huggingface", "python") if word in each)
    block = block.replace("\nTrainer(", "\ntrainer = Trainer(").replace(", ...)", ", **more)")
    (tmp_path / "train.py").write_text(_START + around.replace("BLOCK", block))
    with forked_interpreters():
        done = execute(torchrun(2, "train.py"), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "dct: active on torch DDP" in done.stdout + done.stderr


def test_the_index_leads_to_the_pages_and_they_to_the_decision() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "(guide-pays.md)" in index
    for page in ("ddp", "deepspeed", "fsdp", "huggingface"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert f"({page}.md)" in index
        assert "(guide-pays.md)" in text
        assert "**Off again**" in text
        first = next(block for block in blocks(page, "(?:python|json)"))
        assert '"sparsity"' not in first


def test_the_readme_prints_a_block_without_settings() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "dct_plugin.attach(model, optimizer)\n" in text
    assert '"dct": {}\n' in text
