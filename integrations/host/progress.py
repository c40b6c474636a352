"""The number of steps that a training has made, in a file beside its last checkpoint.

The file outlives a killed process. The next run reads there how many steps after the checkpoint are lost.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from dct_plugin.checkpoint import Loaded

logger = logging.getLogger("dct_plugin")

_NAME = "dct_steps"
#: Seconds to the next note, in units of what the last one took: a slow file system gets fewer notes.
_PAUSE = 100.0


class Progress:
    """Notes the steps of a training beside its last checkpoint; before :meth:`follow` it does nothing."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._step, self._due = 0, 0.0

    def follow(self, folder: str | os.PathLike[str], step: int | None = None) -> None:
        """Note the coming steps in the folder of a checkpoint of ``step``; None: that of the last step."""
        self._file, self._due = Path(folder, _NAME), 0.0
        self.note(self._step if step is None else step)

    def note(self, step: int) -> None:
        """Note that so many steps were made."""
        self._step, began = step, time.monotonic()
        if self._file is None or began < self._due:
            return
        try:
            file = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.write(file, f"{step:20d}".encode())  # of one length: a kill leaves no part of it
            finally:
                os.close(file)
        except OSError:  # for example: the checkpoint was removed
            self._file = None
        ended = time.monotonic()
        self._due = ended + _PAUSE * (ended - began)


def steps_after(folder: str | os.PathLike[str], step: int) -> int | None:
    """Return how many steps were made after the checkpoint of ``step``, at least; None if it is not known."""
    try:
        return max(0, int(Path(folder, _NAME).read_text()) - step)
    except (OSError, ValueError):
        return None


def report_lost(folder: str | os.PathLike[str], found: Loaded, ranks: int) -> None:
    """Log how many steps are lost since a checkpoint, and over how many ranks residuals are spread.

    Args:
        folder: Folder of the checkpoint.
        found: What it held for this rank.
        ranks: Number of ranks now.
    """
    step = found.state["step"]
    lost = steps_after(folder, step)
    if found.ranks in (0, ranks):
        if not lost:
            return
        kept = f"training goes on from step {step} with the residuals of its {ranks} ranks"
    else:
        kept = f"the residuals of {found.ranks} ranks at step {step} are spread over {ranks} ranks"
    count = f"at least {lost} later steps of the earlier run"
    steps = "only what was done since that save" if lost is None else count
    logger.warning("dct: %s: %s; lost: %s", folder, kept, steps)
