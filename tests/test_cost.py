"""The cost model: what it counts is what is there, and what it says is used and kept as written."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dct_plugin import Compressor
from dct_plugin.config import TensorConfig
from dct_plugin.config.options import models
from dct_plugin.cost import (
    ACTIVATIONS,
    COEFFICIENTS,
    GRADIENTS,
    MEASURED,
    Link,
    Machine,
    Transformer,
    data_parallel,
    pays_below,
    pipeline,
    positions,
    reduction,
)
from dct_plugin.errors import ConfigError
from dct_plugin.links.namespaces import Links, LinksError
from dct_plugin.links.team import NETWORKS
from dct_plugin.model_parallel.compressors import COMPRESSORS, Site
from dct_plugin.tools.bench.calibration import (
    CODED_AT,
    Coded,
    Measured,
    activations,
    check,
    coded,
    fitted,
    fitted_coding,
    measure,
)
from dct_plugin.tools.bench.cost import app
from dct_plugin.tools.bench.transformer import Blocks

SHAPE = Transformer(3, 192, 2, 16)
MACHINE = Machine("test", 2, dict.fromkeys(COEFFICIENTS, 1e-9))


def test_parameters_are_those_of_the_model() -> None:
    blocks = Blocks(SHAPE)
    assert SHAPE.parameters == sum(parameter.numel() for parameter in blocks.parameters())
    assert SHAPE.vectors == sum(p.numel() for p in blocks.parameters() if p.dim() == 1)
    x = torch.zeros(SHAPE.batch, SHAPE.sequence, SHAPE.hidden)
    assert blocks(x).shape == x.shape


@pytest.mark.parametrize("name", [name for name in GRADIENTS if name.startswith("DCT")])
def test_bytes_of_an_entry_are_those_of_a_payload(name: str) -> None:
    method, values = GRADIENTS[name], name.split()[-1]
    numel = 1 << 20
    stream = Compressor(sparsity=1.0 - method.density, value_dtype=values, expert={"threshold": "exact"})
    payload = stream.compress(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    one_layer = Transformer(1, round(math.sqrt(numel / 12)), 1, 1)
    _, sent, _ = reduction(one_layer, method, 2)
    expected = (sent - 4 * one_layer.vectors) / (one_layer.parameters - one_layer.vectors) * numel
    assert payload.data.numel() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in ("fp32", "bf16")])
def test_bytes_of_an_activation_are_those_of_its_compressor(name: str) -> None:
    way, model = ACTIVATIONS[name], Transformer(1, 512, 4, 128)
    values = {"value_dtype": "int8"} if way.method == "threshold" and way.bits == 8 else {}
    known = {"sparsity": 1.0 - way.density, "bits": way.bits, "rate": way.rate}
    methods = {method.label(): method for method in models(TensorConfig.model_fields["forward"])}
    own = methods[way.method]
    settings = {key: known[key] for key in known if key in own.model_fields}
    compressor = COMPRESSORS[way.method](own.of({**settings, **values}), Site("point", fixed_size=True))
    shape = torch.Size((model.tokens, model.hidden))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes = []
    for _ in range(50 if way.method == "transform" else 1):
        sizes.append(compressor.encode([tensor]).messages[0].numel())
        compressor.end_step()
    forward, _ = way.crossing(model)
    assert statistics.fmean(sizes[-10:]) == pytest.approx(shape.numel() * forward / 8, rel=0.05)


def test_positions_cost_nothing_where_there_is_nothing_to_say() -> None:
    assert positions(1.0) == 0.0
    assert positions(0.01) == pytest.approx(8.2, rel=0.02)


def test_links_take_the_slower_of_latency_and_bytes() -> None:
    link = Link(1e9, 1e-3)
    assert link.seconds(1000, rounds=2) == pytest.approx(2e-3)
    assert link.seconds(1e9, rounds=2) == pytest.approx(8.0)
    assert Link().seconds(1e9) == 0.0


def test_a_ring_sends_what_a_ring_sends_and_owners_less_than_everybody_to_everybody() -> None:
    for ranks in (2, 4, 8):
        estimate = data_parallel(MACHINE, SHAPE, GRADIENTS["fp32"], ranks=ranks, link=Link(1e9))
        assert estimate.sent == pytest.approx(2 * (ranks - 1) / ranks * 4 * SHAPE.parameters)
        assert estimate.exchange == pytest.approx(8 * estimate.sent / 1e9)
    four = data_parallel(MACHINE, SHAPE, GRADIENTS["DCT 0.99 bf16"], ranks=4, link=Link())
    two = data_parallel(MACHINE, SHAPE, GRADIENTS["DCT 0.99 bf16"], ranks=2, link=Link())
    assert four.sent == pytest.approx(1.5 * two.sent)


def test_ranks_share_cores() -> None:
    def compute(ranks: int, here: int | None) -> float:
        way = GRADIENTS["fp32"]
        return data_parallel(MACHINE, SHAPE, way, ranks=ranks, link=Link(), ranks_here=here).compute

    assert compute(2, None) == compute(4, 2) == compute(4, 1)
    assert compute(4, None) == pytest.approx(2 * compute(2, None))


def test_at_the_rate_where_it_stops_to_pay_both_take_the_same() -> None:
    for name in ("DCT 0.9 bf16", "DCT 0.99 bf16", "PowerSGD 4"):
        ways = GRADIENTS[name], GRADIENTS["bf16"]
        ours, dense = (data_parallel(MEASURED, SHAPE, way, ranks=2, link=Link()) for way in ways)
        rate = pays_below(ours, dense)
        if 0.0 < rate < math.inf:
            at = [data_parallel(MEASURED, SHAPE, way, ranks=2, link=Link(rate)).total for way in ways]
            assert at[0] == pytest.approx(at[1], rel=1e-9)
        else:
            assert (ours.total <= dense.total) == (rate == math.inf)
    assert pays_below(dense, dense) == math.inf


def test_pipelines_wait_for_every_transfer_but_those_of_the_others() -> None:
    link = Link(1e8)
    for stages, micro_batches, crossings in ((2, 4, 4), (4, 1, 3), (4, 8, 10)):
        estimate = pipeline(
            MACHINE, SHAPE, ACTIVATIONS["fp32"], stages=stages, micro_batches=micro_batches, link=link
        )
        one_way = 8 * 4 * SHAPE.tokens * SHAPE.hidden / 1e8
        assert estimate.exchange == pytest.approx(crossings * 2 * one_way)
        assert estimate.sent == micro_batches * 4 * SHAPE.tokens * SHAPE.hidden


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Transformer(0, 1, 1, 1), "layers = 0: must be at least 1"),
        (lambda: data_parallel(MACHINE, SHAPE, GRADIENTS["fp32"], ranks=1, link=Link()), "ranks = 1"),
        (
            lambda: pipeline(MACHINE, SHAPE, ACTIVATIONS["fp32"], stages=1, micro_batches=1, link=Link()),
            "stages = 1",
        ),
    ],
)
def test_jobs_that_are_none_are_refused(call: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()  # type: ignore[operator]


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.json"
    MACHINE.save(path)
    assert Machine.load(path) == MACHINE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "not a machine"),
        ('{"cores": 2, "coefficients": {"flops": 1}}', "coefficients: flops is unknown; known: flop,"),
        ('{"cores": 2, "coefficients": {"flop": -1}}', r"coefficients.flop = -1: must be seconds"),
        ('{"cores": 2, "coefficients": {"flop": "1"}}', r"coefficients.flop = '1': must be seconds"),
        ('{"cores": 0, "coefficients": {}}', "cores = 0: must be an integer >= 1"),
    ],
)
def test_another_file_is_named_with_what_is_wrong_in_it(
    content: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"machine\.json: .*{words}"):
        Machine.load(path)


def test_the_fit_finds_what_the_figures_were_made_with() -> None:
    truth = Machine("truth", 2, {name: (number + 1) * 1e-9 for number, name in enumerate(COEFFICIENTS)})
    found = []
    for shape in (SHAPE, Transformer(1, 256, 4, 32), Transformer(2, 512, 2, 8), Transformer(6, 64, 16, 64)):
        seconds = {"ideal": truth.seconds(shape.counts())}
        for name, way in GRADIENTS.items():
            seconds[name] = data_parallel(truth, shape, way, ranks=2, link=Link()).total
        found.append(Measured(shape, 2, None, seconds, {}))
    machine = Machine("fitted", 2, fitted(found))
    assert max(abs(each.error) for each in check(machine, found)) < 1e-6


def test_coding_is_fitted_class_by_class_and_measured_there_and_back() -> None:
    truth = Machine("truth", 2, dict.fromkeys(COEFFICIENTS, 2e-9))
    found = [
        Coded(way, rows, hidden, truth.seconds(way.coding(rows, hidden)))
        for way, rows, hidden in activations(CODED_AT)
    ]
    machine = Machine("fitted", 2, fitted_coding(found))
    for one in found:
        counts = one.method.coding(one.rows, one.hidden)
        assert machine.seconds(counts) == pytest.approx(one.seconds, rel=1e-6)
    for way, rows, hidden in activations(((64, 32, 0.1),)):
        assert coded(way, rows, hidden, rounds=1).seconds > 0.0


def test_the_command_prints_a_table_json_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "steps.png"
    shape = ["--layers", "2", "--hidden", "128", "--batch", "2", "--sequence", "16"]
    arguments = [*shape, "--rate", "1gbit", "--rate", "unlimited"]
    shown = CliRunner().invoke(app, ["data-parallel", *arguments, "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "DCT 0.99 int4" in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    for kind, classes in (("data-parallel", GRADIENTS), ("pipeline", ACTIVATIONS)):
        done = CliRunner().invoke(app, [kind, *arguments, "--json"])
        answer = json.loads(done.output)
        assert [row["name"] for row in answer["classes"]] == list(classes)
        for row in answer["classes"]:
            for parts in row["seconds"].values():
                whole = parts["compute"] + parts["codec"] + parts["exchange"]
                assert parts["total"] == pytest.approx(whole)
    wrong = CliRunner().invoke(app, ["data-parallel", "--rate", "1qbit"])
    assert wrong.exit_code == 2
    assert "1qbit" in wrong.output


@pytest.mark.slow
def test_bytes_are_those_of_real_ranks(tmp_path: Path) -> None:
    try:
        with Links(3, NETWORKS):
            pass
    except LinksError as error:
        pytest.skip(str(error))
    shape = Transformer(1, 256, 1, 8)
    (found,) = measure(3, [(shape, True)], ["1gbit"], tmp_path, lambda _: None, seconds=0.1)
    assert found.sent["ideal"] < 1000
    for name in found.sent.keys() - {"ideal"}:
        expected = data_parallel(MACHINE, shape, GRADIENTS[name], ranks=3, link=Link()).sent
        # Headers, messages of sizes, and how gloo reduces short vectors weigh in so small a model.
        assert found.sent[name] == pytest.approx(expected, rel=0.1, abs=12_000), name
        assert found.seconds[name] > 8 * expected / 1e9
