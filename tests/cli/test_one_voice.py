"""One job through all commands that give advice: they say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.deepspeed_launch import torchrun
from support.forked import forked_interpreters
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.config import DataParallelConfig
from dct_plugin.integrations.deepspeed.file_check import check
from dct_plugin.policy import Training, resolve
from dct_plugin.policy.rules import Setting, compressors_of

runner = CliRunner()
_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dct_plugin

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(200, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
state = dct_plugin.attach(model, optimizer, {"metrics": {"path": sys.argv[2], "every": 5}})
for step in range(20):
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
state.close()
dist.destroy_process_group()
"""


def said(*arguments: str) -> str:
    result = runner.invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_all_commands_advise_the_same(lr: float, tmp_path: Path) -> None:
    training = Training(["AdamW"], ranks=2, lr=lr)
    made = resolve(DataParallelConfig(), training)
    setting = Setting(made.settings.sparsity, made.settings.value_dtype)
    # The reason without the precision, which DDP does not tell.
    reason = made.line.partition(";")[0]

    printed = said("config", "suggest", "--optimizer", "AdamW", "--ranks", "2", "--lr", str(lr))
    assert f"it becomes: {made.settings.summary}" in printed
    assert reason in printed
    assert json.loads(printed.splitlines()[0]) == {"dct": {}}

    job = {"train_micro_batch_size_per_gpu": 4, "dct": {}}
    job["optimizer"] = {"type": "AdamW", "params": {"lr": lr}}
    (tmp_path / "ds.json").write_text(json.dumps(job))
    (tmp_path / "train.py").write_text(_SCRIPT)
    metrics = str(tmp_path / "m.jsonl")
    with forked_interpreters():
        line = torchrun(2, str(tmp_path / "train.py"), str(lr), metrics)
        checked = said("config", "check", "--ranks", "2", str(tmp_path / "ds.json"))
        advised = said("advise", "--", *line)
        ran = said_by(line)
    assert reason in checked
    assert reason in advised
    assert str(setting) in advised
    decision = advised.strip().splitlines()[-1]
    assert decision.startswith(('here: take "dct": {}, which becomes ', "here: leave the plugin out, "))

    assert made.settings.summary in ran
    assert reason in ran
    report = said("report", metrics, "--out", str(tmp_path / "report.html"))
    assert f"Settings: {made.settings.summary}." in report
    assert report.count("sparsity") == 1  # it names no other settings
    assert '"dct": {}' in said("doctor")


def said_by(line: list[str]) -> str:
    """Return what a job prints."""
    import subprocess

    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_commands_count_nodes_as_a_job_does(tmp_path: Path) -> None:
    """32 ranks on machines of 8 are 4 compressors; a written number of ranks per node counts before them."""
    training = Training(["AdamW"], ranks=32)
    few, many = (resolve(DataParallelConfig(), training, count) for count in (4, 32))
    assert few.settings.sparsity != many.settings.sparsity
    options = ["--optimizer", "AdamW", "--ranks", "32"]
    assert f"it becomes: {many.settings.summary}" in said("config", "suggest", *options)
    suggested = said("config", "suggest", *options, "--ranks-per-node", "8")
    assert f"it becomes: {few.settings.summary}" in suggested
    assert "4 nodes" in suggested
    job = {"optimizer": {"type": "AdamW"}, "dct": {}}
    flat, nodes = (check(job, 32, ranks_per_node).config for ranks_per_node in (1, 8))
    written = check({**job, "dct": {"data_parallel": {"nodes": 8}}}, 32).config
    assert flat is not None
    assert nodes is not None
    assert written is not None
    assert flat.data_parallel.sparsity == many.settings.sparsity
    assert nodes.data_parallel.sparsity == written.data_parallel.sparsity == few.settings.sparsity


@pytest.mark.parametrize(
    ("section", "ranks", "per_node", "count"),
    [
        ({}, 8, 1, 8),
        ({}, 8, 4, 2),
        ({}, 8, 8, 8),  # one machine: no nodes
        ({}, 8, 3, 8),  # machines of different sizes
        ({"nodes": 1}, 8, 4, 8),
        ({"nodes": 2}, 8, 4, 4),
        ({"nodes": 8}, 8, 1, 1),
        ({"local_steps": 30, "nodes": 1}, 8, 4, 8),
        ({}, 0, 1, 0),
    ],
)
def test_compressors(section: dict[str, int], ranks: int, per_node: int, count: int) -> None:
    assert compressors_of(DataParallelConfig.of(section), ranks, per_node) == count
