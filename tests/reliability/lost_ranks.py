"""A rank is lost at a chosen point of start-up, of a step or of a save: the others end in time and name it.

    python tests/reliability/lost_ranks.py --hosts zero1 --seconds 480

Every combination of point (``failing_rank.py``) and of being killed, stopped, failed or left without
memory, in random order, on 2 or 4 ranks, with the key-value store in rank 0 or, as under torchrun, in the
launcher. The others must end within the time limit of the process group (8 s here) and the seconds in which
ranks report. Each of them must name the rank that was lost, the collective and the step, or rank 0 where that
served the store and has ended. Then all go on from the last checkpoint and must end bitwise like a run
without a loss. Ends with a line of JSON, and with 1 if anything of this did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import failing_rank
import psutil
import soak
import soak_worker

from dct_plugin.recommender.links.team import free_port

STEPS = 15
LIMIT = 8.0
#: After the limit: the reports, and the work of ending on a machine with much else to do.
GRACE = 15.0
#: What may say who is gone, with the rank in between.
NAMED = (
    r"the .*? failed: rank\(s\) \[{0}\] gave no sign",
    r"rank\(s\) \[{0}\] failed while preparing this exchange",
    r"rank {0} did not report within",
    r"rank {0} failed at start-up",
    r"cannot save residuals\n.*rank {0}: ",
)
STORE_GONE = (
    "the key-value store does not answer: rank 0, which serves it unless the launcher does, has ended"
)
_SERVER = """import sys, torch.distributed as dist
for line in sys.stdin:
    store = dist.TCPStore("127.0.0.1", int(line), is_master=True, wait_for_workers=False)
    print("ready", flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="time limit")
    parser.add_argument("--hosts", nargs="+", default=soak.HOSTS, choices=soak.HOSTS)
    parser.add_argument("--points", nargs="+", default=failing_rank.POINTS, choices=failing_rank.POINTS)
    parser.add_argument("--hows", nargs="+", default=failing_rank.HOWS, choices=failing_rank.HOWS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator, until = random.Random(arguments.seed), time.monotonic() + arguments.seconds
    hosts, faults = [host for host in soak.HOSTS if host in arguments.hosts], 0
    launcher = Launcher()
    for number, host in enumerate(hosts):
        share = (until - time.monotonic()) / (len(hosts) - number)
        found = lose_on(host, arguments.points, arguments.hows, share, launcher, generator)
        print(json.dumps(found), flush=True)
        faults += len(found["faults"])
    launcher.process.kill()
    return int(faults > 0)


class Launcher:
    """The process that serves the key-value store, as under torchrun."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _SERVER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def variables(self) -> dict[str, Any]:
        """Return the environment of ranks that are to use a new store."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        port = free_port()
        print(port, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "ready\n"
        return {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": port}


def lose_on(
    host: str,
    points: list[str],
    hows: list[str],
    seconds: float,
    launcher: Launcher,
    generator: random.Random,
) -> dict[str, Any]:
    """Lose ranks on one host for so many seconds; return the counts."""
    until = time.monotonic() + seconds
    soak_worker.prepare(host)
    soak.import_beforehand(host)
    counts: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory() as place:
        whole: dict[int, list[dict[str, Any]]] = {}
        # Megatron gives its groups a limit of its own, in minutes.
        hows = [how for how in hows if host != "megatron" or how != "stop"]
        cases = list(itertools.product(points, hows))
        generator.shuffle(cases)
        for number, (point, how) in enumerate(cases):
            if time.monotonic() > until:
                break
            ranks = generator.choice((2, 4))
            if ranks not in whole:
                (reference := Path(place, f"whole{ranks}")).mkdir()
                results = soak.finish(soak.start(host, ranks, reference, STEPS), reference)
                assert results is not None
                whole[ranks] = results
            (folder := Path(place, str(number))).mkdir()
            case = {"rank": generator.randrange(ranks), "step": generator.randrange(4, 9), "point": point}
            case |= {"how": how, "limit": LIMIT, "ranks": ranks}
            variables = generator.choice((dict, launcher.variables))()
            case["launcher"] = bool(variables)
            outcome, took = lose(host, ranks, folder, case, variables)
            slowest = max(slowest, took)
            counts[how if outcome == "named" else f"{outcome}: {point}, {how}"] += 1
            if outcome not in ("named", "went on", "not reached"):
                texts = [(folder / f"rank{rank}.err").read_text()[-1500:] for rank in range(ranks)]
                faults.append({**case, "outcome": outcome, "texts": texts})
                print(json.dumps(faults[-1], indent=1), file=sys.stderr, flush=True)
            again = soak.finish(soak.start(host, ranks, folder, STEPS), folder)
            assert again is not None
            soak.check(host, ranks, [*whole[ranks], *again])
    summary = [{key: fault[key] for key in fault if key != "texts"} for fault in faults]
    return {"host": host, **counts, "slowest_s": round(slowest, 1), "faults": summary}


def lose(
    host: str, ranks: int, folder: Path, case: dict[str, Any], variables: dict[str, Any]
) -> tuple[str, float]:
    """Return the outcome for the others, and the seconds until they ended."""
    variables = {**variables, failing_rank.VARIABLE: json.dumps(case)}
    processes = soak.start(host, ranks, folder, STEPS, **variables)
    others = [process for rank, process in enumerate(processes) if rank != case["rank"]]
    lost = None
    while any(process.exitcode is None for process in others):
        if lost is None and (folder / "lost").exists():
            lost = time.monotonic()
        if lost is not None and time.monotonic() - lost > LIMIT + GRACE:
            break
        time.sleep(0.05)
    took = 0.0 if lost is None else time.monotonic() - lost
    late = [process for process in others if process.exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    if len(psutil.Process().children(recursive=True)) > 1:  # the store's
        return "a process was left", took
    if late:
        return "not in time", took
    if not (folder / "lost").exists():
        return "failed before" if any(process.exitcode for process in others) else "not reached", took
    if not any(process.exitcode for process in others):
        return "went on", took  # with a little less memory
    said = {rank: (folder / f"rank{rank}.err").read_text() for rank in range(ranks)}
    named = {
        rank
        for rank, text in said.items()
        if any(re.search(pattern.format(case["rank"]), text) for pattern in NAMED)
    }
    if not case["launcher"] and (case["rank"] == 0 or 0 in named):
        named |= {rank for rank, text in said.items() if STORE_GONE in text}
    silent = set(range(ranks)) - named - {case["rank"]}
    return f"ranks {silent} do not name it" if silent else "named", took


if __name__ == "__main__":
    sys.exit(main())
