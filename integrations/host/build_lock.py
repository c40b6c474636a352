"""Messages of a process that waits for the compilation of another, or compiles itself.

DeepSpeed has torch compile an operator at the first start on a machine, for minutes and in silence. A process
that is ended meanwhile, or in the second in which every later start looks for something to compile, leaves a
lock file, on which all others wait for ever: locks say whose they are, and those of processes that are gone
are removed. Standard library only: ``import torch`` loads this module in every process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dct_plugin import processes

__all__ = ["MODULE", "advice", "locks", "watch"]

#: Has the class that torch locks a compilation with.
MODULE = "torch.utils.file_baton"
#: Seconds after which a process says what it is doing.
SAY_AFTER = 10.0
#: Seconds without a change in the folder after which a compilation is taken for dead.
_STALE = 300.0

_WRAPPED = "_dct_wrapped"


def locks() -> list[Path]:
    """Return the locks of DeepSpeed's compilations that exist now."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch_extensions"
    return sorted(Path(os.environ.get("TORCH_EXTENSIONS_DIR", cache)).glob("**/deepspeed*/lock"))


def advice(lock: str | os.PathLike[str]) -> str:
    """Return a line about a lock that is waited for: who may hold it, and how to clear it."""
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


def watch(module: ModuleType) -> None:
    """Make torch's lock report what it waits for, or what runs, for longer than :data:`SAY_AFTER` seconds."""
    baton = module.FileBaton
    if getattr(baton.wait, _WRAPPED, False):
        return
    wait, acquire, release = baton.wait, baton.try_acquire, baton.release

    def waits(self: Any, *args: Any, **keywords: Any) -> Any:
        timer = _later(lambda: advice(self.lock_file_path))
        waiting = threading.Event()
        threading.Thread(target=_clear, args=(Path(self.lock_file_path), waiting), daemon=True).start()
        try:
            return wait(self, *args, **keywords)
        finally:
            waiting.set()
            timer.cancel()

    def acquires(self: Any, *args: Any, **keywords: Any) -> Any:
        got = acquire(self, *args, **keywords)
        if got:
            with contextlib.suppress(OSError):
                Path(self.lock_file_path).write_text(processes.this())
            folder = os.path.dirname(str(self.lock_file_path))
            self._dct_timer = _later(
                lambda: f"still compiling in {folder}, once on this machine; ended now it would leave a lock"
            )
        return got

    def releases(self: Any, *args: Any, **keywords: Any) -> Any:
        timer = getattr(self, "_dct_timer", None)
        if timer is not None:
            timer.cancel()
        return release(self, *args, **keywords)

    setattr(waits, _WRAPPED, True)
    baton.wait, baton.try_acquire, baton.release = waits, acquires, releases


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
