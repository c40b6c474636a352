"""One exchange of messages between two ranks: own connections beside gloo, on idle and on busy cores.

Both transports take turns of ten exchanges in the same two processes; with ``--busy`` other processes keep
the cores busy, as training does.

    python benchmarks/transports.py
    python benchmarks/transports.py --busy 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from dct_plugin.recommender.links.team import free_port
from dct_plugin.transport import Exchange

TRANSPORTS = ("sockets", "gloo")
TURN = 10


def burn() -> None:
    """Use a core."""
    while True:
        sum(range(10_000))


def run(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{arguments.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    exchanges = {}
    for name in TRANSPORTS:
        os.environ["DCT_TRANSPORT"] = name
        exchanges[name] = Exchange(None, torch.device("cpu"))
        exchanges[name].agree(0)  # the transport is chosen with the first exchange
    took, spent = defaultdict[tuple[int, str], list[float]](list), defaultdict[tuple[int, str], float](float)
    for size in arguments.sizes:
        message = torch.zeros(size, dtype=torch.uint8)
        for _ in range(arguments.turns):
            for name, exchange in exchanges.items():
                before = time.process_time()
                for _ in range(TURN):
                    began = time.perf_counter()
                    with exchange.preparing():
                        pass
                    exchange.all_gather(message)
                    took[size, name].append(1e3 * (time.perf_counter() - began))
                spent[size, name] += 1e3 * (time.process_time() - before)
    if rank == 0:
        table = Table("bytes each way", "transport", "ms", "slowest tenth, ms", "processor, ms")
        for (size, name), times in took.items():
            slow = statistics.quantiles(times, n=10)[-1]
            cells = statistics.median(times), slow, spent[size, name] / len(times)
            table.add_row(f"{size:,}", name, *(f"{cell:.2f}" for cell in cells))
        Console().print(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 10_000, 200_000, 1_000_000])
    parser.add_argument("--turns", type=int, default=30, help=f"of {TURN} exchanges, per size and transport")
    parser.add_argument("--busy", type=int, default=0, help="processes that use a core each")
    arguments = parser.parse_args()
    arguments.port = free_port()
    others = [multiprocessing.Process(target=burn, daemon=True) for _ in range(arguments.busy)]
    for other in others:
        other.start()
    mp.spawn(run, args=(arguments,), nprocs=2)


if __name__ == "__main__":
    main()
