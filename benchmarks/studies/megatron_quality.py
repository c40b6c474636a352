"""Validation loss and bytes of a character-level GPT in megatron-core, with and without thresholds.

Two ranks on the CPU (gloo): two pipeline stages, dense and at several sparsities, and two data-parallel
ranks, dense, with plain error feedback and with step-ahead, without and with the distributed optimizer. Run
as root, the ranks live in two network namespaces joined by one link, and the bytes are what that link's
interface counters saw, in each direction; else bytes are not reported.

    python benchmarks/studies/megatron_quality.py --text input.txt --steps 1000 --output table.md

``--instances`` runs four ranks in two instances of the distributed optimizer instead, dense and with the
default settings, told the number of steps. Bytes are then those of the gradients between instances, after
the dense steps.

``--results`` keeps every run at once: the command can be stopped and given again, or with more seeds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dct_plugin.recommender.intervals import paired

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support import megatron_cpu
from support.megatron_gpt import Job, Training, train

from dct_plugin.metrics.network_counters import InterfaceCounter

OFF = {"enabled": False}
NAMESPACES = tuple(f"dct-quality-{os.getpid()}-{rank}" for rank in range(2))
DEVICE = "dct0"
ADDRESSES = ("10.78.0.1", "10.78.0.2")


def settings(arguments: argparse.Namespace) -> dict[str, tuple[dict[str, Any] | None, dict[str, Any]]]:
    """Name -> (``dct`` section, changes of the topology)."""
    if arguments.instances:
        two: dict[str, Any] = {"distributed_optimizer": True, "instances": 2, "bucket_size": 1_000_000}
        dct = {"data_parallel": {"total_steps": arguments.steps}}
        return {"2 instances of 2 ranks, dense": (None, two), "2 instances of 2 ranks, default": (dct, two)}
    result: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {"PP 2, dense": (None, {"pp": 2})}
    pipelines: dict[str, dict[str, Any]] = {}
    for sparsity in arguments.pipeline:
        pipelines[f"{sparsity:g}"] = {"forward": {"method": "threshold", "sparsity": sparsity}}
    for sparsity in arguments.pipeline_int8:
        pipelines[f"{sparsity:g}, int8 values"] = {
            "forward": {"method": "threshold", "sparsity": sparsity, "value_dtype": "int8"},
            "backward": {"method": "answer", "value_dtype": "int8"},
        }
    for text, options in pipelines.items():
        pipeline = {**options, "warmup_steps": arguments.warmup}
        dct = {"data_parallel": OFF, "model_parallel": {"pipeline": pipeline}}
        result[f"PP 2, sparsity {text}"] = (dct, {"pp": 2})
    result["DP 2, dense"] = (None, {"pp": 1})
    for sparsity in arguments.data:
        dct = {"data_parallel": {"sparsity": sparsity, "feedback": "local", "warmup_steps": arguments.warmup}}
        result[f"DP 2, sparsity {sparsity:g}"] = (dct, {"pp": 1})
    for sparsity in arguments.data_ramp:
        tenth = arguments.steps // 10
        ramp = {"warmup_steps": tenth, "sparsity_warmup_steps": tenth}
        dct = {"data_parallel": {"sparsity": sparsity, "feedback": "local", **ramp}}
        result[f"DP 2, sparsity {sparsity:g}, 10 % dense + 10 % ramp"] = (dct, {"pp": 1})
    sharded: dict[str, Any] = {"distributed_optimizer": True}
    if arguments.data_ahead:
        result["DP 2 with the distributed optimizer, dense"] = (None, sharded)
    for where, topology in (("DP 2", {}), ("DP 2 with the distributed optimizer", sharded)):
        for sparsity in arguments.data_ahead:
            for ramp in arguments.ahead_ramp:
                ahead = {"sparsity": sparsity, "feedback": "step_ahead"}
                ahead |= {"warmup_steps": arguments.ahead_warmup, "sparsity_warmup_steps": ramp}
                start = f"{arguments.ahead_warmup} dense + ramp {ramp}"
                name = f"{where}, sparsity {sparsity:g}, step-ahead, {start}"
                result[name] = ({"data_parallel": ahead}, topology)
                for updates in arguments.updates if topology else ():
                    both = {**ahead, "parameters": {"sparsity": updates}}
                    result[f"{name}, updates {updates:g}"] = ({"data_parallel": both}, topology)
    if arguments.settings:
        result = {name: found for name, found in result.items() if name in arguments.settings}
    return result


def read_text(path: str | None) -> str:
    """The text, or a generated one: words of a small made-up language in random sentences."""
    if path is not None:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if path.endswith(".gz") else data).decode()
    generator = torch.Generator().manual_seed(0)
    syllables = ["ka", "lo", "mi", "ter", "sun", "ve", "ra", "do", "pli", "an"]

    def pick(count: int) -> int:
        return int(torch.randint(0, count, (), generator=generator))

    words = ["".join(syllables[pick(10)] for _ in range(1 + pick(3))) for _ in range(200)]
    return "".join(words[min(pick(200), pick(200))] + (". " if pick(9) == 0 else " ") for _ in range(60_000))


class Text:
    """Batches of character windows; the last tenth of the text is held out."""

    def __init__(self, text: str) -> None:
        alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(alphabet)}
        tokens = torch.tensor([index[character] for character in text])
        self.vocab = len(alphabet)
        cut = len(tokens) * 9 // 10
        self._parts = {"train": tokens[:cut], "held out": tokens[cut:]}

    def batches(self, part: str, job: Job, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens = self._parts[part]
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(0, len(tokens) - job.seq - 1, (job.micro_batch, 1), generator=generator)
            window = tokens[starts + torch.arange(job.seq + 1)]
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def job_of(arguments: argparse.Namespace, name: str, seed: int) -> Job:
    """The run of a row of the table."""
    base = Job(
        layers=arguments.layers, hidden=arguments.hidden, seq=arguments.seq,
        micro_batch=arguments.micro_batch, micro_batches=arguments.micro_batches,
        steps=arguments.steps, lr=arguments.lr, tied_embeddings=False, evaluation_rounds=16,
    )  # fmt: skip
    dct, topology = settings(arguments)[name]
    return replace(base, seed=seed, dct=dct, **topology)


def counted_run(arguments: argparse.Namespace, name: str, job: Job, number: int) -> None:
    """One rank of ``job`` on the text, what it found to a file: losses, and bytes per step after warm-up."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    address, size = ADDRESSES[0] if arguments.link else "127.0.0.1", int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address, arguments.port + number, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    text = Text(read_text(arguments.text))
    job = replace(job, vocab=text.vocab + -text.vocab % job.tp)
    counter = InterfaceCounter([DEVICE] if arguments.link else None)
    at: list[tuple[int, int]] = []

    def count(training: Training, step: int) -> None:
        if step == arguments.warmup:  # the step before those that are counted
            counter.start()
        if step == job.steps - 1:
            counter.stop()
            at.append((counter.tx, counter.rx))

    outcome = train(
        replace(job, after_step=count),
        batches=lambda job, rank: text.batches("train", job, 1000 * job.seed + rank),
        held_out=lambda job, rank: text.batches("held out", job, 7 + rank),
    )
    steps = max(1, job.steps - 1 - arguments.warmup)
    sent, received = at[0] if at and arguments.link else (0, 0)
    row = {"name": name, "seed": job.seed, "sent": sent / steps, "received": received / steps}
    row["held_out"] = statistics.fmean(outcome.evaluations) if outcome.evaluations else None
    row["train"] = statistics.fmean(outcome.losses[-10:]) if outcome.losses else None
    row["classes"] = {key: part["sent_bytes"] for key, part in outcome.classes.items()}
    row["dense"] = {key: part["dense_bytes"] for key, part in outcome.classes.items()}
    result = Path(arguments.worker) / f"{number}.{rank}"
    unfinished = result.with_name(f"{result.name}.new")  # each rank's own
    unfinished.write_text(json.dumps(row))
    unfinished.rename(result)
    if rank == size - 1:
        print(f"{row['name']}, seed {job.seed}: held out {row['held_out']:.4f}", file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def serve(arguments: argparse.Namespace, job_of: Callable[[str, int], Job]) -> None:
    """One rank: a fork for each run that standard input names, so that imports are paid for once, and gloo's
    connections of one run do not burden the next.
    """
    megatron_cpu.install()
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

    for number, line in enumerate(sys.stdin):
        name, seed = json.loads(line)
        child = os.fork()
        if child == 0:
            counted_run(arguments, name, job_of(name, seed), number)
            os._exit(0)
        os.waitpid(child, 0)
        # After its result a rank only takes down its connections, and gloo may abort in that.
        if not (Path(arguments.worker) / f"{number}.{os.environ['RANK']}").exists():
            raise SystemExit(f"rank {os.environ['RANK']}: {name}, seed {seed} failed")


class Ranks:
    """The ranks' processes, for one run after the other."""

    def __init__(self, measured: bool, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._runs = 0
        self._ranks: list[subprocess.Popen[str]] = []
        for rank in range(count):
            command = [sys.executable, *sys.argv, "--worker", self._folder.name]
            if measured:
                command = ["ip", "netns", "exec", NAMESPACES[rank], *command, "--link"]
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
            environment["GLOO_SOCKET_IFNAME"] = DEVICE if measured else "lo"
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)
            self._ranks.append(process)

    def run(self, name: str, seed: int) -> list[dict[str, Any]]:
        """What each rank found."""
        files = [Path(self._folder.name) / f"{self._runs}.{rank}" for rank in range(len(self._ranks))]
        self._runs += 1
        for process in self._ranks:
            assert process.stdin is not None
            print(json.dumps([name, seed]), file=process.stdin, flush=True)
        limit = time.monotonic() + 1800
        while not all(file.exists() for file in files):
            if any(process.poll() is not None for process in self._ranks) or time.monotonic() > limit:
                raise SystemExit(f"{name}, seed {seed}: a rank failed")
            time.sleep(0.2)
        return [json.loads(file.read_text()) for file in files]

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            process.kill()
            process.wait()
        self._folder.cleanup()


@contextmanager
def started(count: int) -> Iterator[Ranks]:
    """The ranks; between two, a link whose bytes are counted, where that can be made."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the link is removed
    measured = count == 2 and make_link()
    ranks = Ranks(measured, count)
    try:
        yield ranks
    finally:
        ranks.close()
        if measured:
            remove_link()


def measure(
    wanted: Sequence[tuple[str, int]], results: Path, seconds: float = math.inf, count: int = 2
) -> list[dict[str, Any]]:
    """What was found for names and seeds.

    Args:
        wanted: Names and seeds.
        results: JSON lines; a run that is in it is not made again, others are added at once.
        seconds: No run is started after that many.
        count: Ranks.
    """
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["name"], row["seed"]) for row in rows}
    if missing := [run for run in wanted if run not in done]:
        with started(count) as ranks:
            began = time.monotonic()
            for name, seed in missing:
                if time.monotonic() - began > seconds:
                    break
                first, *_, last = ranks.run(name, seed)
                rows.append({**first, "held_out": last["held_out"], "train": last["train"]})
                with results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return [row for row in rows if (row["name"], row["seed"]) in set(wanted)]


def make_link() -> bool:
    """Two namespaces and a link between them; False without the rights to make them."""
    if os.geteuid() != 0:
        return False
    commands = [
        f"ip netns add {NAMESPACES[0]}",
        f"ip netns add {NAMESPACES[1]}",
        f"ip -n {NAMESPACES[0]} link add {DEVICE} type veth peer name {DEVICE} netns {NAMESPACES[1]}",
    ]
    for name, address in zip(NAMESPACES, ADDRESSES, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev {DEVICE}"]
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", DEVICE)]
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{command}: {done.stderr.strip()}; bytes are not measured", file=sys.stderr)
            remove_link()
            return False
    return True


def remove_link() -> None:
    """Delete the namespaces of :func:`make_link`."""
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def table(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per setting, means over the seeds."""
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["seed"]] = row
    lines = [
        f"Held-out loss (nats per character) of {arguments.layers} layers, hidden {arguments.hidden}, after "
        f"{arguments.steps} steps of {arguments.micro_batches} micro-batches of {arguments.micro_batch} x "
        f"{arguments.seq}; {len(arguments.seeds)} seed(s). Differences are paired by seed, with "
        "the 95 % interval.",
        "",
        "| setting | held-out loss | - dense | forward kB/step | fewer | backward kB/step | fewer |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_name.items():
        base = by_name.get(f"{name.split(',')[0]}, dense", {})
        both = sorted(runs.keys() & base.keys())
        paired_to = [runs[seed]["held_out"] - base[seed]["held_out"] for seed in both]
        loss = statistics.fmean(run["held_out"] for run in runs.values())
        cells = [name, f"{loss:.4f}", "" if runs is base or not both else str(paired(paired_to))]
        for key in ("sent", "received"):
            count = statistics.fmean(run[key] for run in runs.values())
            plain = statistics.fmean(base[seed][key] for seed in both) if both else 0
            cells += [f"{count / 1e3:.1f}" if count else "-", f"{plain / count:.1f}x" if plain else "-"]
        if arguments.instances:
            payload = [[run[key].get("gradient", 0) for run in runs.values()] for key in ("dense", "classes")]
            cells[3:] = [
                "-",
                f"{sum(payload[0]) / sum(payload[1]):.1f}x" if sum(payload[1]) else "-",
                "-",
                "-",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Bytes: interface counters of a link between the ranks (-: none could be made, which needs root), "
        "all protocol headers included, warm-up steps excluded. Forward is what rank 0 sends, backward what "
        "it receives; with DP the two directions of the exchange. With instances: payloads of gradients "
        "between them, after the dense steps.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="text file, plain or .gz; generated text without it")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=0, help="dense steps at the start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--pipeline", type=float, nargs="*", default=[0.5, 0.75, 0.9], metavar="SPARSITY")
    parser.add_argument("--pipeline-int8", type=float, nargs="*", default=[0.9], metavar="SPARSITY")
    parser.add_argument("--data-ramp", type=float, nargs="*", default=[0.99], metavar="SPARSITY")
    parser.add_argument("--data", type=float, nargs="*", default=[0.9, 0.99], metavar="SPARSITY")
    parser.add_argument("--data-ahead", type=float, nargs="*", default=[0.9, 0.99], metavar="SPARSITY")
    parser.add_argument(
        "--ahead-warmup", type=int, default=60, metavar="STEPS", help="dense, with step-ahead"
    )
    parser.add_argument("--ahead-ramp", type=int, nargs="+", default=[60, 180], metavar="STEPS")
    parser.add_argument(
        "--updates", type=float, nargs="*", default=[], metavar="SPARSITY", help="of weights, with step-ahead"
    )
    parser.add_argument("--instances", action="store_true", help="of the distributed optimizer: 2 x 2 ranks")
    parser.add_argument(
        "--settings", nargs="+", metavar="NAME", help="rows of the table, by name; all without"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", help="markdown file; standard output without it")
    parser.add_argument("--results", help="JSON lines of every run; those in it are not run again")
    parser.add_argument("--port", type=int, default=29731)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--link", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments, lambda name, seed: job_of(arguments, name, seed))
        return
    wanted = [(name, seed) for seed in arguments.seeds for name in settings(arguments)]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(
            wanted,
            Path(arguments.results or f"{folder}/results.jsonl"),
            count=4 if arguments.instances else 2,
        )
    text = table(arguments, rows)
    if arguments.output:
        Path(arguments.output).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
