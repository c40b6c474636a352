"""Reports of ranks that are lost while the host framework itself communicates.

What the plugin sends ends in an error with the ranks that are gone. A host's own collectives (norms of
gradients, weights that ZeRO gathers, tensor parallelism, barriers of a checkpoint) end with an address at
best: a script that ends with such an error gets one line more, in the plugin's log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from dct_plugin.errors import DCTError
from dct_plugin.transport import lost_ranks

__all__ = ["watch"]

logger = logging.getLogger("dct_plugin")

_COLLECTIVES = "torch.distributed.distributed_c10d"
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_step: Callable[[], int] | None = None


def watch(step: Callable[[], int]) -> None:
    """From now on, name the lost ranks when an error of the transport ends this process.

    Args:
        step: Gives the optimizer steps so far.
    """
    global _step
    lost_ranks.register_process()
    if _step is None:
        sys.excepthook = _reporting(sys.excepthook)
    _step = step


def _reporting(previous: _Hook) -> _Hook:
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if dist.is_initialized() and _of_transport(error):
            what, group = _collective(trace)
            step = None if _step is None else _step()
            logger.error("dct: %s", lost_ranks.describe_failure(what, error, group, step))

    return excepthook


def _of_transport(error: BaseException) -> bool:
    if isinstance(error, DCTError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _collective(trace: TracebackType | None) -> tuple[str, dist.ProcessGroup | None]:
    """Return the name of the torch collective that raised an error, and its group."""
    what, group = "communication of the host", None
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_globals.get("__name__") == _COLLECTIVES and "group" in frame.f_locals:
            what, group = frame.f_code.co_name, frame.f_locals["group"]
    return what, group if isinstance(group, dist.ProcessGroup) else None
