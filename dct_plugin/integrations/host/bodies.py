"""Bodies of a host's functions that an integration rewrites or leans on, as they are in tested versions."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import json
import logging
import pkgutil
import textwrap
from importlib import resources
from typing import Any

from .versions import TESTED, installed, undecorated

logger = logging.getLogger("dct_plugin")

#: By distribution and function, the normalised bodies of tested versions: ``{fingerprint: versions}``. The
#: integrations rewrite these bodies, or lean on the order of what they do.
BODIES: dict[str, dict[str, dict[str, str]]] = json.loads(
    (resources.files(__package__) / "bodies.json").read_text(encoding="utf-8")
)


def fingerprint(function: Any) -> str:
    """Return a hash of a function's body, without decorators, docstring, comments and blanks.

    Raises:
        OSError: Its source is not installed.
    """
    source = textwrap.dedent(inspect.getsource(undecorated(function)))
    node: Any = ast.parse(source).body[0]
    first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
    lines = source.splitlines()[first.lineno - 1 : node.end_lineno]
    kept = [" ".join(line.split()) for line in lines if line.strip() and line.strip()[0] != "#"]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]


def warn_of_unknown(distribution: str, part: str = "") -> None:
    """Warn once about functions whose body is none of a tested version.

    Args:
        distribution: A key of :data:`BODIES`.
        part: Look at functions whose name contains it.
    """
    unknown = []
    for name, known in BODIES[distribution].items():
        if part in name:
            with contextlib.suppress(OSError):  # compiled, without its source
                if fingerprint(pkgutil.resolve_name(name)) not in known:
                    unknown.append(name)
    if unknown:
        logger.warning(
            "dct: %s %s is not as in the versions that were tested (%s): %s; compare the first steps at "
            "sparsity 0 with a run without dct",
            distribution,
            installed(distribution),
            ", ".join(TESTED[distribution]),
            ", ".join(unknown),
        )
