"""Criteo's display advertising data, from the text file that its owner distributes."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from .dataset import MIN_COUNT, Array, ClickDataset, DataFormatError, first_rows, index_columns

# One line of Criteo's Kaggle train.txt: label, 13 integers, 26 hexadecimal hashes; empty = missing
CRITEO_INTEGERS, CRITEO_HASHES = 13, 26
_CRITEO_FIELDS = 1 + CRITEO_INTEGERS + CRITEO_HASHES
_CRITEO_LINE = re.compile(
    rb"[01](?:\t(?:-?[0-9]{1,18})?){%d}(?:\t[0-9a-fA-F]{0,8}){%d}" % (CRITEO_INTEGERS, CRITEO_HASHES)
)
_MISSING = -1  # below every 32-bit hash
_CHUNK_LINES = 16384


def load_criteo(path: str | Path, *, max_rows: int | None = None, min_count: int = MIN_COUNT) -> ClickDataset:
    """Criteo display advertising data in the Kaggle ``train.txt`` format, plain or gzip compressed.

    The first 80 % of the rows, in file order (they are ordered by time), are for training.
    Integers become ``log1p(max(x, 0))``, a missing one 0. A missing hash is a value like any other; values
    that occur fewer than *min_count* times in the training part become id 0. ``max_rows`` stops early.
    Needs about 600 bytes of memory per row while reading and 160 afterwards.

    Raises ``FileNotFoundError`` and :class:`DataFormatError` (file, line number, what was expected).
    """
    path = Path(path)
    labels, integers, hashes = [], [], []
    for first_line, lines in _line_chunks(path, max_rows):
        label, ints, cats = _parse_criteo(lines, path, first_line)
        labels.append(label)
        integers.append(ints)
        hashes.append(cats)
    rows = sum(len(part) for part in labels)
    num_train = first_rows(path, rows)
    categorical, cardinalities = index_columns(np.concatenate(hashes), num_train, min_count)
    return ClickDataset(
        name=f"Criteo ({path.name})",
        dense=np.concatenate(integers),
        categorical=categorical,
        label=np.concatenate(labels),
        cardinalities=cardinalities,
        dense_names=tuple(f"I{i}" for i in range(1, CRITEO_INTEGERS + 1)),
        categorical_names=tuple(f"C{i}" for i in range(1, CRITEO_HASHES + 1)),
        num_train=num_train,
    )


def _line_chunks(path: Path, max_rows: int | None) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (number of the first line, lines without their ends)."""
    read = 0
    with open(path, "rb") as file:
        zipped = file.peek(2)[:2] == b"\x1f\x8b"
        if path.suffix == ".gz" and not zipped:
            raise DataFormatError(f"{path}: expected gzip data, as its name says; its first bytes are others")
        stream: IO[bytes] = gzip.GzipFile(fileobj=file) if zipped else file  # type: ignore[assignment]
        while max_rows is None or read < max_rows:
            wanted = _CHUNK_LINES if max_rows is None else min(_CHUNK_LINES, max_rows - read)
            lines: list[bytes] = []
            try:
                for line in stream:
                    lines.append(line.rstrip(b"\r\n"))
                    if len(lines) == wanted:
                        break
            except (EOFError, OSError, zlib.error) as error:
                raise DataFormatError(
                    f"{path}: line {read + len(lines) + 1}: expected more gzip data, but {error}"
                ) from error
            if not lines:
                return
            yield read + 1, lines
            read += len(lines)


def _parse_criteo(lines: Sequence[bytes], path: Path, first_line: int) -> tuple[Array, Array, Array]:
    """Label float32 [n], log1p of the integers float32 [n, 13], hashes int64 [n, 26]."""
    for number, line in enumerate(lines, first_line):
        if not _CRITEO_LINE.fullmatch(line):
            raise DataFormatError(f"{path}: line {number}: {_explain_criteo(line)}")
    table = np.array(b"\t".join(lines).split(b"\t")).reshape(len(lines), _CRITEO_FIELDS)
    label = (table[:, 0] == b"1").astype(np.float32)
    text = table[:, 1 : 1 + CRITEO_INTEGERS]
    ints = np.where(text == b"", b"0", text).astype(np.int64)
    dense = np.log1p(np.maximum(ints, 0)).astype(np.float32)
    text = table[:, 1 + CRITEO_INTEGERS :]
    hashes = [int(value, 16) if value else _MISSING for value in text.ravel().tolist()]
    return label, dense, np.array(hashes, dtype=np.int64).reshape(len(lines), CRITEO_HASHES)


def _explain_criteo(line: bytes) -> str:
    fields = line.split(b"\t")
    if len(fields) != _CRITEO_FIELDS:
        return (
            f"expected {_CRITEO_FIELDS} tab-separated fields (label, {CRITEO_INTEGERS} integers, "
            f"{CRITEO_HASHES} hashed categories), got {len(fields)}"
        )
    if fields[0] not in (b"0", b"1"):
        return f"field 1: expected the label 0 or 1, got {_shown(fields[0])}"
    for i, field in enumerate(fields[1:], 2):
        integer = i <= 1 + CRITEO_INTEGERS
        pattern = rb"(?:-?[0-9]{1,18})?" if integer else rb"[0-9a-fA-F]{0,8}"
        if not re.fullmatch(pattern, field):
            what = "an integer or nothing" if integer else "a hash of at most 8 hexadecimal digits or nothing"
            return f"field {i}: expected {what}, got {_shown(field)}"
    raise AssertionError("the line is well formed")


def _shown(field: bytes) -> str:
    text = field.decode("ascii", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + "...")
