"""Start the trainer as local ranks under torchrun, follow it, and end all of it when a rank fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dct_plugin import processes
from dct_plugin.errors import DCTError
from dct_plugin.metrics.network_counters import interface_bytes
from dct_plugin.processes import tail

Event = dict[str, Any]

#: Seconds after which a start that waits for a lock says so; importing DeepSpeed takes about as long.
SLOW_START_SECONDS = 10.0

_COMPILING = (
    "compiling a part of DeepSpeed, or waiting for a process that does: that takes minutes, once on this "
    "machine; if no process is compiling, one that was killed left a lock"
)

TRAINER = "dct_plugin.recommender.trainer"

_SUFFIX = ".deepspeed.json"


def config_file(folder: Path, run: str) -> Path:
    """Return the file of a run's configuration in ``folder``."""
    return folder / (run + _SUFFIX)


def run_name(file: Path) -> str:
    """Return the name of the run that a configuration file is for."""
    return file.name.removesuffix(_SUFFIX).removesuffix(".json")


def saved_run(folder: str | Path, run: str, seed: int) -> Path:
    """Return the folder of a saved run."""
    return Path(folder, f"{run}-seed{seed}")


def _compilations() -> list[Path]:
    """Return the lock files of DeepSpeed's compilations that exist now."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch_extensions"
    return sorted(Path(os.environ.get("TORCH_EXTENSIONS_DIR", cache)).glob("**/deepspeed*/lock"))


class RunFailed(DCTError):
    """A launch ended with an error; the message holds the end of what the failing rank wrote."""


class Runner:
    """One launch of the trainer on ``ranks`` local processes.

    Args:
        name: For messages and the folder of the log files.
        ranks: Number of processes.
        arguments: Arguments of the trainer, without ``--events`` and ``--interface``.
        folder: Where ``NAME.events.jsonl`` and the ranks' output (``logs/NAME``) go.
    """

    def __init__(self, name: str, ranks: int, arguments: Sequence[str], folder: Path) -> None:
        self.name, self.ranks, self.folder = name, ranks, folder
        self.events_file = folder / f"{name}.events.jsonl"
        self.logs = folder / "logs" / name
        self.environment = {"OMP_NUM_THREADS": "1"}
        self.arguments = [*arguments, "--events", str(self.events_file)]
        if "DS_ACCELERATOR" not in os.environ and not enough_gpus(ranks):
            self.environment["DS_ACCELERATOR"] = "cpu"
        # The interface whose bytes can be counted, if there is one.
        if "lo" in interface_bytes():
            self.environment["GLOO_SOCKET_IFNAME"] = "lo"
            self.arguments += ["--interface", "lo"]

    @property
    def command(self) -> list[str]:
        # --standalone takes a free port; the local address spares a look-up of the host name.
        launcher = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(self.ranks)]
        return [sys.executable, "-m", *launcher, "-m", TRAINER, *self.arguments]

    @property
    def command_line(self) -> str:
        """The command as one would type it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, "torchrun", shlex.join(self.command[3:])])

    def run(self, follow: Callable[[Event], None], *, poll_seconds: float = 0.1) -> list[Event]:
        """Start the ranks, pass on every event of rank 0 as it comes, return all of them.

        When they take long to start and may be waiting for a compilation, ``follow`` also gets ``slow_start``
        with what to do about it.

        Raises:
            RunFailed: A rank failed; no rank is left running. So it is after any other exception.
        """
        self.events_file.unlink(missing_ok=True)
        events: list[Event] = []
        with contextlib.ExitStack() as stack:
            self.logs.mkdir(parents=True, exist_ok=True)
            torchrun, arguments = self.command[:3], self.command[3:]
            with open(self.logs / "launcher.log", "wb") as output:
                process = subprocess.Popen(
                    [*torchrun, "--redirects", "3", "--log-dir", str(self.logs), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.environment},
                    start_new_session=True,
                )
            stack.callback(processes.end, process)
            stack.enter_context(_signals_raised(signal.SIGTERM, signal.SIGHUP))
            for event in self._new_events(process, poll_seconds):
                if event["event"] != "slow_start":
                    events.append(event)
                follow(event)
        complete = bool(events) and events[-1]["event"] == "result"
        # After the result ranks only take down their connections, and gloo may abort in that.
        if complete:
            return events
        if (fault := next((event for event in events if event["event"] == "fault"), None)) is not None:
            raise RunFailed(fault["text"])
        doing = next((event for event in reversed(events) if event["event"] == "initialize"), None)
        what = f"{self.name} run"
        if doing is not None:
            what += f" (configuration {doing['config']}, seed {doing['seed']})"
        if process.returncode:
            raise RunFailed(self._failure(what, process.returncode))
        raise RunFailed(f"the {what} ended without a result; its output is in {self.logs}")

    def _new_events(self, process: subprocess.Popen[bytes], poll_seconds: float) -> Iterator[Event]:
        """Lines of the events file as they are written, until the process has ended."""
        rest, offset = "", 0
        slow_at = time.monotonic() + SLOW_START_SECONDS
        while True:
            ended = process.poll() is not None
            with contextlib.suppress(FileNotFoundError), open(self.events_file, encoding="utf-8") as file:
                file.seek(offset)
                *lines, rest = (rest + file.read()).split("\n")
                offset = file.tell()
                yield from map(json.loads, lines)
            if ended:
                return
            if offset == 0 and time.monotonic() > slow_at and (locks := _compilations()):
                slow_at = float("inf")
                yield {"event": "slow_start", "advice": [f"{_COMPILING}: rm {' '.join(map(str, locks))}"]}
            time.sleep(poll_seconds)

    def _failure(self, what: str, code: int) -> str:
        """Describe a failed run: the rank, and the end of what it wrote."""
        report = (self.logs / "launcher.log").read_text(errors="replace")
        # torchrun names the rank that failed first at the end of its report.
        first = re.search(
            r"Root Cause.*?\brank\s*:\s*(\d+) \(local_rank: (\d+)\).*?exitcode\s*:\s*(-?\d+)",
            report,
            re.DOTALL,
        )
        if first is None:
            return f"the {what} ended with exit code {code}:\n{tail(report)}"
        rank, local_rank, exit_code = first.groups()
        written = ""
        for stream in ("stderr", "stdout"):
            files = self.logs.glob(f"*/attempt_*/{local_rank}/{stream}.log")
            for file in sorted(files, key=os.path.getmtime)[-1:]:
                written = written or file.read_text(errors="replace").strip()
        return (
            f"rank {rank} of the {what} failed with exit code {exit_code}; the end of its output:\n"
            f"{tail(written) or '(nothing)'}\nAll output is in {self.logs}"
        )


def enough_gpus(ranks: int) -> bool:
    """Return whether every rank can have a GPU."""
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


@contextlib.contextmanager
def _signals_raised(*numbers: signal.Signals) -> Iterator[None]:
    """Meanwhile, these signals end the program like an exception, so that what must be cleaned up is."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
