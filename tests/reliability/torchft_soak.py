"""Replicas of torchft that are killed, started again, and joined by others; the rest trains on meanwhile.

They are forked from this process, which imports torchft and starts no threads. At the end all replicas hold
the same weights, bit by bit, and a run of as many steps without any kill tells what the kills cost.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")  # which torchft reads when it is imported

import torch
from support.torchft_replicas import lighthouse
from support.torchft_worker import Job, work

SECTION = {"data_parallel": {"sparsity": 0.9, "feedback": "local", "min_numel": 512}}
_context = multiprocessing.get_context("fork")
#: Seconds in which a replica that was started takes part, and in which all come to an end, and for each step.
JOINED, ENDED, STEP = 120.0, 180.0, 1.0


def soak(kills: int, seconds: float, generator: random.Random) -> dict[str, Any]:
    """Kill replicas for so many times or seconds; return figures. Exits when replicas differ or hang."""
    with tempfile.TemporaryDirectory() as place:
        disturbed = Replicas(Path(place, "disturbed"))
        try:
            done, joined = disturbed.disturb(kills, time.monotonic() + seconds, generator)
            found = disturbed.results()
        finally:
            disturbed.close()
        oldest = max(found, key=lambda result: result["tries"])
        dense, sent = (sum(sizes) for sizes in zip(*oldest["classes"].values(), strict=True))
        figures = {
            "host": "torchft", "kills": done, "joined": joined, "steps": found[0]["step"], "equal": True,
            "tries_of_the_oldest": oldest["tries"],
            "its_steps_rolled_back": oldest["counts"]["steps_rolled_back"],
            "its_dense_bytes": dense, "its_sent_bytes": sent, "loss": found[0]["loss"],
        }  # fmt: skip
        print(json.dumps(figures), flush=True)
        whole = Replicas(Path(place, "whole"))
        try:
            for name in "abc":
                whole.start(name)
            reference = whole.results(found[0]["step"])
        finally:
            whole.close()
    return {**figures, "loss_without_kills": reference[0]["loss"]}


class Replicas:
    """Replicas and their lighthouse, as processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.processes = folder, {}
        self._lighthouse = _context.Process(target=_serve, args=(folder / "address",), daemon=True)
        self._lighthouse.start()
        while not (folder / "address").exists():
            time.sleep(0.05)

    def start(self, name: str) -> None:
        address = (self.folder / "address").read_text()
        out = str(self.folder / name)
        Path(f"{out}.step").unlink(missing_ok=True)
        job = Job(name, address, out, section=SECTION, seconds=0.02, stop=str(self.folder / "stop"))
        self.processes[name] = _context.Process(target=work, args=(job,))
        self.processes[name].start()

    def steps(self) -> list[int]:
        """Return the steps of the replicas; 0 for those that have made none yet."""
        found = []
        for name in self.processes:
            path = self.folder / f"{name}.step"
            found.append(int((path.read_text() if path.exists() else "") or 0))
        return found

    def wait_until_joined(self) -> None:
        """Wait until all replicas train, and train on for a moment."""
        until, first = time.monotonic() + JOINED, None
        while first is None or min(self.steps()) < first + 2:
            if first is None and min(self.steps()) > max(self.steps()) - 3 > 0:
                first = max(self.steps())
            if time.monotonic() > until or not all(p.is_alive() for p in self.processes.values()):
                raise SystemExit(f"torchft: replicas are at steps {self.steps()}, of {list(self.processes)}")
            time.sleep(0.02)

    def disturb(self, kills: int, until: float, generator: random.Random) -> tuple[int, int]:
        """Kill replicas at random moments and start them again; every fourth time another one joins, and
        leaves with the next kill. Return the kills, and how many joined.
        """
        for name in "abc":
            self.start(name)
        done = joined = 0
        while done < kills and time.monotonic() < until:
            if len(self.processes) == 3 and done % 4 == 3:
                self.start(f"joined{joined}")
                joined += 1
            self.wait_until_joined()
            time.sleep(generator.uniform(0.0, 0.2))  # steps take 0.02 to 0.1 s
            leaves = len(self.processes) > 3
            victim = list(self.processes)[-1] if leaves else generator.choice(list(self.processes))
            os.kill(self.processes[victim].pid, signal.SIGKILL)
            self.processes.pop(victim).join()
            if not leaves:
                self.start(victim)
            done += 1
        self.wait_until_joined()
        return done, joined

    def results(self, steps: int = 0) -> list[dict[str, Any]]:
        """End all replicas after so many steps, or soon; return their results, with the same weights."""
        steps = steps or max(self.steps()) + 40
        order = self.folder / "order"
        order.write_text(f"{steps} {len(self.processes)}")
        order.rename(self.folder / "stop")
        until = time.monotonic() + ENDED + STEP * steps
        for name, process in self.processes.items():
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode != 0:
                raise SystemExit(f"torchft: replica {name} did not end: {process.exitcode}, {self.steps()}")
        found = [torch.load(self.folder / name) for name in self.processes]
        for each in found:
            same = map(torch.equal, each["weights"], found[0]["weights"])
            if each["step"] != found[0]["step"] or not all(same):
                raise SystemExit(f"torchft: replicas differ after {[each['step'] for each in found]} steps")
        return found

    def close(self) -> None:
        for process in (*self.processes.values(), self._lighthouse):
            process.kill()
            process.join()


def _serve(path: Path) -> None:
    with lighthouse(2) as address:
        path.with_suffix(".tmp").write_text(address)
        path.with_suffix(".tmp").rename(path)
        time.sleep(1e6)
