"""A rank that is lost at one point of its work: killed, stopped, failed, or without memory.

``DCT_LOSS`` is JSON: the ``rank``, from which ``step`` on, the ``point``, ``how``, and ``limit``, the seconds
that the others wait for it.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

VARIABLE = "DCT_LOSS"
POINTS = (
    "agreement", "forward", "select", "sizes", "messages", "decode", "optimizer", "half a file", "barrier"
)  # fmt: skip
HOWS = ("kill", "stop", "raise", "memory")
_ballast: list[Any] = []


class Loss:
    """What is to happen to this rank; nothing without ``DCT_LOSS``.

    Args:
        folder: In which ``lost`` is written when it happens.

    Attributes:
        step: To be kept up by the run.
        limit: Seconds to give to process groups; None for their default.
    """

    def __init__(self, folder: Path) -> None:
        self.step, self.limit = 0, None
        self._mark = folder / "lost"
        if VARIABLE not in os.environ:
            return
        asked = json.loads(os.environ[VARIABLE])
        self.limit = timedelta(seconds=asked["limit"])
        self._how, self._from, self._point = asked["how"], asked["step"], asked["point"]
        _limit_waiting(self.limit)
        if int(os.environ["RANK"]) == asked["rank"]:
            self._arm()

    def _arm(self) -> None:
        from dct_plugin.compression import stream
        from dct_plugin.kernels import cpu
        from dct_plugin.transport.agreement import Agreement
        from dct_plugin.transport.exchange import AnnouncedMessages

        places: dict[str, tuple[Any, str]] = {
            "agreement": (Agreement, "confirm"),
            "select": (stream.Compressor, "encode"),
            "sizes": (AnnouncedMessages, "post"),
            "messages": (AnnouncedMessages, "receive_messages"),
            "decode": (cpu.CpuBackend, "sum_messages"),
            "barrier": (dist, "barrier"),
        }
        if self._point == "forward":
            torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self._reached())
        elif self._point == "optimizer":
            register_optimizer_step_pre_hook(lambda *_: self._reached())
        elif self._point == "half a file":
            self._wrap(torch, "save", _write_half)
        else:
            self._wrap(*places[self._point])

    def _wrap(self, owner: Any, name: str, before: Callable[..., None] | None = None) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if before is not None and self._due():
                before(original, *arguments)
            self._reached()
            return original(*arguments, **keywords)

        setattr(owner, name, wrapped)

    def _due(self) -> bool:
        return not self._mark.exists() and (self._point == "agreement" or self.step >= self._from)

    def _reached(self) -> None:
        if not self._due():
            return
        self._mark.touch()
        if self._how == "raise":
            raise MemoryError("no room")
        if self._how == "memory":
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used, used))
            try:
                while True:
                    _ballast.append(bytearray(1 << 12))
            except MemoryError:
                return  # whatever asks for memory from now on fails
        os.kill(os.getpid(), signal.SIGKILL if self._how == "kill" else signal.SIGSTOP)


def _write_half(save: Callable[..., None], content: Any, file: Any, *_: Any) -> None:
    whole = io.BytesIO()
    save(content, whole)
    half = whole.getvalue()[: whole.tell() // 2]
    if hasattr(file, "write"):
        file.write(half)
        file.flush()
    else:
        Path(file).write_bytes(half)


def _limit_waiting(limit: timedelta) -> None:
    """For the groups that a framework makes itself, and for the agreement at start-up."""
    from dct_plugin.transport.agreement import Agreement

    dist.distributed_c10d.default_pg_timeout = limit
    confirm = Agreement.confirm

    def limited(self: Agreement, facts: Any) -> None:
        self.limit = limit.total_seconds()
        confirm(self, facts)

    Agreement.confirm = limited  # type: ignore[method-assign]
