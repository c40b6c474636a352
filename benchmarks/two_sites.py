"""Time and bytes of a step between two sites, on a link of 100 Mbit/s.

    python -m benchmarks.two_sites [--rate 100mbit] [--delay 25] [--ranks 2] [--parameters 10.65]

Every rank has a network namespace. They train one perceptron with AdamW under torch DDP: dense in fp32 and
bf16, with the plugin's default, and with local steps. DiLoCo of torchft, if it is installed, trains the same
without the plugin. Methods take turns in random order, ``--repeats`` times. Bytes are those of the network
interface of a rank; milliseconds and bytes are of a step after the start, medians over the repeats. The first
row is a step of which nothing is sent. ``--delay`` holds frames back for so many milliseconds in each
direction, between two ranks (``benchmarks.links.delay``).

Linux, iproute2, root or user namespaces.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import dct_plugin
from benchmarks.links.delay import delayed
from benchmarks.links.perceptron import batch, perceptron, width_of
from dct_plugin.recommender.links.namespaces import Links, Network

#: Optimizer steps between two exchanges, and rounds of so many steps that are measured.
EVERY, ROUNDS = 30, 2
#: Sections of the plugin by the name of the row.
SECTIONS: dict[str, dict[str, Any]] = {
    "DCT 0.99, step-ahead": {"quality": None, "warmup_steps": 2, "sparsity_warmup_steps": 8},
    f"local steps: {EVERY}, fp32": {"local_steps": EVERY, "value_dtype": "fp32", "warmup_steps": 0},
    f"local steps: {EVERY}, int8": {"local_steps": EVERY, "warmup_steps": 0},
    f"local steps: {EVERY}, int8, a third every {EVERY // 3}, 3 steps later": {
        "local_steps": {"every": EVERY, "fragments": 3, "delay": 3},
        "warmup_steps": 0,
    },
}
TORCHFT = f"DiLoCo of torchft: {EVERY}, fp32"
METHODS = ["nothing sent", "fp32", "bf16", *SECTIONS]
if importlib.util.find_spec("torchft"):
    METHODS.append(TORCHFT)


#: What torchft needs until the end of the process.
LIVING: list[Any] = []


def sent() -> int:
    """Return the bytes that the network interface has sent."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if "dct0:" in line)


def _bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(group, bucket)  # which DDP refuses by its name on gloo


# DDP checks the annotations of a hook as objects, not as the strings they are in this file.
_bf16.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def step_of(method: str, width: int) -> tuple[Callable[[], None], Any]:
    """Return a training step by a method, and the context of its steps."""
    torch.manual_seed(0)
    x, y = batch(width)
    plain = perceptron(width)
    model = plain if method == TORCHFT else DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if method == "bf16":
        model.register_comm_hook(dist.group.WORLD, _bf16)
    if method in SECTIONS:
        dct_plugin.attach(model, optimizer, {"data_parallel": SECTIONS[method]})

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    if method == TORCHFT:
        return step, lambda: _diloco(plain, optimizer)
    return step, model.no_sync if method == "nothing sent" else nullcontext


def _diloco(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return DiLoCo of torchft: a replica per rank, whose managers meet at a lighthouse in rank 0."""
    from torchft import Manager
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.process_group import ProcessGroupGloo

    rank, size, limit = dist.get_rank(), dist.get_world_size(), timedelta(seconds=120)
    own, address = os.environ["OWN_ADDR"], [""]
    if rank == 0:
        LIVING.append(LighthouseServer(bind=f"{own}:0", min_replicas=size, join_timeout_ms=1000))
        address = [f"http://{own}:{LIVING[-1].address().rsplit(':', 1)[1]}"]
    dist.broadcast_object_list(address)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=size,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        replica_id=str(rank),
        store_addr=own,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address[0],
        hostname=own,
        init_sync=False,
    )
    LIVING.extend((store, manager))
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], optimizer, outer, sync_every=EVERY, use_bucketization=True)


def rank_main(method: str, width: int) -> None:
    """Measure one method on this rank; rank 0 prints milliseconds and bytes of a step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step, context = step_of(method, width)
    dense = method in ("fp32", "bf16")
    with context():
        for _ in range(2 if dense else EVERY):
            step()
        dist.barrier()
        count = 3 if dense else EVERY * ROUNDS
        began, before = time.perf_counter(), sent()
        for _ in range(count):
            step()
        dist.barrier()
    if dist.get_rank() == 0:
        print(
            json.dumps([1e3 * (time.perf_counter() - began) / count, (sent() - before) / count]), flush=True
        )
    dist.barrier()
    if method == TORCHFT:
        os._exit(0)  # its threads would wait for each other
    dist.destroy_process_group()


def measured(links: Links, method: str, width: int) -> tuple[float, float]:
    """Start the ranks in their namespaces, and return milliseconds and bytes of a step."""
    with tempfile.NamedTemporaryFile("r") as output:
        ranks = []
        for rank in range(links.nodes):
            variables = {"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(links.nodes), "OWN_ADDR": links.address(rank)}
            variables |= {"GLOO_SOCKET_IFNAME": "dct0", "TP_SOCKET_IFNAME": "dct0", "RUST_LOG": "error"}
            command = [sys.executable, "-m", "benchmarks.two_sites", "--rank", method, "--width", str(width)]
            with open(output.name, "a", encoding="ascii") as file:
                ranks.append(
                    subprocess.Popen(
                        links.inside(rank, command), env={**os.environ, **variables}, stdout=file, stderr=None
                    )
                )
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"{method}: a rank failed")
        milliseconds, nbytes = json.loads(next(line for line in output if line.startswith("[")))
    return milliseconds, nbytes


def main() -> None:
    """Measure all methods in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of each direction, as tc writes it")
    parser.add_argument("--delay", type=float, default=0.0, help="of each direction, in milliseconds")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=10.65, help="of the model, in millions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, args.width)
        return
    if args.delay and args.ranks != 2:
        parser.error("--delay is between two ranks")
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    with Links(args.ranks, [Network("dct0")]) as links, ExitStack() as stack:
        links.limit(args.rate)
        if args.delay:
            stack.enter_context(delayed(links, args.delay))
        for _ in range(args.repeats):
            for method in random.sample(METHODS, len(METHODS)):
                found[method].append(measured(links, method, width_of(args.parameters)))
                print(method, *found[method][-1], file=sys.stderr, flush=True)
    dense = median(each for each, _ in found["fp32"])
    nbytes = median(each for _, each in found["fp32"])
    print(
        f"{args.parameters:g}M parameters, {args.ranks} ranks, {args.rate}, {2 * args.delay:g} ms more for a "
        "round trip\n"
    )
    print(
        "| | ms per step | steps in the time of one in fp32 | bytes per step | fewer |\n|---|--:|--:|--:|--:|"
    )
    for method, figures in found.items():
        ms, size = (median(values) for values in zip(*figures, strict=True))
        fewer = f"{nbytes / size:,.3g}x" if size > 1000 else ""
        print(f"| {method} | {ms:,.0f} | {dense / ms:.3g} | {size:,.0f} | {fewer} |")


if __name__ == "__main__":
    main()
