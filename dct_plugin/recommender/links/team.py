"""Start the ranks of a workload, have them do blocks of steps, and end all of them when one fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from dct_plugin.errors import DCTError
from dct_plugin.processes import tail

from .namespaces import Links, Network

DATA, CONTROL = "data", "control"  # interfaces
NETWORKS = (Network(DATA, offload=True), Network(CONTROL, offload=True))
_WORKER = "dct_plugin.recommender.links.worker"


class TeamError(DCTError):
    """A rank failed; the message holds the end of what it wrote."""


class Block(NamedTuple):
    """Time and bytes of some steps of one method.

    Attributes:
        ms: Milliseconds per step, until the slowest rank was done.
        sent: Bytes per step that left the nodes' interfaces, all nodes together, with headers.
        totals: What the plugin's metrics have timed and counted so far, mean over the ranks.
        steps: How many.
        inside: Bytes per step between ranks of one node, all nodes together, with headers.
        resent: Bytes per step, part of the above, that TCP sent again: as good as none but on machines that
            are too busy to acknowledge in time, and on links that drop packets.
    """

    ms: float
    sent: float
    totals: dict[str, float]
    steps: int
    inside: float = 0.0
    resent: float = 0.0


def rank_environment(rank: int, ranks: int, *, host: str, port: int, device: str) -> dict[str, str]:
    """Return the environment of one rank of a job on this machine."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": device,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "DS_ACCELERATOR": "cpu",
    }


class Team:
    """The ranks of one workload; use it in a ``with`` block.

    Args:
        workload: ``module:class`` of a :class:`~.method.Workload`.
        ranks: How many.
        links: Namespaces of as many nodes, made with :data:`NETWORKS`, that the ranks are spread over; None:
            all talk over the loopback interface.
        options: For the workload; JSON.
        folder: For what the ranks write.
        name: Of their files.

    Raises:
        TeamError: A rank failed or does not answer; no rank is left running.
    """

    def __init__(
        self,
        workload: str,
        ranks: int,
        links: Links | None,
        *,
        options: Mapping[str, Any],
        folder: Path,
        name: str,
        patience: float = 300.0,
    ) -> None:
        self.ranks, self.name, self.patience = ranks, name, patience
        # Each node's first rank counts its bytes; on the loopback interface every rank sees those of all.
        self._per_node = ranks if links is None else ranks // links.nodes
        self._logs = [folder / f"{name}.rank{rank}.log" for rank in range(ranks)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        folder.mkdir(parents=True, exist_ok=True)
        data, control = (DATA, CONTROL) if links is not None else ("lo", "lo")
        host = "127.0.0.1" if links is None else links.address(0, 1)
        port = free_port()
        for rank in range(ranks):
            ours, theirs = Pipe()
            job = {"workload": workload, "options": options, "connection": theirs.fileno()}
            job |= {"data": data, "control": control}
            command = [sys.executable, "-m", _WORKER, json.dumps(job)]
            if links is not None:
                command = links.inside(rank // self._per_node, command)
            environment = rank_environment(rank, ranks, host=host, port=port, device=data)
            with open(self._logs[rank], "wb") as log:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for connection in self._connections:
            connection.close()
        if error is None:
            end = time.monotonic() + 10
            for process in self._processes:
                try:
                    process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
        for process in self._processes:
            process.kill()
            process.wait()

    def open(self, variant: str) -> dict[str, int]:
        """Have a variant made; return its methods and how many steps each needs before it counts."""
        return dict(self._ask("open", variant)[0])

    def close(self) -> None:
        """Free the variant."""
        self._ask("close")

    def block(self, method: str, steps: int) -> Block:
        """Do ``steps`` steps of a method and return what they took."""
        seconds, counts, totals = zip(*self._ask("block", method, steps), strict=True)
        sent, inside, resent = (
            sum(column) / steps for column in zip(*counts[:: self._per_node], strict=True)
        )
        mean = {name: sum(part[name] for part in totals) / self.ranks for name in totals[0]}
        return Block(1e3 * max(seconds) / steps, sent, mean, steps, inside, resent)

    def _ask(self, *request: Any) -> list[Any]:
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(request)
            except OSError:
                self._fail(rank)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.patience
        while missing := [rank for rank in range(self.ranks) if rank not in answers]:
            ready = wait([self._connections[rank] for rank in missing], deadline - time.monotonic())
            if not ready:
                names = ", ".join(map(str, missing))
                raise TeamError(f"{self.name}: no answer from rank {names} within {self.patience:.0f} s")
            for rank in missing:
                if self._connections[rank] in ready:
                    try:
                        answers[rank] = self._connections[rank].recv()
                    except (EOFError, OSError):
                        self._fail(rank)
        return [answers[rank] for rank in range(self.ranks)]

    def _fail(self, rank: int) -> None:
        """Raise for a rank that has closed its connection."""
        try:
            code: int | None = self._processes[rank].wait(30)
        except subprocess.TimeoutExpired:
            code = None
        written = tail(self._logs[rank].read_text(errors="replace")) or "(nothing)"
        state = "hangs" if code is None else f"ended with exit code {code}"
        raise TeamError(
            f"{self.name}: rank {rank} {state}; the end of its output ({self._logs[rank]}):\n{written}"
        )


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
