"""``dct config suggest`` and docs/settings.md: valid sections, and figures that stand where a row says."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from reference_page import updated
from result_tables import expand
from support import ROOT
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.config import DataParallelConfig, DCTConfig, ParametersConfig
from dct_plugin.errors import ConfigError
from dct_plugin.integrations.deepspeed.file_check import check
from dct_plugin.policy import resolve
from dct_plugin.policy.evidence import (
    EXACT_UPDATES,
    KNOWN_LOSSES,
    MEASURED_DEFAULTS,
    MEASURED_UPDATES,
    THRESHOLDS,
    MeasuredDefault,
    Training,
    known_losses,
    size_of,
)
from dct_plugin.policy.optimizers import OptimizerFamily

runner = CliRunner()
NAMES = {
    OptimizerFamily.ADAM: "AdamW",
    OptimizerFamily.RMSPROP: "RMSprop",
    OptimizerFamily.MOMENTUM: "SGD",
    OptimizerFamily.ADAGRAD: "Adagrad",
    OptimizerFamily.SGD: "SGD",
    OptimizerFamily.MUON: "Muon",
    OptimizerFamily.OTHER: "Lion",
}
rows = pytest.mark.parametrize("row", MEASURED_DEFAULTS, ids=lambda row: row.where)


def momentum_of(family: OptimizerFamily) -> float:
    return 0.9 if family is OptimizerFamily.MOMENTUM else 0.0


def section_of(page: str, anchor: str) -> str:
    """The text below a heading with its files of results, up to the next heading of its level."""
    text = expand(ROOT / "docs" / page)
    for match in re.finditer(r"^(##+) (.*)$", text, re.M):
        if re.sub(r"[^\w -]", "", match[2].lower()).replace(" ", "-") == anchor:
            rest = text[match.end() :]
            end = re.search(rf"^#{{2,{len(match[1])}}} ", rest, re.M)
            return rest[: end.start()] if end else rest
    raise AssertionError(f"{page} has no section {anchor}")


def training_of(row: MeasuredDefault) -> Training:
    lr = min(row.most_lr, 1e-3)
    return Training((NAMES[row.family],), momentum_of(row.family), row.stages[0], row.ranks[1], lr)


@rows
def test_what_nothing_written_becomes_is_not_known_to_lose(row: MeasuredDefault) -> None:
    for stage in row.stages:
        training = replace(training_of(row), stage=stage)
        assert row.suits(training)
        assert training.family is row.family
        settings = resolve(DataParallelConfig(), training).settings
        assert list(known_losses(settings, training, training.ranks)) == []
        parameters = {"momentum": momentum_of(row.family), "lr": training.lr}
        optimizer = {"type": NAMES[row.family], "params": parameters}
        report = check({"optimizer": optimizer, "zero_optimization": {"stage": stage}, "dct": {}}, 2)
        # Muon's rows are for torch and Megatron; DeepSpeed's own Muon needs ZeRO.
        assert bool(report.faults) == (row.family is OptimizerFamily.MUON)
        assert report.warnings == []


def test_updates_are_offered_where_they_were_measured() -> None:
    for measured in MEASURED_UPDATES.values():
        figures = re.findall(r"[\d.]+x|[+-][\d.]+", measured.what)
        assert len(figures) >= 2
        assert all(figure in section_of(*measured.source.split("#")) for figure in figures)
    offer = '"exchange_of": "updates" sends'
    for facts, is_offered in (
        ({"optimizer": ["AdamW"], "lr": 1e-5}, True),
        ({"optimizer": ["Muon"], "lr": 1e-2}, True),
        ({"optimizer": ["AdamW"], "lr": 1e-3}, False),
        ({"optimizer": ["AdamW"], "lr": 1e-5, "stage": 1}, False),
        ({"optimizer": ["SGD"], "lr": 1e-2}, False),
        ({"optimizer": ["Lion"], "lr": 1e-5}, False),
    ):
        assert (offer in resolve(DataParallelConfig(), Training(ranks=2, **facts)).line) == is_offered
        written = DataParallelConfig.of({"exchange_of": "updates"})
        if facts["optimizer"][0] in ("SGD", "Lion"):
            with pytest.raises(ConfigError, match="was not measured with"):
                resolve(written, Training(ranks=2, **facts))
        else:
            made = resolve(written, Training(ranks=2, **facts))
            assert made.warns == (facts.get("lr") == 1e-3)
            assert made.settings.value_dtype == ("sign" if facts["optimizer"] == ["Muon"] else "int4")


def test_changed_weights_alone_cross_by_default() -> None:
    """They do where gradients are thresholded and nothing was written; a line says so, or why they do not."""
    figures = re.findall(r"[\d.]+x", EXACT_UPDATES.what)
    assert figures
    assert all(figure in section_of(*EXACT_UPDATES.source.split("#")) for figure in figures)
    training = Training(("AdamW",), stage=1, ranks=2)
    for written, parameters in (
        ({}, "exact"),
        ({"quality": "dense"}, "exact"),
        ({"sparsity": "auto"}, "exact"),
        ({"parameters": None}, None),
        ({"parameters": False}, None),
        ({"parameters": {}}, {}),
        ({"sparsity": 0, "value_dtype": "int8"}, "exact"),
        ({"sparsity": 0}, None),
        ({"enabled": False}, None),
    ):
        settings = DCTConfig.parse({"data_parallel": written}).data_parallel
        made = resolve(settings, replace(training, exact_unavailable=""))
        expected = ParametersConfig() if parameters == {} else parameters
        assert made.settings.parameters == expected, written
        assert ("3.7x" in made.updates) == (parameters == "exact"), written
        off = resolve(settings, replace(training, exact_unavailable="no kernels"))
        assert off.settings.parameters == settings.parameters
        assert ("no kernels" in off.updates) == (parameters == "exact"), written
        none = resolve(settings, training)
        assert (none.settings.parameters, none.updates) == (settings.parameters, "")


@pytest.mark.parametrize(
    ("stage", "precision", "line"),
    [
        (1, "bf16", "cross where their bits changed"),
        (2, "fp16", "cross where their bits changed"),
        (1, "fp32", "are gathered whole: nearly all fp32 weights change"),
        (3, "bf16", "are gathered whole: under ZeRO stage 3"),
        (0, "bf16", ""),
    ],
)
def test_a_file_says_how_updated_weights_are_gathered(stage: int, precision: str, line: str) -> None:
    content = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}, "dct": {}}
    report = check({**content, **({} if precision == "fp32" else {precision: {"enabled": True}})})
    found = [note for note in report.notes if note.startswith("updated weights")]
    assert [line in note for note in found] == [True] * bool(line)


def test_every_row_has_a_model_and_a_section_of_a_page() -> None:
    for row in [*MEASURED_DEFAULTS, *KNOWN_LOSSES, *THRESHOLDS]:
        assert "M parameters" in size_of(row.model)
    for loss in KNOWN_LOSSES:
        assert section_of("quality.md", loss.source)
    for rule in THRESHOLDS:
        assert section_of(*rule.source.split("#"))


@rows
def test_the_figures_of_a_row_stand_where_it_says(row: MeasuredDefault) -> None:
    for measured in (row.fewer_bytes, row.quality, row.step):
        if measured is not None:
            text = section_of(*measured.source.split("#"))
            for figure in re.findall(r"[-+]?\d+\.?\d*(?: ± [\d.]+)?x?", measured.what):
                assert figure in text.replace("**", ""), (measured, figure)


def suggested(training: Training, *more: str) -> tuple[str, str]:
    """Return what ``dct config suggest`` prints on its two streams."""
    arguments = ["--optimizer", training.optimizer[0], "--momentum", str(training.momentum), *more]
    arguments += ["--ranks", str(training.ranks), "--stage", str(training.stage)]
    arguments += ["--lr", str(training.lr)] if training.lr < math.inf else []
    printed = runner.invoke(cli.app, ["config", "suggest", *arguments], catch_exceptions=False)
    assert printed.exit_code == 0
    return printed.stdout, printed.stderr


@rows
def test_a_row_is_what_the_command_prints(row: MeasuredDefault) -> None:
    section, said = suggested(training_of(row))
    assert json.loads(section) == {"dct": {}}
    first = next(each for each in MEASURED_DEFAULTS if each.suits(training_of(row)))
    assert first.quality.what in said
    assert "not measured:" not in said
    assert said.endswith("whether it pays: dct advise -- LAUNCH LINE\n")


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 4, 128])
def test_what_nothing_written_becomes_starts_anywhere(
    family: OptimizerFamily, stage: int, ranks: int
) -> None:
    optimizer = {"type": NAMES[family], "params": {"momentum": momentum_of(family)}}
    report = check({"optimizer": optimizer, "zero_optimization": {"stage": stage}, "dct": {}}, ranks)
    assert bool(report.faults) == (family is OptimizerFamily.MUON and stage == 0)
    assert report.warnings == []


def test_what_was_not_measured_is_said() -> None:
    for training in (Training(["lion"], ranks=2), Training(["adamw"], stage=3, ranks=2)):
        _, said = suggested(training)
        assert "this combination was not measured" in said
        assert "all entries are sent, in int8" in said


@pytest.mark.parametrize(
    ("per_node", "precision", "copies"),
    [
        (2, "bf16", "updated weights cross where their bits changed"),
        (1, "bf16", "weights are gathered from a copy in int8 on each rank"),
        (4, "bf16", "gathered whole: every rank is a node"),
        (2, "fp32", "gathered whole: nearly all fp32 weights change"),
    ],
)
def test_ranks_that_share_one_copy(per_node: int, precision: str, copies: str) -> None:
    options = ["--one-mesh", "--ranks-per-node", str(per_node), "--precision", precision]
    section, said = suggested(Training(["adamw"], ranks=4), *options)
    assert json.loads(section) == {"dct": {}}
    assert "it becomes: sparsity 0, int8 values, feedback none\n" in said
    assert copies in said
    assert "take HSDP: docs/settings.md#sharded-jobs" in said


def test_replicas_where_a_node_holds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=180e9)
    monkeypatch.setattr("dct_plugin.policy.memory.psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for parameters, said_first in (
        (10e9, "better: HSDP"),
        (10.1e9, "one mesh: a node cannot hold a replica"),
    ):
        _, said = suggested(Training(["adamw"], ranks=4), "--one-mesh", "--parameters", str(parameters))
        assert f"\n{said_first}" in said
        assert "180.0 GB of memory" in said


def test_one_mesh_is_no_zero_stage() -> None:
    line = ["config", "suggest", "--optimizer", "adamw", "--ranks", "4", "--stage", "3", "--one-mesh"]
    with pytest.raises(ConfigError, match="--one-mesh is FSDP2's, --stage 3 DeepSpeed's"):
        runner.invoke(cli.app, line, catch_exceptions=False)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert updated(page) == page, "run python docs/reference_page.py"
