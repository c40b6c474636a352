"""The DeepSpeed integration with real engines in real processes.

Importing DeepSpeed takes longer than a training run of this size, so all runs of a world size share one
launch; every test then looks at its part of the results.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import CONFIGS
from support.deepspeed_launch import Results, Run, assert_resumed_bitwise, config, launch

pytest.importorskip("deepspeed")
from support.deepspeed_worker import Net, NetOfExperts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Everything crosses, in full precision: the run must be DeepSpeed's own. Small tensors and large ones take
#: part.
EXACT = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}}
SPARSE = {"data_parallel": {"sparsity": 0.99, "min_numel": 100}}
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
ACCUMULATE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}

#: Those of hybrid jobs are run by test_dlrm_command.py, those of pipelines and experts by tests of their own.
READY = sorted(
    path
    for path in CONFIGS.glob("deepspeed_*.json")
    if not path.stem.startswith(("deepspeed_pipeline", "deepspeed_experts"))
)


def _cases() -> dict[str, Run]:
    """Runs by name: every combination that is supported."""
    cases: dict[str, Any] = {}
    for precision, more in itertools.product(("fp32", "bf16"), ({}, ACCUMULATE)):
        cases["-".join(["zero0", precision, *(["accumulate"] if more else [])])] = config(
            0, precision, **more
        )
    for stage, precision, scatter, contiguous, overlap, more in itertools.product(
        (1, 2), ("fp32", "bf16"), (True, False), (True, False), (True, False), ({}, ACCUMULATE)
    ):
        words = {"scatter": scatter, "contiguous": contiguous, "overlap": overlap, "accumulate": bool(more)}
        name = "-".join([f"zero{stage}", precision, *(word for word, used in words.items() if used)])
        keys = {"reduce_scatter": scatter, "contiguous_gradients": contiguous, "overlap_comm": overlap}
        cases[name] = config(stage, precision, zero=keys, **more)
    for more in ({}, ACCUMULATE):
        word = "-accumulate" if more else ""
        cases[f"zero1-bf16-fp32accumulation{word}"] = config(1, "bf16", **FP32_ACCUMULATION, **more)
    cases["zero1-bf16-fp32accumulation-immediate"] = config(
        1, bf16={"enabled": True, "immediate_grad_update": True}, **FP32_ACCUMULATION
    )
    for scatter, contiguous in itertools.product((True, False), (True, False)):
        cases[f"zero2-bf16-fp32accumulation-{scatter}-{contiguous}"] = config(
            2,
            "bf16",
            zero={"reduce_scatter": scatter, "contiguous_gradients": contiguous},
            **FP32_ACCUMULATION,
            **ACCUMULATE,
        )
    for stage, precision, wire in (
        (0, "bf16", "fp32"),
        (1, "bf16", "fp32"),
        (2, "bf16", "fp32"),
        (2, "fp32", "bf16"),
    ):
        cases[f"zero{stage}-{precision}-communicate-{wire}"] = config(
            stage, precision, communication_data_type=wire
        )
    cases["zero1-fp32-communicate-bf16-separate"] = config(
        1, communication_data_type="bf16", zero={"contiguous_gradients": False}
    )
    cases["zero0-fp32-communicate-bf16"] = config(0, communication_data_type="bf16")
    cases["zero0-prescale"] = config(0, prescale_gradients=True)
    cases["zero0-predivide2"] = config(0, gradient_predivide_factor=2.0)
    cases["zero0-predivide3"] = config(0, gradient_predivide_factor=3.0)
    full = {"reduce_scatter": False}
    cases["zero1-predivide3"] = config(1, gradient_predivide_factor=3.0, zero=full)
    cases["zero1-prescale"] = config(1, prescale_gradients=True, zero=full)
    for name, stage, zero in (
        ("zero0-sum", 0, {}),
        ("zero2-sum", 2, {}),
        ("zero1-sum-allreduce", 1, full),
        ("zero2-sum-separate", 2, {"contiguous_gradients": False}),
    ):
        cases[name] = config(stage, gradient_allreduce_op="sum", zero=zero)
    cases["zero2-round-robin"] = config(2, zero={"round_robin_gradients": True})
    cases["zero2-one-bucket-per-owner"] = config(2, zero={"use_multi_rank_bucket_allreduce": False})
    cases["zero2-autocast"] = config(2, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    for stage, optimizer in itertools.product((0, 1, 2), ("Adam", "AdamW")):
        cases[f"zero{stage}-{optimizer}"] = config(stage, optimizer=optimizer)
    runs = {name: {"config": settings} for name, settings in cases.items()}
    client = config(1)
    del client["optimizer"]
    runs["zero1-client-AdamW"] = {"config": client, "client_optimizer": "AdamW"}
    for stage in (0, 1, 2):
        runs[f"zero{stage}-experts"] = {"config": config(stage, optimizer="AdamW"), "model": NetOfExperts}
    runs["zero0-sparse-gradients"] = {"config": config(0), "model": functools.partial(Net, sparse=True)}
    return runs


CASES = _cases()


def _is_daily(name: str) -> bool:
    """Return whether two sets of four switches have an even number on. These 16 of the 64 combinations of six
    switches have every three switches in every combination.
    """
    stage, precision, *words = name.split("-")
    if stage == "zero0" or precision not in ("fp32", "bf16") or not set(words) <= SWITCHES:
        return True
    on = {*words, *(["zero2"] if stage == "zero2" else []), *(["bf16"] if precision == "bf16" else [])}
    return all(len(on & some) % 2 == 0 for some in FOURS)


SWITCHES = {"scatter", "contiguous", "overlap", "accumulate"}
FOURS = {"zero2", "bf16", "scatter", "contiguous"}, {"zero2", "bf16", "overlap", "accumulate"}
#: The other combinations are compared once a week.
WEEKLY = [name for name in CASES if not _is_daily(name)]
COMPARED = [name for name in CASES if name not in WEEKLY]
#: Trained for long enough to see the loss fall at 99 % sparsity.
LEARNING = [
    "zero0-fp32", "zero0-bf16-accumulate", "zero1-fp32-scatter-contiguous", "zero1-bf16-fp32accumulation",
    "zero2-bf16-scatter-contiguous-overlap", "zero2-fp32-contiguous", "zero1-AdamW", "zero0-Adam",
    "zero2-experts",
]  # fmt: skip
#: Without overlap_comm and with it.
OVERLAPPED = ["zero1-bf16-scatter-contiguous", "zero2-fp32-scatter-contiguous"]
#: The others at 99 % sparsity: enough that the ranks stay in step.
IN_STEP = [
    name
    for name in [*COMPARED, *OVERLAPPED]
    if name not in LEARNING and not name.endswith(("accumulate", "overlap"))
]
IN_STEP_WEEKLY = [name for name in WEEKLY if name not in LEARNING + IN_STEP]
FOUR = [
    "zero0-fp32", "zero0-bf16", "zero1-fp32-scatter-contiguous", "zero1-bf16-fp32accumulation",
    "zero2-bf16-scatter-contiguous", "zero2-fp32-scatter-contiguous-accumulate", "zero2-fp32",
]  # fmt: skip
ONE = ["zero0-fp32", "zero1-bf16-scatter-contiguous", "zero2-fp32-scatter"]


def run(name: str, dct: dict[str, Any] | None, steps: int, prefix: str = "", **more: Any) -> Run:
    case = CASES[name]
    settings = {**case["config"], **({} if dct is None else {"dct": dct})}
    return {**case, "id": prefix + name, "config": settings, "steps": steps, **more}


def compared(names: list[str], dct: dict[str, Any], steps: int) -> list[Run]:
    """Each run without the plugin and with it."""
    return [r for name in names for r in (run(name, None, steps, "plain/"), run(name, dct, steps, "exact/"))]


def checkpointed(name: str, folder: Path) -> list[Run]:
    """Six steps at a stretch, and in two halves with a checkpoint between them."""
    kept_in = {"zero1-fp32-scatter-contiguous": "int8", "zero1-bf16-fp32accumulation": "bf16"}
    adaptive = {"adaptive": {"kind": "accordion", "sparsity": 0.5, "interval": 2}}
    section = {"sparsity": 0.95, "value_dtype": "fp32", "min_numel": 100, "warmup_steps": 1, **adaptive}
    section["residual_dtype"] = kept_in.get(name, "auto")
    dct = {"data_parallel": section}
    save = str(folder / name)
    return [
        run(name, dct, 6, "whole/"),
        run(name, dct, 3, "half/", save=save),
        run(name, dct, 6, "rest/", load=save, seed=2),
    ]


CHECKPOINTED = [
    "zero0-fp32", "zero1-fp32-scatter-contiguous", "zero2-fp32-scatter-contiguous-accumulate",
    "zero1-bf16-fp32accumulation",
]  # fmt: skip


SKIPPING = {"data_parallel": {**SPARSE["data_parallel"], "nonfinite_action": "skip"}}
SKIPPED = [
    "zero0-fp32", "zero0-bf16", "zero0-AdamW", "zero0-sparse-gradients", "zero1-fp32-scatter-contiguous",
    "zero1-bf16-fp32accumulation", "zero2-bf16-scatter-contiguous",
]  # fmt: skip


#: Chooses by itself among all settings.
AUTOMATIC = {"data_parallel": {**SPARSE["data_parallel"], "quality": "bytes"}}
CHOOSING = ["zero0-fp32", "zero1-bf16-fp32accumulation", "zero2-fp32-contiguous"]


def _switch_off(engine: Any) -> None:
    """Keep the gradients of DeepSpeed's own loop from the plugin."""
    engine.enable_backward_allreduce = False


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="session")
def two(folder: Path, request: pytest.FixtureRequest) -> Results:
    if request.config.getoption("--long"):
        plan = compared(WEEKLY, EXACT, 2) + [run(name, SPARSE, 3, "sparse/") for name in IN_STEP_WEEKLY]
        return launch(2, plan, folder / "two")
    plan = compared(COMPARED, EXACT, 2)
    plan += [run(name, SPARSE, 16, "sparse/") for name in LEARNING]
    plan += [run(name, SPARSE, 3, "sparse/") for name in IN_STEP]
    plan += [run(f"{name}-overlap", SPARSE, 3, "sparse/") for name in OVERLAPPED]
    plan += [run(name, AUTOMATIC, 30, "automatic/") for name in CHOOSING]
    plan += [r for name in CHECKPOINTED for r in checkpointed(name, folder)]
    plain = str(folder / "plain")
    plan += [
        run("zero0-fp32", None, 2, "without-residuals/", save=plain),
        run("zero0-fp32", SPARSE, 4, "with-residuals/", load=plain),
        run("zero0-fp32", {"data_parallel": {**SPARSE["data_parallel"], "warmup_steps": 9}}, 2, "warmup/"),
        run("zero0-fp32", {"enabled": False}, 2, "disabled/"),
        run("zero0-fp32", {"data_parallel": {"enabled": False}}, 2, "no-gradients/"),
        run("zero0-fp32", SPARSE, 3, "before-the-end/", save=str(folder / "unsent")),
        run("zero0-fp32", {"enabled": False}, 3, "off-in-mid-run/", load=str(folder / "unsent")),
        run("zero2-fp32-scatter-contiguous", SPARSE, 6, "poison/", poison=[2]),
        run("zero0-bf16", SPARSE, 6, "poison/", poison=[2]),
        *(run(name, SKIPPING, 6, "skip/", poison=[2, 4]) for name in SKIPPED),
        run("zero0-fp32", SPARSE, 2, "switched-off/", prepare=_switch_off),
    ]
    # A folder where rank 1's file should be.
    (folder / "blocked" / "global_step2" / "dct_rank_00001.pt" / "taken").mkdir(parents=True)
    blocked = {"save": str(folder / "blocked"), "expect_error": True}
    plan.append(run("zero0-fp32", SPARSE, 2, "cannot-write/", **blocked))
    reported = run(
        "zero2-fp32-scatter-contiguous",
        {**SPARSE, "metrics": {"every": 2, "path": str(folder / "m.jsonl")}},
        6,
    )
    reported["id"] = "reported"
    for monitor in ("csv_monitor", "tensorboard"):
        reported["config"][monitor] = {
            "enabled": True,
            "output_path": str(folder / monitor),
            "job_name": "job",
        }
    plan.append(reported)
    plan += [
        {"id": path.name, "config": json.loads(path.read_text()), "steps": 3}
        for path in READY
        if not path.stem.endswith("_gpu")
    ]
    return launch(2, plan, folder / "two")


@pytest.fixture(scope="session")
def four(folder: Path, two: Results) -> Results:
    plan = compared(FOUR, EXACT, 2) + [run(name, SPARSE, 5, "sparse/") for name in FOUR]
    direct = {"data_parallel": {**SPARSE["data_parallel"], "exchange": "direct"}}
    plan.append(run("zero0-fp32", direct, 4, "direct/"))
    plan.append(
        run(
            "zero0-fp32", SPARSE, 5, "more-ranks/", load=str(folder / "zero0-fp32"), save=str(folder / "four")
        )
    )
    return launch(4, plan, folder / "four-ranks")


@pytest.fixture(scope="session")
def one(folder: Path, four: Results) -> Results:
    plan = compared(ONE, SPARSE, 3)
    plan.append(run("zero0-fp32", SPARSE, 6, "fewer-ranks/", load=str(folder / "four")))
    return launch(1, plan, folder / "one")


def same(plain: Run, exact: Run) -> None:
    assert exact["losses"] == plain["losses"]
    assert exact["norms"] == plain["norms"]
    assert exact["hash"] == plain["hash"]


def with_weekly(names: list[str], weekly: list[str]) -> list[Any]:
    return [*names, *(pytest.param(name, marks=pytest.mark.long) for name in weekly)]


@pytest.mark.parametrize("name", with_weekly(COMPARED, WEEKLY))
def test_sparsity_0_is_deepspeed_on_two_ranks(two: Results, name: str) -> None:
    """Losses, gradient norms and parameters, bitwise."""
    for rank in two:
        assert rank[f"exact/{name}"]["attached"]
        assert not rank[f"plain/{name}"]["attached"]
        assert rank[f"exact/{name}"]["streams"]
        same(rank[f"plain/{name}"], rank[f"exact/{name}"])


@pytest.mark.parametrize("name", OVERLAPPED)
def test_buckets_are_reduced_beside_the_backward_pass(two: Results, name: str) -> None:
    """Losses, parameters and residuals bitwise as without overlap."""
    for rank in two:
        plain, overlapped = rank[f"sparse/{name}"], rank[f"sparse/{name}-overlap"]
        same(plain, overlapped)
        assert overlapped["residual"] == plain["residual"]
        assert overlapped["sent"] == plain["sent"]


@pytest.mark.parametrize("name", FOUR)
def test_sparsity_0_is_deepspeed_on_four_ranks(four: Results, name: str) -> None:
    """The order of summation differs from gloo's ring: equal within the precision of the gradients."""
    tolerance = 2e-2 if "bf16" in name else 1e-5
    for rank in four:
        plain, exact = rank[f"plain/{name}"], rank[f"exact/{name}"]
        assert exact["losses"] == pytest.approx(plain["losses"], rel=tolerance)
        assert exact["sums"] == pytest.approx(plain["sums"], rel=tolerance, abs=1e-3)


@pytest.mark.parametrize("name", ONE)
def test_one_rank_has_nothing_to_exchange(one: Results, name: str) -> None:
    """Whatever the sparsity."""
    assert one[0][f"exact/{name}"]["attached"]
    same(one[0][f"plain/{name}"], one[0][f"exact/{name}"])


def in_step(results: Results, key: str) -> Run:
    first = results[0][key]
    for rank in results:
        assert rank[key]["attached"]
        assert rank[key]["finite"]
        assert rank[key]["hash"] == first["hash"]
        assert rank[key]["losses"] == first["losses"]
    return first


@pytest.mark.parametrize("name", LEARNING)
def test_ranks_in_step_and_loss_falling_at_99(two: Results, name: str) -> None:
    found = in_step(two, f"sparse/{name}")
    assert found["after"] < 0.92 * found["before"]
    assert found["sent"] < found["dense"] / 8


@pytest.mark.parametrize("name", with_weekly(IN_STEP, IN_STEP_WEEKLY))
def test_ranks_in_step_at_99(two: Results, name: str) -> None:
    found = in_step(two, f"sparse/{name}")
    assert found["sent"] < found["dense"]


@pytest.mark.parametrize("name", CHOOSING)
def test_ranks_that_choose_the_sparsity_stay_in_step(two: Results, name: str) -> None:
    found = in_step(two, f"automatic/{name}")
    assert found["after"] < found["before"]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_in_step_at_99(four: Results, name: str) -> None:
    in_step(four, f"sparse/{name}")


def test_direct_exchange_between_four_ranks(four: Results) -> None:
    in_step(four, "direct/zero0-fp32")


def test_streams_are_parameters(two: Results) -> None:
    streams = two[0]["exact/zero0-fp32"]["streams"]
    assert {"embedding.weight", "hidden.weight", "hidden.bias", "middle.weight", "unused.weight"} <= set(
        streams
    )
    assert two[0]["exact/zero2-bf16-scatter-contiguous"]["streams"]


def test_expert_parameters_and_sparse_gradients_stay_dense(two: Results) -> None:
    for stage in (0, 1, 2):
        streams = two[0][f"sparse/zero{stage}-experts"]["streams"]
        assert "hidden.weight" in streams
        assert not [name for name in streams if "deepspeed_experts" in name]
    found = two[0]["sparse/zero0-sparse-gradients"]
    assert "embedding.weight" not in found["streams"]
    assert found["classes"]["uncompressed/gradient/sparse"]["sent"] > 0
    assert any(line.endswith("bytes went uncompressed: sparse gradients") for line in found["log"])


def test_disabled_changes_nothing(two: Results) -> None:
    for key in ("disabled/zero0-fp32", "no-gradients/zero0-fp32"):
        assert not two[0][key]["attached"]
        same(two[0]["plain/zero0-fp32"], two[0][key])
    assert "nothing to do" in two[0]["no-gradients/zero0-fp32"]["log"][0]


def test_residuals_that_are_dropped_are_told(two: Results) -> None:
    off, line = two[0]["off-in-mid-run/zero0-fp32"]["log"]
    assert off == "dct: nothing to do: dct.enabled is false"
    assert "the checkpoint holds residuals: the unsent gradient of rank 0, of norm" in line
    assert "'sparsity': 0" in line
    assert not two[1]["off-in-mid-run/zero0-fp32"]["log"]


def test_gradients_that_never_arrive_are_warned_about(two: Results) -> None:
    lines = [line for line in two[0]["switched-off/zero0-fp32"]["log"] if "without passing gradients" in line]
    assert len(lines) == 1


def test_warmup_steps_are_deepspeed(two: Results) -> None:
    assert two[0]["warmup/zero0-fp32"]["attached"]
    same(two[0]["plain/zero0-fp32"], two[0]["warmup/zero0-fp32"])


@pytest.mark.parametrize("name", ["zero2-fp32-scatter-contiguous", "zero0-bf16"])
def test_non_finite_gradients_never_enter_a_residual(two: Results, name: str) -> None:
    for rank in two:
        assert rank[f"poison/{name}"]["finite"]
    if "bf16" in name:
        # DeepSpeed skips the step; the run goes on.
        assert two[0][f"poison/{name}"]["skipped"] == 1
        in_step(two, f"poison/{name}")


@pytest.mark.parametrize("name", SKIPPED)
def test_a_step_that_is_not_finite_is_taken_back(two: Results, name: str) -> None:
    for rank in two:
        found = rank[f"skip/{name}"]
        assert found["skipped"] == 2
        assert found["residuals_kept"] == [True, True]
        assert sum("is not finite in step" in line for line in found["log"]) == (2 if rank is two[0] else 0)
    in_step(two, f"skip/{name}")


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_resumed_run_goes_on_bitwise(two: Results, name: str) -> None:
    assert_resumed_bitwise(two, name)


def test_a_rank_that_cannot_write_its_file_stops_all(two: Results) -> None:
    for rank in two:
        error = rank["cannot-write/zero0-fp32"]["error"]
        assert error.startswith("DCTError: cannot save residuals\n  rank 1: ")
        assert "global_step2/dct_rank_00001.pt: IsADirectoryError" in error


def test_a_checkpoint_without_residuals_is_loaded_with_one_warning(two: Results) -> None:
    for number, rank in enumerate(two):
        found = rank["with-residuals/zero0-fp32"]
        warnings = [line for line in found["log"] if "dct_rank" in line]
        assert found["loaded"]
        assert len(warnings) == (number == 0)
        assert found["steps"] == 2
        assert not found["restored"]


def test_residuals_are_shared_out_to_other_ranks(two: Results, four: Results, one: Results) -> None:
    """Two ranks, then four, then one: the average of the unsent gradients stays the same."""
    saved = [rank["half/zero0-fp32"]["residual"] for rank in two]
    assert set(saved[0]) == set(four[0]["more-ranks/zero0-fp32"]["restored"])
    for name in saved[0]:
        mean = sum(residual[name] for residual in saved) / 2
        for rank in four:
            assert rank["more-ranks/zero0-fp32"]["restored"][name] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    in_step(four, "more-ranks/zero0-fp32")
    # Four ranks have owners with residuals of the sum: they are unsent, too.
    left = [rank["more-ranks/zero0-fp32"]["residual"] for rank in four]
    restored = one[0]["fewer-ranks/zero0-fp32"]["restored"]
    unsent: dict[str, float] = {}
    for residual in left:
        for name, value in residual.items():
            parameter = re.sub(r"\[\d+:\d+\]$", "", name)
            unsent[parameter] = unsent.get(parameter, 0.0) + value / 4
    assert any("[" in name for residual in left for name in residual)
    assert restored == pytest.approx(unsent, rel=1e-4, abs=1e-6)


def test_metrics_reach_file_monitor_and_summary(two: Results, folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert lines.pop(0)["event"] == "start"
    settings = lines.pop(0)
    assert (settings["event"], settings["data_parallel"]["sparsity"]) == ("settings", 0.99)
    assert {line["step"] for line in lines} == {2, 4, 6}
    assert {"gradient", "gradient_small"} <= {line["class"] for line in lines}
    tables = {path.name: path for path in (folder / "csv_monitor").rglob("*.csv")}
    (name,) = [name for name in tables if re.fullmatch(r"dct_gradient_sent_bytes\.csv", name)]
    rows = list(csv.reader(tables[name].open()))
    assert [int(row[0]) for row in rows[1:]] == [2, 4, 6]
    assert list((folder / "tensorboard").rglob("events*"))
    log = (folder / "two" / "log").read_text()
    attached = sum(result.get("attached", True) for result in two[0].values())  # the one that failed, too
    assert len(re.findall(r"^dct: \d+ steps?, ", log, re.MULTILINE)) == attached


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_made_configurations(two: Results, path: Path) -> None:
    if path.stem.endswith("_gpu"):
        pytest.skip("needs a GPU: see test_deepspeed_fp16.py")
    found = in_step(two, path.name)
    assert found["steps"] == 3
