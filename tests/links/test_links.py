"""Links of a limited rate, what is measured on them, and the benchmark of steps there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import CONFIGS, ROOT
from support.forked import forked_interpreters
from typer.testing import CliRunner

from benchmarks.links import suite
from benchmarks.links.__main__ import app
from benchmarks.links.recommender import SECTIONS, configurations
from benchmarks.links.report import draw, split, tables, unmeasured
from benchmarks.links.suite import Cell, Plan, measure
from dct_plugin import cli
from dct_plugin.rates import check_rate, rate_name
from dct_plugin.recommender.links.interleave import LEAST_ROUNDS, Figures, interleaved
from dct_plugin.recommender.links.namespaces import Links, LinksError, Network
from dct_plugin.recommender.links.team import NETWORKS, Block, Team, TeamError

# -- options ---


@pytest.mark.parametrize("rate", ["100mbit", "1gbit", "2.5gbit", "250kbit"])
def test_rates_of_tc(rate: str) -> None:
    assert check_rate(rate) == rate


@pytest.mark.parametrize(
    "rate", ["1Gbit/s", "1 Gbit/s", "1Gbps", "1gbps", "1Gb/s", "1GBit", "1 gbits/s", " 1gbit"]
)
def test_rates_with_their_seconds(rate: str) -> None:
    assert check_rate(rate) == "1gbit"


@pytest.mark.parametrize(
    "rate", ["", "fast", "1mb", "mbit", "1 kbit", "-1gbit", "1kbit", "1GB/s", "1GBps", "1g", "1 Gbit/h"]
)
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(rate))):
        check_rate(rate)


def test_names_of_rates() -> None:
    assert [rate_name(rate) for rate in ("100mbit", "1gbit", "unlimited")] == [
        "100 Mbit/s",
        "1 Gbit/s",
        "unlimited",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "'fast': must be a number with one of kbit, mbit, gbit"),
        (["--workload", "jax"], "must be one of ddp, "),
        (["--batch-size", "255"], "must be a multiple of 2 ranks"),
        (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--data", "."], ".: a folder, not a file"),
        (["demo", "--link", "fast"], "'fast': must be a number"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str) -> None:
    command = cli.app if arguments[0] == "demo" else app
    result = CliRunner().invoke(command, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text


def test_without_the_tools_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(LinksError, match="unshare, which is not installed"), Links(2, [Network("data")]):
        pass


def test_limited_links_that_cannot_be_made_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    plan = Plan(["ddp", "deepspeed"], [2, 4], ["1gbit", "100mbit"], 60, tmp_path, optimizers=["sgd"])
    cells = measure(plan, lambda cell: None)
    assert [(cell.workload, cell.ranks) for cell in cells if cell.rate == "1gbit"] == [
        ("ddp", 2),
        *[("deepspeed", 2)] * 3,
        ("ddp", 4),
        *[("deepspeed", 4)] * 3,
    ]
    assert all("not installed" in cell.skipped and not cell.failed for cell in cells)
    (line,) = unmeasured(cells)
    assert "ddp 10.65M parameters, 2 ranks, 1 Gbit/s" in line


def test_chosen_methods_are_measured_beside_the_baseline(tmp_path: Path) -> None:
    made = {"ideal": 3, "fp32": 3, "bf16": 3, "DCT": 10}
    plan = Plan(["ddp"], [2], ["1gbit"], 60, tmp_path, methods=["DCT"])
    assert suite._Run(plan, print)._chosen(made, "fp32") == {"fp32": 3, "DCT": 10}
    plan = Plan(["ddp"], [2], ["1gbit"], 60, tmp_path)
    assert suite._Run(plan, print)._chosen(made, "fp32") == made
    plan = Plan(["ddp"], [2], ["1gbit"], 60, tmp_path, methods=["DCT 1"])
    with pytest.raises(TeamError, match="no method DCT 1; there are ideal, fp32, bf16, DCT"):
        suite._Run(plan, print)._chosen(made, "fp32")


def test_the_recommender_runs_as_the_ready_files_say() -> None:
    for name, file in (("lossless", "hybrid_lossless"), ("hybrid", "hybrid_dct")):
        assert SECTIONS[name] == json.loads((CONFIGS / f"{file}.json").read_text())["dct"]
    made = configurations(4, [256])
    assert list(made) == ["batch 256"]
    assert "dct" not in made["batch 256"]["dense"]
    assert all(config["train_batch_size"] == 256 for config in made["batch 256"].values())


# -- turns ---


def test_methods_take_turns_in_changing_order() -> None:
    costs = {"fast": 1.0, "slow": 900.0, "third": 150.0}
    taken: list[tuple[str, int]] = []

    def take(name: str, steps: int) -> Block:
        taken.append((name, steps))
        return Block(costs[name], 1000.0, {"select_ms": 2.0 * len(taken)}, steps)

    figures = interleaved(take, list(costs), 0.0)
    assert [one.name for one in figures] == list(costs)
    assert [one.median for one in figures] == list(costs.values())
    assert all(len(one.ms) == LEAST_ROUNDS for one in figures)
    assert all(one.sent == 1000.0 for one in figures)
    turns = taken[2 * len(costs) :]
    assert dict(turns) == {"fast": 5, "slow": 1, "third": 2}
    rounds = [tuple(name for name, _ in turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert len(set(rounds)) == LEAST_ROUNDS


def figures(name: str, ms: float, **times: float) -> Figures:
    return Figures(
        name, [ms - 1, ms, ms + 1, ms], 1e6, {f"{key}_ms": value for key, value in times.items()}, 8
    )


def cells() -> list[Cell]:
    made = []
    for rate, factor in (("1gbit", 1), ("100mbit", 10)):
        cell = Cell("ddp", "10.65M parameters", 2, rate, "fp32")
        cell.figures = [
            figures("ideal", 100.0),
            figures("fp32", 100.0 + 300 * factor),
            figures("DCT 0.99 bf16", 120.0, select=5.0, exchange=8.0),
        ]
        made.append(cell)
    made.append(Cell("ddp", "10.65M parameters", 4, "1gbit", "fp32", skipped="no root"))
    return made


def test_tables_and_plot(tmp_path: Path) -> None:
    steps, parts = tables(cells())
    assert steps.rows[2][2:] == ["120 ±0", "0.30x", "120 ±0", "0.04x"]
    narrow = next(iter(tables(cells(), ratios=False)))
    assert narrow.rows[1][2:] == ["400 ±0", "3100 ±0"]
    assert split(cells()[0], cells()[0].figures[2]) == {
        "compute": 100.0,
        "select": 5.0,
        "exchange": 8.0,
        "rest": 7.0,
    }
    assert [row[:3] for row in parts.rows] == [
        ["DCT 0.99 bf16", "1 Gbit/s", "120.0"],
        ["DCT 0.99 bf16", "100 Mbit/s", "120.0"],
    ]
    draw(cells(), tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


# -- real ranks ---


@pytest.fixture
def namespaces() -> None:
    try:
        with Links(2, NETWORKS):
            pass
    except LinksError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_the_suite_on_one_link(namespaces: None, tmp_path: Path) -> None:
    out = tmp_path / "links"
    arguments = ["--workload", "ddp", "--ranks", "2", "--rate", "100mbit", "--parameters", "0.5"]
    arguments += ["--minutes", "0.1", "--optimizer", "sgd", "--out", str(out)]
    with forked_interpreters():
        command = [sys.executable, "-m", "benchmarks.links", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "links.png").exists()
    assert "fp32" in (out / "links.md").read_text()
    (cell,) = json.loads((out / "links.json").read_text())["cells"]
    assert (cell["workload"], cell["ranks"], cell["rate"]) == ("ddp", 2, "100mbit")
    methods: dict[str, Any] = {entry["name"]: entry for entry in cell["figures"]}
    assert set(methods) >= {"ideal", "fp32", "bf16", "PowerSGD 4", "top-k 1 %", "DCT 0.99 bf16"}
    dense, ours = methods["fp32"], methods["DCT 0.99 bf16"]
    # Two ranks send every gradient once, and not faster than their links let them.
    assert dense["sent"] == pytest.approx(2 * 4 * 0.5e6, rel=0.03)
    assert methods["bf16"]["sent"] == pytest.approx(dense["sent"] / 2, rel=0.03)
    assert dense["median_ms"] > 8e3 * dense["sent"] / 2 / 100e6
    assert ours["sent"] < dense["sent"] / 30
    assert ours["median_ms"] < dense["median_ms"]
    assert methods["ideal"]["sent"] < 1000
    assert ours["split"]["exchange_ms"] > 0
    assert all(part.endswith("_ms") for part in ours["split"])


class FailsOnOne:
    """A workload that one rank cannot make."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("nothing to be done")

    def open(self, variant: str) -> list[Any]:
        return []

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    workload = f"{__name__}:FailsOnOne"
    with (
        pytest.raises(TeamError, match=r"(?s)rank 1 ended with exit code 1.*nothing to be done"),
        forked_interpreters(),
        Team(workload, 2, None, options={}, folder=tmp_path, name="failing") as team,
    ):
        team.open("")
    assert all(process.returncode is not None for process in team._processes)
