"""A trace of the calls into the files of the package."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

from support import ROOT


class Trace:
    """Counts the calls into each file of the package, in all threads that start within the block."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._package = os.path.realpath(ROOT / "dct_plugin") + os.sep

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "dct_plugin" in name:
            name = os.path.realpath(name)
            if name.startswith(self._package):
                name = name.removeprefix(self._package)
                self.calls[name] = self.calls.get(name, 0) + 1

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
