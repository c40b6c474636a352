"""A step of the Makefile prints one line."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT


@pytest.mark.slow
def test_the_set_up_has_a_line_for_each_step_whatever_commands_print(tmp_path: Path) -> None:
    makefile = tmp_path / "Makefile"
    step = "$(call step,compile,{ echo still compiling >&2; false; } || true)"
    makefile.write_text(f"include {ROOT / 'Makefile'}\nprobe:\n\t{step}\n")
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", makefile, "probe"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(r"  compile +\d+ s\n", done.stdout), done
    assert done.stderr == ""
