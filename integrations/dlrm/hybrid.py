"""The hybrid job: sharded tables and data-parallel MLPs under DeepSpeed, many configurations and seeds in
turn.

    torchrun --nproc-per-node 2 -m dct_plugin.integrations.dlrm.hybrid --job job.json --events events.jsonl

``dct dlrm`` writes the job and starts this. One launch trains every configuration under every seed, seed
after seed, so that configurations are paired from the first seed on. Rank 0 appends one JSON object per line
to ``--events``: ``start``, ``run`` (one configuration under one seed), ``step``, ``epoch`` (AUC and log loss
on the test part), ``trained`` (bytes and times of the run) and ``result``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_plugin.config import DCTConfig, EmbeddingChannelConfig, MetricsConfig
from dct_plugin.embedding.des import ColumnShards, FieldShards, Traffic
from dct_plugin.embedding.tables import ShardedTables, TableShard
from dct_plugin.metrics import InterfaceCounter, Metrics

from .data import ClickDataset, Rows, epoch_batches, load
from .experts import Experts
from .models import build
from .optimizers import HybridOptimizer, hybrid_groups
from .settings import MODEL_SECTION, model_settings
from .train import reporter, tensors_of

__all__ = ["main"]

#: ``dct.embedding`` of a run without a ``dct`` section.
PLAIN = {"enabled": False, "deduplicate": False}


def main() -> None:
    arguments = parse_arguments()
    with open(arguments.job, encoding="utf-8") as file:
        job = json.load(file)
    # A rank that died must not keep the others waiting for the default of half an hour.
    deepspeed.init_distributed(timeout=timedelta(minutes=5))
    report = reporter(arguments.events if dist.get_rank() == 0 else None)
    clicks = load(job["format"], job["data"], max_rows=job["max_rows"])
    batch_sizes = {name: global_batch(config, clicks) for name, config in job["configs"].items()}
    steps = {name: clicks.num_train // size for name, size in batch_sizes.items()}
    report(
        "start",
        data=clicks.name,
        rows=len(clicks),
        training_rows=clicks.num_train,
        fields=len(clicks.cardinalities),
        table_rows=sum(clicks.cardinalities),
        ranks=dist.get_world_size(),
        steps=len(job["seeds"]) * job["epochs"] * sum(steps.values()),
    )
    for seed in job["seeds"]:
        for name, config in job["configs"].items():
            run = Run(name, config, clicks, seed=seed, epochs=job["epochs"], report=report)
            run.train(arguments.interface)
            run.close()
    report("result")
    dist.barrier()  # a rank that tears down its connections while others still use them can abort them
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train recommenders with sharded tables; see `dct dlrm`.")
    parser.add_argument("--job", required=True, help="JSON file: data, configurations, seeds, epochs")
    parser.add_argument("--events", help="JSON lines file that rank 0 writes")
    parser.add_argument("--interface", help="network interface whose bytes are counted; all if left out")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return parser.parse_args()


def global_batch(config: Mapping[str, Any], clicks: ClickDataset) -> int:
    """Samples of one optimizer step, all ranks together."""
    accumulation = config.get("gradient_accumulation_steps", 1)
    if "train_batch_size" in config:
        size = config["train_batch_size"]
    else:
        size = dist.get_world_size() * config["train_micro_batch_size_per_gpu"] * accumulation
    if size > clicks.num_train:
        raise ValueError(f"a batch of {size} samples is more than the {clicks.num_train} training rows")
    return size


class Run:
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
        report: Callable[..., None],
    ) -> None:
        self.name, self.clicks, self.seed, self.epochs, self.report = name, clicks, seed, epochs, report
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        settings = model_settings(config, name)
        dct = config.get("dct")
        # Without a section nothing is compressed: a plain all-to-all of every vector.
        channel = DCTConfig.parse({"embedding": PLAIN} if dct is None else dct).embedding
        self.metrics = Metrics(MetricsConfig(), rank=self.rank, world_size=self.world_size)
        self.step_ms: list[float] = []

        def make_tables(cardinalities: Sequence[int], dim: int, table_seed: int, tables: str) -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(table_seed)
                return ShardedTables(
                    cardinalities,
                    dim,
                    config=channel,
                    sparse=settings.sparse_gradients,
                    average_gradients=False,  # DeepSpeed does that
                    name=tables,
                    metrics=self.metrics,
                )

        model, self.choices = build(
            settings.model,
            clicks.dense.shape[1],
            clicks.cardinalities,
            embedding_dim=settings.embedding_dim,
            seed=seed,
            exchange=settings.exchange,
            make_tables=make_tables,
            compression=settings.compression or 1.0,
            average_gradients=False,
            **settings.widths,
        )
        self.reasons = [str(choice) for choice in self.choices]
        if settings.exchange == "auto" and settings.compression is None and compresses(channel):
            self.reasons.append(
                "(N*K)/(T*m) counts uncompressed vectors, but the channel makes the all-to-all smaller: "
                f"measure how much with exchange = all_to_all and give it as {MODEL_SECTION}.compression"
            )
        self.model = model = Experts(model)
        content = {key: value for key, value in config.items() if key != MODEL_SECTION}
        if settings.table_optimizer is None:
            parameters: dict[str, Any] = {
                "model_parameters": [p for p in model.parameters() if p.requires_grad]
            }
        else:
            rest = content.pop("optimizer")
            parameters = {"optimizer": two_optimizers(model, settings.table_optimizer.model_dump(), rest)}
        self.engine, *_ = deepspeed.initialize(model=model, config=content, **parameters)
        self.batch_size = self.world_size * self.engine.train_micro_batch_size_per_gpu()
        self.batch_size *= self.engine.gradient_accumulation_steps()
        self.steps = epochs * (clicks.num_train // self.batch_size)

    def train(self, interface: str | None) -> None:
        """All epochs, each followed by an evaluation; reports as it goes."""
        self.report(
            "run",
            config=self.name,
            seed=self.seed,
            steps=self.steps,
            batch_size=self.batch_size,
            exchange=self.reasons,
            parameters=[count_parameters(self.model, expert) for expert in (False, True)],
        )
        counter = InterfaceCounter([interface] if interface else None)
        on_wire = 0
        to_tensors = tensors_of(self.clicks.train, self.engine)
        for epoch in range(self.epochs):
            dist.barrier()
            counter.start()
            self.engine.train()
            for batch in epoch_batches(self.clicks.num_train, self.batch_size, seed=self.seed, epoch=epoch):
                started = time.perf_counter()
                loss = self._step(batch, to_tensors)
                self.metrics.step(len(self.step_ms) + 1)
                self.step_ms.append(1e3 * (time.perf_counter() - started))
                self.report("step", loss=loss)
            dist.barrier()
            on_wire += counter.stop().tx
            with self._unrecorded():
                probability = self.predict(self.clicks.test)
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
            interface_bytes=on_wire / self.steps if counter.available else None,
            bytes=self.bytes_per_step(),
        )

    def _step(self, batch: np.ndarray, to_tensors: Callable[[Any], tuple[Tensor, Tensor, Tensor]]) -> float:
        """One optimizer step; returns this rank's loss."""
        engine = self.engine
        shape = engine.gradient_accumulation_steps(), self.world_size, engine.train_micro_batch_size_per_gpu()
        losses = []
        for part in batch.reshape(shape)[:, self.rank]:
            dense, categorical, label = to_tensors(part)
            loss = binary_cross_entropy_with_logits(engine(dense, categorical).float(), label)
            engine.backward(loss)
            engine.step()
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
        probability = torch.cat(parts)
        everyones = [torch.empty_like(probability) for _ in range(self.world_size)]
        dist.all_gather(everyones, probability)
        self.engine.train()
        return torch.cat(everyones)[:count].cpu().numpy()

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Bytes of an evaluation are not those of training."""
        modules = [m for m in self.model.modules() if getattr(m, "metrics", None) is self.metrics]
        shards = [
            (m, m.traffic) for m in self.model.modules() if isinstance(getattr(m, "traffic", None), Traffic)
        ]
        before = [(traffic, dict(vars(traffic))) for _, traffic in shards]
        for module in modules:
            module.metrics = None
        yield
        for module in modules:
            module.metrics = self.metrics
        for traffic, values in before:
            vars(traffic).update(values)

    def bytes_per_step(self) -> dict[str, dict[str, float]]:
        """``{class: {dense, sent}}`` bytes per optimizer step, all ranks together. A collective."""
        classes: dict[str, list[float]] = {}

        def add(name: str, dense: float, sent: float) -> None:
            total = classes.setdefault(name, [0.0, 0.0])
            total[0] += dense
            total[1] += sent

        for name, summary in self.metrics.summary().classes.items():
            add(name, summary.dense_bytes, summary.sent_bytes)
        for module in self.model.modules():
            traffic = getattr(module, "traffic", None)
            if isinstance(traffic, Traffic):
                add("des_forward", traffic.forward_bytes, traffic.forward_bytes)
                add("des_backward", traffic.backward_bytes, traffic.backward_bytes)
                add("embedding_ids", traffic.id_bytes, traffic.id_bytes)
        attached = self.engine.__dict__.get("dct")
        if attached is not None:
            for name, summary in attached.metrics.summary().classes.items():
                add(name, summary.dense_bytes, summary.sent_bytes)
        else:  # a ring all-reduce in fp32
            size = 2 * (self.world_size - 1) / self.world_size * 4 * count_parameters(self.model, False)
            add("gradient", size * self.steps, size * self.steps)
        everyones: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(everyones, classes)
        names = sorted({name for one in everyones for name in one})
        return {
            name: {
                kind: sum(one.get(name, (0.0, 0.0))[i] for one in everyones) / self.steps
                for i, kind in enumerate(("dense", "sent"))
            }
            for name in names
        }

    def close(self) -> None:
        """Free the engine before the next run."""
        self.engine.destroy()
        self.metrics.close()
        del self.engine, self.model
        gc.collect()


def two_optimizers(
    model: nn.Module, tables: Mapping[str, Any], rest: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """One optimizer of the method ``tables`` for embedding tables, and of DeepSpeed's ``rest`` for all
    else.
    """
    settings = {k: v for k, v in rest.get("params", {}).items() if k in ("lr", "betas", "eps")}
    method = {"method": rest["type"].lower(), **settings}
    of_tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, TableShard | FieldShards | ColumnShards)
    }
    made = []
    for group in hybrid_groups(model, tables=dict(tables), rest=method):
        # Shards of a layer's weight are experts to DeepSpeed as well, but no tables.
        table = [p for p in group["params"] if id(p) in of_tables]
        layer = [p for p in group["params"] if id(p) not in of_tables]
        made += [{**group, "params": table}] if table else []
        made += [{**group, **method, "params": layer}] if layer else []
    return HybridOptimizer(made)


def compresses(channel: EmbeddingChannelConfig) -> bool:
    """Whether fewer bytes cross than there are vectors."""
    lossy = channel.sparsity > 0 or channel.error_bound is not None or channel.gradient_bound is not None
    return channel.enabled and (channel.deduplicate or lossy)


def count_parameters(model: nn.Module, expert: bool) -> int:
    """Weights that are replicated, or (``expert``) held by this rank alone."""
    return sum(p.numel() for p in model.parameters() if getattr(p, "allreduce", True) is not expert)


if __name__ == "__main__":
    main()
