"""Measure the regret of the automatic mode: its steps against the best fixed setting's, in the same run.

Every rank gets a network namespace of its own (Linux, root or user namespaces). On each link the automatic
mode decides, keeps its decision, and then all methods take turns. Figures of a cell (job, ranks, link) are
kept in a file; a cell that it has is not measured again. With ``--drop`` one job sees three links in turn.
With ``--nodes`` the ranks are spread over nodes, only links between these are limited, and fixed settings run
with and without ``nodes``.

    python benchmarks/regret.py
    python benchmarks/regret.py --workload megatron --ranks 2 --rates 1gbit
    python benchmarks/regret.py --workload ddp --optimizer adamw      # with step-ahead
    python benchmarks/regret.py --nodes 2 --ranks 4 --workload ddp
    python benchmarks/regret.py --drop --metrics drop.jsonl && dct report drop.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import megatron_gpt

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel.autotune.add_on import AutomaticSparsity
from dct_plugin.data_parallel.autotune.cost_model import DecisionRules
from dct_plugin.integrations.ddp import DCTState
from dct_plugin.rates import rate_name
from dct_plugin.recommender import on_links
from dct_plugin.recommender.commands.dlrm import configuration
from dct_plugin.recommender.links.interleave import interleaved, warmed
from dct_plugin.recommender.links.method import Method
from dct_plugin.recommender.links.namespaces import Links
from dct_plugin.recommender.links.team import NETWORKS, Team, TeamError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.links import ddp, zero
from benchmarks.links.perceptron import batch, perceptron, width_of
from benchmarks.links.suite import OPTIMIZERS

AUTOMATIC = "automatic"
BEGAN = time.monotonic()
SECTION: dict[str, Any] = {"data_parallel": {"quality": "bytes", "sparsity": 0.99, "feedback": "local"}}
#: Millions of parameters of the perceptron.
PARAMETERS = 4.0
#: Steps in which the automatic mode decides.
DECIDES = 150
FIXED = [(0.9, "bf16"), (0.97, "bf16"), (0.99, "bf16"), (0.99, "int8"), (0.99, "int4")]
SECTIONS: dict[str, dict[str, Any]] = {
    f"DCT {sparsity:g} {values}": {
        "data_parallel": {"sparsity": sparsity, "value_dtype": values, "feedback": "local"}
    }
    for sparsity, values in FIXED
} | {AUTOMATIC: SECTION}
#: Not methods to choose from.
APART = ("ideal", "latency floor", "top-k 1 %", "fp16", "PowerSGD 1", "PowerSGD 4")
#: Link and steps, one after the other.
DROP = [("10gbit", 150), ("100mbit", 150), ("10gbit", 200)]


def _prepare(options: Mapping[str, Any]) -> None:
    SECTION["data_parallel"]["quality"] = options["quality"]
    if options["per_node"] > 1:
        # Nodes are the rule, which the automatic mode follows.
        nodes = {"nodes": options["per_node"]}
        SECTION["data_parallel"] |= nodes
        SECTIONS.update(_variants("{}, nodes", nodes))
    elif options["ranks"] > 2:  # two phases are the rule
        SECTIONS.update(_variants("{} direct", {"exchange": "direct"}))
    if options["keeps"]:
        # Other methods' turns are no part of its steps.
        AutomaticSparsity.rules = DecisionRules(window_steps=10**9)


def _variants(named: str, changed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fixed settings at 0.99 with other values, each by a name made from its own."""
    strongest = ("DCT 0.99 bf16", "DCT 0.99 int8", "DCT 0.99 int4")
    return {
        named.format(name): {"data_parallel": {**SECTIONS[name]["data_parallel"], **changed}}
        for name in strongest
    }


class DDP(ddp.DDP):
    """torch DDP: fixed settings, or the automatic mode alone."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        _prepare(options)
        self._keeps, self._millions, self._path = options["keeps"], options["parameters"], options["metrics"]
        self._is_adamw = options["optimizer"] == "adamw"

    def open(self, variant: str) -> list[Method]:
        width = width_of(self._millions)
        shared, one_bucket = (
            ddp.Trained(perceptron(width), batch(width), mb, is_adamw=self._is_adamw) for mb in (25, 1e6)
        )
        if not self._keeps:
            return [self._method(shared, AUTOMATIC, SECTION)]
        hosts = [each for each in ddp.methods_of(shared, one_bucket, []) if each.name not in APART]
        if self._is_adamw:
            ahead = {"feedback": "step_ahead", **ddp.START}
            made = {name: {**section["data_parallel"], **ahead} for name, section in SECTIONS.items()}
            methods = [ddp.with_adamw(width, name, section) for name, section in made.items()]
            next(each for each in methods if each.name == AUTOMATIC).warmup = DECIDES
            return [*hosts, *methods]
        return [*hosts, *(self._method(shared, name, section) for name, section in SECTIONS.items())]

    def _method(self, shared: ddp.Trained, name: str, section: dict[str, Any]) -> Method:
        path = self._path if name == AUTOMATIC else None
        state = DCTState(DCTConfig.parse(section).updated({"metrics": {"path": path, "every": 5}}))
        warmup = DECIDES if name == AUTOMATIC else 10
        return Method(
            name, shared.step, [state.metrics], around=partial(shared.through, state), warmup=warmup
        )


class Zero(zero.Zero):
    """DeepSpeed, ZeRO-0 and 1: fixed settings and the automatic mode."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        _prepare(options)

    def open(self, variant: str) -> list[Method]:
        stage = int(variant.removeprefix("ZeRO-"))
        sections: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"communication_data_type": "bf16"}}
        sections |= {name: {"dct": section} for name, section in SECTIONS.items()}
        return [self._method(name, stage, section) for name, section in sections.items()]

    def _method(self, name: str, stage: int, section: dict[str, Any]) -> Method:
        engine = self._engine(stage, section)
        attached = engine.__dict__.get("dct")
        warmup = DECIDES if name == AUTOMATIC else 3 if attached is None else 10
        return Method(
            name, partial(self._step, engine), [] if attached is None else [attached.metrics], warmup=warmup
        )


class Recommender(on_links.Trainings):
    """The hybrid DLRM: its tables exchange distinct rows in full, and the MLPs' gradients are measured."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        _prepare(options)
        rows = {"deduplicate": True}
        sections = {"rows": {"data_parallel": {"enabled": False}}, **SECTIONS}
        content = {"train_batch_size": 2048, "gradient_clipping": 1.0}
        made = {"fp32": content} | {
            name: {**content, "dct": {"embedding": rows, **section}} for name, section in sections.items()
        }
        configs = {name: configuration(each, ranks=options["ranks"]) for name, each in made.items()}
        data = {"format": "diabetes", "data": None, "max_rows": None}
        super().__init__({**data, "configs": {"DLRM": configs}})

    def open(self, variant: str) -> list[Method]:
        methods = super().open(variant)
        for method in methods:
            method.warmup = DECIDES if method.name == AUTOMATIC else method.warmup
        return methods


class Megatron(megatron_gpt.Megatron):
    """Megatron's data parallelism: every method has a model and hooks of its own, which take turns.

    Weights stay as they are. As this GPT learns, its steps take up to a tenth less processor time, and the
    automatic mode has made more of them than the others.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__({"dct": False})
        _prepare(options)

    def open(self, variant: str) -> list[Method]:
        optimizer = "optimizer" in variant
        megatron_gpt.LEARNING_RATE = 0.0
        (dense,) = super().open("DP 2, distributed optimizer" if optimizer else "DP 2")
        dense.name = "fp32"
        return [dense, *(self._hooked(name, section, optimizer) for name, section in SECTIONS.items())]

    def _hooked(self, name: str, section: dict[str, Any], optimizer: bool) -> Method:
        from dct_plugin.integrations.megatron import hooks

        hooks.install(DCTConfig.parse(section))
        session = hooks.current()
        assert session is not None
        step = partial(next, megatron_gpt.training(1, self._batch, distributed_optimizer=optimizer))
        replaced = [(owner, key, vars(owner)[key]) for owner, key, _ in session.patches._originals]

        @contextmanager
        def hooked() -> Iterator[None]:
            hooks._session = session
            for each in replaced:
                session.patches.replace(*each)
            yield
            leave()

        def leave() -> None:
            hooks._session = None
            session.patches.undo()

        leave()
        return Method(
            name, step, [session.metrics], around=hooked, warmup=DECIDES if name == AUTOMATIC else 10
        )


WORKLOADS = {
    "ddp": ("regret:DDP", ["torch DDP"]),
    "deepspeed": ("regret:Zero", ["ZeRO-0", "ZeRO-1"]),
    "dlrm": ("regret:Recommender", ["DLRM"]),
    "megatron": ("regret:Megatron", ["Megatron", "Megatron, distributed optimizer"]),
}


class Row(NamedTuple):
    """Milliseconds of a step by method, on one link."""

    where: str
    ms: dict[str, float]

    @property
    def best(self) -> str:
        return min((name for name in self.ms if name != AUTOMATIC), key=self.ms.__getitem__)

    @property
    def regret(self) -> float:
        return self.ms[AUTOMATIC] / self.ms[self.best]

    @property
    def beside_host(self) -> float:
        return self.ms[AUTOMATIC] / self.ms["fp32"]

    def __str__(self) -> str:
        return (
            f"| {self.where} | {self.ms['fp32']:.1f} | {self.best} {self.ms[self.best]:.1f} | "
            f"{self.ms[AUTOMATIC]:.1f} | {self.regret:.2f} | {self.beside_host:.2f} |"
        )


def _decisions(folder: Path) -> list[str]:
    """Return the log lines of decisions, in any rank's output."""
    lines = [line for path in sorted(folder.rglob("*")) if path.is_file() for line in _lines(path)]
    return [line[line.index("dct: step") :] for line in lines if "dct: step" in line and " ms a step" in line]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def regret(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """Return a row for every workload, number of ranks and link, and print each when it is there."""
    suffix = "" if arguments.quality == "bytes" else f", {arguments.quality}"
    suffix += f", {arguments.nodes} nodes" if arguments.nodes else ""
    suffix += "" if arguments.optimizer == "sgd" else ", AdamW"
    suffix += "" if arguments.parameters == PARAMETERS else f", {arguments.parameters:g} million parameters"
    kept = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    rows = {row.where: row for row in (Row(**json.loads(line)) for line in kept)}
    cells: dict[str, tuple[int, str, str, str]] = {
        f"{variant}, {ranks} ranks, {rate_name(rate)}{suffix}": (ranks, name, variant, rate)
        for ranks in arguments.ranks
        for name in arguments.workload
        for variant in WORKLOADS[name][1]
        for rate in arguments.rates
    }
    for (ranks, name), part in itertools.groupby(cells.items(), lambda cell: cell[1][:2]):
        missing = {where: cell for where, cell in part if where not in rows}
        try:
            for row in _measured(arguments, folder, ranks, name, missing) if missing else ():
                rows[row.where] = row
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row._asdict()) + "\n")
                print(f"{row}  ({time.monotonic() - BEGAN:.0f} s)", file=sys.stderr, flush=True)
        except TeamError as error:
            print(error, file=sys.stderr, flush=True)
    return [rows[where] for where in cells if where in rows]


def _measured(
    arguments: argparse.Namespace,
    folder: Path,
    ranks: int,
    name: str,
    cells: dict[str, tuple[int, str, str, str]],
) -> Iterator[Row]:
    target = WORKLOADS[name][0]
    nodes = arguments.nodes or ranks
    options = {"parameters": arguments.parameters, "keeps": True, "metrics": None, "ranks": ranks}
    options |= {"quality": arguments.quality, "per_node": ranks // nodes, "optimizer": arguments.optimizer}
    with (
        Links(nodes, NETWORKS) as links,
        Team(target, ranks, links, options=options, folder=folder, name=f"{name}-{ranks}") as team,
    ):
        for where, (_, _, variant, rate) in cells.items():
            links.limit(None if rate == "unlimited" else rate)
            methods = team.open(variant)
            if arguments.quality == "dense":
                methods = {name: methods[name] for name in ("fp32", AUTOMATIC)}
            warmed(team.block, methods)
            figures = interleaved(team.block, list(methods), arguments.seconds)
            team.close()
            yield Row(where, {each.name: each.median for each in figures})


def drop(arguments: argparse.Namespace, folder: Path) -> None:
    """Print the steps of one job while the link between its ranks changes."""
    metrics = None if arguments.metrics is None else str(arguments.metrics.resolve())
    options = {"parameters": arguments.parameters, "ranks": 2, "keeps": False, "metrics": metrics}
    options |= {"quality": "bytes", "per_node": 1, "optimizer": "sgd"}
    with (
        Links(2, NETWORKS) as links,
        Team("regret:DDP", 2, links, options=options, folder=folder, name="drop") as team,
    ):
        team.open("torch DDP")
        done = 0
        print("| steps | link | ms a step, median of ten |\n|---|---|--:|")
        for rate, steps in DROP:
            links.limit(rate)
            for _ in range(steps // 10):
                block = team.block(AUTOMATIC, 10)
                done += 10
                print(f"| {done - 10} to {done} | {rate_name(rate)} | {block.ms:.1f} |", flush=True)
        team.close()
    print(*_decisions(folder), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["unlimited", "10gbit", "1gbit", "100mbit"])
    parser.add_argument("--parameters", type=float, default=PARAMETERS, help="millions")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="of the workload ddp")
    parser.add_argument("--seconds", type=float, default=30.0, help="of turns, for each link")
    parser.add_argument(
        "--quality", default="bytes", choices=["dense", "bytes"], help="dense: beside fp32 alone"
    )
    parser.add_argument("--nodes", type=int, default=0, help="nodes that the ranks are spread over")
    parser.add_argument("--drop", action="store_true", help="one job, whose link changes")
    parser.add_argument("--out", type=Path, default=Path("out/regret.jsonl"), help="figures of the cells")
    parser.add_argument("--metrics", type=Path, help="with --drop: metrics file, for dct report")
    arguments = parser.parse_args()
    if arguments.nodes and any(
        ranks % arguments.nodes or ranks == arguments.nodes for ranks in arguments.ranks
    ):
        parser.error(f"--nodes {arguments.nodes}: --ranks must be multiples of it, at least two per node")
    if arguments.nodes and arguments.drop:
        parser.error("--nodes does not go with --drop")
    here = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*here, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.drop:
            return drop(arguments, Path(folder))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        rows = regret(arguments, Path(folder))
        print(*_decisions(Path(folder)), sep="\n", file=sys.stderr)
    print("| job | fp32, ms | best fixed, ms | automatic, ms | regret | beside fp32 |")
    print("|---|--:|--:|--:|--:|--:|", *rows, sep="\n")
    regrets = [row.regret for row in rows]
    if not rows:
        parser.exit(1, "no cell was measured\n")
    print(f"regret: median {statistics.median(regrets):.2f}, worst {max(regrets):.2f}")
    print(f"slowest beside fp32: {max(row.beside_host for row in rows):.2f}")


if __name__ == "__main__":
    main()
