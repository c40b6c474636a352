"""What is accumulated, written and summed up."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dct_plugin import ConfigError
from dct_plugin.config import MetricsConfig
from dct_plugin.metrics import Event, Metrics, Record, format_bytes
from dct_plugin.metrics.summary import in_words

FIELDS = {
    "step", "steps", "is_start", "step_ms", "dense_step_ms", "class", "dense_bytes", "sent_bytes", "ratio",
    "density_target", "density", "tau", "refreshes", "held_back", "select_ms", "encode_ms", "exchange_ms",
    "decode_ms", "waited_ms", "rank", "world_size", "time",
}  # fmt: skip


def make(*, rank: int = 0, sinks: Any = (), **config: Any) -> Metrics:
    metrics = Metrics(MetricsConfig(**config), rank=rank, world_size=2)
    for sink in sinks:
        metrics.add_sink(sink)
    return metrics


def gradient(into: Metrics, **changes: Any) -> None:
    values: dict[str, Any] = {
        "dense_bytes": 4000, "sent_bytes": 40, "numel": 1000, "nnz": 9, "target_density": 0.01, "tau": 0.5,
        "select_ms": 1.2, "encode_ms": 0.3, "exchange_ms": 2.1, "decode_ms": 0.5,
    }  # fmt: skip
    into.record(Record("gradient", **{**values, **changes}))


def small(into: Metrics) -> None:
    into.record(
        Record(
            "gradient_small", dense_bytes=400, sent_bytes=440, numel=100, nnz=100, target_density=1.0, tau=0.0
        )
    )


def lines(path: Path, *, events: bool = False) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    found = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    return [line for line in found if ("event" in line) == events]


def test_what_crosses_uncompressed_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder, silent = make(path=str(path), every=1), make(rank=1)

    def step(number: int, experts: float, sparse: float = 0.0) -> None:
        for each in (recorder, silent):
            gradient(each)
            each.uncompressed("gradient", "experts", experts)
            each.record(Record("host_all_reduce", experts + sparse, experts + sparse))
            if sparse:
                each.uncompressed("gradient", "sparse", sparse)
            if number == 0:  # which a decision has told, in a line of its own
                each.uncompressed("gradient", "faster", 1000.0)
            each.step(number)

    step(0, 30.0)  # of 4030 bytes
    assert caplog.messages == []
    step(1, 900.0, sparse=100.0)
    step(2, 4000.0)
    (line,) = caplog.messages
    assert line == (
        "dct: 20 % of gradient bytes went uncompressed: 18 % experts (dct.model_parallel.expert_gradients is "
        "off), 2 % sparse gradients"
    )
    total = recorder.summary()
    assert total.dense_bytes == 3 * 4000 + 5030  # once
    assert total.classes["uncompressed/gradient/experts"].sent_bytes == 4930
    assert "; 33 % of gradient bytes went uncompressed: 27 % experts" in (line := recorder.summary_line())
    assert ", 6 % dense steps, timed for the decision or faster, " in line
    (row,) = (each for each in lines(path) if each["class"] == "uncompressed/gradient/sparse")
    assert (row["step"], row["dense_bytes"], row["ratio"]) == (1, 100, 1)


def test_lines_hold_window_averages_per_class(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    recorder = make(path=str(path), every=2)
    for step, tau in ((7, 0.5), (8, 1.0)):
        gradient(recorder, tau=tau, refreshes=1)
        gradient(recorder, tau=tau, nnz=11)
        small(recorder)
        recorder.step(step)
    first, second = lines(path)
    assert first.keys() == second.keys() == FIELDS
    assert (first["class"], second["class"]) == ("gradient", "gradient_small")
    assert (first["step"], first["steps"]) == (8, 2)
    assert (first["dense_bytes"], first["sent_bytes"], first["ratio"]) == (8000, 80, 100)
    assert first["density"] == pytest.approx(0.01)
    assert first["density_target"] == pytest.approx(0.01)
    assert first["tau"] == pytest.approx(0.75)
    assert first["refreshes"] == 2
    assert first["select_ms"] == pytest.approx(2.4)
    assert first["exchange_ms"] == pytest.approx(4.2)
    assert (first["rank"], first["world_size"]) == (0, 2)
    assert second["tau"] is None
    assert second["density"] == 1


def test_windows_do_not_overlap_and_close_writes_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = make(path=str(path), every=3)
    for step in range(1, 9):
        gradient(recorder, nnz=step)
        recorder.step(step)
    assert [line["step"] for line in lines(path)] == [3, 6]
    recorder.close()
    recorder.close()
    written = lines(path)
    assert [(line["step"], line["steps"]) for line in written] == [(3, 3), (6, 3), (8, 2)]
    assert [line["density"] * 1000 for line in written] == pytest.approx([2, 5, 7.5])


def test_events_stand_beside_the_reports(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = make(path=str(path))
    recorder.event("loss", step=3, loss=math.nan)
    recorder.event("decision", step=4, setting="0.99", reason="why", predicted_ms=1.5)
    begun, loss, decision = lines(path, events=True)
    assert (begun["event"], begun["format"], begun["world_size"]) == ("start", 1, 2)
    assert (loss["step"], loss["loss"]) == (3, None)
    assert (decision["reason"], decision["predicted_ms"], decision["rank"]) == ("why", 1.5, 0)


@pytest.mark.parametrize("later", [{}, {"target_density": 1.0, "sent_bytes": 1000}], ids=["sparse", "int8"])
def test_dense_steps_at_the_start_are_kept_to_compare_with(
    tmp_path: Path, later: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "metrics.jsonl", [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    recorder = make(path=str(path), every=1)
    for step in range(1, 9):
        now[0] += 0.02 if step <= 5 else 0.001
        if step <= 5:
            recorder.record(Record("gradient_warmup", 4000, 4000, 1000))
        else:
            gradient(recorder, **later)
        recorder.step(step)
    written = lines(path)
    assert [line["dense_step_ms"] is None for line in written] == [True, True, True, *5 * [False]]
    assert written[0]["step_ms"] is None
    assert written[-1]["dense_step_ms"] == written[4]["dense_step_ms"] == 20.0
    assert written[-1]["step_ms"] == 1.0


def test_tensors_go_to_the_file_alone(tmp_path: Path) -> None:
    path, got = tmp_path / "metrics.jsonl", []
    recorder = make(path=str(path), every=1, sinks=[got.extend])
    gradient(recorder)
    recorder.record(Record("gradient/tensor/body.0.weight", numel=10, nnz=1, target_density=0.01))
    recorder.step(1)
    assert [line["class"] for line in lines(path)] == ["gradient", "gradient/tensor/body.0.weight"]
    assert not any("tensor" in name for name, *_ in got)
    assert recorder.summary().dense_bytes == 4000


def test_infinite_tau_and_nothing_sent_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = make(path=str(path), every=1)
    gradient(recorder, tau=math.inf, nnz=0, sent_bytes=0)
    recorder.step(1)
    (line,) = lines(path)
    assert line["tau"] is None
    assert line["ratio"] is None


def test_tau_and_density_are_weighted_by_entries() -> None:
    recorder = make()
    gradient(recorder, numel=1000, nnz=100, tau=1.0)
    gradient(recorder, numel=3000, nnz=0, tau=2.0)
    recorder.step(1)
    summary = recorder.summary()
    assert summary.tau == pytest.approx(1.75)
    assert summary.density == pytest.approx(0.025)


def test_existing_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        recorder = make(path=str(path), every=1)
        gradient(recorder)
        recorder.step(1)
        recorder.close()
    assert len(lines(path)) == 2


def test_only_rank_0_writes_unless_the_path_names_the_rank(tmp_path: Path) -> None:
    for name in ("one.jsonl", "each-{rank}.jsonl"):
        for rank in (0, 1):
            recorder = make(rank=rank, path=str(tmp_path / name), every=1)
            gradient(recorder)
            recorder.step(1)
            recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["each-0.jsonl", "each-1.jsonl", "one.jsonl"]
    assert [line["rank"] for line in lines(tmp_path / "one.jsonl")] == [0]
    assert [line["rank"] for line in lines(tmp_path / "each-1.jsonl")] == [1]


@pytest.mark.parametrize("key", ["path", "tensorboard"])
def test_unwritable_places_are_refused_at_start(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    config: dict[str, Any] = {key: str(tmp_path / "file" / "below")}
    with pytest.raises(ConfigError, match=rf"rank 0(.|\n)*dct\.metrics\.{key} = .*that can be written"):
        make(**config)
    make(rank=1, **config)


def test_path_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dct\.metrics\.path"):
        make(path=str(tmp_path))


def test_a_full_disk_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    recorder = make(path="/dev/full", every=1)
    for step in (1, 2, 3):
        gradient(recorder)
        recorder.step(step)
    recorder.close()
    assert recorder.summary().steps == 3
    assert len([record for record in caplog.records if "no longer written" in record.message]) == 1


def test_sinks_get_events_and_a_failing_one_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    got: list[list[Event]] = []
    calls = []

    def broken(events: list[Event]) -> None:
        calls.append(events)
        raise RuntimeError("no connection")

    recorder = make(every=2, sinks=[broken, got.append])
    late: list[list[Event]] = []
    recorder.add_sink(late.append)
    for step in range(1, 5):
        gradient(recorder)
        recorder.step(step)
    assert len(calls) == 1
    assert "no connection" in caplog.text
    assert got == late
    assert len(got) == 2
    values = {name: (value, step) for name, value, step in got[1]}
    assert values["dct/gradient/sent_bytes"] == (40.0, 4)
    assert values["dct/gradient/ratio"] == (100.0, 4)
    assert values["dct/gradient/tau"] == (0.5, 4)
    assert all(type(value) is float for value, _ in values.values())


def test_steps_without_records_send_nothing() -> None:
    got: list[list[Event]] = []
    recorder = make(every=1, sinks=[got.append])
    recorder.step(1)
    assert got == []


def test_own_tensorboard_writer(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorder = make(tensorboard=str(tmp_path / "events"), every=5)
    for step in range(1, 11):
        gradient(recorder)
        recorder.step(step)
    recorder.close()
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert "dct/gradient/density" in events.Tags()["scalars"]
    assert [(event.step, event.value) for event in events.Scalars("dct/gradient/ratio")] == [
        (5, 100),
        (10, 100),
    ]


def test_summary_totals_classes_and_line() -> None:
    recorder = make(every=3)
    for step in range(1, 5):
        for _ in range(2):
            gradient(recorder, refreshes=int(step in (1, 2, 4)), select_ms=0.6)
        small(recorder)
        recorder.step(step)
    summary = recorder.summary()
    assert summary.steps == 4
    assert (summary.dense_bytes, summary.sent_bytes) == (4 * 8400, 4 * 520)
    assert summary.ratio == pytest.approx(8400 / 520)
    assert summary.density == pytest.approx(0.009)  # of what is thresholded, not of the small tensors
    assert summary.select_ms == pytest.approx(1.2)
    assert summary.classes["gradient"].ratio == pytest.approx(100)
    assert summary.classes["gradient_small"].density is None
    assert recorder.summary_line() == (
        "dct: 4 steps, rank 0 sent 2.1 kB in place of 33.6 kB (16.2x fewer); 85 % of it tensors below "
        "min_numel; density 0.00900 (target 0.0100); plugin 7.0 ms per step on average (the median step "
        f"takes {summary.step_ms:.1f} ms): select 1.2, encode 0.6, exchange 4.2, decode 1.0; not counted: "
        "what the framework sends by itself"
    )
    longer = in_words(replace(summary, step_ms=20.0), rank=0, world_size=2, counts_host=True)
    assert "; plugin 7.0 of 20.0 ms per step: select" in longer


def test_the_start_counts_apart() -> None:
    recorder = make()
    recorder.starting = True
    for step in range(1, 4):
        recorder.record(Record("gradient_warmup", 4000, 4000, 1000))
        recorder.step(step)
    assert "3 steps, rank 0 sent 12.0 kB in place of 12.0 kB (as many); all steps are the start" in (
        recorder.summary_line()
    )
    recorder.starting = False
    for step in range(4, 8):
        gradient(recorder)
        recorder.record(Record("host_all_gather", 40, 40, 10))
        recorder.step(step)
    summary = recorder.summary()
    assert (summary.start_steps, summary.steady.ratio) == (3, pytest.approx(4040 / 80))
    assert summary.largest == ("gradient", 0.5)
    assert "fewer); 50.5x fewer after the first 3 steps; 50 % of it thresholded gradients" in (
        recorder.summary_line()
    )


def test_summary_lines_of_special_runs() -> None:
    recorder = Metrics(MetricsConfig(), rank=0, world_size=1)
    recorder.step(1)
    assert recorder.summary_line() == "dct: 1 step, nothing sent (1 rank)"
    recorder = make()
    recorder.record(
        Record("activation", dense_bytes=0, sent_bytes=8, numel=0, nnz=0, target_density=1.0, tau=0.0)
    )
    assert "sent 8 bytes in place of 0 bytes (only extra)" in recorder.summary_line()
    recorder = make()
    small(recorder)
    recorder.step(1)
    assert (
        "400 bytes (1.1x more); 100 % of it tensors below min_numel; plugin 0.0 ms" in recorder.summary_line()
    )
    recorder = make()
    for cls, dense in (("parameter_exact", 100.0), ("parameter_full", 900.0)):
        recorder.record(Record(cls, dense, 90.0, numel=100, nnz=12, target_density=0.12))
    said = recorder.summary_line()
    assert "12 % of the weights change in a step, 90 % of their gathers are whole" in said
    assert "density" not in said  # of gradients, all of which were sent
    recorder.record(Record("gradient", 4e3, 1e3, numel=1000, nnz=1000, target_density=1.0))
    said = recorder.summary_line()
    assert "% of it gradients, all entries" in said
    recorder.record(Record("gradient_answer", 4e3, 2e3, numel=1000, nnz=1000, target_density=1.0))
    assert "% of it sums of gradients, all entries" in recorder.summary_line()
    assert "density" not in said


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["gradient", "gradient_small", "activation"]),
        st.integers(0, 10**9),  # dense bytes
        st.integers(0, 10**9),  # sent bytes
        st.integers(0, 10**6),  # entries
        st.floats(0, 1),  # share kept
        st.booleans(),  # step ends here
    ),
    max_size=30,
)


@settings(deadline=None)
@given(RECORDS, st.integers(1, 5))
def test_totals_do_not_depend_on_the_windows(records: list[Any], every: int) -> None:
    whole, windowed = make(every=10**6), make(every=every)
    step = 0
    for cls, dense, sent, numel, share, ends in records:
        for recorder in (whole, windowed):
            recorder.record(Record(
                cls, dense_bytes=dense, sent_bytes=sent, numel=numel, nnz=int(share * numel),
                target_density=share, tau=share, refreshes=1, exchange_ms=1.0,
            ))  # fmt: skip
            if ends:
                recorder.step(step + 1)
        step += ends
    one, other = whole.summary(), windowed.summary()
    assert one.dense_bytes == sum(record[1] for record in records)
    assert (one.steps, one.sent_bytes, one.refreshes) == (other.steps, other.sent_bytes, other.refreshes)
    assert one.density == (pytest.approx(other.density) if other.density is not None else None)
    assert one.classes.keys() == other.classes.keys()
    for recorder in (whole, windowed):
        assert recorder.summary_line().startswith(f"dct: {one.steps} step")


def test_records_from_several_threads_are_not_lost() -> None:
    recorder = make(every=10**6)

    def work() -> None:
        for _ in range(2000):
            gradient(recorder)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.step(1)
    assert recorder.summary().sent_bytes == 4 * 2000 * 40


def test_format_bytes() -> None:
    assert [format_bytes(count) for count in (0, 999, 1900, 251e6, 3.2e9)] == [
        "0 bytes",
        "999 bytes",
        "1.9 kB",
        "251.0 MB",
        "3.2 GB",
    ]
