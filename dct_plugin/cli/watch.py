"""``dct watch``: the figures of a metrics file in the terminal while it grows."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DCTError
from ..metrics import format_bytes
from ..output import Table, formatted
from ..report.metrics_part import PART_NAMES, verdict
from ..report.reading import MetricsReader
from ..report.run import Run

if TYPE_CHECKING:
    from rich.console import Group


class _Followed:
    """A file that another process appends to, removes, or writes anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._begin()

    def read(self) -> MetricsReader:
        """Read what has come since the last call."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._position:  # written anew
                    self._begin()
                    self._inode = found.st_ino
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return self.reader
        except OSError as error:
            raise DCTError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        self._position += len(data)
        self.reader.feed(data)
        return self.reader

    def _begin(self) -> None:
        self.reader, self._position = MetricsReader(str(self.path)), 0


def watch(
    path: Annotated[Path, typer.Argument(help="Metrics file of one rank; may not be there yet.")],
    once: Annotated[bool, typer.Option("--once", help="Print the figures there are, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the file.")] = 1.0,
) -> None:
    """Show the metrics of a job in the terminal while it runs; Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    followed, console = _Followed(path), Console()
    if once:
        if not path.exists():
            raise DCTError(f"{path}: cannot be read: No such file or directory")
        console.print(_shown(followed.read()))
        return
    try:
        with Live(_shown(followed.read()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_shown(followed.read()), refresh=True)
    except KeyboardInterrupt:
        return


def _shown(reader: MetricsReader) -> Group:
    """Lay out the last run of the file."""
    from rich.console import Group, RenderableType
    from rich.text import Text

    notes = [Text(note, style="yellow") for note in reader.notes()]
    ranks = [each for each in reader.runs if each.rows]
    if not ranks:
        return Group(*notes, Text(f"{reader.source}: no report yet (dct.metrics.every)"))
    run = Run([ranks[-1]])
    last = run.windows[-1]
    classes = [
        [
            cls,
            *(format_bytes(last.mean(key, cls) or 0.0) for key in ("dense_bytes", "sent_bytes")),
            *(formatted(last.mean(key, cls), ".4g") for key in ("density", "density_target", "tau")),
        ]
        for cls in run.classes
        if cls in last.rows
    ]
    parts = [[name, f"{last.part(key):.2f}"] for key, name in PART_NAMES.items()]
    header = ["", "without", "sent", "density", "target", "threshold"]
    shown: list[RenderableType] = [
        *notes,
        *map(Text, verdict(run)),
        Table(f"Steps {last.step - last.steps + 1} to {last.step}, per step", header, classes).rich(),
        Table("Milliseconds per step", ["", "ms"], parts).rich(),
    ]
    shown += [Text(f"Step {each.step}: {each.setting} ({each.reason})") for each in run.decisions[-5:]]
    return Group(*shown)
