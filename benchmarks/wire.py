"""Bytes on the wire of a DeepSpeed job, dense and with DCT, by the operating system's interface counters.

Starts two local ranks that train a perceptron of more than ten million parameters with an ordinary DeepSpeed
engine, for each ZeRO stage once without and once with a ``dct`` section (the only difference), and reads what
the loopback interface carried in steady state: both directions, packet headers and everything else included.
ZeRO-1 and 2 also send updated parameters, thresholded with ``--parameters`` (0 leaves that gather dense), and
in bf16 exactly, in a row of its own; ZeRO-3 gathers parameters for every pass, dense (``--stages 3``).

    python benchmarks/wire.py

With ``--nodes`` every node is a network namespace (Linux, root), and bytes between nodes and inside them are
counted apart; ZeRO-3 also runs with a copy of the weights in each node (hpZ), which ``dct`` updates.

    python benchmarks/wire.py --stages 3 --nodes 2 --ranks 4 --bf16

Exact updates by learning rate of AdamW, as CPUs send them (with lengths) and as devices do (in slots, by
kernels of the tests); gradients in int8. Bytes are those of links on which exact
updates are faster:

    python benchmarks/wire.py --stages 1 --nodes 2 --bf16 --lr 1e-6 1e-5 1e-3 --sparsity 0 --value-dtype int8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LAYERS, BATCH = 1600, 4, 16


class Variant(NamedTuple):
    """One row of the table."""

    name: str
    dct: bool
    hpz: bool = False
    exact: bool = False
    lr: float | None = None
    """AdamW at this rate in place of SGD."""
    backend: str = "auto"


def variants(stage: int, nodes: int, *, bf16: bool, rates: Sequence[float] = ()) -> list[Variant]:
    """DeepSpeed's own first; with hpZ last, since DeepSpeed keeps its groups for all later engines."""
    if rates:
        forms = [("lengths", "auto"), ("slots", "deferred")]
        exact = [
            Variant(f"DCT, exact at {rate:g}, {form}", True, exact=True, lr=rate, backend=backend)
            for rate in rates
            for form, backend in forms
        ]
        return [Variant("dense", False, lr=rates[0]), *exact]
    if stage < 3 or nodes == 1:
        exact = [Variant("DCT, exact", True, exact=True)] if bf16 and stage in (1, 2) else []
        return [Variant("dense", False), Variant("DCT", True), *exact]
    return [Variant("dense", False), Variant("dense, hpZ", False, True), Variant("DCT, hpZ", True, True)]


def model_and_data() -> tuple[Any, Any]:
    """The same on every rank; a regression task that can be learnt."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(1 + rank)

    def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x.to(dtype), x[:, :8].sum(1, keepdim=True).to(dtype)

    return model, batch


def dct_section(args: argparse.Namespace, stage: int, *, exact: bool) -> dict[str, Any]:
    """Of ``--config``, or what the other options say."""
    if args.config is not None:
        return json.loads(args.config.read_text())["dct"]
    data: dict[str, Any] = {"sparsity": args.sparsity, "value_dtype": args.value_dtype}
    if args.nodes > 1:
        data["nodes"] = args.ranks // args.nodes
    if stage in (1, 2) or (stage == 3 and args.nodes > 1):
        thresholded = {"sparsity": args.parameters, "value_dtype": args.parameters_dtype}
        data["parameters"] = "exact" if exact else thresholded if args.parameters else None
    return {"data_parallel": data}


def config_of(args: argparse.Namespace, stage: int, variant: Variant) -> dict[str, Any]:
    """DeepSpeed's JSON."""
    zero: dict[str, Any] = {"stage": stage}
    if args.nodes > 1:  # as in large models, of which not all weights stay until the backward pass
        zero |= {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1}
    if variant.hpz:
        zero["zero_hpz_partition_size"] = args.ranks // args.nodes
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}}
        if variant.lr is None
        else {"type": "AdamW", "params": {"lr": variant.lr, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": args.bf16},
        "steps_per_print": 10**9,
    }
    if args.config is not None:
        config["optimizer"] = json.loads(args.config.read_text())["optimizer"]
    if variant.dct:
        config["dct"] = dct_section(args, stage, exact=variant.exact)
        config["dct"]["kernels"] = {"backend": variant.backend}
    return config


def worker(args: argparse.Namespace) -> None:
    """One rank: every stage, dense and DCT, in this process."""
    import deepspeed
    import torch
    import torch.distributed as dist

    from dct_plugin.data_parallel import exact_updates
    from dct_plugin.kernels import register_backend
    from dct_plugin.metrics.network_counters import InterfaceCounter
    from dct_plugin.recommender.links.team import DATA

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.deferred_backend import DeferredBackend

    register_backend("deferred", DeferredBackend)
    exact_updates.clock = lambda: 0.0  # as on a link where exact updates are the faster way
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    results = []
    for stage in args.stages:
        for variant in variants(stage, args.nodes, bf16=args.bf16, rates=args.lr):
            dct = variant.dct
            model, batch = model_and_data()
            section = config_of(args, stage, variant)
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=section
            )
            dtype = torch.bfloat16 if args.bf16 else torch.float32
            device = "lo" if args.nodes == 1 else DATA
            counter, measured = InterfaceCounter([device]), args.steps
            loopback = InterfaceCounter(["lo"])
            data = section["dct"]["data_parallel"] if dct else {}
            uncounted = args.warmup + data.get("warmup_steps", 0) + data.get("sparsity_warmup_steps", 0)
            for step in range(uncounted + measured):
                if step == uncounted:
                    dist.barrier()
                    counter.start()
                    loopback.start()
                x, y = batch(dtype)
                loss = torch.nn.functional.mse_loss(engine(x), y)
                engine.backward(loss)
                engine.step()
            dist.barrier()
            counter.stop()
            loopback.stop()
            sent: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(sent, (counter.tx / measured, loopback.tx / measured))
            firsts = sent[:: args.ranks // args.nodes]  # the ranks of a node count the same bytes
            parameters = list(engine.module.parameters())
            with deepspeed.zero.GatheredParameters([p for p in parameters if hasattr(p, "ds_id")]):
                flat = torch.cat([p.detach().float().reshape(-1) for p in parameters])
            digests: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(digests, hash(flat.numpy().tobytes()))
            cls = "gradient" if variant.lr is None else "parameter_exact"
            density = engine.dct.metrics.summary().classes[cls].density if dct else None
            results.append(
                {
                    "stage": stage,
                    "name": variant.name,
                    "dct": dct,
                    "parameters": flat.numel(),
                    "bytes_per_step": sum(each for each, _ in firsts),
                    "bytes_inside": sum(each for _, each in firsts) if args.nodes > 1 else 0,
                    "density": density,
                    "loss": loss.item(),
                    "ranks_identical": len(set(digests)) == 1,
                }
            )
            engine.destroy()
    if dist.get_rank() == 0:
        Path(args.result).write_text(json.dumps(results))


def launch(args: argparse.Namespace, result: Path) -> None:
    """Run the ranks, each node in a network namespace of its own if there are several."""
    from dct_plugin.recommender.links.namespaces import Links
    from dct_plugin.recommender.links.team import DATA, NETWORKS, free_port, rank_environment

    own = [__file__, *sys.argv[1:], "--worker", "--result", str(result)]
    # PYTHONHASHSEED: the ranks compare hashes of their parameters.
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
    if args.nodes == 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        subprocess.run([sys.executable, *launcher, *own], env=fixed, check=True)
        return
    with Links(args.nodes, NETWORKS) as links:
        port, ranks = free_port(), []
        for rank in range(args.ranks):
            command = links.inside(rank * args.nodes // args.ranks, [sys.executable, *own])
            environment = rank_environment(rank, args.ranks, host=links.address(0), port=port, device=DATA)
            ranks.append(subprocess.Popen(command, env={**environment, "PYTHONHASHSEED": "0"}))
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit("a rank failed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--config", type=Path, help="DeepSpeed JSON whose dct section and optimizer to take")
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument(
        "--lr", type=float, nargs="*", default=[], help="AdamW at these rates in place of SGD, exact updates"
    )
    parser.add_argument("--parameters", type=float, default=0.97, help="sparsity of updated parameters")
    parser.add_argument("--parameters-dtype", default="bf16")
    parser.add_argument("--value-dtype", default="bf16")
    parser.add_argument("--bf16", action="store_true", help="bf16 training instead of fp32")
    parser.add_argument(
        "--warmup", type=int, default=10, help="steps before the counters are read, after the section's start"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps that are counted")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    from rich.console import Console
    from rich.table import Table

    from dct_plugin.metrics import format_bytes

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launch(args, result)
        results = json.loads(result.read_text())
    table = Table(
        "ZeRO",
        "",
        "bytes per step" if args.nodes == 1 else "bytes per step between nodes",
        "inside",
        "fewer than dense",
        "fewer than dense fp32 gradients" if args.nodes == 1 else "fewer than hpZ",
        "density, whole run",
        "ranks",
    )
    dense: dict[int, float] = {}
    for row in results:
        if row["name"] == "dense":
            dense[row["stage"]] = row["bytes_per_step"]
        # Two ranks, each sends every gradient once in an all-reduce of fp32.
        base = 2 * 4 * row["parameters"] if args.nodes == 1 else results[-2]["bytes_per_step"]
        row["ratio"] = dense[row["stage"]] / row["bytes_per_step"]
        row["second_ratio"] = base / row["bytes_per_step"]
        table.add_row(
            str(row["stage"]),
            row["name"],
            format_bytes(round(row["bytes_per_step"])),
            format_bytes(round(row["bytes_inside"])) if args.nodes > 1 else "",
            f"{row['ratio']:.1f}x",
            "" if args.lr else f"{row['second_ratio']:.1f}x",
            "" if row["density"] is None else f"{row['density']:.4f}",
            "identical" if row["ranks_identical"] else "DIFFERENT",
        )
    console = Console()
    console.print(
        f"{results[0]['parameters']:,} parameters, {args.ranks} ranks on {args.nodes} node(s), interface "
        f"counters over {args.steps} steps"
    )
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1, default=str))


if __name__ == "__main__":
    main()
