"""Validation loss and bytes of a character-level GPT in DeepSpeed: pipeline stages, experts on two ranks.

Two ranks on the CPU (gloo), dense and with ``dct.model_parallel``; gradients of replicas are DeepSpeed's. The
bytes are what the loopback interface carried in the last steps of a run, both directions, headers and
everything else included: of a whole step of the pipeline, and of a micro-batch of the experts, in which no
gradients are averaged. In a network namespace of its own there is nothing else on it:

    unshare -n sh -c 'ip link set lo up; python benchmarks/studies/deepspeed_activations.py --text input.txt'
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT, WIDTH, BLOCKS, BATCH, MICRO = 32, 64, 4, 8, 4
#: Name -> section of ``dct.model_parallel``; None: without the plugin.
PIPELINE: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "sparsity 0.9": {"forward": {"method": "threshold", "sparsity": 0.9}},
    "sparsity 0.9, int8 values": {
        "forward": {"method": "threshold", "sparsity": 0.9, "value_dtype": "int8"},
        "backward": {"method": "answer", "value_dtype": "int8"},
    },
    "sparsity 0.99": {"forward": {"method": "threshold", "sparsity": 0.99}},
    "quantise, 4 bits": {"forward": {"method": "quantise", "bits": 4}},
    "transform, 1.42 bits": {"forward": "transform"},
}
EXPERTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "quantise, 8 bits": {"forward": {"method": "quantise", "bits": 8}},
    "quantise, 4 bits": {"forward": {"method": "quantise", "bits": 4}},
    "bound 0.05": {"forward": {"method": "bound", "error_bound": 0.05}},
    "bound 0.3": {"forward": {"method": "bound", "error_bound": 0.3}},
    "sparsity 0.9": {"forward": {"method": "threshold", "sparsity": 0.9}},
    "sparsity 0.99": {"forward": {"method": "threshold", "sparsity": 0.99}},
}


class Block(nn.Module):
    """Causal attention and a perceptron, or experts: two on each of two ranks."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))
        self.experts: Any = experts
        inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        if experts:
            from deepspeed.moe.layer import MoE

            self.inner: Any = MoE(WIDTH, inner, num_experts=4, ep_size=2, k=1, capacity_factor=1.25)
        else:
            self.inner = inner
        self.loss: Tensor | float = 0.0

    def forward(self, h: Tensor) -> Tensor:
        x = self.norms[0](h)
        h = h + self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        out = self.inner(self.norms[1](h))
        if self.experts:
            out, self.loss, _ = out
        return h + out


class Embed(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids.long()) + self.places.weight


class Head(nn.Sequential):
    def __init__(self, vocabulary: int) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))


class Batches:
    """Pairs of text and the text one further, at random places that depend on seed and number alone."""

    def __init__(self, text: Path) -> None:
        data = gzip.decompress(text.read_bytes()) if text.suffix == ".gz" else text.read_bytes()
        ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        known, self.ids = ids.unique(return_inverse=True)
        self.vocabulary = len(known)
        self.cut = int(0.9 * len(ids))

    def micro(self, number: int, seed: int, *, training: bool) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        low, high = (0, self.cut) if training else (self.cut, len(self.ids))
        starts = torch.randint(low, high - CONTEXT - 1, (BATCH,), generator=generator)
        window = self.ids[starts[:, None] + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, 1:]

    def stream(self, first: int, seed: int, *, training: bool) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.micro(first, seed, training=training)
            first += 1


def cross_entropy(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.float().flatten(0, 1), labels.flatten())


def train_pipeline(config: dict[str, Any], data: Batches, seed: int, args: argparse.Namespace) -> Any:
    """(validation loss, bytes per step)."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [
        LayerSpec(Embed, data.vocabulary),
        *[LayerSpec(Block) for _ in range(BLOCKS)],
        LayerSpec(Head, data.vocabulary),
    ]
    model = PipelineModule(
        layers,
        num_stages=2,
        loss_fn=cross_entropy,
        partition_method="uniform",
        seed_layers=True,
        base_seed=1234 + 100 * seed,
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    batches = data.stream(0, seed, training=True)
    counted = _Counted(args)
    for step in range(args.steps):
        with counted.during(step):
            engine.train_batch(batches)
    validation = data.stream(0, 10**6, training=False)
    losses = [float(engine.eval_batch(validation)) for _ in range(args.validation // MICRO)]
    engine.destroy()
    return statistics.fmean(losses), counted.per_step()


def train_experts(config: dict[str, Any], data: Batches, seed: int, args: argparse.Namespace) -> Any:
    """(validation loss, bytes of tokens and their gradients per micro-batch)."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    torch.manual_seed(1234 + 100 * seed + dist.get_rank())
    blocks = [Block(experts=bool(i % 2)) for i in range(BLOCKS)]
    model = nn.Sequential(Embed(data.vocabulary), *blocks, Head(data.vocabulary))
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    rank, counted = dist.get_rank(), _Counted(args)
    for step in range(args.steps):
        for micro in range(MICRO // 2):  # the other half is the other rank's
            x, y = data.micro(step * MICRO + 2 * micro + rank, seed, training=True)
            # Tokens alone: gradients are reduced in the last micro-batch.
            with counted.during(step) if micro == 0 else nullcontext():
                loss = cross_entropy(engine(x), y) + 0.01 * sum(block.loss for block in blocks)
                engine.backward(loss)
            engine.step()
    total = torch.zeros(())
    engine.eval()
    with torch.no_grad():
        for number in range(rank, args.validation, 2):
            x, y = data.micro(number, 10**6, training=False)
            total += cross_entropy(engine(x), y) / args.validation
    dist.all_reduce(total)
    engine.destroy()
    return float(total), counted.per_step()


class _Counted:
    """Bytes on the loopback interface, in the last ``args.counted`` steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.sent = args, 0

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Around a part of a step."""
        import torch.distributed as dist

        from dct_plugin.metrics.network_counters import InterfaceCounter

        if step < self.args.steps - self.args.counted:
            yield
            return
        counter = InterfaceCounter(["lo"])
        dist.barrier()
        counter.start()
        yield
        dist.barrier()
        counter.stop()
        self.sent += counter.tx

    def per_step(self) -> float:
        return self.sent / self.args.counted


def worker(args: argparse.Namespace) -> None:
    """One rank: every setting and seed, in this process."""
    import deepspeed
    import torch.distributed as dist

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    data, results = Batches(args.text), []
    for part, settings, train in (
        ("pipeline", PIPELINE, train_pipeline),
        ("experts", EXPERTS, train_experts),
    ):
        for name, section in settings.items() if part in args.parts else ():
            if args.settings and name not in args.settings:
                continue
            for seed in args.seeds:
                config: dict[str, Any] = {
                    "train_micro_batch_size_per_gpu": BATCH,
                    "gradient_accumulation_steps": MICRO if part == "pipeline" else MICRO // 2,
                    "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
                    "gradient_clipping": 1.0,
                    "steps_per_print": 10**9,
                }
                if section is not None:
                    config["dct"] = {
                        "data_parallel": {"enabled": False},
                        "model_parallel": {part: {**section, "warmup_steps": args.warmup}},
                    }
                loss, sent = train(config, data, seed, args)
                results.append({"part": part, "name": name, "seed": seed, "loss": loss, "bytes": sent})
                if dist.get_rank() == 0:
                    print(results[-1], flush=True)
                    args.result.write_text(json.dumps(results))


def report(results: list[dict[str, Any]]) -> None:
    """A Markdown table for each part."""
    from dct_plugin.recommender.intervals import paired

    for part in dict.fromkeys(result["part"] for result in results):
        runs: dict[str, list[dict[str, Any]]] = {}
        for result in results:
            if result["part"] == part:
                runs.setdefault(result["name"], []).append(result)
        dense = runs["dense"]
        print(f"\n| {part} | loss | against dense | kB | fewer |\n|---|---|---|---|---|")
        for name, own in runs.items():
            loss = statistics.fmean(run["loss"] for run in own)
            sent = statistics.fmean(run["bytes"] for run in own)
            first = statistics.fmean(run["bytes"] for run in dense)
            differences = [run["loss"] - other["loss"] for run, other in zip(own, dense, strict=True)]
            against = paired(differences) if own is not dense else ""
            print(f"| {name} | {loss:.3f} | {against} | {sent / 1e3:.1f} | {first / sent:.1f}x |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="a text, or a .gz of one")
    parser.add_argument("--parts", nargs="*", default=["pipeline", "experts"])
    parser.add_argument("--settings", nargs="*", help="names of the settings; all without it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20, help="dense steps")
    parser.add_argument("--counted", type=int, default=20, help="steps at the end whose bytes are counted")
    parser.add_argument("--validation", type=int, default=32, help="micro-batches")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--json", type=Path, nargs="*", help="report results that were kept, without training"
    )
    parser.add_argument("--result", type=Path, help="keep the results here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    if args.json:
        report([result for path in args.json for result in json.loads(path.read_text())])
        return
    with tempfile.TemporaryDirectory() as folder:
        result = args.result or Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, __file__, *sys.argv[1:], "--worker", "--result", str(result)]
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, env=environment, check=True)
        report(json.loads(result.read_text()))


if __name__ == "__main__":
    main()
