"""Messages for the terminal that the commands share, and lines of the log that are written once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

logger = logging.getLogger("dct_plugin")


@functools.cache
def log_once(line: str) -> None:
    """Log a warning, once in a process."""
    logger.warning("%s", line)


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names with commas between them, and dots in place of those behind the first ``most``."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def print_error(message: object) -> None:
    """Print an error to standard error as it is, without markup and line wrapping."""
    _print(("error: ", "bold red"), message)


def print_warning(message: object) -> None:
    """Print a warning to standard error as it is, without markup and line wrapping."""
    _print(("warning: ", "bold yellow"), message)


def _print(label: tuple[str, str], message: object) -> None:
    # Imported here: `dct --help` and jobs without errors do not need rich.
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, highlight=False).print(Text.assemble(label, str(message)), soft_wrap=True)
