"""Messages of a process that compiles an operator, or waits for another process to compile it.

At the first start on a machine DeepSpeed has torch compile an operator, for minutes and in silence. A
process that is killed meanwhile leaves a lock file, and all others wait for it forever. Here a lock names its
process, and a lock of a process that is gone is removed. From torch 2.15 on the kernel frees the lock; a
process then only says that it compiles or waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dct_plugin import processes

from ..host.patching import Function, Patches

#: Seconds after which a process says what it is doing.
SAY_AFTER = 10.0
#: Seconds without a change in the folder after which a compilation is taken for dead.
_STALE = 300.0


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


def advice(lock: str | os.PathLike[str]) -> str:
    """Return a sentence about a lock that is waited for: who may hold it, and how to remove it."""
    quiet = 0.0
    with contextlib.suppress(OSError):
        quiet = time.time() - max(path.stat().st_mtime for path in Path(lock).parent.iterdir())
    if quiet > _STALE:
        held = (
            f"nothing has changed in its folder for {quiet / 60:.0f} minutes, so it was probably left by one "
            "that was killed"
        )
    else:
        held = "that takes minutes, once; if no process is compiling, one that was killed left it"
    return f"waiting for another process to compile a part of DeepSpeed: {held}: rm {lock}"


@contextlib.contextmanager
def builder_watched() -> Iterator[None]:
    """Watch the compilations that DeepSpeed starts inside the block."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def jit_load(original: Function, *args: Any, **keywords: Any) -> Any:
        with watched():
            return original(*args, **keywords)

    with Patches() as patches:
        patches.intercept(OpBuilder, "jit_load", jit_load)
        yield


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Replace torch's lock of a compilation inside the block.

    The lock prints what the process waits for, or does, for longer than :data:`SAY_AFTER` seconds. A lock of
    a process that is gone is removed.
    """
    if not locks_stay():
        doing = "compiling a part of DeepSpeed, or waiting for a process that does"
        timer = _later(lambda: f"still {doing}: that takes minutes, once on this machine")
        try:
            yield
        finally:
            timer.cancel()
        return
    from torch.utils import cpp_extension

    class WatchedBaton(cpp_extension.FileBaton):
        def wait(self) -> None:
            timer = _later(lambda: advice(self.lock_file_path))
            waiting = threading.Event()
            arguments = Path(self.lock_file_path), waiting
            clearing = threading.Thread(target=_clear, args=arguments, daemon=True)
            clearing.start()
            try:
                super().wait()
            finally:
                waiting.set()
                clearing.join()
                timer.cancel()

        def try_acquire(self) -> bool | None:
            acquired = super().try_acquire()
            if acquired:
                with contextlib.suppress(OSError):
                    Path(self.lock_file_path).write_text(processes.this())
                folder = os.path.dirname(str(self.lock_file_path))
                once = "once on this machine; ended now it would leave a lock"
                self.timer = _later(lambda: f"still compiling in {folder}, {once}")
            return acquired

        def release(self) -> None:
            self.timer.cancel()
            super().release()

    with Patches() as patches:
        patches.replace(cpp_extension, "FileBaton", WatchedBaton)
        yield


def _clear(lock: Path, ended: threading.Event) -> None:
    """Remove the lock as soon as the process that holds it, of this machine, is gone."""
    while not ended.wait(0.2):
        with contextlib.suppress(OSError):
            holder = lock.read_text()
            if processes.gone(holder):
                # Whoever is first takes it away; another process may have made a new one since.
                taken = lock.with_name(f"lock.{os.getpid()}")
                lock.rename(taken)
                if taken.read_text() != holder:
                    os.link(taken, lock)
                taken.unlink()


def _later(text: Callable[[], str]) -> threading.Timer:
    def say() -> None:
        print(f"dct: {text()}", file=sys.stderr, flush=True)

    timer = threading.Timer(SAY_AFTER, say)
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") in ("0", "1"):  # one of them waits, if anybody does
        timer.start()
    return timer
