"""What the tests share: worker processes, jobs of the host frameworks, and where things lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
#: Data sets for the tests that use real data; they skip where it is missing.
DATA = ROOT.parent / "shared" / "data"
#: Scripts that tests start as processes of their own.
SUPPORT = Path(__file__).resolve().parent
