"""Measure the loss of thresholded gradients under Adam, with DeepSpeed's engine and a character-level GPT.

Starts local ranks that train the same small GPT (350,976 parameters) from the same weights on the same
batches, once for every setting and seed; the settings differ in the ``dct`` section of the JSON alone. AdamW
with weight decay, gradient clipping, learning-rate warm-up and cosine, for all settings alike. Held-out loss
in nats per character, paired with the dense run of the seed; bytes are what the loopback interface carried in
the second half of the run, and in all of it, all headers included.

    python benchmarks/studies/adam.py --text wikitext2_valid.txt.gz
    python benchmarks/studies/adam.py --text wikitext2_valid.txt.gz --ranks 4 --settings dense ahead-0.99

``--results`` keeps every run at once: the command can be stopped and given again, or with more seeds.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

SEQUENCE, BATCH, WIDTH, LAYERS, HEADS, SYMBOLS = 64, 8, 96, 3, 4, 95

#: Options that make runs comparable; with setting and seed they name one.
JOB = (
    "ranks",
    "per_node",
    "batch",
    "stage",
    "precision",
    "steps",
    "optimizer",
    "optimizer_params",
    "lr",
    "lr_warmup",
    "split",
)

Configure = Callable[[argparse.Namespace, str], dict[str, Any]]
#: From a model and what Configure made, what DeepSpeed calls an engine.
Initialize = Callable[[Any, dict[str, Any]], Any]

LOCAL, AHEAD = {"feedback": "local"}, {"feedback": "step_ahead"}
#: Dense steps and the rise of sparsity after them, for all settings but those that name others.
START = {"warmup_steps": 60, "sparsity_warmup_steps": 60}
SLOWER = {**START, "sparsity_warmup_steps": 180}
ACCORDION = {"adaptive": {"kind": "accordion", "sparsity": 0.9, "interval": 100}}


def _updates(sparsity: float, **more: Any) -> dict[str, Any]:
    """Thresholded updates of the weights besides; for ZeRO-1 and 2 (``--stage``)."""
    return {"parameters": {"sparsity": sparsity, **more}}


SETTINGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    # What follows from the optimizer and the number of ranks.
    "default": {"quality": None},  # the settings, whatever the link
    "default-copies-int8": {"quality": None, "parameters": "int8"},  # ZeRO-3
    "local-0.9": {"sparsity": 0.9, **LOCAL, **START},
    "local-0.99": {"sparsity": 0.99, **LOCAL, **START},
    "ahead-0.9": {"sparsity": 0.9, **AHEAD, **START},
    "ahead-0.97": {"sparsity": 0.97, **AHEAD, **START},
    "ahead-0.99": {"sparsity": 0.99, **AHEAD, **START},
    "ahead-0.99-ramp180": {"sparsity": 0.99, **AHEAD, **SLOWER},
    "ahead-0.99-ramp180-direct": {"sparsity": 0.99, **AHEAD, **SLOWER, "exchange": "direct"},
    **{
        f"ahead-0.99-ramp180-answers{factor}": {
            "sparsity": 0.99,
            **AHEAD,
            **SLOWER,
            "exchange": "two_phase",
            "expert": {"server_density": float(factor)},
        }
        for factor in (1, 2, 3)
    },
    "ahead-0.97-ramp180": {"sparsity": 0.97, **AHEAD, **SLOWER},
    "ahead-0.99-no-start": {"sparsity": 0.99, **AHEAD},
    "ahead-0.99-int8": {"sparsity": 0.99, **AHEAD, **START, "value_dtype": "int8"},
    **{
        f"ahead-0.99-ramp180-{kind}": {"sparsity": 0.99, **AHEAD, **SLOWER, "value_dtype": kind}
        for kind in ("int8", "int4", "int2")
    },
    "accordion-local": {"sparsity": 0.99, **LOCAL, **START, **ACCORDION},
    "accordion-ahead": {"sparsity": 0.99, **AHEAD, **START, **ACCORDION},
    **{
        f"ahead-0.99-ramp180-parameters-{share}": {"sparsity": 0.99, **AHEAD, **SLOWER, **_updates(share)}
        for share in (0.9, 0.95, 0.97, 0.99)
    },
    **{
        f"ahead-0.99-ramp180-parameters-{share}-{kind}": {
            "sparsity": 0.99,
            **AHEAD,
            **SLOWER,
            **_updates(share, value_dtype=kind),
        }
        for share in (0.9, 0.95, 0.97)
        for kind in ("int8", "int4")
    },
    **{
        f"dense{name}-parameters-{share}": {
            "sparsity": 0,
            "value_dtype": "fp32",
            **feedback,
            **SLOWER,
            **_updates(share),
        }
        for name, feedback in (("", LOCAL), ("-ahead", AHEAD))
        for share in (0.97, 0.99)
    },
    **{
        f"ahead-0.99-ramp180-residuals-{kind}": {"sparsity": 0.99, **AHEAD, **SLOWER, "residual_dtype": kind}
        for kind in ("bf16", "int8")
    },
    "ahead-0.99-coefficient1": {
        "sparsity": 0.99,
        **AHEAD,
        **START,
        "expert": {"step_ahead_coefficient": 1.0},
    },
}


def text_of(path: Path, other: str | None = None) -> tuple[Any, Any]:
    """Training and held-out part of a text, or of another one in its symbols, int64."""
    text = read_text(path)
    return parts_of(text if other is None else other, text)


def read_text(path: Path) -> str:
    """A text, plain or gzip; of a folder its Python and C++ files, in the order of their names."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in (".py", ".h"))
        return "".join(each.read_text(encoding="utf-8", errors="replace") for each in files)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return str(file.read())


def parts_of(text: str, symbols: str) -> tuple[Any, Any]:
    """Training and held-out part of a text in the most common symbols of another one, int64."""
    import torch

    numbers = {symbol: i for i, (symbol, _) in enumerate(Counter(symbols).most_common(SYMBOLS))}
    data = torch.tensor([numbers.get(symbol, 0) for symbol in text])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:]


def model_of(
    seed: int,
    width: int = WIDTH,
    layers: int = LAYERS,
    sequence: int = SEQUENCE,
    *,
    vectors: bool = True,
) -> Any:
    """A GPT with tied embeddings; the same on every rank. Without ``vectors`` it has matrices alone."""
    import torch
    from torch import nn
    from torch.nn import functional

    norm = partial(nn.LayerNorm, width, elementwise_affine=vectors)
    linear = partial(nn.Linear, bias=vectors)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before_attention, self.before_mlp = norm(), norm()
            self.attention, self.out = linear(width, 3 * width), linear(width, width)
            self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            rows, length, _ = x.shape
            qkv = self.attention(self.before_attention(x)).view(rows, length, 3, HEADS, width // HEADS)
            mixed = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.before_mlp(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.symbols, self.positions = nn.Embedding(SYMBOLS, width), nn.Embedding(sequence, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.last = norm()
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and vectors:
                    nn.init.zeros_(module.bias)

        def forward(self, x: Any) -> Any:
            hidden = self.symbols(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                hidden = block(hidden)
            return functional.linear(self.last(hidden), self.symbols.weight)

    torch.manual_seed(1000 + seed)
    return GPT()


def held_out_loss(engine: Any, held_out: Any, sequence: int = SEQUENCE) -> float:
    """Nats per character."""
    import torch
    from torch.nn import functional

    loss, count, offsets = 0.0, 0, torch.arange(sequence)
    with torch.no_grad():
        for start in range(0, len(held_out) - sequence - 1, 64 * sequence):
            firsts = torch.arange(start, min(start + 64 * sequence, len(held_out) - sequence - 1), sequence)
            where = firsts[:, None] + offsets
            logits = engine(held_out[where]).view(-1, SYMBOLS).float()
            loss += float(functional.cross_entropy(logits, held_out[where + 1].view(-1), reduction="sum"))
            count += where.numel()
    return loss / count


def config_of(args: argparse.Namespace, setting: str) -> dict[str, Any]:
    """DeepSpeed's JSON."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "optimizer": {
            "type": args.optimizer,
            "params": {"lr": args.lr, **json.loads(args.optimizer_params)},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    section = SETTINGS[setting]
    if args.stage == 3:
        # DeepSpeed's default is for large models, and would keep this one whole on every rank.
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 1000,
            "zero_hpz_partition_size": args.per_node,
        }
    if section is not None:
        config["dct"] = {"data_parallel": {**section, "nodes": args.per_node}}
    return config


def initialize(model: Any, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine."""
    import deepspeed

    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(
    args: argparse.Namespace,
    setting: str,
    seed: int,
    data: tuple[Any, Any],
    engine: Any,
) -> dict[str, Any]:
    """One run on this rank."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from dct_plugin.metrics.network_counters import InterfaceCounter

    training, held_out = data
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(SEQUENCE)
    counter, whole = InterfaceCounter(["lo"]), InterfaceCounter(["lo"])
    dist.barrier()
    whole.start()
    for step in range(args.steps):
        if step == args.steps // 2:
            dist.barrier()
            counter.start()
        rate = args.lr * min(1.0, (step + 1) / args.lr_warmup)
        rate *= max(0.05, 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        own = (len(training) if not args.split else len(training) // world_size) - SEQUENCE - 1
        starts = torch.randint(own, (world_size, args.batch), generator=generator)[rank]
        starts += rank * (len(training) // world_size) if args.split else 0
        where = starts[:, None] + offsets
        logits = engine(training[where]).float()
        engine.backward(functional.cross_entropy(logits.view(-1, SYMBOLS), training[where + 1].view(-1)))
        engine.step()
    dist.barrier()
    counter.stop()
    whole.stop()
    engine.eval()
    working = held_out_loss(engine, held_out)
    if hasattr(engine, "dct"):
        engine.dct.gather_parameters()
    weights = [None] * world_size
    with deepspeed.zero.GatheredParameters([p for p in engine.module.parameters() if hasattr(p, "ds_id")]):
        flat = torch.cat([p.detach().reshape(-1) for p in engine.module.parameters()])
    dist.all_gather_object(weights, hash(flat.float().numpy().tobytes()))
    loss = held_out_loss(engine, held_out)
    engine.destroy()
    return {
        **{key: getattr(args, key) for key in JOB},
        "setting": setting,
        "seed": seed,
        "loss": loss,
        "loss_of_working_weights": working,
        "bytes_per_step": counter.tx / (args.steps - args.steps // 2),
        "bytes_of_the_run": whole.tx,
        "ranks_identical": len(set(weights)) == 1,
    }


def worker(args: argparse.Namespace, configure: Configure, initialize: Initialize) -> None:
    """One rank: every setting and seed, in this process."""
    import deepspeed
    import torch
    import torch.distributed as dist

    missing = _missing(args, _rows(args))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    data = text_of(args.text)
    for seed, setting in missing:
        result = train(args, setting, seed, data, initialize(model_of(seed), configure(args, setting)))
        if dist.get_rank() == 0:
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of this job's runs."""
    if not args.results.exists():
        return []
    rows = (json.loads(line) for line in args.results.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if all(row.get(key, 1) == getattr(args, key) for key in JOB)]


def _missing(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Seeds and settings that were not run yet."""
    done = {(row["seed"], row["setting"]) for row in rows}
    return [run for run in itertools.product(args.seeds, args.settings) if run not in done]


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: means, paired differences with their 95 % interval, and bytes."""
    from dct_plugin.recommender.intervals import paired

    by_setting: dict[str, dict[int, dict[str, Any]]] = {}
    for row in results:
        by_setting.setdefault(row["setting"], {})[row["seed"]] = row
    lines = [
        "| setting | held-out loss | - dense (95 %) | kB per step, second half | fewer | MB in all | ranks |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    dense = by_setting.get("dense", {})
    for setting, runs in by_setting.items():
        loss = sum(run["loss"] for run in runs.values()) / len(runs)
        sent = sum(run["bytes_per_step"] for run in runs.values()) / len(runs)
        both = sorted(runs.keys() & dense.keys())
        difference = fewer = ""
        if setting != "dense" and both:
            difference = str(paired([runs[seed]["loss"] - dense[seed]["loss"] for seed in both]))
            fewer = f"{sum(dense[seed]['bytes_per_step'] for seed in both) / len(both) / sent:.1f}x"
        total = sum(run["bytes_of_the_run"] for run in runs.values()) / len(runs) / 1e6
        same = "identical" if all(run["ranks_identical"] for run in runs.values()) else "DIFFERENT"
        figures = f"{sent / 1e3:.1f} | {fewer} | {total:.0f}"
        lines.append(f"| {setting} | {loss:.4f} | {difference} | {figures} | {same} |")
    return "\n".join(lines)


def parser_of(
    description: str | None, settings: Iterable[str], default: list[str]
) -> argparse.ArgumentParser:
    """The options that studies share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="plain or gzip")
    parser.add_argument("--settings", nargs="+", choices=list(settings), default=default)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per rank")
    parser.add_argument(
        "--per-node",
        type=int,
        default=1,
        help="so many ranks are a node; under ZeRO-3 they have a copy (hpZ)",
    )
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage: 0 to 3")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of working weights")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--optimizer-params", default='{"weight_decay": 0.01, "torch_adam": true}')
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lr-warmup", type=int, default=60)
    parser.add_argument("--split", action="store_true", help="each rank trains on its own part of the text")
    parser.add_argument("--results", type=Path, help="JSON lines of every run; those in it are not run again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(
    args: argparse.Namespace, configure: Configure, initialize: Initialize = initialize, **variables: str
) -> None:
    """Train every setting and seed in local ranks, and print the table; ``variables`` are the ranks'."""
    if args.worker:
        worker(args, configure, initialize)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.results = args.results or Path(folder) / "results.jsonl"
        if _missing(args, _rows(args)):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            # PYTHONHASHSEED: the ranks compare hashes of their parameters.
            environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ, **variables}
            environment["PYTHONHASHSEED"] = "0"
            command = [*launcher, f"--nproc-per-node={args.ranks}", sys.argv[0], *sys.argv[1:], "--worker"]
            subprocess.run([*command, "--results", str(args.results)], env=environment, check=True)
        rows = _rows(args)
        print(table([row for row in rows if row["seed"] in args.seeds and row["setting"] in args.settings]))


def main() -> None:
    run(parser_of(__doc__, SETTINGS, ["dense", "local-0.99", "ahead-0.99"]).parse_args(), config_of)


if __name__ == "__main__":
    main()
