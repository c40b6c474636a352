"""ZeRO-3 without hpZ on real engines: passes gather from copies that the plugin keeps."""

from __future__ import annotations

from typing import Any

import pytest
from support.deepspeed_launch import Results, Run, config, launch

pytest.importorskip("deepspeed")
from support.deepspeed_worker import exactness

pytestmark = pytest.mark.slow

DENSE = {"sparsity": 0, "value_dtype": "fp32", "min_numel": 100}
#: Every rank is a node.
APART = {**DENSE, "nodes": 1}
#: What a training has beside bf16: copies are read by several micro-batches, or all is gathered twice.
CASES: dict[str, dict[str, Any]] = {
    "accumulating": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    "gathering twice": {"zero": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "exact copies of all": ({"nodes": 1, "parameters": "exact"}, "every rank is a node, and an exact copy"),
    "thresholds": (
        {"nodes": 2, "parameters": {"sparsity": 0.9}},
        "copies of the weights that DeepSpeed keeps",
    ),
}


def settings(case: str, section: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    changes = dict(CASES.get(case, {}))
    zero = {"stage3_param_persistence_threshold": 100, **changes.pop("zero", {})}
    dct = {} if section is None else {"dct": {"data_parallel": section}}
    return config(3, "bf16", optimizer="AdamW", zero=zero, **changes, **dct, **more)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    plan: list[Run]
    folder, plan = tmp_path_factory.mktemp("resident"), []

    def add(name: str, case: str, section: dict[str, Any] | None, steps: int = 4, **more: Any) -> None:
        plan.append({"id": name, "config": settings(case, section), "steps": steps, **more})

    for case in CASES:
        add(f"gathers/{case}", case, {**DENSE, "nodes": 2})
        add(f"exact/{case}", case, {**DENSE, "nodes": 2, "parameters": "exact"})
        add(f"whole/{case}", case, APART)
        add(f"int8/{case}", case, APART | {"parameters": "int8"}, steps=6)
    int8 = APART | {"parameters": "int8"}
    add("saved", "", int8, steps=6, save=str(folder / "saved"), save_after=3)
    add("rest", "", int8, steps=6, load=str(folder / "saved"), seed=2)
    add("same", "", int8)
    add("between", "", int8, between=True)
    add("written", "", int8, report=exactness)
    add("int8 in nodes", "", {**DENSE, "nodes": 2, "parameters": "int8"})
    for name, (section, _) in REFUSED.items():
        add(name, "", {**DENSE, **section}, steps=1, expect_error=True)
    return launch(4, plan, folder / "four")


@pytest.mark.parametrize("case", CASES)
def test_exact_copies_are_gathers(four: Results, case: str) -> None:
    for rank in four:
        gathers, exact = rank[f"gathers/{case}"], rank[f"exact/{case}"]
        for what in ("losses", "norms", "hash"):
            assert exact[what] == gathers[what], what
        assert exact["classes"]["parameter_exact"]["sent"] > 0


@pytest.mark.parametrize("case", CASES)
def test_int8_copies_train_all_ranks_alike(four: Results, case: str) -> None:
    whole = four[0][f"whole/{case}"]
    for rank in four:
        found = rank[f"int8/{case}"]
        assert found["hash"] == four[0][f"int8/{case}"]["hash"]
        assert found["after"] < found["before"]
        assert found["losses"][: len(whole["losses"])] == pytest.approx(whole["losses"], rel=0.1)
        gathered, before = (each["classes"].get("host_all_gather", {"sent": 0}) for each in (found, whole))
        assert gathered["sent"] < before["sent"] / 2  # what is left: small weights, which stay whole


def test_int8_copies_in_nodes_of_two_ranks(four: Results) -> None:
    for rank in four:
        assert rank["int8 in nodes"]["hash"] == four[0]["int8 in nodes"]["hash"]
        assert rank["int8 in nodes"]["after"] < rank["int8 in nodes"]["before"]


def test_a_resumed_run_goes_on_bitwise(four: Results) -> None:
    for rank in four:
        assert rank["rest"]["loaded"]
        for what in ("losses", "norms", "hash"):
            assert rank["rest"][what] == rank["saved"][what], what


def test_an_evaluation_between_passes_changes_nothing(four: Results) -> None:
    for rank in four:
        assert rank["between"]["losses"] == rank["same"]["losses"]
        assert rank["between"]["hash"] == rank["same"]["hash"]


def test_gathered_parameters_are_the_partitions(four: Results) -> None:
    """Also after they were written."""
    for rank in four:
        for what, (engine, weights) in rank["written"]["exact"].items():
            assert engine == pytest.approx(weights, rel=5e-2), what


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(four: Results, name: str) -> None:
    for rank in four:
        assert rank[name]["error"].startswith("ConfigError: ")
        assert REFUSED[name][1] in rank[name]["error"]
