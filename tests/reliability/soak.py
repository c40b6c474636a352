"""Training that is killed again and again ends bitwise like training that is not.

    python tests/reliability/soak.py --seconds 1800

For every host and number of ranks: one run without interruption, and one of which a random rank gets SIGKILL
(or SIGSTOP, and SIGKILL later) at random moments, start-up and saving included; each time all ranks go on
from the last checkpoint. Ends with a line of JSON; exits with 1 when the parameters differ, between the ranks
or from the uninterrupted run, or when a rank outlives the others' end by more than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dct_plugin.integrations.links.team import free_port

WORKER = Path(__file__).parents[1] / "support" / "soak_worker.py"
HOSTS = ("ddp", "zero0", "zero1", "zero2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="time limit")
    parser.add_argument("--hosts", nargs="+", default=HOSTS, choices=HOSTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=60, help="of every run")
    parser.add_argument("--kills", type=int, default=6, help="of every run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    until, generator = time.monotonic() + arguments.seconds, random.Random(arguments.seed)
    report: dict[str, Any] = {"cycles": 0, "runs": []}
    cases = [(host, ranks) for ranks in arguments.ranks for host in arguments.hosts]
    for host, ranks in cases:
        share = (until - time.monotonic()) / (len(cases) - len(report["runs"]))
        found = soak(host, ranks, arguments.steps, arguments.kills, time.monotonic() + share, generator)
        report["runs"].append(found)
        report["cycles"] += found["kills"]
        print(json.dumps(found), flush=True)
    print(json.dumps(report), flush=True)
    return 0


def soak(
    host: str, ranks: int, steps: int, kills: int, until: float, generator: random.Random
) -> dict[str, Any]:
    """One host with so many ranks: the reference, and a run that is killed until the time is up."""
    with tempfile.TemporaryDirectory() as reference, tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        whole = finish(start(host, ranks, Path(reference), steps), Path(reference))
        length = time.monotonic() - began
        done, results = 0, None
        while results is None:
            processes = start(host, ranks, Path(folder), steps)
            if done < kills and time.monotonic() < until:
                time.sleep(generator.uniform(0.1, 1.0) * length)
                done += interrupt(processes, generator)
            results = finish(processes, Path(folder))
    digests = {result["digest"] for result in [*whole, *results]}
    if len(digests) > 1:
        raise SystemExit(f"{host} on {ranks} ranks: parameters differ: {whole} {results}")
    growth = max(last - first for first, last in (result["memory"] for result in whole))
    return {"host": host, "ranks": ranks, "kills": done, "growth_mib": round(growth, 1), "equal": True}


def start(host: str, ranks: int, folder: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    (folder / "alive").unlink(missing_ok=True)
    common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": ranks}
    common |= {"MASTER_PORT": free_port(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), host, str(folder), str(steps)],
            env={
                **os.environ,
                **{name: str(value) for name, value in common.items()},
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=open(folder / f"rank{rank}.out", "w"),
            stderr=open(folder / f"rank{rank}.err", "w"),
        )
        for rank in range(ranks)
    ]


def interrupt(processes: list[subprocess.Popen[bytes]], generator: random.Random) -> int:
    """Kill one; whether it was still there."""
    victim = generator.choice(processes)
    if victim.poll() is not None:
        return 0
    if generator.random() < 0.25:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
    victim.kill()
    return 1


def finish(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[dict[str, Any]] | None:
    """What all ranks say at their end; None when one was lost, and then all have ended."""
    began = None
    while any(process.poll() is None for process in processes):
        if began is None and any(process.poll() not in (None, 0) for process in processes):
            began = time.monotonic()
        training = (folder / "alive").exists()
        # Before the first step it is the launcher's task to end the others: they wait in the rendezvous.
        if began is not None and time.monotonic() - began > (60 if training else 5):
            for process in processes:
                process.kill()
            if training:
                raise SystemExit("a rank outlived the loss of another by a minute")
        time.sleep(0.05)
    codes = [process.returncode for process in processes]
    if any(codes):
        if -signal.SIGKILL not in codes:
            texts = [(folder / f"rank{rank}.err").read_text()[-2000:] for rank in range(len(codes))]
            raise SystemExit("a rank failed by itself:\n" + "\n".join(texts))
        return None
    outputs = [(folder / f"rank{rank}.out").read_text() for rank in range(len(codes))]
    return [json.loads(text.strip().splitlines()[-1]) for text in outputs]


if __name__ == "__main__":
    sys.exit(main())
