"""``dct advise``: figures of an unmodified job, what they say, and jobs that cannot be measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from support.deepspeed_launch import torchrun
from support.forked import forked_interpreters
from torch.distributed.fsdp import FSDPModule
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.cli.advise import Figures, _measured, decision, launch_line
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel.autotune.cost_model import Coding, CostModel, Link
from dct_plugin.data_parallel.autotune.measurements import unmeasured
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.metrics import format_bytes
from dct_plugin.policy import Training, resolve
from dct_plugin.policy.rules import Setting

DENSE, INT8, STRONG = Setting(), Setting(0.0, "int8"), Setting(0.99, "bf16")
LOG4 = Setting(0.0, "log4")


def _figures(**training: object) -> Figures:
    codings = {STRONG: Coding(3e-9, 1e-9, 0.03), INT8: Coding(1e-9, 1e-9, 1.0)}
    model = CostModel(0.1, 0.2, codings, Link(1e-4, 8e-9), 10_000_000, 4_000, 2, True)
    made = Training(**{"optimizer": ["AdamW"], "ranks": 2, **training})  # type: ignore[arg-type]
    return Figures(model, made, resolve(DataParallelConfig(), made))


def test_a_setting_pays_below_the_rate_where_both_take_as_long() -> None:
    figures = _figures()
    rate = figures.pays_below(STRONG)
    there = figures.model.at_rate(rate)
    assert 1e8 < rate < 1e11
    assert there.predict(STRONG).total == pytest.approx(there.predict(DENSE).total, rel=1e-3)
    free = figures._replace(model=figures.model._replace(codings={STRONG: Coding(0.0, 0.0, 0.03)}))
    assert free.pays_below(STRONG) == math.inf


def test_the_rows_are_those_that_a_job_with_nothing_written_compares() -> None:
    assert _figures().rows == [DENSE, INT8, STRONG]
    for other in ({"lr": 1e-5}, {"optimizer": ["Lion"]}, {"optimizer": []}, {"ranks": 16}):
        assert _figures(**other).rows == [DENSE, INT8]  # type: ignore[arg-type]


def test_the_decision_is_one_sentence() -> None:
    line, figures = ["torchrun"], _figures()
    slow, fast = figures.model, figures.model.at_rate(1e13)
    assert decision(figures, "here", slow, line) == (
        'here: take "dct": {}, which becomes sparsity 0.99, bf16 values: '
        f"{slow.predict(DENSE).total / slow.predict(STRONG).total:.2f}x as fast."
    )
    dense = figures._replace(model=fast._replace(dense_reduction=1e-3))
    assert decision(dense, "here", dense.model, line).startswith(
        "here: leave the plugin out, dense steps are as fast (0."
    )
    steps = {DENSE: (0.3, 9.0), INT8: (0.1, 3.0), LOG4: (0.1, 2.0)}
    timed = figures._replace(model=fast._replace(steps=steps))
    assert timed.best(timed.model) == INT8  # equally fast
    log4 = decision(timed, "8 bit/s", timed.model.at_rate(8.0), line)
    assert log4 == (
        '8 bit/s: take "dct": {"data_parallel": {"value_dtype": "log4"}}, which becomes sparsity 0, log4 '
        "values: 4.43x as fast."
    )
    megatron = decision(figures, "1 Gbit/s", slow, ["-m", "dct_plugin.megatron"])
    assert megatron.startswith("1 Gbit/s: take --dct '{}', which becomes")


def test_step_ahead_takes_time_where_a_training_has_it(tmp_path: Path) -> None:
    model = _figures().model
    with_ahead = model._replace(step_ahead=0.1)
    assert with_ahead.predict(STRONG).coding - model.predict(STRONG).coding == pytest.approx(0.1)
    assert with_ahead.predict(DENSE) == model.predict(DENSE)


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
    through = [*line, "-m", "dct_plugin.megatron", str(megatron)]
    assert launch_line(through) == through


def test_bytes_are_those_of_the_topology_that_the_optimizer_gets(tmp_path: Path) -> None:
    model = _figures().model._replace(ranks=4, is_direct=False)
    figures = {**model._asdict(), "codings": [[0.99, "bf16", 3e-9, 1e-9, 0.03]], "link": [1e-4, 8e-9]}
    for optimizer, is_direct, density in (("AdamW", True, 3.0), ("Adagrad", False, 1.0)):
        facts = {"optimizer": [optimizer], "momentum": 0.0, "stage": 0}
        content = {"model": figures, "facts": facts, "left_out": [], "device": "cuda"}
        (tmp_path / "figures").write_text(json.dumps(content))
        read = Figures.read(tmp_path / "figures").model
        assert "not checked on a GPU" in unmeasured(Figures.read(tmp_path / "figures").device)
        assert unmeasured("cpu") == ""
        assert (read.is_direct, read.server_density) == (is_direct, density)


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
if sys.argv[1] in ("attached", "hooked"):
    model = DistributedDataParallel(model)
    if sys.argv[1] == "hooked":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
else:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] == "attached":
    import dct_plugin
    dct_plugin.attach(model, optimizer)
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
@pytest.mark.parametrize("how", ["hooked", "attached", "hsdp"])
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
    assert [(row["sparsity"], row["value_dtype"]) for row in others] == [INT8, STRONG]
    assert all(set(row["step_ms"]) == {"here", "100 Mbit/s"} for row in others)
    assert others[-1]["sent_bytes"] < dense["sent_bytes"] / 30


_ZERO_3 = """
import deepspeed
import torch

model = torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.Linear(100, 100))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
while True:
    engine.backward(engine(torch.randn(4, 200, dtype=torch.bfloat16)).float().sum())
    engine.step()
"""


@pytest.mark.slow
def test_zero_3_is_measured_with_its_gathers(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "train.py").write_text(_ZERO_3)
    with forked_interpreters():
        line = ["advise", "--", *torchrun(2, str(tmp_path / "train.py"))]
        result = CliRunner().invoke(cli.app, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    gathered = format_bytes(2 * (2 * 30_200) / 2)  # two gathers in bf16, of which a rank sends half
    assert f"{gathered} of each row are gathered weights; with copies of them" in result.output
    assert "sparsity 0.99" not in result.output  # no rank has the weights that step-ahead displaces
    assert 'take "dct": {}' in result.output or "leave the plugin out" in result.output


_ONE_MESH = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dct_plugin
from dct_plugin import processes

dist.init_process_group("gloo")
rank = dist.get_rank()
processes.machine = lambda: f"machine {rank // 2}"
model = torch.nn.Linear(512, 256, bias=False)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
dct_plugin.attach(model, optimizer, {"data_parallel": {"value_dtype": "int2"}})
while True:
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_all_gather"), reason="torch 2.9 has the seam")
def test_one_mesh_is_measured_as_it_is_and_with_few_bits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ONE_MESH)
    with forked_interpreters():
        figures = _measured(torchrun(4, str(tmp_path / "train.py")), 120)
    assert figures.rows == [DENSE, INT8, LOG4]
    assert figures.settings.settings.parameters == "exact"
    model, entries = figures.model, 512 * 256
    assert model.ranks == 2
    dense, int8, log4 = map(model.sent_bytes, figures.rows)
    # A micro-batch gathers once, gloo reduces in fp32 on all ranks; a ring leaves a node of two ranks once.
    assert dense == pytest.approx(entries * 3 / 4 / 2 * (2 * 4 + 2 * 2), rel=0.05)
    for sent, bits in ((int8, 8), (log4, 4)):
        gradients, weights = entries / 2 / 2 * bits / 8, 2 * entries / 2 / 2
        assert gradients < sent < 1.1 * gradients + weights  # ranks choose by time: changed bits, or all
    for setting in figures.rows:  # at the rate here, the times that were measured
        rest, sent = model.steps[setting]
        assert model.predict(setting).total == pytest.approx(rest + sent * model.link.seconds_per_byte)
        assert model.at_rate(1e3).predict(setting).total == pytest.approx(rest + 8e-3 * sent)
        assert rest >= -1e-9
    assert decision(figures, "1 kbit/s", model.at_rate(1e3), []).startswith('1 kbit/s: take "dct": {')
