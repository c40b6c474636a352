"""Compilers that are done at once."""

from __future__ import annotations

import shlex
from pathlib import Path

from dct_plugin.kernels import build


def copier(folder: Path, library: Path) -> str:
    """Write a compiler that copies a library into ``folder`` and return its path, for ``CC``."""
    content = library.read_bytes()
    compiled, script = folder / "compiled", folder / "copier"
    compiled.write_bytes(content.rpartition(build._SEAL)[0] or content)
    found = shlex.quote(str(compiled))
    script.write_text(f"""#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nexec cp {found} "$2"\n""")
    script.chmod(0o755)
    return str(script)


def quick(folder: Path) -> str:
    """Write ``cc`` into ``folder``, a compiler that optimizes little, and return its path: all flags take ten
    seconds.
    """
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(build.compilers()[0])} "$@" -O1\n')
    script.chmod(0o755)
    return str(script)
