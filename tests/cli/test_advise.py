"""``dct advise``: figures of an unmodified job, what they say, and jobs that cannot be measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from support.deepspeed_launch import torchrun
from support.forked import forked_interpreters
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.cli.advise import Candidate, Figures, _best, _measured, _pasted, launch_line
from dct_plugin.data_parallel.autotune.cost_model import Coding, CostModel, Link
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.policy import Training
from dct_plugin.policy.settings import Setting

DENSE, STRONG = Setting(), Setting(0.99, "bf16")


def _figures(**training: object) -> Figures:
    codings = {STRONG: Coding(3e-9, 1e-9, 0.03)}
    model = CostModel(0.1, 0.2, codings, Link(1e-4, 8e-9), 10_000_000, 4_000, 2, True)
    return Figures(model, Training(**{"optimizer": ["AdamW"], "ranks": 2, **training}))  # type: ignore[arg-type]


def test_a_setting_pays_below_the_rate_where_both_take_as_long() -> None:
    figures = _figures()
    rate = figures.pays_below(Candidate(STRONG))
    there = figures.model.at_rate(rate)
    assert 1e8 < rate < 1e11
    assert there.predict(STRONG).total == pytest.approx(there.predict(DENSE).total, rel=1e-3)
    free = figures._replace(model=figures.model._replace(codings={STRONG: Coding(0.0, 0.0, 0.03)}))
    assert free.pays_below(Candidate(STRONG)) == math.inf


def test_quality_is_that_of_the_results() -> None:
    assert "nothing measurable lost" in _figures().quality(Candidate(STRONG))
    assert "0.23 nats at 0.99" in _figures(stage=3).quality(Candidate(STRONG))
    assert not _figures(optimizer=["Lion"]).is_safe(Candidate(STRONG))
    assert _figures().quality(Candidate(DENSE)) == "as it is"


def test_bytes_are_those_of_a_ring_or_of_all_messages() -> None:
    model = _figures().model
    assert model.sent_bytes(DENSE) == 4 * 10_000_000 + 4_000
    assert model.sent_bytes(STRONG) == pytest.approx(0.03 * 10_000_000 + 4_000)
    four = model._replace(ranks=4, is_direct=False)
    assert four.sent_bytes(DENSE) == pytest.approx(1.5 * (4 * 10_000_000 + 4_000))
    assert four._replace(entry_bytes=2.0).sent_bytes(DENSE) == pytest.approx(1.5 * (2 * 10_000_000 + 4_000))


def test_gathers_of_weights_cross_with_every_setting() -> None:
    figures = _figures(stage=1)
    model = figures.model._replace(weight_gathers=1)
    gathered = (4 * 10_000_000 + 4_000) / 2
    assert model.sent_bytes(DENSE) == figures.model.sent_bytes(DENSE) + gathered
    assert model.sent_bytes(STRONG) == pytest.approx(0.03 * 10_000_000 / 2 + 4_000 + gathered)
    slower = model.link.seconds_per_byte * 9  # per byte, on a link of a tenth of the rate
    assert model.at_rate(1e8).rest == pytest.approx(model.rest + gathered * slower)
    assert model.at_rate(math.inf).rest == 0.0
    assert model.at_rate(1e8).predict(STRONG).exchange < figures.model.at_rate(1e8).predict(STRONG).exchange


def test_zero_2_reduces_each_micro_batch() -> None:
    model = _figures(stage=2).model._replace(weight_gathers=1)
    four = model._replace(reductions=4, dense_reduction=4 * 0.2)
    gathered = model.gathered_bytes
    for setting in (DENSE, STRONG):
        assert four.sent_bytes(setting) - gathered == 4 * (model.sent_bytes(setting) - gathered)
        one, more = (each.predict(setting).total - each.rest for each in (model, four))
        assert more == pytest.approx(4 * one)


def test_rows_with_thresholded_updates_agree_with_suggest() -> None:
    updates = Setting(0.97, "bf16")
    codings = {STRONG: Coding(3e-9, 1e-9, 0.03), updates: Coding(3e-9, 1e-9, 0.09)}
    figures = _figures(stage=1)
    figures = figures._replace(model=figures.model._replace(weight_gathers=1, codings=codings, rest=0.3))
    model, both = figures.model, Candidate(STRONG, updates)
    assert [str(each) for each in figures.candidates()][-2:] == [
        "sparsity 0.97, bf16 values; updates 0.97",
        "sparsity 0.99, bf16 values; updates 0.97",
    ]
    fewer = model.gathered_bytes - (0.09 * 10_000_000 + 4_000) / 2
    assert model.sent_bytes(*both) == pytest.approx(model.sent_bytes(STRONG) - fewer)
    saved = fewer * model.link.seconds_per_byte - 1e-4 - 10_000_000 * (3e-9 / 2 + 1e-9)
    assert model.predict(*both).total == pytest.approx(model.predict(STRONG).total - saved)
    assert figures.is_safe(both)
    best = _best(figures, model.at_rate(1e7))
    assert best.section == {
        "sparsity": 0.99,
        "value_dtype": "bf16",
        "parameters": {"sparsity": 0.97, "value_dtype": "bf16"},
    }
    options = _pasted(best.section, ["-m", "dct_plugin.megatron", "x.py"])
    assert """--dct-data-parallel-parameters '{"sparsity": 0.97, "value_dtype": "bf16"}'""" in options
    # Not measured with momentum, and lost where the optimizer is not known.
    for other in ({"optimizer": ["SGD"], "momentum": 0.9}, {"optimizer": []}):
        assert not _figures(stage=1, **other)._replace(model=model).is_safe(both)
    assert "not measured" in _figures(stage=1, optimizer=["SGD"], momentum=0.9)._replace(model=model).quality(
        both
    )
    plain = figures._replace(model=model._replace(weight_gathers=0))
    assert all(each.updates is None for each in plain.candidates())


def test_a_megatron_script_is_started_through_the_wrapper(tmp_path: Path) -> None:
    megatron, plain = tmp_path / "pretrain_gpt.py", tmp_path / "train.py"
    megatron.write_text("from megatron.training import pretrain")
    plain.write_text("import torch")
    line = ["torchrun", "--nproc-per-node", "2"]
    assert launch_line([*line, str(megatron), "--x"]) == [
        *line,
        "-m",
        "dct_plugin.megatron",
        str(megatron),
        "--x",
    ]
    assert launch_line([*line, str(plain), "--x"]) == [*line, str(plain), "--x"]
    section = {"sparsity": 0.97, "value_dtype": "bf16"}
    options = "--dct-data-parallel-sparsity 0.97 --dct-data-parallel-value-dtype bf16"
    assert (
        _pasted(section, launch_line([*line, str(megatron)]))
        == f"-m dct_plugin.megatron {options} SCRIPT ..."
    )
    assert json.loads(_pasted(section, line)) == {"dct": {"data_parallel": section}}
    through = [*line, "-m", "dct_plugin.megatron", str(megatron)]
    assert launch_line(through) == through


def test_bytes_are_those_of_the_topology_that_the_optimizer_gets(tmp_path: Path) -> None:
    model = _figures().model._replace(ranks=4, is_direct=False)
    figures = {**model._asdict(), "codings": [[0.99, "bf16", 3e-9, 1e-9, 0.03]], "link": [1e-4, 8e-9]}
    for optimizer, is_direct, density in (("AdamW", True, 3.0), ("Adagrad", False, 1.0)):
        facts = {"optimizer": [optimizer], "momentum": 0.0, "stage": 0}
        (tmp_path / "figures").write_text(json.dumps({"model": figures, "facts": facts, "left_out": []}))
        read = Figures.read(tmp_path / "figures", is_megatron=False).model
        assert (read.is_direct, read.server_density) == (is_direct, density)


def test_local_steps_exchange_whole_progress_once_in_so_many_steps(tmp_path: Path) -> None:
    model = _figures().model
    codings = [[0.0, "bf16", 3e-9, 1e-9, 2.0], [0.99, "bf16", 3e-9, 1e-9, 0.03]]
    figures = {**model._asdict(), "codings": codings, "link": [0.05, 8e-8]}

    def read(is_megatron: bool = False, stage: int = 0, gathers: int = 0) -> Figures:
        facts = {"optimizer": ["AdamW"], "momentum": 0.0, "stage": stage}
        content = {"model": {**figures, "weight_gathers": gathers}, "facts": facts, "left_out": []}
        (tmp_path / "figures").write_text(json.dumps(content))
        return Figures.read(tmp_path / "figures", is_megatron=is_megatron)

    local = read().candidates()[-1]
    assert str(local) == "local steps: 30, int8 values"
    assert local.section == {"local_steps": 30}
    model = read().model
    assert model.sent_bytes(*local) == pytest.approx((10_000_000 + 4_000) / 30)
    assert model.predict(*local).total == pytest.approx(
        model.rest + (0.05 + 10_004_000 * 8e-8 + 3 * 1e-9 * 10_000_000 + 2 * 1e-9 * 10_000_000) / 30, rel=1e-3
    )
    # Its round trips are a thirtieth, but it loses quality: it is not what is proposed.
    assert model.predict(*local).total < model.predict(STRONG).total
    assert _best(read(), model) == Candidate(STRONG)
    for other in (read(is_megatron=True), read(stage=1, gathers=1), read(stage=3)):
        assert all(each.every == 1 for each in other.candidates())


@pytest.mark.slow
def test_a_launch_line_needs_no_option_before_it() -> None:
    result = CliRunner().invoke(cli.app, ["advise", "--", "no-such-program", "--nproc-per-node", "2"])
    assert isinstance(result.exception, ConfigError)
    assert "no-such-program: cannot be started" in str(result.exception)


@pytest.mark.slow
def test_a_job_that_fails_shows_its_own_error() -> None:
    code = "raise SystemExit('no data at /data')"
    with pytest.raises(DCTError, match=r"ended with status 1 before it was measured(?s:.*)no data at /data"):
        _measured([sys.executable, "-c", code], 60)
    with pytest.raises(ConfigError, match="no-such-program: cannot be started"):
        _measured(["no-such-program"], 60)
    alone = [
        "import torch",
        "weight = torch.ones(1, requires_grad=True)",
        "optimizer = torch.optim.SGD([weight])",
        "while True: weight.sum().backward(); optimizer.step()",
    ]
    with (
        forked_interpreters(),
        pytest.raises(DCTError, match="the job trains on one rank, which sends nothing"),
    ):
        _measured([sys.executable, "-c", "\n".join(alone)], 60)
    with pytest.raises(DCTError, match="was not measured within 1 s"):
        _measured([sys.executable, "-c", "import time; time.sleep(60)"], 1)


_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(200, 100)
if sys.argv[1] in ("ddp", "hooked"):
    model = DistributedDataParallel(model)
    if sys.argv[1] == "hooked":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
else:
    names = ("replicate", "shard")
    shape = (2, 1) if sys.argv[1] == "hsdp" else (2,)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape):]))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(_SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hooked", "hsdp"])
def test_an_unmodified_script_is_measured_and_stopped(
    script: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "hooked":  # these ranks load the plugin when they import torch; the others are forks
        monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    with forked_interpreters():
        line = ["advise", "--json", "--link", "100mbit", "--", *torchrun(2, script, how)]
        result = CliRunner().invoke(cli.app, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert ("hook of its own (bf16_compress_hook)" in result.stderr) == (how == "hooked")
    dense, *others = json.loads(result.stdout)
    assert dense["sparsity"] == 0
    assert dense["sent_bytes"] == 4 * 20_100
    assert len(others) == 11
    local = others.pop()
    assert local["local_steps"] == 30
    assert local["sent_bytes"] == pytest.approx(20_100 / 30, rel=0.05)  # int8, two ranks
    assert "docs/local-steps.md" in local["quality"]
    assert all(set(row["step_ms"]) == {"here", "100 Mbit/s"} for row in others)
    assert others[-1]["sent_bytes"] < dense["sent_bytes"] / 30
    assert "nothing measurable lost" in others[-1]["quality"]  # AdamW on two ranks


@pytest.mark.slow
def test_a_model_without_replicas_is_refused_by_name(script: str) -> None:
    message = "Pass fully_shard a mesh of two dimensions"
    with forked_interpreters(), pytest.raises(DCTError, match=message) as caught:
        _measured(torchrun(2, script, "sharded"), 60)
    assert "ChildFailedError" not in str(caught.value)  # torchrun's own report
