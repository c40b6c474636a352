"""The demo: its configuration, what it computes and says, and the command from end to end."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from support.forked import forked_interpreters
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.errors import ConfigError
from dct_plugin.recommender import runner
from dct_plugin.recommender.commands.demo import PRESETS, Options, deepspeed_config
from dct_plugin.recommender.comparison import Comparison, Measured, Sent
from dct_plugin.recommender.figures import Run, read_runs
from dct_plugin.recommender.links.interleave import Figures
from dct_plugin.recommender.progress import LaunchProgress
from dct_plugin.recommender.report import (
    comparison_part,
    diverged,
    draw_training,
    moving_average,
    speed_table,
    verdict,
)
from dct_plugin.recommender.runner import RunFailed, Runner
from dct_plugin.report.page import write_page
from dct_plugin.report.reading import Row

PRESET = PRESETS["diabetes"]


# -- configuration -----------------------------------------------------------------------------------------


def test_configuration_without_options() -> None:
    config = deepspeed_config(PRESET, Options())
    assert config["train_batch_size"] == PRESET.batch_size
    assert config["optimizer"] == {"type": "Adagrad", "params": {"lr": 0.02}}
    assert config["scheduler"]["params"]["warmup_max_lr"] == 0.02
    assert config["zero_optimization"]["stage"] == 0
    assert config["dct"] == {"data_parallel": {"sparsity": 0.99}}


@pytest.mark.parametrize(
    ("optimizer", "ahead"),
    [
        ({"type": "AdamW"}, True),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, True),
        ({"type": "SGD"}, False),
    ],
)
def test_optimizers_with_momentum_look_ahead(tmp_path: Path, optimizer: Any, ahead: bool) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": optimizer}))
    chosen = {"feedback": {"kind": "step_ahead"}, "warmup_steps": 10, "sparsity_warmup_steps": 20}
    config = deepspeed_config(PRESET, Options(config=file))
    assert config["dct"]["data_parallel"] == {"sparsity": 0.99, **(chosen if ahead else {})}


def test_options_override_the_file_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    content = {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "dct": {"data_parallel": {"sparsity": 0.9, "min_numel": 100}, "metrics": {"every": 7}},
    }
    file.write_text(json.dumps(content))
    config = deepspeed_config(PRESET, Options(config=file))
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "dct"):
        assert config[key] == content[key]
    assert config["optimizer"]["params"] == {"lr": 3e-4, "weight_decay": 0.1, "torch_adam": True}
    assert "scheduler" not in config

    given = Options(config=file, sparsity=0.95, zero_stage=1, optimizer="SGD", lr=0.5, batch_size=256)
    config = deepspeed_config(PRESET, given)
    assert config["train_batch_size"] == 256
    assert "train_micro_batch_size_per_gpu" not in config
    assert "gradient_accumulation_steps" not in config
    assert config["zero_optimization"] == {"stage": 1, "overlap_comm": False}
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": 0.5}}
    assert config["dct"]["data_parallel"] == {"sparsity": 0.95, "min_numel": 100}
    assert config["gradient_clipping"] == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"dct": {"data_parallel": {"sparsitty": 0.9}}}', "did you mean dct.data_parallel.sparsity"),
        ('{"dct": 3}', "dct"),
        ('{"optimizer": "Adam"}', 'optimizer = "Adam": must be a JSON object'),
        ('{"train_batch_size": "auto"}', 'train_batch_size = "auto": must be an integer'),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        deepspeed_config(PRESET, Options(config=file))


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match=r"dct\.data_parallel\.sparsity = 1"):
        deepspeed_config(PRESET, Options(sparsity=1.0))
    with pytest.raises(ConfigError, match="train_batch_size = 100: must be a multiple of 3 ranks"):
        deepspeed_config(PRESET, Options(batch_size=100, ranks=3))


# -- figures -----------------------------------------------------------------------------------------------


def run(name: str = "dense", *, auc: float = 0.71, **changes: Any) -> Run:
    figures: dict[str, Any] = {
        "auc": {0: auc},
        "log_loss": {0: 0.62},
        "losses": {0: [0.7 - 0.001 * i for i in range(100)]},
        "wire_bytes": 2.02e6,
        "step_ms": 20.0,
        "seconds": 2.0,
    }
    return Run(name=name, **{**figures, **changes})


def dct_run(**changes: Any) -> Run:
    return run("dct", **{"wire_bytes": 2.1e4, "step_ms": 18.0, **changes})


def compare(dense: Run | None = None, dct: Run | None = None, *, stage: int = 0, **cost: Any) -> Comparison:
    densities = [(i + 1, 0.01) for i in range(100)]
    sent_by_dct = {"payload_bytes": 1e4, "density": 0.0101, **cost}
    return Comparison(
        dense=dense or run(),
        dct=dct or dct_run(),
        dense_sent=Sent(payload_bytes=1e6),
        dct_sent=Sent(**{"density_target": 0.01, "densities": densities, **sent_by_dct}),
        ranks=2,
        zero_stage=stage,
    )


def test_figures_come_from_events_and_metrics() -> None:
    common = {"config": "dense", "seed": 3}
    events: list[dict[str, Any]] = [
        {"event": "start"},
        {"event": "initialize", **common},
        {
            "event": "run",
            **common,
            "exchange": [],
            "batch_size": 64,
            "parameters": [1000, 0],
        },
        *({"event": "step", "step": i, "loss": 1 / i, "ms": float(i)} for i in range(1, 6)),
        {"event": "evaluate"},
        {"event": "epoch", **common, "epoch": 0, "auc": 0.7, "log_loss": 0.6},
        {
            "event": "trained",
            **common,
            "step_ms": 3.0,
            "seconds": 1.0,
            "interface_bytes": 1000.0,
            "bytes": {"gradient": {"dense": 4000.0, "sent": 4000.0}},
            "ranks_in_step": True,
        },
        {"event": "result"},
    ]
    times = {"select_ms": 1.0, "encode_ms": 2.0, "decode_ms": 3.0, "exchange_ms": 4.0}
    small_times = dict.fromkeys(times, 0.25)
    metrics: list[Row] = []
    for step in range(1, 6):
        common = {"step": step, "steps": 1}
        large = {"class": "gradient", "dense_bytes": 10_000, "sent_bytes": 100, "density": 0.02}
        small = {"class": "gradient_small", "dense_bytes": 2_000, "sent_bytes": 20, "density": 1.0}
        rows = [{**common, **large, **times}, {**common, **small, **small_times}]
        metrics += map(Row.model_validate, rows)

    (dense,) = read_runs(events)
    assert (dense.steps, dense.step_ms, dense.wire_bytes, dense.weights) == (5, 3.0, 1000, 1000)
    assert dense.losses[3][1] == 0.5
    sent = Sent.by_dense_run(metrics)
    assert sent.payload_bytes == 12_000
    assert sent.density == sent.density_target == 1

    dct = Sent.by_dct_run(metrics, density_target=0.01)
    assert (dct.payload_bytes, dct.density_target) == (120, 0.01)
    assert dct.density == pytest.approx(0.02)
    assert dct.densities == [(step, 0.02) for step in range(1, 6)]


def test_reductions() -> None:
    comparison = compare()
    assert comparison.reduction == 100
    assert comparison.wire_reduction == pytest.approx(2.02e6 / 2.1e4)


def test_verdict_is_honest() -> None:
    def text(*runs: Run, quick: bool = False, **settings: Any) -> str:
        return "\n".join(verdict(compare(*runs, **settings), quick=quick))

    good = text(run(), dct_run(auc=0.7085))
    assert "Quality held: the AUC differs by -0.0015" in good
    assert "a DCT step was 1.11x faster" in good
    assert "steps on slower links were not measured" in good
    assert "other programs" not in good
    assert "Quality did not hold: the AUC is 0.0030 lower" in text(run(), dct_run(auc=0.707))
    assert "too short" in text(run(), dct_run(auc=0.6), quick=True)

    busy = dct_run(wire_bytes=5.2e4)
    assert "50 % of the bytes counted on the wire" in text(run(), busy)
    # Under ZeRO the optimizer's all-gather is in the count, too.
    assert "other programs" not in text(run(), busy, stage=1)
    assert "no interface counters" in text(run(wire_bytes=None), dct_run(wire_bytes=None))
    # Two GPUs that talk past the interface.
    assert "no interface counters" in text(run(wire_bytes=3e4), dct_run(wire_bytes=3e4))
    (line,) = diverged([run(), dct_run(ranks_in_step=False)])
    assert "ranks of the dct run ended with different weights" in line


def test_table_and_charts(tmp_path: Path) -> None:
    comparison = compare()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(speed_table(comparison, title="a title").rich())
    text = console.export_text()
    for part in (
        "AUC (test)",
        "100x fewer",
        "96.2x fewer",
        "1.01 % (1.00 %)",
        "1.11x faster",
    ):
        assert part in text, part
    without = compare(run(wire_bytes=None), dct_run(wire_bytes=None))
    assert len(speed_table(without, title="").rows) == len(speed_table(comparison, title="").rows) - 1

    short = {"losses": {0: [0.7]}}
    for name, drawn in (
        ("usual", comparison),
        ("no densities", compare(densities=[])),
        ("one step", compare(run(**short), dct_run(**short))),
    ):
        draw_training(drawn, tmp_path / f"{name}.png", title=name)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        json.dumps(drawn.as_dict())
        write_page(tmp_path / "page.html", [comparison_part(drawn, title=name)])
        assert (tmp_path / "page.html").read_text().count("Dense and DCT") == 1


def test_measured_steps() -> None:
    def steps(ms: float) -> Figures:
        return Figures("", [ms - 2, ms, ms + 2], 1e6, {}, 9)

    comparison = compare()
    comparison.measured = [Measured("1 Gbit/s", steps(60.0), steps(40.0), steps(20.0))]
    rows = [
        row for row in speed_table(comparison, title="").rows if row[0].startswith(("Step at", "  dense"))
    ]
    assert rows == [
        ["Step at 1 Gbit/s", "60.0 ms", "20.0 ms", "3.00x faster"],
        ["  dense in bf16", "40.0 ms", "20.0 ms", "2.00x faster"],
    ]
    text = "\n".join(verdict(comparison))
    assert "it took 20 ms (half of the turns 18 to 22), 3.00x faster than dense in fp32 (60 ms)" in text
    assert "not measured" not in text
    (written,) = comparison.as_dict()["measured_step_ms"]
    assert written["speed_up"] == 3.0


def test_moving_average() -> None:
    assert moving_average([1, 2, 3, 6], 1) == [1, 2, 3, 6]
    assert moving_average([1, 2, 3, 6], 3) == pytest.approx([2, 11 / 3])
    assert moving_average([1], 2) == []


# -- the command -------------------------------------------------------------------------------------------


def start_demo(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    with forked_interpreters():
        environment = {**os.environ, "COLUMNS": "120"}
        environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        return subprocess.Popen(
            [sys.executable, "-m", "dct_plugin.cli", "demo", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def launch_in(folder: Path) -> list[psutil.Process]:
    """Return torchrun and its ranks, started in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "dct_plugin.recommender.trainer" in process.cmdline() and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found


@pytest.mark.slow
def test_demo_from_end_to_end(tmp_path: Path) -> None:
    process = start_demo("--quick", "--seed", "3", "--json", "figures/demo.json", folder=tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    for part in (
        "AUC (test)",
        "DCT",
        "Step at 1 Gbit/s",
        "torchrun",
        "Wrote out/demo.png, figures/demo.json and out/report.html",
    ):
        assert part in output, output
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Dense and DCT" in page
    assert "Settings: sparsity" in page
    assert page.count("<svg") == 1

    figures = json.loads((tmp_path / "figures" / "demo.json").read_text())
    dense, dct = figures["dense"], figures["dct"]
    assert figures["command"] == "dct demo --quick --seed 3 --json figures/demo.json"
    assert figures["versions"]["deepspeed"]
    assert dense["steps"] == dct["steps"] == len(dense["losses"]) == len(dct["losses"]) >= 80
    # The same weights and the same rows in the first step, the same rows later.
    assert dense["losses"][0] == dct["losses"][0]
    assert dense["losses"] != dct["losses"]
    for figure in (dense, dct):
        assert figure["ranks_in_step"]
        assert sum(figure["losses"][-20:]) < sum(figure["losses"][:20])
        assert 0.5 < figure["auc"] < 0.8
    assert dct["density"] == pytest.approx(0.01, rel=0.2)
    assert len(dct["densities"]) == dct["steps"]
    assert 70 < figures["reduction_payload"] < 130
    if dct["wire_bytes"] is not None:  # other programs may add to it
        assert dct["wire_bytes"] >= 2 * dct["payload_bytes"]
        assert dense["wire_bytes"] >= 2 * dense["payload_bytes"]

    if figures["measured_step_ms"]:
        (link,) = figures["measured_step_ms"]
        assert link["name"] == "1 Gbit/s"
        assert all(len(link[method]["ms"]) >= 3 for method in ("dense", "bf16", "dct"))
        assert link["dct"]["sent"] < link["bf16"]["sent"] < link["dense"]["sent"]
        assert "not measured" not in output
    else:
        assert "not measured: " in output

    assert "dct, seed 3, epoch 1: AUC" in output

    # The configurations differ in the dct section and in nothing else.
    with_dct = json.loads((tmp_path / "out" / "dct.deepspeed.json").read_text())
    without = json.loads((tmp_path / "out" / "dense.deepspeed.json").read_text())
    assert with_dct.pop("dct")
    assert with_dct == without


@pytest.mark.slow
def test_demo_on_criteo_lines_with_zero_2_and_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.chdir(tmp_path)
    lines = []
    for i in range(1200):
        integers = [str((i * k) % 50) if (i + k) % 5 else "" for k in range(13)]
        hashes = [f"{(i * k) % 37:08x}" if (i + k) % 7 else "" for k in range(26)]
        lines.append("\t".join([str(int(i % 37 < 12)), *integers, *hashes]))
    (tmp_path / "train.txt").write_text("\n".join(lines))
    settings = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    arguments = ["--data", "train.txt", "--config", "ds.json", "--zero-stage", "2", "--sparsity", "0.9"]
    arguments += ["--link", "none", "--json", "demo.json"]
    with forked_interpreters():
        result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["dct"]["steps"] == 960 // 64
    assert figures["dct"]["density_target"] == pytest.approx(0.1)
    assert figures["deepspeed_config"]["zero_optimization"]["stage"] == 2
    assert figures["dct"]["ranks_in_step"]
    assert "ZeRO-2" in result.output
    assert figures["measured_step_ms"] == []


@pytest.mark.slow
def test_the_output_of_a_rank_that_fails_is_shown(tmp_path: Path) -> None:
    shown = (
        r"(?s)rank \d of the test run failed with exit code 1; .* No such file or directory: 'absent.json'"
    )
    with pytest.raises(RunFailed, match=shown), forked_interpreters():
        Runner("test", 2, ["absent.json"], tmp_path).run(lambda event: None)


def running_demo(folder: Path, event: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A demo of many epochs that has come to an event, its launcher and its ranks."""
    demo = start_demo("--epochs", "1000", folder=folder)
    events = folder / "out" / "demo.events.jsonl"
    while not (events.exists() and f'"event": "{event}"' in events.read_text()):
        assert demo.poll() is None, demo.communicate()[0]
        time.sleep(0.2)
    ranks = launch_in(folder)
    assert len(ranks) == 3
    return demo, ranks


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_and_is_reported(tmp_path: Path) -> None:
    demo, ranks = running_demo(tmp_path, "step")
    next(process for process in ranks if process.environ().get("RANK") == "1").kill()
    output, _ = demo.communicate()
    assert demo.returncode == 1
    assert re.search(r"rank \d of the demo run \(configuration dense, seed 0\) failed with exit code", output)
    _, alive = psutil.wait_procs(ranks)
    assert not alive


@pytest.mark.slow
def test_a_signal_to_the_demo_ends_its_ranks(tmp_path: Path) -> None:
    demo, ranks = running_demo(tmp_path, "initialize")
    demo.send_signal(signal.SIGTERM)
    demo.communicate()
    assert demo.returncode == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(ranks)
    assert not alive


@pytest.mark.slow
def test_a_start_that_waits_for_a_lock_left_behind_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(runner, "SLOW_START_SECONDS", 0.5)
    console = Console(file=io.StringIO(), width=100)
    never_read = tmp_path / "config.json"
    os.mkfifo(never_read)  # the ranks wait for a writer until they are ended

    class Followed(Exception):
        pass

    with LaunchProgress(console) as progress:

        def follow(event: dict[str, Any]) -> None:
            progress.follow(event)
            raise Followed

        with pytest.raises(Followed), forked_interpreters():
            Runner("test", 2, [str(never_read)], tmp_path).run(follow)
    assert isinstance(console.file, io.StringIO)
    assert f"rm {lock}" in console.file.getvalue()
