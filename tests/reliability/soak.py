"""Training that is killed again and again ends bitwise like training that is not.

    python tests/reliability/soak.py --seconds 1800

For every host and number of ranks: one run without interruption, and runs of which a random rank gets SIGKILL
(or SIGSTOP, and SIGKILL later) at random moments, start-up and saving included; each time all ranks go on
from the last checkpoint, a third of the times on a link of limited rate where users may make namespaces.
Ranks are forked from this process, which has imported the host and nothing more. Ends with a line of JSON;
exits with 1 when the parameters differ, between the ranks or from the uninterrupted run, when a rank outlives
the others' end by more than a minute, or when memory grows.

Two cases are different. "torchft": replicas are killed, heal and join, and no run begins anew
(``torchft_soak.py``). "torchrun": torchrun itself starts the ranks of a DDP job again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from dct_plugin.rates import check_rate
from dct_plugin.recommender.links.team import free_port

sys.path.extend(map(str, Path(__file__).resolve().parents[1:3]))
import soak_worker
from support import torchrun_job

#: In this order: megatron-core's stand-ins for CUDA stay in the process that ranks are forked from.
#: ``nodes``: DDP on nodes of two ranks.
HOSTS = ("ddp", "nodes", "zero0", "zero1", "zero2", "megatron")
_NETWORK = "DCT_SOAK_NETWORK"
#: MiB between the first quarter of the steps and the last.
GROWTH = 8.0
_context = multiprocessing.get_context("fork")
Processes = list[Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="time limit")
    torchft = ("torchft",) if importlib.util.find_spec("torchft") else ()
    installed = (*HOSTS, "torchrun", *torchft)
    parser.add_argument("--hosts", nargs="+", default=installed, choices=installed)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=(2, 4))
    parser.add_argument("--steps", type=int, default=60, help="of every run")
    parser.add_argument("--kills", type=int, default=20, help="of every host and number of ranks")
    parser.add_argument(
        "--rate", default="20mbit", help="of the limited link (namespaces, tc); none: no limit"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.rate != "none" and _NETWORK not in os.environ and check_rate(arguments.rate):
        _again_in_a_network_of_its_own()
    limit = Limit(arguments.rate if _NETWORK in os.environ else None)
    until, generator = time.monotonic() + arguments.seconds, random.Random(arguments.seed)
    report: dict[str, Any] = {"rate": limit.rate, "seed": arguments.seed, "cycles": 0, "runs": []}
    cases = [(host, ranks) for host in HOSTS if host in arguments.hosts for ranks in arguments.ranks]
    others = [] if "torchrun" not in arguments.hosts else [soak_torchrun]
    if "torchft" in arguments.hosts:
        import torchft_soak  # torchft need not be installed

        others.append(torchft_soak.soak)
    for case in others:
        found = case(arguments.kills, arguments.seconds / (len(cases) + len(others)), generator)
        report["runs"].append(found)
        report["cycles"] += found["kills"]
        print(json.dumps(found), flush=True)
    for host, ranks in cases:
        share = (until - time.monotonic()) / (len(cases) - cases.index((host, ranks)))
        found = soak(host, ranks, arguments.steps, arguments.kills, share, limit, generator)
        report["runs"].append(found)
        report["cycles"] += found["kills"]
        print(json.dumps(found), flush=True)
    print(json.dumps(report), flush=True)
    return 0


def _again_in_a_network_of_its_own() -> None:
    """This program, with a loopback interface that nothing else uses."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    os.environ.update({_NETWORK: "1", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"})
    command = ["unshare", *user, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    os.execvp("unshare", [*command, sys.executable, *sys.argv])


class Limit:
    """The loopback's rate, limited or not; None: it cannot be."""

    def __init__(self, rate: str | None) -> None:
        self.rate = rate
        self.on = False

    def switch(self, on: bool) -> bool:
        """Whether the limit is in force from now on."""
        if self.rate is not None and on != self.on:
            shape = f"tbf rate {self.rate} burst 256kb latency 200ms" if on else "pfifo"
            subprocess.run(f"tc qdisc replace dev lo root {shape}".split(), check=True)
            self.on = on
        return self.on


def soak(
    host: str, ranks: int, steps: int, kills: int, seconds: float, limit: Limit, generator: random.Random
) -> dict[str, Any]:
    """One host with so many ranks: the reference, and then runs that are killed for so many seconds."""
    soak_worker.prepare(host)
    import_beforehand(host)
    with tempfile.TemporaryDirectory() as place:
        reference, folder = Path(place, "whole"), Path(place, "killed")
        began = time.monotonic()
        limit.switch(False)
        reference.mkdir()
        whole = finish(start(host, ranks, reference, steps), reference)
        length = time.monotonic() - began
        assert whole is not None
        done = limited = runs = resumed = 0
        until = time.monotonic() + seconds
        while done < kills and time.monotonic() < until:
            folder.mkdir()
            results = None
            while results is None:
                resumed += (folder / "latest").exists()
                slow = limit.switch(generator.random() < 1 / 3)
                processes = start(host, ranks, folder, steps)
                if done < kills and time.monotonic() < until:
                    # Moments of start-up, too; and several of them in one run.
                    time.sleep(generator.uniform(0.0, 0.6) * length)
                    hit = interrupt(processes, generator)
                    done, limited = done + hit, limited + hit * slow
                results = finish(processes, folder)
            runs += 1
            check(host, ranks, [*whole, *results])
            shutil.rmtree(folder)
    growth = max(last - first for first, last in (result["memory"] for result in whole))
    if growth > GROWTH:
        raise SystemExit(f"{host} on {ranks} ranks: memory grew by {growth:.1f} MiB: {whole}")
    return {
        "host": host, "ranks": ranks, "kills": done, "limited": limited, "runs": runs, "resumed": resumed,
        "growth_mib": round(growth, 1), "equal": True, "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def soak_torchrun(kills: int, seconds: float, generator: random.Random) -> dict[str, Any]:
    """Kill ranks of a job of three for so many times or seconds; return figures."""
    until, done, began = time.monotonic() + seconds, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        # It ends after the last kill: every checkpoint is followed by one kill at most.
        steps = 20 * (kills + 2)
        job = torchrun_job.Job(Path(place), f"--steps={steps}", "--seconds=0.05", restarts=kills)
        job.add_node(3)
        try:
            while done < kills and time.monotonic() < until and job.latest() < steps - 20:
                job.wait_for(job.latest() + 10, 3)
                time.sleep(generator.uniform(0.0, 0.5))
                job.kill_rank(0, generator.randrange(3))
                done += 1
            log = job.finish()
        finally:
            job.close()
    found = torchrun_job.ends(log)
    assert len(found) == 3, log
    assert len({weights for *_, weights in found}) == 1, log
    return {
        "host": "torchrun", "kills": done, "steps": steps, "equal": True,
        "loss": statistics.fmean(loss for _, _, loss, _ in found), "seconds": time.monotonic() - began,
    }  # fmt: skip


def import_beforehand(host: str) -> None:
    """Import here what two ranks import on their way: they find it there when they are forked."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if finish(start(host, 2, folder, 4), folder) is None:
            raise SystemExit(f"{host} does not run")
        names = (folder / "modules").read_text().split()
    for name in names:
        with contextlib.suppress(Exception), contextlib.redirect_stdout(None):
            importlib.import_module(name)
    if threading.active_count() > 1:
        raise SystemExit(f"{host}: its modules start threads, which a fork would lose")


def check(host: str, ranks: int, results: list[dict[str, Any]]) -> None:
    """Whether all ranks of all runs ended with the same parameters, each those of its part of the model."""
    for part in {result["part"] for result in results}:
        if len({result["digest"] for result in results if result["part"] == part}) > 1:
            raise SystemExit(f"{host} on {ranks} ranks: parameters differ: {results}")


def start(host: str, ranks: int, folder: Path, steps: int, **more: Any) -> Processes:
    """The ranks; ``more`` is added to their environment."""
    (folder / "alive").unlink(missing_ok=True)
    common: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "DS_ACCELERATOR": "cpu"}
    common |= {"OMP_NUM_THREADS": 1, **more}
    processes = [
        _context.Process(target=_rank, args=(rank, common, host, folder, steps)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def _rank(rank: int, environment: dict[str, Any], host: str, folder: Path, steps: int) -> None:
    """In the process of a rank."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for number, kind in ((1, "out"), (2, "err")):
        target = os.open(folder / f"rank{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, number)
    try:
        soak_worker.run(host, folder, steps)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        os._exit(1)
    if rank == 0:
        (folder / "modules").write_text("\n".join(sys.modules))
    os._exit(0)  # ranks that take down their connections while others still use them can abort them


def interrupt(processes: Processes, generator: random.Random) -> int:
    """Kill one; whether it was still there."""
    victim = generator.choice(processes)
    if victim.exitcode is not None:
        return 0
    if generator.random() < 0.25:
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(2.0)
    victim.kill()
    return 1


def finish(processes: Processes, folder: Path) -> list[dict[str, Any]] | None:
    """What all ranks say at their end; None when one was lost, and then all have ended."""
    began = None
    while any(process.exitcode is None for process in processes):
        if began is None and any(process.exitcode not in (None, 0) for process in processes):
            began = time.monotonic()
        training = (folder / "alive").exists()
        # Before the first step it is the launcher's task to end the others: they wait in the rendezvous.
        if began is not None and time.monotonic() - began > (60 if training else 5):
            for process in processes:
                process.kill()
            if training:
                raise SystemExit("a rank outlived the loss of another by a minute")
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    if any(codes):
        if -signal.SIGKILL not in codes:
            texts = [(folder / f"rank{rank}.err").read_text()[-2000:] for rank in range(len(codes))]
            raise SystemExit("a rank failed by itself:\n" + "\n".join(texts))
        return None
    outputs = [(folder / f"rank{rank}.out").read_text() for rank in range(len(codes))]
    # The plugin's summary follows when the worker drops its model.
    said = [[line for line in text.splitlines() if line.startswith("{")] for text in outputs]
    return [json.loads(lines[-1]) for lines in said]


if __name__ == "__main__":
    sys.exit(main())
