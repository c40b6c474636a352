"""Loss after so many steps of torch DDP: dense, PowerSGD, top-k and DCT, same weights, same batches.

The model and the methods are those of ``dct bench links --workload ddp``, which measures their time. Every
step has fresh samples of a task that a teacher network sets, so that the training loss is a test loss, too;
its mean over the last tenth of the steps is compared.

    python benchmarks/studies/peers_loss.py --steps 300 --seeds 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dct_plugin.integrations import ddp as plugin
from dct_plugin.integrations.bench.ddp import TopK
from dct_plugin.integrations.bench.perceptron import BATCH, perceptron, width_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dct_plugin.config import MetricsConfig
from dct_plugin.metrics import Metrics

METHODS = ("fp32", "bf16", "PowerSGD 1", "PowerSGD 4", "top-k 1 %", "DCT 0.9", "DCT 0.99")


def hook_of(name: str) -> Any:
    group = dist.group.WORLD
    kind, _, setting = name.partition(" ")
    if kind == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=int(setting), start_powerSGD_iter=2, min_compression_rate=1
        )
        return partial(powerSGD_hook.powerSGD_hook, state)
    if kind == "top-k":
        return TopK(0.01)
    if kind == "DCT":
        metrics = Metrics(MetricsConfig(), rank=dist.get_rank(), world_size=dist.get_world_size())
        settings = {"data_parallel": {"sparsity": float(setting)}}
        return partial(plugin.dct_hook, plugin.DCTState(settings, metrics=metrics))
    return partial(
        getattr(default_hooks, f"{ {'fp32': 'allreduce', 'bf16': 'bf16_compress'}[name] }_hook"), group
    )


def dispatch(hook: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return hook(bucket)


dispatch.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def train(name: str, seed: int, arguments: argparse.Namespace) -> float:
    """Mean loss of the last tenth of the steps, over all ranks."""
    width = width_of(arguments.parameters)
    model = perceptron(width)
    torch.manual_seed(1000 + seed)
    teacher = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 1))
    cap = 1e6 if name.startswith("PowerSGD") else 25
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    ddp.register_comm_hook(hook_of(name), dispatch)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=arguments.momentum)
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    losses = []
    for _ in range(arguments.steps):
        x = torch.randn(BATCH, width, generator=generator)
        with torch.no_grad():
            y = 3 * teacher(x)
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = torch.tensor(losses[-max(1, arguments.steps // 10) :]).mean()
    dist.all_reduce(last)
    return float(last) / dist.get_world_size()


def work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for seed in range(arguments.seeds):
        for name in arguments.methods:
            loss = train(name, seed, arguments)
            rows.append({"method": name, "seed": seed, "loss": loss})
            if dist.get_rank() == 0:
                print(f"seed {seed}, {name}: {loss:.4f}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        Path(arguments.worker).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=10.65, help="millions")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(arguments.ranks)]
        subprocess.run([*launcher, __file__, *sys.argv[1:], "--worker", str(result)], check=True)
        rows = json.loads(result.read_text())
    table = Table("", "loss", "beside fp32", title=f"{arguments.steps} steps, {arguments.ranks} ranks")
    means = {
        name: statistics.fmean(row["loss"] for row in rows if row["method"] == name)
        for name in arguments.methods
    }
    for name, mean in means.items():
        beside = "" if "fp32" not in means else f"{mean - means['fp32']:+.4f}"
        table.add_row(name, f"{mean:.4f}", beside)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, default=str))


if __name__ == "__main__":
    main()
