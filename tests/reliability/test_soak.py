"""Random faults and random input for some minutes; ``make soak`` and ``make fuzz`` take any time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", ["soak.py", "fuzz.py"])
def test_script(script: str) -> None:
    command = [sys.executable, str(Path(__file__).parent / script), "--seconds", "300"]
    subprocess.run(command, check=True, timeout=1500)
