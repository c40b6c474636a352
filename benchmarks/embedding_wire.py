"""Bytes that embeddings put on the wire, by the network interfaces' counters, and what that does to a step.

Trains the DLRM with sharded tables on real data, the same batches from the same weights under every setting
of the channel, and counts requests (ids), vectors and gradients together. Run as root, every rank lives in a
network namespace of its own with two interfaces: embeddings cross on one, and the gradients of the MLPs are
averaged on the other, whose bytes are not counted. Otherwise the ranks share the loopback interface, and the
MLPs are not averaged (quality is not measured here). ``--rate`` limits the link of the embeddings.

    python benchmarks/embedding_wire.py --ranks 2 4 --batch-size 256 2048
    python benchmarks/embedding_wire.py --format criteo --data train.txt.gz
    python benchmarks/embedding_wire.py --rate 100mbit 1gbit --settings lossless "bound 0.01"
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.nn.functional import binary_cross_entropy_with_logits

from dct_plugin.config import EmbeddingChannelConfig, MetricsConfig
from dct_plugin.embedding import ShardedTables
from dct_plugin.metrics import Metrics, format_bytes
from dct_plugin.metrics.network_counters import InterfaceCounter, interface_bytes
from dct_plugin.recommender.data import ClickDataset, epoch_batches, load
from dct_plugin.recommender.links.interleave import orders
from dct_plugin.recommender.links.namespaces import Links, LinksError, Network
from dct_plugin.recommender.links.team import free_port
from dct_plugin.recommender.models import DLRM

#: Ethernet 14, IPv4 20, TCP 20 with timestamps 12: what interface counters see of every packet's headers.
HEADER_BYTES = 66
EMBEDDINGS, MLPS = "embeddings", "mlps"  # interfaces
CLASSES = {"ids": "embedding_ids", "forward": "embedding_forward", "backward": "embedding_backward"}
DIM, BOTTOM, TOP, LEARNING_RATE = 16, (128, 64), (256, 128), 1e-3

SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"enabled": False, "deduplicate": False},
    "lossless": {},
    "bound 0.01": {"error_bound": 0.01, "gradient_bound": 0.1},
    "bound 0.03": {"error_bound": 0.03, "gradient_bound": 0.1},
    "threshold 0.75": {"sparsity": 0.75},
    "threshold 0.9": {"sparsity": 0.9},
    "threshold 0.95": {"sparsity": 0.95},
    "0.9, bound 0.01": {"sparsity": 0.9, "error_bound": 0.01, "gradient_bound": 0.1},
}


def packets_sent(device: str) -> int:
    """Packets that an interface of this process's network namespace has sent since it came up."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        columns = next(line.split(":")[1].split() for line in file if line.split(":")[0].strip() == device)
    return int(columns[9])


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the namespaces are removed
    console = Console()
    command = shlex.join(["python", *sys.argv])
    sections, collected = [], []
    for ranks, rate in itertools.product(arguments.ranks, arguments.rate or [None]):
        results = launch(arguments, ranks, rate)
        collected.append(results)
        for batch_size in arguments.batch_size:
            rows = summarise(results, batch_size)
            title = f"{results['data']}: {ranks} ranks, global batch {batch_size}, {results['link']}"
            console.print(*terminal_tables(title, rows))
            sections.append(f"**{title}**\n\n{markdown_tables(rows)}")
    notes = footnotes(arguments, collected)
    console.print(notes, style="dim", highlight=False)
    if arguments.markdown:
        text = "\n\n".join([f"```\n{command}\n```", *sections, notes]) + "\n"
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.json:
        tables = [
            {**{key: r[key] for key in ("data", "ranks", "rate", "link")}, "batch_size": b, "rows": rows}
            for r in collected
            for b in arguments.batch_size
            for rows in [summarise(r, b)]
        ]
        arguments.json.write_text(json.dumps({"command": command, "tables": tables}, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="diabetes", help="diabetes (bundled) or criteo")
    parser.add_argument("--data", help="file of another format")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[256, 2048], help="all ranks together")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, metavar="NAME", default=list(SETTINGS),
                        help=f"beside dense: {', '.join(list(SETTINGS)[1:])}")  # fmt: skip
    parser.add_argument("--warmup", type=int, default=10, help="steps before those that are counted")
    parser.add_argument("--steps", type=int, default=60, help="steps that are counted")
    parser.add_argument("--repeats", type=int, default=3, help="each with other weights and batches")
    parser.add_argument("--rate", nargs="*", help="limits of the link, such as 100mbit 1gbit (root)")
    parser.add_argument(
        "--mlp",
        choices=("apart", "along", "none"),
        help="average the MLPs' gradients on an interface of their own (default, root), along with the "
        "embeddings and counted with them, or not at all (default on loopback)",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    for hidden in ("--worker", "--store"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for size, ranks in itertools.product(arguments.batch_size, arguments.ranks):
        if size % ranks:
            parser.error(f"a batch of {size} samples cannot be shared evenly by {ranks} ranks")
    return arguments


# -- launching ---


def launch(arguments: argparse.Namespace, ranks: int, rate: str | None) -> dict[str, Any]:
    """Start the ranks, in namespaces if that is possible, and collect what they measured."""
    with ExitStack() as stack:
        links: Links | None = None
        try:
            links = stack.enter_context(
                Links(ranks, [Network(EMBEDDINGS, rate), Network(MLPS, offload=True)])
            )
        except LinksError as error:
            if rate is not None or arguments.mlp == "apart":
                raise SystemExit(f"--rate and --mlp apart need network namespaces: {error}") from error
            print(f"{error}; counting on the loopback interface", file=sys.stderr)
        mlp = arguments.mlp or ("apart" if links else "none")
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "rank"
        host = "127.0.0.1" if links is None else links.address(0, 1)
        port = free_port()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                command = [sys.executable, *sys.argv, "--mlp", mlp, "--worker", str(place)]
                command += ["--store", f"{host}:{port}"]
                environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": EMBEDDINGS if links else "lo"}
                if links is not None:
                    command = links.inside(rank, command)
                processes.append(subprocess.Popen(command, env=environment))
            codes = wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"a rank failed: exit codes {codes}")
        measured = [json.loads(Path(f"{place}.{rank}").read_text()) for rank in range(ranks)]
    by_run = zip(*(part["runs"] for part in measured), strict=True)
    whole = [merge(parts, on_loopback=links is None) for parts in by_run]
    link = "loopback" if links is None else f"links of {rate}" if rate else "unlimited links"
    return {
        "data": measured[0]["data"],
        "ranks": ranks,
        "rate": rate,
        "link": link,
        "mlp": mlp,
        "runs": whole,
    }


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes, as soon as one fails or all have ended."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return [0 if code is None else code for code in codes]
        time.sleep(0.2)


def merge(parts: Sequence[dict[str, Any]], *, on_loopback: bool) -> dict[str, Any]:
    """One run of all ranks: bytes and packets are sums, times are those of the slowest rank."""
    whole = {key: parts[0][key] for key in ("setting", "batch_size", "repeat")}
    for key in (*CLASSES, "mlps"):
        whole[key] = sum(part[key] for part in parts)
    for key in ("interface", "packets"):  # on loopback, every rank sees the bytes of all
        whole[key] = parts[0][key] if on_loopback else sum(part[key] for part in parts)
    for key in ("step_ms", "cpu_ms", "distinct_ms", "coding_ms", "exchange_ms"):
        whole[key] = max(part[key] for part in parts)
    return whole


# -- one rank ---


def work(arguments: argparse.Namespace) -> None:
    """Every setting, batch size and repeat in turn; results to a file."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = arguments.store.rsplit(":", 1)
    timeout = timedelta(minutes=5)
    store = dist.TCPStore(host, int(port), ranks, rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    mlps: dist.ProcessGroup | None = None
    if arguments.mlp == "apart":
        embeddings, os.environ["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"], MLPS
        mlps = dist.new_group(backend="gloo")
        os.environ["GLOO_SOCKET_IFNAME"] = embeddings
    clicks = load(arguments.format, arguments.data)
    names = list(dict.fromkeys(["dense", *arguments.settings]))
    runs = []
    rounds = itertools.product(arguments.batch_size, range(arguments.repeats))
    for (batch_size, repeat), order in zip(rounds, orders(names), strict=False):
        for name in order:
            outcome = train(clicks, name, batch_size, repeat, mlps, arguments)
            runs.append({"setting": name, "batch_size": batch_size, "repeat": repeat, **outcome})
            if rank == 0:
                print(
                    f"{ranks} ranks, batch {batch_size}, repeat {repeat + 1}, {name}: "
                    f"{format_bytes(outcome['interface'])} per step, {outcome['step_ms']:.1f} ms",
                    file=sys.stderr,
                    flush=True,
                )
    Path(f"{arguments.worker}.{rank}").write_text(json.dumps({"data": clicks.name, "runs": runs}))
    dist.barrier()  # a rank that tears down its connections while others still use them can abort them
    dist.destroy_process_group()


def train(
    clicks: ClickDataset,
    setting: str,
    batch_size: int,
    seed: int,
    mlps: dist.ProcessGroup | None,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """What one setting costs this rank: bytes and packets per step (means), milliseconds (medians)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    metrics = Metrics(MetricsConfig(), rank=rank, world_size=ranks)
    config = EmbeddingChannelConfig.of(SETTINGS[setting])
    torch.manual_seed(seed)
    tables = ShardedTables(clicks.cardinalities, DIM, config=config)
    model = DLRM(
        clicks.dense.shape[1],
        clicks.cardinalities,
        embedding_dim=DIM,
        bottom=BOTTOM,
        top=TOP,
        tables=tables,
        seed=seed,
    )
    replicated = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    tables.follow(optimizer)
    device = EMBEDDINGS if EMBEDDINGS in interface_bytes() else "lo"
    counter = InterfaceCounter([device])
    beside = InterfaceCounter([MLPS]) if device == EMBEDDINGS else None
    packets, cpu = 0, 0.0
    step_ms = []
    channel_ms = [np.zeros(3)]  # distinct rows, coding and exchanges so far
    for step, rows in zip(
        range(arguments.warmup + arguments.steps), batches(clicks, batch_size, seed), strict=False
    ):
        if step == arguments.warmup:
            let_counters_rest()
            tables.metrics = metrics
            counter.start()
            packets = packets_sent(device)
            if beside is not None:
                beside.start()
            cpu = time.process_time()
        started = time.perf_counter()
        mine = rows.reshape(ranks, -1)[rank]
        dense, ids, label = (torch.from_numpy(column[mine]) for column in clicks.train)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(dense, ids), label).backward()
        if arguments.mlp != "none":
            average(replicated, mlps)
        optimizer.step()
        if step >= arguments.warmup:
            step_ms.append(1e3 * (time.perf_counter() - started))
            metrics.step(len(step_ms))
            channel_ms.append(time_in_channel(metrics, len(step_ms)))
    cpu = time.process_time() - cpu
    time.sleep(0.2)  # what the kernel still holds has to leave
    counter.stop()
    packets = packets_sent(device) - packets
    mlp_bytes = beside.stop().tx if beside is not None else 0
    time.sleep(0.2)  # nobody goes on to the next run's barrier while another still counts
    summary = metrics.summary().classes
    metrics.close()
    distinct, coding, exchange = np.median(np.diff(channel_ms, axis=0), axis=0).tolist()
    return {
        **{name: summary[cls].sent_bytes / arguments.steps for name, cls in CLASSES.items()},
        "interface": counter.tx / arguments.steps,
        "packets": packets / arguments.steps,
        "mlps": mlp_bytes / arguments.steps,
        "step_ms": statistics.median(step_ms),
        "cpu_ms": 1e3 * cpu / arguments.steps,
        "distinct_ms": distinct,
        "coding_ms": coding,
        "exchange_ms": exchange,
    }


def time_in_channel(metrics: Metrics, steps: int) -> np.ndarray:
    """Milliseconds in distinct rows, in coding and in exchanges so far: requests, vectors and gradients."""
    parts = [metrics.summary().classes[name] for name in CLASSES.values()]
    coding = sum(part.encode_ms + part.decode_ms for part in parts)
    times = [sum(part.select_ms for part in parts), coding, sum(part.exchange_ms for part in parts)]
    return steps * np.array(times)


def batches(clicks: ClickDataset, size: int, seed: int) -> Iterator[np.ndarray]:
    """Row numbers of global batches, epoch after epoch."""
    for epoch in itertools.count():
        yield from epoch_batches(clicks.num_train, size, seed=seed, epoch=epoch)


def average(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Mean over the ranks of gradients of parameters that every rank holds."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def let_counters_rest() -> None:
    """All ranks are here, and nothing is under way."""
    dist.barrier()
    time.sleep(0.2)


# -- reporting ---


def summarise(results: dict[str, Any], batch_size: int) -> list[dict[str, Any]]:
    """One row per setting: means over the repeats (times: medians), and ratios to dense paired by repeat."""
    runs = [run for run in results["runs"] if run["batch_size"] == batch_size]
    dense = {run["repeat"]: run for run in runs if run["setting"] == "dense"}
    rows = []
    for name in SETTINGS:
        chosen = [run for run in runs if run["setting"] == name]
        if not chosen:
            continue
        row: dict[str, Any] = {"setting": name}
        for key in (*CLASSES, "interface", "packets", "mlps"):
            row[key] = statistics.fmean(run[key] for run in chosen)
        for key in ("step_ms", "cpu_ms", "distinct_ms", "coding_ms", "exchange_ms"):
            row[key] = statistics.median(run[key] for run in chosen)
        row["step_range"] = [f(run["step_ms"] for run in chosen) for f in (min, max)]
        row["payload"] = sum(row[key] for key in CLASSES)
        # What counters and plugin do not explain to each other: the transport's own framing.
        row["framing"] = row["interface"] - row["payload"] - HEADER_BYTES * row["packets"]
        ratios = [dense[run["repeat"]]["interface"] / run["interface"] for run in chosen]
        row["fewer"], row["fewer_range"] = statistics.fmean(ratios), [min(ratios), max(ratios)]
        row["fewer_moved"] = statistics.fmean(
            (dense[run["repeat"]]["forward"] + dense[run["repeat"]]["backward"])
            / (run["forward"] + run["backward"])
            for run in chosen
        )
        row["speedup"] = statistics.median(dense[run["repeat"]]["step_ms"] / run["step_ms"] for run in chosen)
        rows.append(row)
    return rows


BYTES = ["kB per step", "ids", "forward", "backward", "fewer", "on the wire", "fewer"]
TIMES = ["ms per step", "step", "range", "dense / this", "CPU", "distinct", "coding", "exchange"]


def byte_cells(row: dict[str, Any]) -> list[str]:
    counts = [f"{row[key] / 1e3:.1f}" for key in (*CLASSES, "interface")]
    return [row["setting"], *counts[:3], f"{row['fewer_moved']:.1f}x", counts[3], f"{row['fewer']:.1f}x"]


def time_cells(row: dict[str, Any]) -> list[str]:
    low, high = row["step_range"]
    times = [f"{row[key]:.1f}" for key in ("cpu_ms", "distinct_ms", "coding_ms", "exchange_ms")]
    return [
        row["setting"],
        f"{row['step_ms']:.1f}",
        f"{low:.0f} to {high:.0f}",
        f"{row['speedup']:.2f}",
        *times,
    ]


def terminal_tables(title: str, rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    for headings, cells in ((BYTES, byte_cells), (TIMES, time_cells)):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in rows:
            table.add_row(*cells(row))
        yield table


def markdown_tables(rows: Sequence[dict[str, Any]]) -> str:
    tables = []
    for headings, cells in ((BYTES, byte_cells), (TIMES, time_cells)):
        lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *map(cells, rows)]
        tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables)


def footnotes(arguments: argparse.Namespace, collected: Sequence[dict[str, Any]]) -> str:
    """What the columns are, and how far the two ways of counting agree."""
    rows = [row for results in collected for b in arguments.batch_size for row in summarise(results, b)]
    framing = [row["framing"] for row in rows]
    mlp = {
        "apart": f"averaged over another interface ({format_bytes(rows[0]['mlps'])} per step), not counted",
        "along": "averaged over the same interface and counted in its bytes",
        "none": "not averaged",
    }[collected[0]["mlp"]]
    low, high = format_bytes(min(framing)), format_bytes(max(framing))
    return (
        f"kB: all ranks together, means of {arguments.repeats} runs of {arguments.steps} steps after "
        f"{arguments.warmup} others. ids, forward and backward are what the plugin counts when it hands them "
        "to the transport; on the wire is what left the ranks' interfaces, with all headers and "
        f"acknowledgements, ids included: {HEADER_BYTES} bytes per packet are headers, {low} to {high} per "
        f"step are the transport's own messages. Gradients of the MLPs: {mlp}.\n\n"
        "ms: slowest rank. Step: median of the runs' median steps; dense / this is paired within a run, "
        "below 1 is slower than dense. CPU: of the process, all threads. Distinct: finding the rows to "
        "ask for. Distinct, coding and exchange: of requests, vectors and gradients, medians; the "
        "exchange includes waiting for the other ranks."
    )


if __name__ == "__main__":
    main()
