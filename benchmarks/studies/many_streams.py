"""Measure the loss of thresholded gradients by the number of compressors: 2 to 64, in one process.

Every compressor is a thread with a replica of the model, an optimizer, and the library's reducer, step-ahead
and updates of weights (``one_process.py``). All runs share a global batch, so that those of a seed are paired
with one dense run. Bytes are those of a rank and step after the start, with the headers of the messages, and
the mean of all ranks.

- ``gpt`` (106,432 parameters, or another ``--width``): 64 sequences of 32 characters; AdamW, clipping,
  learning-rate warm-up and cosine. Its figure is the held-out loss in nats per character. Several texts are
  those of different ranks. With ``--pretrained`` it is fine-tuned.
- ``dlrm``: the model, data and batch of ``dct demo``, tables included; Adagrad with local feedback. Its
  figure is the AUC on the test part. With ``--sources`` ranks have different rows.
- ``digits``: a small ResNet, SGD with momentum. Its figure is the held-out loss.

    python benchmarks/studies/many_streams.py --text wikitext2_valid.txt.gz --results FILE
    python benchmarks/studies/many_streams.py --text wikitext2_valid.txt.gz --results FILE \\
        --compressors 8 16 --settings 0.99 "0.97 int2"
    python benchmarks/studies/many_streams.py --text wikitext2_valid.txt.gz --width 128 --compressors 2
    python benchmarks/studies/many_streams.py --text wikitext2_valid.txt.gz tinyshakespeare.txt.gz \\
        --compressors 2
    python benchmarks/studies/many_streams.py --model dlrm --compressors 2 8 --settings "local 0.99"

``--results`` keeps every run at once: the command can be stopped and given again, or with more seeds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import one_process
import torch
import torch.distributed as dist
from tasks import LR, WIDTH, Digits, Gpt, Loss, Recommender, Run, Task, trained
from torch import Tensor

from dct_plugin.config import DataParallelConfig, MetricsConfig
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.plan import shards_in
from dct_plugin.data_parallel.step_ahead.add_on import StepAhead
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.metrics import Metrics, Summary
from dct_plugin.policy.evidence import Training
from dct_plugin.policy.resolve import resolve
from dct_plugin.recommender.intervals import paired
from dct_plugin.transport.nodes import Nodes

RESULTS = Path(__file__).resolve().parents[1] / "results" / "many_streams.jsonl"
#: Nearly all entries are thresholded, as in models of a useful size.
COMMON: dict[str, Any] = {
    "feedback": "step_ahead",
    "warmup_steps": 60,
    "sparsity_warmup_steps": 180,
    "min_numel": 1024,
}


#: One rank has nobody to exchange anything with.
DENSE = {"feedback": "local"}


def _section(sparsity: float, answers: float | None = None, **options: Any) -> dict[str, Any]:
    """A section with the sparsity of what ranks send, and that of the owners' answers where it is set."""
    if answers is not None:
        options["expert"] = {"server_density": (1 - answers) / (1 - sparsity)}
    return {**COMMON, "exchange": "two_phase", "sparsity": sparsity, **options}


def _local(sparsity: float, **options: Any) -> dict[str, Any]:
    """A section for the recommender: as ``dct demo``, local feedback without a start."""
    return {"feedback": "local", "exchange": "two_phase", "sparsity": sparsity, **options}


SETTINGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "0.99 direct": _section(0.99, exchange="direct"),
    "0.99": _section(0.99),
    "0.98 int4": _section(0.98, value_dtype="int4"),
    "0.98/0.95 int4": _section(0.98, 0.95, value_dtype="int4"),
    "0.96 int4 direct": _section(0.96, value_dtype="int4", exchange="direct"),
    "0.96/0.92 int4": _section(0.96, 0.92, value_dtype="int4"),
    "0.96/0.934 int4": _section(0.96, 0.934, value_dtype="int4"),
    "0.97 int4": _section(0.97, value_dtype="int4"),
    "0.97/0.93 int4": _section(0.97, 0.93, value_dtype="int4"),
    "0.97/0.93 int2": _section(0.97, 0.93, value_dtype="int2"),
    "0.95/0.90 int4": _section(0.95, 0.90, value_dtype="int4"),
    "0.96/0.934 int4, displaced by steps of a rank's own gradient": _section(
        0.96, 0.934, value_dtype="int4", steps_of_own=True
    ),
    "0.92/0.868 int4": _section(0.92, 0.868, value_dtype="int4"),
    "0.85/0.75 int4": _section(0.85, 0.75, value_dtype="int4"),
    "int4 of all": {**_local(0, value_dtype="int4"), "min_numel": 1024},
    "int8 of all": {**_local(0, value_dtype="int8"), "min_numel": 1024},
    "4-bit levels of all": {**_local(0, value_dtype="log4"), "min_numel": 1024},
    "local 0.99 for Adam": _section(0.99, feedback="local"),
    "the default": {"min_numel": 1024},
    "the default at 0.9": {"min_numel": 1024, "sparsity": 0.9},
    "0.99, updates 0.97": _section(0.99, parameters={"sparsity": 0.97}),
    "0.99, updates 0.97, not displaced by them": _section(
        0.99, parameters={"sparsity": 0.97}, displaced_by_updates=False
    ),
    "0.98 int4, updates 0.93 int4": _section(
        0.98, value_dtype="int4", parameters={"sparsity": 0.93, "value_dtype": "int4"}
    ),
    "0.96 int4, updates 0.90 int4": _section(
        0.96, value_dtype="int4", parameters={"sparsity": 0.90, "value_dtype": "int4"}
    ),
    "0.96 int4, updates 0.90 int4, not displaced by them": _section(
        0.96,
        value_dtype="int4",
        parameters={"sparsity": 0.90, "value_dtype": "int4"},
        displaced_by_updates=False,
    ),
    "0.99, weighted": _section(0.99, weighted=0.5),
    "0.98 int4, weighted": _section(0.98, value_dtype="int4", weighted=0.5),
    "0.98 int4, weighted fully": _section(0.98, value_dtype="int4", weighted=1.0),
    "0.97/0.93 int4, weighted": _section(0.97, 0.93, value_dtype="int4", weighted=0.5),
    "local 0.99": _local(0.99),
    "local 0.99 direct": _local(0.99, exchange="direct"),
    "local 0.98 int4": _local(0.98, value_dtype="int4"),
}


class Rank:
    """A rank: a replica of the model, its optimizer, and what exchanges gradients and weights.

    Args:
        model: Replica of the model.
        section: Settings of the exchange.
        per_node: So many consecutive ranks are one compressor together.
        task: Has the optimizer.
        steps: Number of steps of the run, on which the default start depends.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        section: Mapping[str, Any],
        per_node: int = 1,
        task: Task | type[Gpt] = Gpt,
        steps: int | None = None,
    ) -> None:
        self.model, self.named = model, dict(model.named_parameters())
        self.section, self._clip_to = dict(section), task.clip
        self._power, self._factors = self.section.pop("weighted", 0.0), dict[str, Tensor]()
        displaced_by_updates = self.section.pop("displaced_by_updates", True)
        steps_of_own = self.section.pop("steps_of_own", False)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        config = DataParallelConfig.of(self.section)
        if "feedback" not in section:
            training = Training(["AdamW"], ranks=self.count, steps=steps)
            config = resolve(config, training, self.count // per_node).settings
        nodes = None if per_node == 1 else nodes_of(self.rank, self.count, per_node)
        self.metrics = Metrics(MetricsConfig(every=10**9), rank=self.rank, world_size=self.count)
        self.reducer = GradientReducer(config, nodes, metrics=self.metrics)
        if self.reducer.group.node is not None:
            with one_process.apart():
                _ = self.reducer.group.exchange.peers.group, self.reducer.group.node.exchange.peers.group
        self.updates = None
        if config.parameters is not None:
            self.updates = ParameterUpdates(config, nodes, metrics=self.metrics)
        self.shards = dict(self._shards())
        self.masters = self.named if self.updates is None else dict(self._masters())
        self.optimizer = task.optimizer(self.masters.values())
        self.ahead: StepAhead | None = None
        if config.feedback.looks_ahead:
            units = units_of(self.optimizer, groups=[list(self.named.values())])
            pending = {}
            if self.updates is not None and displaced_by_updates:
                pending["pending_of"] = self.updates.pending_of
            if steps_of_own:
                self.reducer.add_ons.step_ahead._has_many_ranks = False
            self.ahead = self.reducer.add_ons.step_ahead.prepare(self.named.items(), units, **pending)
            self.ahead.attach(model)

    def _shards(self) -> Iterator[tuple[str, list[Shard]]]:
        """Yield the owners of each parameter's parts, as ZeRO has them."""
        each, start = -(-sum(p.numel() for p in self.named.values()) // self.count), 0
        for name, parameter in self.named.items():
            yield name, shards_in(start, parameter.numel(), each)
            start += parameter.numel()

    def _masters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the master weights of the parts that this rank owns."""
        for name, parameter in self.named.items():
            for part in self._part(name, parameter.detach().view(-1), self.rank):
                yield name, torch.nn.Parameter(part.clone())

    def _part(self, name: str, tensor: Tensor, owner: int) -> list[Tensor]:
        """Return the part of a tensor that a rank owns, or none."""
        return [tensor[s.start : s.stop] for s in self.shards[name] if s.owner == owner]

    def step(self, loss: Loss, lr: float) -> None:
        """One optimizer step on this rank's loss; a collective."""
        self.optimizer.param_groups[0]["lr"] = lr
        loss(self.model).backward()
        if self.ahead is not None:
            self.ahead.restore()
        entries = [(name, p.grad.view(-1)) for name, p in self.named.items() if p.grad is not None]
        if self._power and self.reducer.group.step == COMMON["warmup_steps"]:
            self._factors = {name: self._factor(parameter) for name, parameter in self.named.items()}
        for name in self._factors:
            self.named[name].grad.mul_(self._factors[name])
        if self.updates is None:
            self.reducer.all_reduce(entries, scale=1.0 / self.count)
        else:
            owned = [(name, gradient, self.shards[name]) for name, gradient in entries]
            self.reducer.reduce_scatter(owned, scale=1.0 / self.count)
            gradients = dict(entries)
            for name, master in self.masters.items():
                (master.grad,) = self._part(name, gradients[name], self.rank)
        for name in self._factors:
            self.named[name].grad.div_(self._factors[name])
        if self._clip_to < math.inf:
            self._clip()
        self.optimizer.step()
        if self.updates is not None:
            self._update(self.updates)
        self.model.zero_grad()
        if self.ahead is not None:
            self.ahead.forget()
        self.reducer.end_step()
        self.metrics.step(self.reducer.group.step)

    def _factor(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return the factors by which the entries of a gradient are weighted against each other.

        Adam answers an entry g by a step of lr * g / sqrt(v), for which the loss falls by g^2 / sqrt(v), to
        first order. To send what lets it fall most is to compare |g| / v^(1/4), a power of 1/2. A power of 1
        compares steps. ``v`` is that at the end of the dense steps, as row and column means.
        """
        v = self.optimizer.state[parameter]["exp_avg_sq"].double()
        v = v.mean(1, keepdim=True) * v.mean(0, keepdim=True)
        factor = (v / v.mean()).clamp(min=1e-6).pow(-0.5 * self._power)
        return (factor / factor.mean()).clamp(0.05, 20.0).float()

    def _clip(self) -> None:
        gradients = [master.grad for master in self.masters.values()]
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if self.updates is not None:
            dist.all_reduce(square)
        factor = float(self._clip_to / (square.sqrt() + 1e-6))
        if factor < 1.0:
            torch._foreach_mul_(gradients, factor)

    def gather_weights(self) -> None:
        """Bring all working weights to the masters, in full; a collective."""
        everyone = one_process.gather(
            {name: master.detach().clone() for name, master in self.masters.items()}
        )
        for owner, masters in enumerate(everyone):
            for name, master in masters.items():
                self._part(name, self.named[name].data.view(-1), owner)[0].copy_(master)

    @torch.no_grad()
    def _update(self, updates: ParameterUpdates) -> None:
        """Bring the working weights to the masters: all of them, or those that pass a threshold."""
        if updates.full(torch.float32):
            self.gather_weights()
            updates.record_full(sum(parameter.numel() for parameter in self.named.values()), 4)
        else:
            entries = [(name, p.data.view(-1), self.shards[name]) for name, p in self.named.items()]
            updates.update(entries, lambda name: self.masters[name].data)
        updates.end_step()


def nodes_of(rank: int, count: int, per_node: int) -> Nodes:
    """Return nodes of consecutive ranks."""
    ranks = range(count)
    return Nodes(tuple(tuple(ranks[first : first + per_node]) for first in ranks[::per_node]), rank)


def train(rank: int, run: Run, model: torch.nn.Module, task: Task) -> dict[str, Any]:
    """Train one rank, and return the figures of all; a collective."""
    section = SETTINGS[run.setting]
    worker = Rank(copy.deepcopy(model), DENSE if section is None else section, run.per_node, task, run.steps)
    for loss, rate in task.losses(run, rank, worker.count):
        worker.step(loss, rate)
    figures: dict[str, Any] = {}
    if worker.ahead is not None:
        worker.ahead.detach()
        figures["agreement"] = worker.ahead.coefficients.agreement()
    if worker.updates is not None:
        figures["loss_of_working_weights"] = task.score(worker.model) if rank == 0 else 0
        worker.gather_weights()
    weights = torch.cat([parameter.detach().view(-1) for parameter in worker.named.values()])
    figures["ranks_identical"] = all(torch.equal(weights, other) for other in one_process.gather(weights))
    summary = worker.metrics.summary()
    sent = one_process.gather({**steady_bytes(summary), "whole_run": float(summary.sent_bytes)})
    if rank == 0:
        figures["loss"] = task.score(worker.model)
        config = worker.reducer.config
        start = config.dense_steps + config.ramp_steps
        steps = run.steps - min(run.steps, start)
        for what in sent[0]:
            count = run.steps if what == "whole_run" else max(steps, 1)
            figures[what] = sum(each[what] for each in sent) / len(sent) / count
    return figures


def steady_bytes(summary: Summary) -> dict[str, float]:
    """Return the bytes that a rank sent after the start, and those of a dense ring."""
    parts = summary.steady_classes.values()
    return {
        "sent": float(sum(part.sent_bytes for part in parts)),
        "dense": float(sum(part.dense_bytes for part in parts)),
    }


def missing(runs: Iterable[Run], results: Path) -> Iterator[Run]:
    """Yield the runs that have no result."""
    done = {run_of(row) for row in rows_of(results)}
    yield from (run for run in runs if run not in done)


def rows_of(results: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def run_of(row: Mapping[str, Any]) -> Run:
    """Return the run that a result is of."""
    return Run(**{name: row[name] for name in Run._fields})


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: differences to the dense run of the seed with their interval, and bytes."""
    dense = {row["seed"]: row["loss"] for row in rows if row["setting"] == "dense"}
    lines = [
        "| compressors: setting | - dense (95 %) | by seed | kB a step | fewer | in the whole run |",
        "|---|--:|---|--:|--:|--:|",
    ]
    groups: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["setting"] != "dense" and row["seed"] in dense:
            key = row["ranks"] // row["per_node"], row["per_node"], row["setting"]
            groups.setdefault(key, []).append(row)
    for (compressors, per_node, setting), those in sorted(groups.items()):
        differences = [row["loss"] - dense[row["seed"]] for row in those]
        sent, whole = (sum(row[what] for row in those) for what in ("sent", "dense"))
        name = f"{compressors}: {setting}" + (f", nodes of {per_node}" if per_node > 1 else "")
        by_seed = ", ".join(f"{difference:+.4f}" for difference in differences)
        fewer = f"{sent / len(those) / 1e3:.1f} | {whole / sent:.1f}x" if sent else " | "
        run = sum(row.get("whole_run", 0.0) for row in those)
        in_run = f"{whole / run:.1f}x" if run else ""
        lines.append(f"| {name} | {paired(differences)} | {by_seed} | {fewer} | {in_run} |")
    return "\n".join(lines)


def main() -> None:
    """Train what has no result yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["gpt", "dlrm", "digits"], default="gpt")
    parser.add_argument("--text", type=Path, nargs="+", help="of the GPT: files, plain or gzip, or folders")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the GPT")
    parser.add_argument("--pretrained", type=Path, help="text on which the GPT is trained before")
    parser.add_argument("--lr", type=float, default=LR, help="highest learning rate of the GPT")
    parser.add_argument("--clip", type=float, default=math.inf, help="norm of the gradients of the digits")
    parser.add_argument("--sources", type=int, default=1, help="ranges of rows of the DLRM")
    parser.add_argument("--by", choices=["row", "age"], default="row", help="order of these ranges")
    parser.add_argument("--compressors", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--per-node", type=int, default=1, help="ranks of a compressor")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=["0.99"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, help="1,200 (GPT), three epochs (DLRM), 1,320 (digits) if left out"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines of every run")
    args = parser.parse_args()
    if args.model == "gpt" and args.text is None:
        parser.error("--model gpt needs --text")
    torch.set_num_threads(1)
    task = task_of(args)
    model_name, steps = name_of(args), args.steps or task.steps
    for seed in args.seeds:
        runs = [Run(model_name, "dense", 1, 1, seed, steps)]
        for setting, compressors in itertools.product(args.settings, args.compressors):
            ranks = compressors * args.per_node
            runs.append(Run(model_name, setting, ranks, args.per_node, seed, steps))
        for run in missing(runs, args.results):
            began, model = time.process_time(), task.model(seed)
            figures = one_process.run(run.ranks, partial(train, run=run, model=model, task=task))[0]
            result = {**run._asdict(), **figures, "seconds": time.process_time() - began}
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    rows = rows_of(args.results)
    print(table([row for row in rows if (row["model"], row["steps"]) == (model_name, steps)]))


def task_of(args: argparse.Namespace) -> Task:
    """Return the task that the command names."""
    if args.model == "dlrm":
        return Recommender(args.sources, args.by)
    if args.model == "digits":
        return Digits(args.clip)
    before = None if args.pretrained is None else partial(trained, args.pretrained, args.width)
    return Gpt(args.text, args.width, args.lr, before, args.pretrained)


def name_of(args: argparse.Namespace) -> str:
    """Return the task's name in the results."""
    parts = [args.model]
    if args.width != WIDTH:
        parts.append(f"width {args.width}")
    if args.text is not None and len(args.text) > 1:
        parts.append(f"{len(args.text)} texts")
    if args.pretrained is not None:
        parts.append(f"fine-tuned at {args.lr:g}")
    if args.clip < math.inf:
        parts.append(f"clipped to {args.clip:g}")
    if args.sources > 1:
        parts.append(f"{args.sources} ranges by {args.by}")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
