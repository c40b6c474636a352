"""torchrun starts ranks anew when a node is lost: they go on from the last checkpoint, with fewer ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dct_plugin.links.team import free_port

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic_ddp.py"
RENDEZVOUS = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=2,is_host={host}"


def agent(port: int, folder: Path, *, host: bool) -> subprocess.Popen[bytes]:
    """A torchrun of one node with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1"]
    command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += ["--rdzv-conf", RENDEZVOUS.format(host=int(host)), "--rdzv-id=elastic"]
    command += [str(SCRIPT), "--folder", str(folder), "--steps=60", "--seconds=0.2"]
    with open(folder / f"agent{os.urandom(2).hex()}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def saved_by_three(folder: Path) -> bool:
    """Whether the last checkpoint is one of three ranks."""
    latest = folder / "latest"
    return latest.exists() and (folder / f"step{latest.read_text()}" / "dct_rank_00002.pt").exists()


def test_a_lost_node(tmp_path: Path) -> None:
    port = free_port()
    agents = [agent(port, tmp_path, host=number == 0) for number in range(3)]
    try:
        until = time.monotonic() + 150
        while not saved_by_three(tmp_path) and time.monotonic() < until:
            time.sleep(0.1)
        lost = psutil.Process(agents[2].pid)
        for process in (*lost.children(recursive=True), lost):
            process.kill()
        for each in agents[:2]:
            each.wait(120)
    finally:
        for each in agents:
            for process in psutil.Process(each.pid).children(recursive=True) if each.poll() is None else ():
                process.kill()
            each.kill()
    logs = "\n".join(path.read_text() for path in tmp_path.glob("agent*.log"))
    assert [each.returncode for each in agents[:2]] == [0, 0], logs
    lines = re.findall(r"rank \d of (\d): step (\d+) to 60, (\S+)", logs)
    assert len(lines) == 2, logs
    assert len(set(lines)) == 1
    ranks, first, _ = lines[0]
    assert ranks == "2"
    assert int(first) >= 10
    assert f"what 3 ranks had not sent by step {first} is spread over 2 ranks" in logs
