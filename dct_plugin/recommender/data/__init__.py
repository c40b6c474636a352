"""Readers for click-through style data sets, all returning one :class:`ClickDataset`. They need
numpy alone, except Parquet."""

from __future__ import annotations

from pathlib import Path

from .criteo import load_criteo
from .dataset import MIN_COUNT, ClickDataset, DataFormatError, Rows, check_parts, epoch_batches
from .diabetes import DIABETES_FILE, load_diabetes
from .table import Columns, load_table

__all__ = [
    "DIABETES_FILE",
    "FORMATS",
    "MIN_COUNT",
    "ClickDataset",
    "Columns",
    "DataFormatError",
    "Rows",
    "check_parts",
    "epoch_batches",
    "load",
    "load_criteo",
    "load_diabetes",
    "load_table",
]

FORMATS = ("diabetes", "criteo", "table")


def load(
    format: str = "diabetes",
    path: str | Path | None = None,
    *,
    seed: int = 0,
    max_rows: int | None = None,
    columns: Columns | None = None,
    min_count: int = MIN_COUNT,
) -> ClickDataset:
    """Read a data set by the name of its format; without ``path``, the data that ships with the package.

    ``columns`` are those of a table. A value that occurs fewer than *min_count* times in the training part
    becomes id 0. Raises ``ValueError`` for an unknown format or a path left out,
    ``FileNotFoundError``, :class:`DataFormatError`.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown data format {format!r}; known formats: {', '.join(FORMATS)}")
    if format == "diabetes":
        return load_diabetes(path, seed=seed, max_rows=max_rows, min_count=min_count)
    if path is None:
        files = {
            "criteo": "path of a train.txt or train.txt.gz file",
            "table": "path of a .csv, .tsv or .parquet file",
        }
        raise ValueError(f"format {format!r} needs the {files[format]}")
    if format == "table":
        return load_table(path, columns or Columns(), max_rows=max_rows, min_count=min_count)
    return load_criteo(path, max_rows=max_rows, min_count=min_count)
