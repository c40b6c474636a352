"""A compiler that is done at once: it copies a library that a real one made."""

from __future__ import annotations

import shlex
from pathlib import Path

from dct_plugin.kernels import build


def copier(folder: Path, library: Path) -> str:
    """Write the compiler into ``folder`` and return its path, for ``CC``."""
    content = library.read_bytes()
    compiled, script = folder / "compiled", folder / "copier"
    compiled.write_bytes(content.rpartition(build._SEAL)[0] or content)
    found = shlex.quote(str(compiled))
    script.write_text(f"""#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nexec cp {found} "$2"\n""")
    script.chmod(0o755)
    return str(script)
