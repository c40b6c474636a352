"""Messages for the terminal that the commands share."""

from __future__ import annotations


def print_error(message: object) -> None:
    """Print an error to standard error as it is, without markup and line wrapping."""
    # Imported here: `dct --help` and jobs without errors do not need rich.
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(("error: ", "bold red"), str(message))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
