"""``dct config suggest`` and docs/settings.md: valid sections, and figures that stand where a row says."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from reference_page import updated
from support import ROOT
from typer.testing import CliRunner

from dct_plugin import cli
from dct_plugin.config import DCTConfig, ParametersConfig
from dct_plugin.integrations.deepspeed.file_check import check
from dct_plugin.policy import resolve
from dct_plugin.policy.evidence import (
    EXACT_UPDATES,
    KNOWN_LOSSES,
    LINKS,
    RECOMMENDATIONS,
    THRESHOLDS,
    Recommendation,
    Training,
    known_losses,
    size_of,
    suggestion,
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
rows = pytest.mark.parametrize("row", RECOMMENDATIONS, ids=lambda row: row.where)


def momentum_of(family: OptimizerFamily) -> float:
    return 0.9 if family is OptimizerFamily.MOMENTUM else 0.0


def section_of(page: str, anchor: str) -> str:
    """The text below a heading, up to the next heading of its level."""
    text = (ROOT / "docs" / page).read_text()
    for match in re.finditer(r"^(#+) (.*)$", text, re.M):
        if re.sub(r"[^\w -]", "", match[2].lower()).replace(" ", "-") == anchor:
            rest = text[match.end() :]
            end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.M)
            return rest[: end.start()] if end else rest
    raise AssertionError(f"{page} has no section {anchor}")


@rows
def test_a_row_is_valid_and_not_known_to_lose(row: Recommendation) -> None:
    for stage in row.stages:
        training = Training(
            (NAMES[row.family],), momentum=momentum_of(row.family), stage=stage, ranks=row.ranks[1]
        )
        config = DCTConfig.parse(row.section)
        assert training.family is row.family
        if row.data_parallel is not None:
            assert (
                list(known_losses(resolve(config.data_parallel, training).settings, training, training.ranks))
                == []
            )
        optimizer = {"type": NAMES[row.family], "params": {"momentum": momentum_of(row.family)}}
        report = check({"optimizer": optimizer, "zero_optimization": {"stage": stage}, "dct": row.section})
        # Muon's rows are for torch and Megatron; with DeepSpeed's own Muon it is refused.
        assert bool(report.faults) == (row.family is OptimizerFamily.MUON)
        assert report.warnings == []


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
        assert ("4.0x" in made.updates) == (parameters == "exact"), written
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
    for row in [*RECOMMENDATIONS, *KNOWN_LOSSES, *THRESHOLDS]:
        assert "M parameters" in size_of(row.model)
    for loss in KNOWN_LOSSES:
        assert section_of("quality.md", loss.source)
    for rule in THRESHOLDS:
        assert section_of(*rule.source.split("#"))


@rows
def test_the_figures_of_a_row_stand_where_it_says(row: Recommendation) -> None:
    for measured in (row.fewer_bytes, row.quality, row.step):
        if measured is not None:
            text = section_of(*measured.source.split("#"))
            for figure in re.findall(r"[-+]?\d+\.?\d*(?: ± [\d.]+)?x?", measured.what):
                assert figure in text.replace("**", ""), (measured, figure)


@rows
def test_a_row_is_what_the_command_prints(row: Recommendation) -> None:
    for link in row.links:
        rate = f"{LINKS[link] / 1e6:g}mbit"
        momentum = momentum_of(row.family)
        arguments = ["--optimizer", NAMES[row.family], "--link", rate, "--momentum", str(momentum)]
        arguments += ["--ranks", str(row.ranks[1]), "--stage", str(row.stages[-1])]
        arguments += ["--lr", str(row.most_lr)] if row.most_lr < math.inf else []
        printed = runner.invoke(cli.app, ["config", "suggest", *arguments])
        assert printed.exit_code == 0
        assert "Not measured" not in printed.output
        assert row.quality.what in printed.stderr
        assert json.loads(printed.stdout) == {"dct": row.section}


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 4, 128])
@pytest.mark.parametrize("rate", [1e7, 1e9, 1e11])
def test_what_is_suggested_starts_anywhere(
    family: OptimizerFamily, stage: int, ranks: int, rate: float
) -> None:
    training = Training([NAMES[family]], momentum_of(family), stage, ranks)
    assert training.family is family
    row, measured = suggestion(training, rate)
    assert not (measured and (ranks == 128 or rate > 1e10))
    assert (row is None) == (family is OptimizerFamily.OTHER)
    if row is not None:
        optimizer = {"type": NAMES[family], "params": {"momentum": momentum_of(family)}}
        report = check({"optimizer": optimizer, "zero_optimization": {"stage": stage}, "dct": row.section})
        assert bool(report.faults) == (family is OptimizerFamily.MUON)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adamw", "100gbit", "16", "0"], "Not measured: adamw on 16 ranks at 100gbit, no ZeRO. The nearest"),
        (["lion", "1gbit", "2", "0"], "nor an optimizer like it"),
        (["adamw", "1gbit", "2", "3"], "Nothing that was measured keeps the quality of adamw on 2 ranks"),
    ],
)
def test_what_was_not_measured_is_said(arguments: list[str], words: str) -> None:
    options = [
        part
        for pair in zip(["--optimizer", "--link", "--ranks", "--stage"], arguments, strict=True)
        for part in pair
    ]
    printed = runner.invoke(cli.app, ["config", "suggest", *options])
    assert words in printed.stderr
    assert json.loads(printed.stdout).keys() == {"dct"}


def test_a_link_may_be_written_with_its_seconds() -> None:
    said = [
        runner.invoke(
            cli.app, ["config", "suggest", "--optimizer", "adam", "--ranks", "2", "--link", link]
        ).stdout
        for link in ("1gbit", "1Gbit/s", "1 Gbps", "1000 mbit")
    ]
    assert len(set(said)) == 1


def test_a_wrong_link_is_named() -> None:
    arguments = ["--optimizer", "adam", "--link", "1g", "--ranks", "2"]
    result = runner.invoke(cli.app, ["config", "suggest", *arguments])
    assert result.exit_code == 2
    assert "'1g'" in result.stderr


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert updated(page) == page, "run python docs/reference_page.py"
