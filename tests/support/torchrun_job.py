"""Jobs under the real torchrun whose ranks and nodes get SIGKILL; torchrun starts the ranks again."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from dct_plugin.recommender.links.team import free_port
from support.deepspeed_launch import environment
from support.forked import forked_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic_ddp.py"
#: Seconds in which a job reaches its next checkpoint, start included, and ends.
PATIENCE = 600.0
_RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={host}"


class Job:
    """A job of one or two nodes on this machine, each of which is a torchrun.

    Args:
        folder: Folder of checkpoints and of ``log``.
        arguments: Arguments of the script.
        restarts: Number of restarts after which torchrun gives up.
    """

    def __init__(self, folder: Path, *arguments: str, restarts: int = 3) -> None:
        self.folder, self.log = folder, folder / "log"
        self.nodes: list[psutil.Popen] = []
        self._command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--rdzv-id=job"]
        self._command += ["--monitor-interval=0.2", "--rdzv-backend=c10d", f"--max-restarts={restarts}"]
        self._command += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        self._script = [str(SCRIPT), "--folder", str(folder), *arguments]

    def add_node(self, ranks: int) -> None:
        """Start a node with so many ranks; the first node keeps the job's key-value store."""
        command = [*self._command, f"--nproc-per-node={ranks}", "--rdzv-conf"]
        command += [_RENDEZVOUS.format(host=int(not self.nodes)), *self._script]
        with open(self.log, "ab") as log, forked_ranks():
            variables = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            self.nodes.append(psutil.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))

    def latest(self) -> int:
        """Return the step of the last checkpoint; 0 if there is none."""
        latest = self.folder / "latest"
        return int(latest.read_text()) if latest.exists() else 0

    def ranks_of_latest(self) -> int:
        """Return the number of ranks that wrote the last checkpoint, where its folder was written once."""
        return len(list((self.folder / f"step{self.latest()}").glob("dct_rank_*.pt")))

    def wait_for(self, step: int, ranks: int) -> None:
        """Wait for a checkpoint of ``step`` or later by so many ranks."""
        until = time.monotonic() + PATIENCE
        while not (self.latest() >= step and self.ranks_of_latest() == ranks):
            assert time.monotonic() < until, self.log.read_text()
            assert all(node.poll() is None for node in self.nodes), self.log.read_text()
            time.sleep(0.02)

    def kill_rank(self, node: int, number: int) -> None:
        """Kill a rank of a node with SIGKILL."""
        self.nodes[node].children()[number].kill()

    def kill_node(self, node: int) -> None:
        """Kill a node's torchrun and all of its ranks with SIGKILL, as a machine that fails."""
        lost = self.nodes.pop(node)
        for process in (*lost.children(recursive=True), lost):
            process.kill()
        lost.wait()

    def finish(self) -> str:
        """Wait for the end of the job; return the log."""
        until = time.monotonic() + PATIENCE
        while any(node.poll() is None for node in self.nodes):
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)
        assert not any(node.returncode for node in self.nodes), self.log.read_text()
        return self.log.read_text()

    def close(self) -> None:
        """End what is still running."""
        while self.nodes:
            if self.nodes[-1].poll() is None:
                self.kill_node(-1)
            else:
                self.nodes.pop()


def ends(log: str) -> list[tuple[int, int, float, str]]:
    """Return ranks, first step, loss and weights of every rank's last line."""
    lines = re.findall(r"rank \d+ of (\d+): steps (\d+) to \d+, loss (\S+), weights (\S+)", log)
    return [(int(ranks), int(first), float(loss), weights) for ranks, first, loss, weights in lines]
