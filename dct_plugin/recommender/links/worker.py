"""One rank: makes a workload and does blocks of steps when it is told to.

Started by :mod:`.team`, which it is connected to by a socket: requests and answers are pickled tuples.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin.host_traffic import HostTraffic
from dct_plugin.metrics.network_counters import InterfaceCounter

from .method import Method, Workload, totals_of
from .namespaces import SEGMENT

#: Seconds that the ranks wait for each other. At 100 Mbit/s, 100 million fp32 gradients take half a minute.
PATIENCE = timedelta(minutes=3)


def main() -> None:
    job = json.loads(sys.argv[1])
    connection = Connection(job["connection"])
    torch.set_num_threads(1)
    try:
        module, _, attribute = job["workload"].partition(":")
        rank = Rank(job["data"], job["control"])
        rank.serve(getattr(importlib.import_module(module), attribute)(job["options"]), connection)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


class Rank:
    """This process's place among the ranks.

    Args:
        data: Interface that the workload communicates on, whose bytes are counted.
        control: Interface for keeping the ranks together between blocks.
    """

    def __init__(self, data: str, control: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = data
        dist.init_process_group("gloo", timeout=PATIENCE)
        os.environ["GLOO_SOCKET_IFNAME"] = control
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        os.environ["GLOO_SOCKET_IFNAME"] = data
        self._counter = InterfaceCounter(list(dict.fromkeys([data, "lo"])))
        self._data = data

    def serve(self, workload: Workload, connection: Connection) -> None:
        """Answer requests until the connection closes."""
        methods: dict[str, Method] = {}
        while True:
            try:
                request, *arguments = connection.recv()
            except EOFError:
                break
            answer: Any = None
            if request == "open":
                methods = {method.name: method for method in workload.open(*arguments)}
                answer = [(method.name, method.warmup) for method in methods.values()]
            elif request == "close":
                methods = {}
                workload.close()
            else:
                name, steps = arguments
                answer = self.block(methods[name], steps)
            connection.send(answer)
        dist.barrier(self._control)  # one that takes its connections down early can abort the others
        dist.destroy_process_group()

    def block(self, method: Method, steps: int) -> tuple[float, tuple[int, int, int], dict[str, float]]:
        """Seconds that ``steps`` steps take here; bytes that left this node, that stayed in it, and that its
        kernel sent again; the totals of the method's metrics.
        """
        with method.around():
            dist.barrier(self._control)
            self._counter.start()
            resent = _resent()
            began = time.perf_counter()
            with ExitStack() as recorded:
                for metrics in method.metrics:  # other methods of this process have theirs
                    recorded.enter_context(HostTraffic(metrics))
                for _ in range(steps):
                    method.step()
            seconds = time.perf_counter() - began
            dist.barrier(self._control)
            sent = {name: tx for name, (_, tx) in self._counter.stop().per_interface.items()}
            resent = _resent() - resent
        counts = sent.pop(self._data), sum(sent.values()), resent
        return seconds, counts, totals_of(method.metrics)


def _resent() -> int:
    """Bytes that TCP has sent again in this network namespace; 0 where that is not counted."""
    try:
        names, values = [
            line.split()
            for line in Path("/proc/self/net/snmp").read_text("ascii").splitlines()
            if line[:4] == "Tcp:"
        ]
    except (OSError, ValueError):
        return 0
    return int(dict(zip(names, values, strict=True))["RetransSegs"]) * SEGMENT


if __name__ == "__main__":
    main()
