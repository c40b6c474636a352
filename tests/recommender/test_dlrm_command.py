"""``dct dlrm``: the job under DeepSpeed, its statistics and its report."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from sklearn.metrics import roc_auc_score
from support import CONFIGS
from support.deepspeed_launch import environment, run_ranks
from support.forked import forked_interpreters
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_plugin.errors import ConfigError
from dct_plugin.recommender.commands.dlrm import _files, _Options, configuration, configurations
from dct_plugin.recommender.data import ClickDataset, DataFormatError, epoch_batches
from dct_plugin.recommender.figures import BASELINE, read_runs
from dct_plugin.recommender.intervals import paired
from dct_plugin.recommender.models import build
from dct_plugin.recommender.report import judged, markdown, run_tables
from dct_plugin.recommender.trainer import Training

READY = sorted(CONFIGS.glob("hybrid_*.json"))


CARDINALITIES = (40, 3, 9, 90, 2)
# Long steps: weights and products of a DLRM start so small that it does nothing for a while.
BATCH, LR, EPOCHS, SEED = 32, 1.0, 4, 5
SMALL: dict[str, dict[str, Any]] = {
    "dlrm": {"embedding_dim": 6, "bottom": [8], "top": [16]},
    "deepfm": {"embedding_dim": 6, "hidden": [8]},
    "widedeep": {"embedding_dim": 6, "hidden": [8, 8]},
    "dcn": {"embedding_dim": 6, "hidden": [8], "depth": 3},
}
CASES = [
    ("dlrm", "all_to_all", 0),
    ("dlrm", "des", 1),
    ("deepfm", "auto", 0),
    ("widedeep", "all_to_all", 1),
    ("dcn", "des", 0),
]


def clicks() -> ClickDataset:
    generator = np.random.default_rng(1)
    rows, train = 200, 160
    categorical = np.stack([generator.integers(0, n, rows) for n in CARDINALITIES], axis=1).astype(np.int32)
    dense = generator.standard_normal((rows, 4)).astype(np.float32)
    # From a wide table, a narrow one and a number: every part of a model has something to learn.
    score = 2.0 * (categorical[:, 0] % 3 == 0) + 2.0 * (categorical[:, 1] == 1) + 1.5 * dense[:, 0]
    label = (score > 1.5).astype(np.float32)
    return ClickDataset(
        name="made up",
        dense=dense,
        categorical=categorical,
        label=label,
        cardinalities=CARDINALITIES,
        dense_names=tuple("abcd"),
        categorical_names=tuple("vwxyz"),
        num_train=train,
    )


def on_one_rank(model: str, data: ClickDataset) -> np.ndarray:
    """Probabilities of the test part after plain training on the whole batch."""
    net, _ = build(model, 4, CARDINALITIES, seed=SEED, **SMALL[model])
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        for batch in epoch_batches(data.num_train, BATCH, seed=SEED, epoch=epoch):
            dense, categorical, label = (torch.from_numpy(column[batch]) for column in data.train)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(net(dense, categorical), label).backward()
            optimizer.step()
    with torch.no_grad():
        test = data.test
        return net(torch.from_numpy(test.dense), torch.from_numpy(test.categorical)).sigmoid().numpy()


def resumed(config: dict[str, Any], data: ClickDataset, folder: Path) -> tuple[np.ndarray, str]:
    """Probabilities of the test part after as many epochs, with a break in between; what other data meets."""

    def half() -> Training:
        return Training("half", config, data, seed=SEED, epochs=EPOCHS // 2, report=lambda *_, **__: None)

    run = half()
    run.train(None)
    run.save(folder)
    run.close()
    run = half()
    dist.barrier()
    run.clicks, error = replace(data, label=1 - data.label), ""
    try:
        run.resume(folder)
    except DataFormatError as found:
        error = str(found)
    run.clicks = data
    run.resume(folder)
    run.train(None)
    probability = run.predict(data.test)
    run.close()
    return probability, error


def _trained(folder: str) -> list[dict[str, Any]]:
    """Train each case under DeepSpeed, and again on one rank; return how they differ."""
    import deepspeed

    deepspeed.init_distributed()
    data = clicks()
    results = []
    for model, exchange, stage in CASES:
        events: list[dict[str, Any]] = []
        config = {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed's own is 1, by the mean of the ranks' norms
            "dlrm": {"model": model, "exchange": exchange, **SMALL[model]},
        }
        run = Training(
            "plain",
            config,
            data,
            seed=SEED,
            epochs=EPOCHS,
            report=lambda event, events=events, **fields: events.append({"event": event, **fields}),
        )
        run.train(None)
        probability = run.predict(data.test)
        expected = on_one_rank(model, data)
        results.append(
            {
                "case": [model, exchange, stage],
                "difference": float(np.abs(probability - expected).max()),
                "spread": float(expected.std()),
                "auc": float(roc_auc_score(data.test.label, probability)),
                "exchange": [choice.strategy for choice in run.choices],
                "bytes": events[-1]["bytes"],
                "events": [event["event"] for event in events],
            }
        )
        run.close()
        if (model, exchange) == ("dlrm", "all_to_all"):
            again, results[-1]["refused"] = resumed(config, data, Path(folder, "saved"))
            results[-1]["resumed"] = float(np.abs(probability - again).max())
    return results


@pytest.mark.slow
def test_hybrid_training_is_training_on_one_rank(tmp_path: Path) -> None:
    """Uncompressed, whatever the exchange and the ZeRO stage: only the order of sums differs."""
    results, _ = run_ranks(2, _trained, tmp_path, str(tmp_path))
    for result in results:
        assert result.get("resumed", 0.0) == 0.0, result["case"]
        if "resumed" in result:
            assert "saved run is of other data or ranks: its digest of the training" in result["refused"]
        # It did learn, and the difference is nothing beside what it learned.
        assert result["spread"] > 0.1, result["case"]
        assert result["auc"] > 0.7, result["case"]
        assert result["difference"] < 1e-5, result["case"]
        assert result["events"] == ["run"] + (["step"] * 5 + ["evaluate", "epoch"]) * 4 + ["trained"]
        moved = {name for name, amount in result["bytes"].items() if amount["sent"]}
        if "des" in result["exchange"]:
            assert {"des_forward", "des_backward", "embedding_ids", "gradient"} <= moved
        if "all_to_all" in result["exchange"]:
            # 2 ranks, half of the vectors cross in each direction
            assert {"embedding_forward", "embedding_backward"} <= moved


@pytest.mark.slow
def test_command_compares_ready_configurations(tmp_path: Path) -> None:
    """All of them in one launch: three in JSON and a plot, and what the screen shows at 80 columns."""
    report = tmp_path / "report.json"
    arguments = ["--compare", *map(str, READY), "--max-rows", "9000", "--epochs", "1"]
    with forked_interpreters():
        command = [sys.executable, "-m", "dct_plugin.cli", "dlrm", *arguments, "--report", str(report)]
        done = subprocess.run(
            command, env=environment(COLUMNS="80"), capture_output=True, text=True, cwd=tmp_path
        )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_text())
    found = figures["outcomes"]
    assert list(found) == [BASELINE, *(file.stem for file in READY)]
    assert (tmp_path / "report.png").stat().st_size > 10_000
    layers = {name: set(outcome["layers"]) for name, outcome in found.items()}
    assert layers == {
        BASELINE: set(),
        "hybrid_dct": {"lossless", "bounded"},
        "hybrid_lossless": {"lossless"},
        "hybrid_threshold": {"lossless", "threshold"},
        "hybrid_zero1": {"lossless", "bounded"},
    }
    lossless, best = found["hybrid_lossless"], found["hybrid_dct"]
    assert 2 < lossless["embedding_reduction"] < best["embedding_reduction"]
    assert lossless["parameter_bytes_per_step"] == 0 < found["hybrid_zero1"]["parameter_bytes_per_step"]
    assert lossless["gradient_reduction"] == pytest.approx(1.0)
    for name, outcome in found.items():
        amounts = outcome["bytes_per_step"]
        moved = sum(amounts[f"embedding_{part}"]["sent"] for part in ("forward", "backward", "ids"))
        assert outcome["crossing_bytes_per_step"] == pytest.approx(moved)
        assert 0.3 < outcome["auc"]["0"] < 1
        # Every layer of both directions: they multiply to the whole.
        whole = outcome["embedding_reduction"] or 1.0
        assert math.prod(outcome["layers"].values()) == pytest.approx(whole, rel=0.02)
        if name != BASELINE:
            assert outcome["crossing_reduction"] > 2  # de-duplicated rows need fewer ids, too
            assert outcome["auc_difference"]["pairs"] == 1
            assert f"{name}, seed 0, epoch 1: AUC" in done.stdout
        if name not in (BASELINE, "hybrid_lossless"):
            assert outcome["gradient_reduction"] > 2
    # De-duplication is exact, so only the order of sums differs from the dense run.
    assert abs(lossless["auc_difference"]["mean"]) < 1e-3
    assert "\u2026" not in done.stdout
    # The notice of a slow start has a command to copy, in one line; names of columns are listed in one.
    unwrapped = "Still starting", "constant in the training part"
    lines = [line for line in done.stdout.splitlines() if not line.startswith(unwrapped)]
    assert "hybrid_dct: the AUC differs from dense by" in done.stdout
    assert max(map(len, lines)) <= 80


def test_paired_interval_is_students() -> None:
    # Textbook: mean 0.75, sd 1.7078, t(0.975, 3) = 3.1824
    interval = paired([1.0, 2.0, 1.5, -1.5])
    assert interval.mean == pytest.approx(0.75)
    assert interval.half_width == pytest.approx(3.1824463 * 1.5545632 / 2, rel=1e-6)
    assert interval.inside(4.0) is True
    assert interval.inside(1.0) is False
    assert paired([0.5]).half_width is None
    assert str(paired([0.5])) == "+0.5000"
    with pytest.raises(ValueError, match="no differences"):
        paired([])


def events(name: str, aucs: list[float], sent: float) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for seed, auc in enumerate(aucs):
        common = {"config": name, "seed": seed}
        made += [
            {
                "event": "run",
                **common,
                "exchange": [],
                "batch_size": 2,
                "parameters": [3, 4],
            },
            {"event": "epoch", **common, "epoch": 0, "auc": 0.1, "log_loss": 0.9},
            {"event": "epoch", **common, "epoch": 1, "auc": auc, "log_loss": 1 - auc},
            {
                "event": "trained",
                **common,
                "step_ms": 2.0,
                "seconds": 1.0,
                "ranks_in_step": True,
                "interface_bytes": None,
                "bytes": {
                    "embedding_forward": {"dense": 800.0, "sent": sent},
                    "embedding_forward/lossless": {"dense": 800.0, "sent": 200.0},
                    "embedding_forward/bounded": {"dense": 200.0, "sent": sent},
                    "embedding_ids": {"dense": 100.0, "sent": 100.0},
                    "gradient": {"dense": 100.0, "sent": 50.0},
                },
            },
        ]
    return made


def test_runs_are_paired_by_seed_and_layers_multiply() -> None:
    found = read_runs(events("b", [0.71, 0.73], 40.0) + events(BASELINE, [0.70, 0.74], 800.0))
    assert [run.name for run in found] == [BASELINE, "b"]
    b = found[1]
    assert b.auc == {0: 0.71, 1: 0.73}  # of the last epoch
    assert len(b.epochs) == 4
    assert b.difference.auc_difference is not None
    assert b.difference.auc_difference.mean == pytest.approx(0.0)
    assert b.difference.embedding_reduction == pytest.approx(20)
    assert b.layers() == {"lossless": 4.0, "bounded": 5.0}
    text = markdown(run_tables(found), command="dct dlrm", data="made up")
    assert "| b | 0.7200 | +0.0000 ±" in text
    assert "20x" in text
    assert b.sent_bytes("crossing") == 140
    assert b.difference.crossing_reduction == pytest.approx(900 / 140)
    console = Console(width=80, file=io.StringIO())
    for table in run_tables(found):
        console.print(table.rich())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("difference", "with ids", "lossless", "MLP gradients"):
        assert word in shown
    assert "threshold" not in shown  # no run has it
    assert "\u2026" not in shown


def test_every_run_has_a_verdict() -> None:
    base = [0.70, 0.74, 0.72]
    for aucs, slower, words in (
        (base[:1], 1.0, ["with one seed and so without", "412 test rows", "10x fewer bytes in all"]),
        ([auc + 0.0001 for auc in base], 1.5, ["quality held", "1.50x slower here (3.0 ms, dense 2.0 ms)"]),
        ([auc - 0.01 for auc in base], 1.0, ["quality did not hold", "-0.0100 ±0.0000 (3 seeds)"]),
        ([0.60, 0.85, 0.72], 1.0, ["not decided", "Use more seeds"]),
    ):
        found = read_runs(events("b", aucs, 0.0) + events(BASELINE, base[: len(aucs)], 1350.0))
        found[1].step_ms *= slower
        (said,) = judged(found, rarer=412)
        assert said.startswith("b: ")
        for each in words:
            assert each in said
        assert ("slower" in said) == (slower > 1)
        title = run_tables(found)[0].title
        assert ("so the difference to dense has no interval" in title) == (len(aucs) == 1)
    alone = read_runs(events("b", base, 40.0))
    assert judged(alone, rarer=1) == []
    assert run_tables(alone)[0].header == ["", "AUC", "log loss", "seeds"]


def test_baseline_is_the_first_configuration_without_compression(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"train_batch_size": 64, "dct": {}, "dlrm": {"exchange": "des"}}))
    made = configurations([file], model="dcn", ranks=2)
    assert list(made) == [BASELINE, "mine"]
    assert "dct" not in made[BASELINE]
    assert made[BASELINE]["train_batch_size"] == 64
    assert made[BASELINE]["dlrm"] == {"exchange": "all_to_all", "model": "dcn"}
    assert made["mine"]["dlrm"] == {"exchange": "des", "model": "dcn"}
    assert list(configurations([], ranks=2)) == [BASELINE]
    assert _files(_Options()) == [Path("hybrid_dct")]


def test_faults_of_configurations_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"dct": {"embedding": {"error_bund": 1}}}')
    with pytest.raises(ConfigError, match=r"did you mean dct\.embedding\.error_bound"):
        configurations([file], ranks=2)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="'mine' is used twice"):
        configurations([file, file], ranks=2)
    for content, message in (
        ({"dlrm": {"modl": 1}}, r"dlrm\.modl = 1: unknown key; did you mean dlrm\.model\?"),
        ({"dlrm": {"model": "fm"}}, r'dlrm\.model = "fm": must be one of "dlrm", "deepfm"'),
        ({"dlrm": {"top": [8, 0]}}, r"dlrm\.top = \[8, 0\]: must be a list of integers >= 1"),
        ({"dlrm": {"hidden": [8]}}, "dlrm.hidden is no setting of model 'dlrm'; it has bottom, top"),
        ({"train_batch_size": "a"}, r'train_batch_size = "a": must be an integer >= 1'),
        ({"zero_optimization": 1}, "zero_optimization = 1: must be a JSON object"),
        ({"dlrm": []}, "dlrm must be a JSON object"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage = 3: sharded tables need ZeRO"),
        ({"zero_optimization": {"stage": 1}, "dlrm": {"sparse_gradients": True}}, "needs ZeRO stage 0"),
        ({"optimizer": {"type": "Lamb"}, "dlrm": {"table_optimizer": {}}}, "optimizer.type = 'Lamb'"),
        ({"dlrm": {"tables": "replicated", "exchange": "des"}}, "exchange = 'des' is for sharded tables"),
        ({"dlrm": {"tables": "replicated", "model": "dcn"}}, "is for model 'dlrm', not 'dcn'"),
    ):
        with pytest.raises(ConfigError, match=message):
            configuration(content, ranks=2)
    with pytest.raises(ConfigError, match="train_batch_size = 7: must be a multiple of 2 ranks"):
        configuration({"train_batch_size": 7}, ranks=2)


@pytest.mark.slow  # DeepSpeed tells its keys in a process of its own
@pytest.mark.parametrize("file", READY, ids=lambda file: file.stem)
def test_ready_configurations_are_valid(file: Path) -> None:
    with forked_interpreters():
        assert file.stem in configurations([file], ranks=2)
