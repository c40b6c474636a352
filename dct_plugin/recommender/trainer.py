"""Train recommenders under DeepSpeed: every configuration under every seed, in one launch.

    torchrun --nproc-per-node 2 -m dct_plugin.recommender.trainer dense.json dct.json --epochs 2

A configuration is a DeepSpeed JSON, with a ``dlrm`` section that says what is trained (:mod:`.settings`) and,
if anything is to be compressed, a ``dct`` section. Seed after seed is trained under all configurations, so
that they are paired from the first seed on. Rank 0 appends one JSON object per line to ``--events``:
``start``, ``initialize`` and ``run`` (before and after an engine is made for one configuration under one
seed), ``step`` for every optimizer step, ``evaluate``, ``epoch`` (AUC and log loss on the test part),
``trained`` (bytes and times of the run) and ``result``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_plugin.config import DCTConfig, MetricsConfig
from dct_plugin.errors import DCTError
from dct_plugin.host_traffic import own_traffic
from dct_plugin.metrics import Metrics
from dct_plugin.metrics.network_counters import InterfaceCounter

from .data import MIN_COUNT, ClickDataset, Columns, DataFormatError, Rows, check_parts, epoch_batches, load
from .engine import make_engine
from .runner import run_name, saved_run

Report = Callable[..., None]  # takes the name of an event, and its fields as keywords


def main() -> None:
    arguments = parse_arguments()
    configs = {run_name(file): json.loads(file.read_text("utf-8")) for file in arguments.configs}
    # A rank that died must not keep the others waiting for the default of half an hour.
    deepspeed.init_distributed(timeout=timedelta(minutes=5))
    report = reporter(arguments.events if dist.get_rank() == 0 else None)
    try:
        _train_all(arguments, configs, report)
    except (DCTError, FileNotFoundError) as error:
        report("fault", text=str(error))  # the launcher's one line; the traceback is in this rank's output
        raise
    report("result")
    dist.barrier()  # a rank that tears down its connections while others still use them can abort them
    dist.destroy_process_group()


def _train_all(arguments: argparse.Namespace, configs: Mapping[str, Any], report: Report) -> None:
    clicks = load(
        arguments.format,
        arguments.data,
        seed=arguments.split_seed,
        max_rows=arguments.max_rows,
        columns=None if arguments.columns is None else Columns(**json.loads(arguments.columns)),
        min_count=arguments.min_count,
    )
    check_parts(clicks)
    steps = sum(clicks.num_train // global_batch(config, clicks) for config in configs.values())
    report(
        "start",
        data=clicks.name,
        rows=len(clicks),
        training_rows=clicks.num_train,
        fields=len(clicks.cardinalities),
        table_rows=sum(clicks.cardinalities),
        roles=[*clicks.roles, *clicks.facts()],
        rarer=int(min(clicks.test.label.sum(), (1 - clicks.test.label).sum())),
        ranks=dist.get_world_size(),
        runs=len(arguments.seeds) * len(configs),
        steps=len(arguments.seeds) * arguments.epochs * steps,
    )
    for seed in arguments.seeds:
        for name, config in configs.items():
            report("initialize", config=name, seed=seed)
            training = Training(name, config, clicks, seed=seed, epochs=arguments.epochs, report=report)
            if arguments.resume is not None:
                training.resume(saved_run(arguments.resume, name, seed))
            training.train(arguments.interface)
            if arguments.save is not None:
                training.save(saved_run(arguments.save, name, seed))
            training.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train recommenders with DeepSpeed.")
    parser.add_argument(
        "configs", nargs="+", type=Path, help="DeepSpeed JSON files; runs are named after them"
    )
    parser.add_argument("--format", default="diabetes", help="diabetes, criteo or table")
    parser.add_argument("--columns", help="of a table, as JSON: label, dense, categorical")
    parser.add_argument("--data", help="file to read; without it the data set that ships with the package")
    parser.add_argument("--max-rows", type=int, help="read the first rows only")
    parser.add_argument("--min-count", type=int, default=MIN_COUNT, help="rarer values become id 0")
    parser.add_argument("--split-seed", type=int, default=0, help="of the test part of diabetes")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of initial weights and batches")
    parser.add_argument("--save", help="folder to save each run in")
    parser.add_argument("--resume", help="folder of saved runs, which go on")
    parser.add_argument("--events", help="JSON lines file that rank 0 writes")
    parser.add_argument("--interface", help="network interface whose bytes are counted; all if left out")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return parser.parse_args()


def reporter(path: str | None) -> Report:
    """A function that appends an event and its fields to the JSON lines file ``path``, or does nothing."""
    if path is None:
        return lambda event, **fields: None
    file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - open until the process ends

    def report(event: str, **fields: Any) -> None:
        file.write(json.dumps({"event": event, **fields}) + "\n")

    return report


def global_batch(config: Mapping[str, Any], clicks: ClickDataset) -> int:
    """Samples of one optimizer step, all ranks together.

    Raises:
        DataFormatError: There are fewer training rows.
    """
    size = config.get("train_batch_size")
    if size is None:
        accumulation = config.get("gradient_accumulation_steps", 1)
        size = dist.get_world_size() * config["train_micro_batch_size_per_gpu"] * accumulation
    if size > clicks.num_train:
        raise DataFormatError(f"a batch of {size} samples is more than the {clicks.num_train} training rows")
    return size


def metrics_of(config: Mapping[str, Any]) -> MetricsConfig:
    """Make the metrics of the tables; they write files unless the engine's attachment does."""
    section = config.get("dct")
    dct = DCTConfig.parse({} if section is None else section)
    return MetricsConfig() if dct.enabled and dct.data_parallel.enabled else dct.metrics


class Training:
    """One configuration under one seed.

    Args:
        name: Of the configuration.
        config: DeepSpeed JSON with a ``dct`` and a ``dlrm`` section.
        clicks: Data.
        seed: Of the initial weights and the batches.
        epochs: Passes over the training part.
        report: Takes an event and its fields.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        clicks: ClickDataset,
        *,
        seed: int,
        epochs: int,
        report: Report,
    ) -> None:
        self.name, self.clicks, self.seed, self.epochs, self.report = name, clicks, seed, epochs, report
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.metrics = Metrics(metrics_of(config), rank=self.rank, world_size=self.world_size)
        self.step_ms: list[float] = []
        self.engine, self.choices, self.notes = make_engine(
            name, config, clicks, seed=seed, metrics=self.metrics
        )
        self.shape = (
            self.engine.gradient_accumulation_steps(),
            self.world_size,
            self.engine.train_micro_batch_size_per_gpu(),
        )
        self.batch_size = math.prod(self.shape)
        self.steps = epochs * (clicks.num_train // self.batch_size)
        self.first_epoch = 0

    def save(self, folder: Path) -> None:
        """Save the run as a checkpoint of DeepSpeed; a collective."""
        self.engine.save_checkpoint(str(folder), client_state={"epochs": self.first_epoch + self.epochs})
        if self.rank == 0:
            (folder / "data.json").write_text(json.dumps(self._data()))

    def _data(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the saved one."""
        clicks = self.clicks
        return {
            "ranks": self.world_size,
            "training rows": clicks.num_train,
            "dense columns": list(clicks.dense_names),
            "rows of the tables": dict(zip(clicks.categorical_names, clicks.cardinalities, strict=True)),
            "digest of the training part": clicks.digest(),
        }

    def resume(self, folder: Path) -> None:
        """Go on with a saved run, with the epoch after its last one; a collective.

        Raises:
            DataFormatError: There is no checkpoint, or it is of other data or another number of ranks.
        """
        file = folder / "data.json"
        if not file.is_file():
            raise DataFormatError(f"{folder}: expected a run that --save wrote: there is no {file.name}")
        saved = json.loads(file.read_text())
        for key, mine in self._data().items():
            if saved[key] != mine:
                raise DataFormatError(
                    f"{folder}: the saved run is of other data or ranks: its {key}: {str(saved[key])[:200]}; "
                    f"here: {str(mine)[:200]}. Ids are numbered by the data: resume with the same data, "
                    "--max-rows, --min-count and columns, or train anew"
                )
        path, state = self.engine.load_checkpoint(str(folder))
        if path is None:
            raise DataFormatError(f"{folder}: expected a checkpoint of DeepSpeed, got none")
        self.first_epoch = state["epochs"]

    def train(self, interface: str | None) -> None:
        """Train all epochs, each followed by an evaluation, and report on the way."""
        engine = self.engine
        weights = list(engine.module.parameters())
        replicated = [p for p in weights if getattr(p, "allreduce", True)]
        shared, total = (sum(p.numel() for p in some) for some in (replicated, weights))
        self.report(
            "run",
            config=self.name,
            seed=self.seed,
            steps=self.steps,
            batch_size=self.batch_size,
            exchange=[*map(str, self.choices), *self.notes],
            parameters=[shared, total - shared],
        )
        counter = InterfaceCounter([interface] if interface else None)
        on_wire, seconds = 0, 0.0
        to_tensors = tensors_of(self.clicks.train, engine)
        for epoch in range(self.first_epoch, self.first_epoch + self.epochs):
            dist.barrier()
            counter.start()
            begin = time.perf_counter()
            for batch in epoch_batches(self.clicks.num_train, self.batch_size, seed=self.seed, epoch=epoch):
                started = time.perf_counter()
                loss = self.step(batch, to_tensors)
                self.metrics.step(len(self.step_ms) + 1)
                self.step_ms.append(1e3 * (time.perf_counter() - started))
                self.report("step", step=len(self.step_ms), loss=loss, ms=round(self.step_ms[-1], 3))
            dist.barrier()
            seconds += time.perf_counter() - begin
            on_wire += counter.stop().tx
            self.report("evaluate")
            with unrecorded(engine.module, self.metrics):
                probability = self.predict(self.clicks.test)
            if self.rank == 0:
                from sklearn.metrics import log_loss, roc_auc_score  # a second in every other rank

                label = self.clicks.test.label
                self.report(
                    "epoch",
                    config=self.name,
                    seed=self.seed,
                    epoch=epoch,
                    auc=float(roc_auc_score(label, probability)),
                    log_loss=float(log_loss(label, probability.clip(1e-7, 1 - 1e-7))),
                )
        self.report(
            "trained",
            config=self.name,
            seed=self.seed,
            step_ms=statistics.median(self.step_ms),
            seconds=seconds,
            interface_bytes=self._all_bytes(on_wire, interface) / self.steps,
            bytes=bytes_per_step(engine, self.metrics, self.steps),
            ranks_in_step=same_on_all_ranks(replicated, engine.device),
        )

    def _all_bytes(self, mine: int, interface: str | None) -> float:
        """Bytes of all ranks: on one machine they share the loopback interface. A collective."""
        if interface == "lo":
            return mine
        return float(sum(gathered(torch.tensor([mine], device=self.engine.device))))

    def step(self, batch: np.ndarray, to_tensors: Callable[[Any], tuple[Tensor, Tensor, Tensor]]) -> float:
        """One optimizer step on the rows of a global batch; returns this rank's loss."""
        losses = []
        for part in batch.reshape(self.shape)[:, self.rank]:
            dense, categorical, label = to_tensors(part)
            loss = binary_cross_entropy_with_logits(self.engine(dense, categorical).float(), label)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())
        return statistics.fmean(losses)

    @torch.no_grad()
    def predict(self, rows: Rows, batch: int = 2048) -> np.ndarray:
        """Probability of label 1 for every row, float32 [rows], on every rank: each one evaluates its
        share.
        """
        self.engine.eval()
        to_tensors = tensors_of(rows, self.engine)
        count = len(rows.label)
        share = math.ceil(count / self.world_size)
        # Ranks evaluate equally many rows, since every batch is exchanged; the last ones more than once.
        mine = np.arange(self.rank * share, (self.rank + 1) * share).clip(max=count - 1)
        parts = []
        for start in range(0, share, batch):
            dense, categorical, _ = to_tensors(mine[start : start + batch])
            parts.append(self.engine(dense, categorical).float().sigmoid())
        self.engine.train()
        return torch.cat(gathered(torch.cat(parts)))[:count].cpu().numpy()

    def close(self) -> None:
        """Free the engine before the next run."""
        self.engine.destroy()
        self.metrics.close()
        del self.engine
        gc.collect()


def tensors_of(rows: Rows, engine: Any) -> Callable[[Any], tuple[Tensor, Tensor, Tensor]]:
    """A function from row numbers (or a slice) to (dense, categorical, label) on the engine's device."""
    dtype = next(engine.module.parameters()).dtype

    def to_tensors(at: Any) -> tuple[Tensor, Tensor, Tensor]:
        dense, categorical, label = (torch.from_numpy(column[at]).to(engine.device) for column in rows)
        return dense.to(dtype), categorical, label

    return to_tensors


# -- measurements ---


@contextmanager
def unrecorded(model: nn.Module, metrics: Metrics) -> Iterator[None]:
    """Inside, nothing that is sent is counted: bytes of an evaluation are not those of training."""
    modules: list[Any] = [m for m in model.modules() if getattr(m, "metrics", None) is metrics]
    for module in modules:
        module.metrics = None
    try:
        with own_traffic():
            yield
    finally:
        for module in modules:
            module.metrics = metrics


def bytes_per_step(engine: Any, metrics: Metrics, steps: int) -> dict[str, dict[str, float]]:
    """``{class: {dense, sent}}`` bytes per optimizer step, all ranks together. A collective.

    Args:
        engine: After training.
        metrics: Of its sharded tables.
        steps: Optimizer steps that it did.
    """
    attached = engine.__dict__.get("dct")
    sources = [metrics] if attached is None else [metrics, attached.metrics]
    mine = [
        (name, summary.dense_bytes, summary.sent_bytes)
        for source in sources
        for name, summary in source.summary().classes.items()
    ]
    shared = sum(p.numel() for p in engine.module.parameters() if getattr(p, "allreduce", True))
    ranks = dist.get_world_size()
    ring = steps * 2 * (ranks - 1) / ranks * 4 * shared  # a ring all-reduce in fp32
    if attached is None:
        mine.append(("gradient", ring, ring))
    dense_gather = attached is None or attached.config.data_parallel.parameters is None
    if engine.zero_optimization_stage() > 0 and dense_gather:
        # DeepSpeed's own gather of updated weights: half of what an all-reduce of as many sends.
        mine.append(("parameter_full", ring / 2, ring / 2))
    everyones: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(everyones, mine)
    found: dict[str, dict[str, float]] = {}
    for name, *amounts in sorted(itertools.chain.from_iterable(everyones)):
        total = found.setdefault(name, {"dense": 0.0, "sent": 0.0})
        for kind, amount in zip(total, amounts, strict=True):
            total[kind] += amount
    return {name: {kind: sent / steps for kind, sent in total.items()} for name, total in found.items()}


def same_on_all_ranks(parameters: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether these are bitwise the same on all ranks."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.int64, device=device)
    return all(torch.equal(mine, other) for other in gathered(mine))


def gathered(tensor: Tensor) -> list[Tensor]:
    """Gather the tensors of all ranks, which have one shape and dtype."""
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return everyones


if __name__ == "__main__":
    main()
