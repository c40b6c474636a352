"""``dct report``: figures, files as they are found, advice, and the page in a browser."""

from __future__ import annotations

import html
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.processes import run as run_processes
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.config import MetricsConfig
from dct_plugin.errors import DCTError
from dct_plugin.metrics import Metrics, Record
from dct_plugin.metrics.summary import DISPLACED
from dct_plugin.recommender.comparison import Comparison, Measured, Sent
from dct_plugin.recommender.figures import Run as Training
from dct_plugin.recommender.links.interleave import Figures
from dct_plugin.recommender.report import comparison_part
from dct_plugin.report.advice import advice
from dct_plugin.report.metrics_part import verdict
from dct_plugin.report.page import write_page
from dct_plugin.report.reading import RankRun, Row, read
from dct_plugin.report.run import Run

runner = CliRunner()


def job(path: Path, *, ranks: int = 1, steps: int = 60, every: int = 5) -> None:
    """Write the metrics of a job: ten dense steps, thresholded ones, a loss and a decision."""
    for rank in range(ranks):
        metrics = Metrics(
            MetricsConfig(path=str(path), every=every, tensors=True), rank=rank, world_size=max(ranks, 2)
        )
        for step in range(1, steps + 1):
            metrics.starting = step <= 10
            if step <= 10:
                metrics.record(Record("gradient_warmup", 4000, 4000, 1000, exchange_ms=4.0))
            for name, nnz in (("body.weight<b>", 9), ("head.$weight", 60)) if step > 10 else ():
                record = Record("gradient", 4000, 40 + rank, 1000, nnz, 0.01, 0.5, 1, 0.2, 0.1)
                metrics.record(record)
                metrics.record(replace(record, cls=f"gradient/tensor/{name}"))
            metrics.record(Record("gradient", exchange_ms=1.5, waited_ms=0.5 + rank))
            metrics.record(Record("host_all_reduce", 8, 8, 1))
            metrics.event("loss", step=step, loss=1 / step)
            metrics.step(step)
        metrics.event("settings", data_parallel={"sparsity": 0.9, "feedback": "local"})
        metrics.event("decision", step=40, setting="0.99", reason="the <link>", predicted_ms=2, measured_ms=3)
        metrics.close()


def report(*arguments: str | Path) -> str:
    result = runner.invoke(cli.app, ["report", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of a table of the report, below its header."""
    lines = text[text.index(title) :].splitlines()
    body = next(at for at, line in enumerate(lines) if "───" in line) + 1
    return [re.split(r"\s{2,}", line.strip()) for line in itertools.takewhile(str.strip, lines[body:])]


# -- text and page ---


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the text that the command prints, and the page."""
    folder = tmp_path_factory.mktemp("report")
    job(folder / "m-{rank}.jsonl", ranks=2)
    out = folder / "new" / "report.html"
    text = report(folder / "m-0.jsonl", folder / "m-1.jsonl", "--out", out)
    assert text.endswith(f"Wrote {out}\n")
    return text, out.read_text()


def test_figures_are_those_of_the_metrics(said: tuple[str, str]) -> None:
    text, _ = said
    assert "In 60 steps a rank (mean of 2 of 2) sent" in text
    assert "Settings: sparsity 0.9, bf16 values, feedback local." in text
    steps = cells(text, "Per step and rank")
    assert [row[0] for row in steps] == [str(step) for step in range(5, 61, 5)]
    assert [row[1:3] for row in steps] == 2 * [["4.0 kB", "4.0 kB"]] + 10 * [["89 bytes", "8.0 kB"]]
    assert steps[0][-1] == f"{sum(1 / x for x in range(1, 6)) / 5:.6g}"
    classes = {row[0]: row[1:] for row in cells(text, "Classes, per step")}
    assert classes["gradient"] == ["81 bytes", "8.0 kB", "98.8x fewer", "0.0345", "0.01", "0.5"]
    assert classes["host_all_reduce"] == ["8 bytes", "8 bytes", "as many"]
    times = dict(cells(text, "Milliseconds per step after the start"))
    assert (times["select"], times["exchange, network"]) == ("0.400", "0.500")
    assert times["exchange, wait for slow ranks"] == "1.000"
    assert (times["rank 0 waits"], times["rank 1 waits"]) == ("0.500", "1.500")
    tensors = cells(text, "tensors that miss their")
    assert tensors == [["head.$weight", "0.06", "0.01", "0.5"], ["body.weight<b>", "0.009", "0.01", "0.5"]]
    assert cells(text, "Decisions by measured times") == [["40", "0.99", "the <link>", "2.0", "3.0"]]
    assert "To try: " in text


def test_the_page_has_the_text_and_one_picture_and_needs_no_other_file(said: tuple[str, str]) -> None:
    text, page = said
    plain = html.unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", "", page, flags=re.DOTALL))
    for line in text.splitlines()[:-1]:
        assert line.rstrip() in plain, line
    assert page.count('<svg role="img" aria-label="') == page.count("<svg") == 1
    assert len(page) < 100_000
    for absent in ("<script", "<b>", "src=", "@import", "url(http", '<link rel="stylesheet'):
        assert absent not in page


@pytest.mark.filterwarnings("error")
def test_one_rank_that_sends_nothing_has_a_picture(tmp_path: Path) -> None:
    metrics = Metrics(MetricsConfig(path=str(tmp_path / "m.jsonl"), every=1), rank=0, world_size=1)
    for step in range(1, 4):
        metrics.record(Record("gradient", numel=1000))
        metrics.step(step)
    metrics.close()
    report(tmp_path / "m.jsonl", "--out", tmp_path / "r.html")
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    job(tmp_path / "m.jsonl")
    assert "without a picture" in report(tmp_path / "m.jsonl", "--out", tmp_path / "r.html")
    assert "<svg" not in (tmp_path / "r.html").read_text()


# -- files as they are found ---


def test_a_line_cut_off_and_foreign_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    job(path)
    whole = path.read_text()
    old = '{"step": 70, "class": "gradient", "bytes": 3}\n'
    path.write_text(whole + "nonsense\n" + old + '{"step": 71, "steps"')
    count = whole.count("\n")
    said = report(path, "--out", tmp_path / "r.html")
    assert f"m.jsonl ends in the middle of line {count + 3}, which is left out." in said
    assert f"2 of {count + 2} lines of {path} are left out; line {count + 1}: it is not JSON" in said
    assert "ends in the middle" in (tmp_path / "r.html").read_text()

    row = '{"step": 1, "steps": 1, "class": "a", "dense_bytes": 1, "sent_bytes": 1}\n'
    path.write_text(old + '{"event": "start", "format": 2}\n{"step": 1, "steps": 0, "class": 3}\n[1]\n' + row)
    first, newer = read([path])[1]
    assert "3 of 5 lines" in first
    assert "it has no 'steps', so another version or another program wrote it" in first
    assert "newer version (format 2, this one knows 1)" in newer


_HUGE = 10**400
_BAD: list[tuple[str, Any]] = [
    *((key, -1) for key in ("step", "steps", "dense_bytes", "sent_bytes", "tau", "exchange_ms", "rank")),
    *((key, _HUGE) for key in ("step", "steps", "dense_bytes", "waited_ms", "density", "rank", "world_size")),
    *((key, 1e300) for key in ("sent_bytes", "tau", "step_ms", "density")),
    *((key, 0) for key in ("steps", "density_target", "step_ms", "dense_step_ms", "world_size")),
    *((key, float("nan")) for key in ("dense_bytes", "tau", "step_ms")),
    ("density_target", 1e-320),
    ("class", "x" * 100_000),
    ("class", None),
]
_BAD_EVENTS: list[tuple[str, Any]] = [
    ("loss", 1e300),
    ("step", -1),
    ("step", _HUGE),
    ("reason", 999 * "x"),
]


def test_every_bad_line_is_counted_and_the_first_is_named(tmp_path: Path) -> None:
    common = {"dense_bytes": 100.0, "sent_bytes": 1.0, "density": 0.01, "density_target": 0.01, "tau": 0.5}
    good = [{"step": step, "steps": 10, "class": "$a$ _{^", **common, "step_ms": 9.0} for step in (10, 20)]
    tensors = [{**good[0], "class": f"gradient/tensor/{name}"} for name in ("$", "$x_{", "<i>")]
    odd = [{**good[1], "class": f"c{number}", "density_target": 1e-9} for number in range(100)]
    extra = [
        {**good[1], "class": "plugin", "dense_bytes": 0},
        {"event": "decision", "reason": "$"},
    ]
    bad = [json.dumps({**good[0], key: value}) for key, value in _BAD]
    bad += [json.dumps({"event": "loss", "step": 1, "loss": 0.5, key: value}) for key, value in _BAD_EVENTS]
    bad += ["[" * 100_000, "{}", "3", "\x00"]
    path, out = tmp_path / "m.jsonl", tmp_path / "r.html"
    fine = [json.dumps(line) for line in (good[0], *tensors, good[1], *odd, *extra)]
    path.write_text("\n".join([fine[0], *bad, *fine[1:]]) + "\n")
    said = report(path, "--out", out)
    count = len(bad) + len(fine)
    assert f"{len(bad)} of {count} lines of {path} are left out; line 2: step = -1: Input should be" in said
    assert "In 20 steps" in said
    assert out.stat().st_size < 2_000_000
    assert len(cells(said, "Classes, per step")) == 40


def test_report_and_summary_have_the_same_start(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = Metrics(MetricsConfig(path=str(path), every=5), rank=0, world_size=2)
    for step in range(1, 31):
        metrics.starting = step <= 7 or 10 <= step <= 13  # it begins anew
        sent = 4000 if metrics.starting else 40 + step
        metrics.record(Record("gradient", 4000, sent, 1000, 10, 0.01, select_ms=float(step)))
        metrics.step(step)
    metrics.close()
    summary, (rank,) = metrics.summary(), read([path])[0]
    run = Run([rank])
    assert [window.step for window in run.windows] == [5, 7, 12, 13, 18, 23, 28, 30]
    assert [window.step for window in run.steady] == [18, 23, 28, 30]
    assert run.ratio(run.steady) == pytest.approx(summary.steady.ratio, rel=1e-3)
    assert run.part("select_ms") == pytest.approx(summary.steady.select_ms) == pytest.approx(22)
    assert run.step_ms == pytest.approx(summary.step_ms)
    assert (summary.start_steps, summary.dense_bytes) == (13, 120_000)


def test_lines_of_an_older_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    row = {"step": 50, "steps": 50, "class": "gradient", "dense_bytes": 100.0, "sent_bytes": 10.0}
    path.write_text(json.dumps(row) + "\n")
    said = report(path, "--out", tmp_path / "r.html")
    assert "10x fewer" in said
    assert "How long steps took is not in these metrics" in said


def test_of_several_runs_the_last_one_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for steps in (20, 30, 40):
        job(path, steps=steps)
    assert "In 40 steps" in (said := report(path, "--out", tmp_path / "r.html"))
    assert f"{path} holds 3 runs; this is the last one." in said


def test_ranks_of_one_run_belong_together(tmp_path: Path) -> None:
    job(tmp_path / "a-{rank}.jsonl", ranks=2, steps=10)
    ranks, notes = read([tmp_path / "a-1.jsonl", tmp_path / "a-0.jsonl"])
    assert ([part.rank for part in ranks], notes) == ([1, 0], [])
    together = tmp_path / "all.jsonl"
    together.write_text("".join((tmp_path / f"a-{rank}.jsonl").read_text() for rank in (0, 1)))
    assert sorted(part.rank for part in read([together])[0]) == [0, 1]


def test_files_of_different_runs_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        job(tmp_path / f"{name}-{{rank}}.jsonl", ranks=2, steps=10)
        for path in tmp_path.glob(f"{name}-*"):
            path.write_text(path.read_text().replace('"run": null', f'"run": "{name}"'))
    for first, second in (("a-0", "b-1"), ("a-0", "a-0")):
        with pytest.raises(DCTError, match=r"is not of the same run as .*a-0\.jsonl: report each run"):
            read([tmp_path / f"{first}.jsonl", tmp_path / f"{second}.jsonl"])


def _header(rank: int, world_size: int, folder: str) -> list[Any]:
    for name in ("a", "a", "b"):
        Metrics(MetricsConfig(path=f"{folder}/{name}-{{rank}}.jsonl"), rank=rank, world_size=2).close()
    dist.barrier()  # a rank that ends early breaks the connections that gloo still makes elsewhere
    files = (Path(folder, f"{name}-{rank}.jsonl").read_text().splitlines() for name in "ab")
    return [json.loads(line)["run"] for lines in files for line in lines]


@pytest.mark.slow
def test_ranks_of_a_run_write_one_identity(tmp_path: Path) -> None:
    first, second = run_processes(2, _header, str(tmp_path))
    assert first == second
    assert len(set(first)) == 3
    assert all(first)


def test_the_loss_beside_a_dense_run(tmp_path: Path) -> None:
    path, dense, out = tmp_path / "m.jsonl", tmp_path / "dense.jsonl", tmp_path / "r.html"
    job(path, steps=40)
    job(dense, steps=80)
    dense.write_text(dense.read_text().replace('"loss": 0.025,', '"loss": 0.125,'))
    said = report(path, "--dense", dense, "--out", out)
    ours, theirs = sum(1 / x for x in range(37, 41)) / 4, sum(1 / x for x in range(37, 40)) / 4 + 0.125 / 4
    assert (
        f"From step 37 to 40 the loss is {ours:.4f} and that of the dense run {theirs:.4f}: -0.0250" in said
    )
    assert "than those of the dense run" in said
    rows = cells(said, "Per step and rank")
    assert rows[-1][-2:] == [
        f"{sum(1 / x for x in range(36, 41)) / 5:.6g}",
        f"{(4 * theirs + 1 / 36) / 5:.6g}",
    ]
    dense.write_text("".join(line for line in dense.open() if '"loss"' not in line))
    with pytest.raises(DCTError, match=r"dense\.jsonl: holds no loss: the callbacks"):
        runner.invoke(cli.app, ["report", str(path), "--dense", str(dense)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no report of metrics. It is empty, or its job has not made a report yet"),
        ('{"event": "start"}\n', "has not made a report yet"),
        ("a,b\n1,2\n", "2 of 2 lines of .* are left out; line 1: it is not JSON"),
        ('{"a": 1}\n', "line 1: it has no 'step', so another version or another program wrote it"),
        (json.dumps({"runs": [1, 2]}, indent=1), "It is one JSON document; metrics files have a line"),
        (None, "cannot be read: No such file"),
    ],
)
def test_nothing_to_read(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "m.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DCTError, match=message):
        runner.invoke(
            cli.app, ["report", str(path), "--out", str(tmp_path / "r.html")], catch_exceptions=False
        )
    assert not (tmp_path / "r.html").exists()


# -- what it says ---


def run_of(*rows: dict[str, Any], ranks: int = 1) -> Run:
    common = {"step": 10, "steps": 10, "class": "gradient", "dense_bytes": 1000, "sent_bytes": 10}
    common |= {"density": 0.01, "density_target": 0.01, "step_ms": 10, "dense_step_ms": 20}
    return Run(
        [
            RankRun("m", rank, 2, rows=[Row.model_validate({**common, **row, "rank": rank}) for row in rows])
            for rank in range(ranks)
        ]
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"step_ms": 30}], '"enabled": false'),
        ([{"step_ms": 25, "select_ms": 15, "encode_ms": 6}], "encoding and decoding take 21.0 ms"),
        ([{"exchange_ms": 5, "waited_ms": 4}], "Look for the slow rank"),
        ([{}, {"class": "host_all_reduce", "sent_bytes": 500, "density": None}], "own collectives"),
        ([{}, {"class": "gradient_small", "sent_bytes": 50, "density_target": 1}], "Lower min_numel"),
        ([{"exchange_ms": 2}, {"class": "gradient/tensor/odd", "density": 0.1}], "the gradient of odd"),
        ([{"exchange_ms": 2, "dense_step_ms": None}], "dct advise -- LAUNCH LINE"),
    ],
)
def test_advice_has_its_reason(rows: list[dict[str, Any]], said: str) -> None:
    given = advice(run_of(*rows))
    assert any(said in f"{each.try_this} {each.because}" for each in given), given


def test_the_share_of_weights_that_change_is_said() -> None:
    rows = [{}, {"class": "parameter_exact", "density": 0.0391, "density_target": 0.0391}]
    assert verdict(run_of(*rows))[0].endswith("; 3.9 % of the weights change in a step.")


def test_the_share_of_displaced_tensors_is_said(tmp_path: Path) -> None:
    metrics = Metrics(MetricsConfig(path=str(tmp_path / "m.jsonl"), every=2), rank=0, world_size=2)
    for step in range(1, 9):
        metrics.record(Record("gradient", 4000, 40, 1000, 10, 0.01))
        metrics.record(Record(DISPLACED, numel=8, nnz=6, target_density=1 - 1e-9))
        metrics.step(step)
    metrics.close()
    assert "75 % of the tensors displaced by step-ahead" in metrics.summary_line()
    assert metrics.summary().density == pytest.approx(0.01)
    assert "step-ahead displaced 75 % of the tensors" in report(
        tmp_path / "m.jsonl", "--out", tmp_path / "r.html"
    )


def test_a_good_run_gets_no_advice_and_a_slow_rank_is_named() -> None:
    assert advice(run_of({"exchange_ms": 2})) == []
    run = run_of({"exchange_ms": 5, "waited_ms": 4}, ranks=2)
    run.windows[0].rows["gradient"][1] = (
        run.windows[0].rows["gradient"][1].model_copy(update={"waited_ms": 3.0})
    )
    assert "Look at rank 1" in advice(run)[0].try_this
    assert "2.00x faster than the dense steps" in verdict(run)[1]
    assert "1.50x slower" in verdict(run_of({"step_ms": 30}))[1]
    assert "nothing was thresholded" in verdict(run_of({"density_target": 1, "sent_bytes": 1000}))[1]
    assert "2.00x faster than the dense steps" in verdict(run_of({"density_target": 1}))[1]  # all in int8
    assert "no dense steps" in verdict(run_of({"dense_step_ms": None}))[1]


# -- the demo's part ---


def test_the_part_of_the_demo(tmp_path: Path) -> None:
    figures = [
        Figures(name, [ms] * 5, sent, {}, 5) for name, ms, sent in (("fp32", 60.0, 8e6), ("DCT", 20.0, 8e4))
    ]

    def training(name: str) -> Training:
        return Training(name, {0: 0.7}, {0: 0.6}, {0: [0.7 - 0.001 * i for i in range(100)]}, step_ms=20.0)

    comparison = Comparison(
        training("dense"),
        training("dct"),
        Sent(1e6),
        Sent(1e4, 0.011, 0.01, [(1, 0.01)]),
        2,
        measured=[Measured("1 Gbit/s", figures[0], figures[0], figures[1])],
    )
    write_page(tmp_path / "demo.html", [comparison_part(comparison, title="demo")])
    rows = [re.split(r"\s{2,}", x.strip()) for x in (tmp_path / "demo.html").read_text().splitlines()]
    assert ["Step at 1 Gbit/s", "60.0 ms", "20.0 ms", "3.00x faster"] in rows
    assert ["Payload per step and rank", "1.0 MB", "10.0 kB", "100x fewer"] in rows
