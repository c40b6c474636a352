"""Messages of a process that compiles an operator, or waits for another process to compile it.

At the first start on a machine DeepSpeed has torch compile an operator, for minutes and in silence. Before
torch 2.15 a process that is killed meanwhile leaves a lock file, and all others wait for it forever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..host.patching import Function, Patches

#: Seconds after which a process says what it is doing.
SAY_AFTER = 10.0


def locks_stay() -> bool:
    """Return whether the lock of a process that is killed stays: before torch 2.15."""
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")


def locks() -> list[Path]:
    """Return the lock files of DeepSpeed's compilations that exist now, if they mean that others wait."""
    if not locks_stay():
        return []
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch_extensions"
    return sorted(Path(os.environ.get("TORCH_EXTENSIONS_DIR", cache)).glob("**/deepspeed*/lock"))


def advice() -> str:
    """Return a sentence about a compilation that takes long, and the locks that may have been left."""
    remove = "".join(
        f"; if no process is compiling, one that was killed left a lock: rm {lock}" for lock in locks()
    )
    return (
        "compiling a part of DeepSpeed, or waiting for a process that does: that takes minutes, once on this "
        f"machine{remove}"
    )


@contextlib.contextmanager
def builder_watched() -> Iterator[None]:
    """Say so if a compilation that DeepSpeed starts inside the block takes more than :data:`SAY_AFTER`."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def say() -> None:
        print(f"dct: still {advice()}", file=sys.stderr, flush=True)

    def jit_load(original: Function, *args: Any, **keywords: Any) -> Any:
        timer = threading.Timer(SAY_AFTER, say)
        timer.daemon = True
        if os.environ.get("LOCAL_RANK", "0") in ("0", "1"):  # one of them waits, if anybody does
            timer.start()
        try:
            return original(*args, **keywords)
        finally:
            timer.cancel()

    with Patches() as patches:
        patches.intercept(OpBuilder, "jit_load", jit_load)
        yield
