"""Readers for click-through style data sets, all returning one :class:`ClickDataset`.

Diabetes 130-US hospitals (Strack et al. 2014, CC BY 4.0) ships with the package; Criteo's display advertising
data is read from the text file its owner distributes, and MovieLens 100k from the directory of its archive.
Only numpy is needed here.
"""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dct_plugin.errors import DCTError

__all__ = [
    "DIABETES_FILE",
    "FORMATS",
    "ClickDataset",
    "DataFormatError",
    "Rows",
    "epoch_batches",
    "load",
    "load_criteo",
    "load_diabetes",
    "load_movielens",
]

DIABETES_FILE = Path(__file__).parent / "data" / "diabetes130.npz"
FORMATS = ("diabetes", "criteo", "movielens")

Array = npt.NDArray[Any]


class DataFormatError(DCTError, ValueError):
    """A data file does not have the format it was read as. Names the file, the line and what was expected."""


class Rows(NamedTuple):
    """A part of a data set: dense float32 [rows, D], categorical int32 [rows, F], label float32 [rows]."""

    dense: Array
    categorical: Array
    label: Array


@dataclass(frozen=True)
class ClickDataset:
    """Rows with dense and categorical features and a binary label; the training part comes first.

    ``dense`` float32 [rows, D]; ``categorical`` int32 [rows, F], column ``f`` in ``[0, cardinalities[f])``;
    ``label`` float32 [rows] of 0 and 1. Id 0 of every column stands for values that are unknown or rare in
    the training part. Rows ``[0, num_train)`` are for training, the others for testing.
    """

    name: str
    dense: Array
    categorical: Array
    label: Array
    cardinalities: tuple[int, ...]
    dense_names: tuple[str, ...]
    categorical_names: tuple[str, ...]
    num_train: int

    def __len__(self) -> int:
        return len(self.label)

    @property
    def train(self) -> Rows:
        n = self.num_train
        return Rows(self.dense[:n], self.categorical[:n], self.label[:n])

    @property
    def test(self) -> Rows:
        n = self.num_train
        return Rows(self.dense[n:], self.categorical[n:], self.label[n:])


def load(
    format: str = "diabetes",
    path: str | Path | None = None,
    *,
    seed: int = 0,
    max_rows: int | None = None,
) -> ClickDataset:
    """Read a data set by the name of its format; without ``path``, the data that ships with the package.

    Raises ``ValueError`` for an unknown format or a path left out, ``FileNotFoundError``,
    :class:`DataFormatError`.
    """
    if format == "diabetes":
        return load_diabetes(path, seed=seed, max_rows=max_rows)
    if format == "criteo":
        if path is None:
            raise ValueError("format 'criteo' needs the path of a train.txt or train.txt.gz file")
        return load_criteo(path, max_rows=max_rows)
    if format == "movielens":
        if path is None:
            raise ValueError("format 'movielens' needs the directory that holds u.data, u.item and u.user")
        return load_movielens(path, max_rows=max_rows)
    raise ValueError(f"unknown data format {format!r}; known formats: {', '.join(FORMATS)}")


def load_diabetes(
    path: str | Path | None = None,
    *,
    split: Literal["patient", "file"] = "patient",
    seed: int = 0,
    test_fraction: float = 0.2,
    min_count: int = 4,
    max_rows: int | None = None,
) -> ClickDataset:
    """Diabetes 130-US hospitals 1999-2008: 101,766 hospital stays, 37 categorical and 8 numeric fields.

    The label is 1 when the patient was readmitted (``readmitted != "NO"``, 46 %). ``split="patient"`` draws
    whole patients into the test part by ``seed``, so that no patient is in both parts, and keeps file order
    within the parts; ``split="file"`` tests on the last rows. Numeric fields are counts and become
    ``log1p(count)``. Values that occur fewer than ``min_count`` times in the training part become id 0.
    ``max_rows`` keeps the first rows only.

    Raises :class:`DataFormatError` when the file is not one written by ``prepare_diabetes``.
    """
    _check_fraction("test_fraction", test_fraction)
    path = DIABETES_FILE if path is None else Path(path)
    columns = _read_columns(path)
    names = [str(n) for n in columns["categorical_names"]]
    dense_names = [str(n) for n in columns["numeric_names"]]
    label = columns["label"].astype(np.float32)
    patient = columns["patient"]
    dense = np.log1p(np.stack([columns[f"numeric.{n}"] for n in dense_names], axis=1).astype(np.float32))
    raw = np.stack([columns[f"code.{n}"].astype(np.int64) for n in names], axis=1)
    if max_rows is not None:
        label, patient, dense, raw = label[:max_rows], patient[:max_rows], dense[:max_rows], raw[:max_rows]

    if split == "patient":
        num_patients = int(patient.max()) + 1
        in_test = np.random.default_rng(seed).random(num_patients)[patient] < test_fraction
        order = np.argsort(in_test, kind="stable")
        label, dense, raw = label[order], dense[order], raw[order]
        num_train = int(len(label) - in_test.sum())
    elif split == "file":
        num_train = round(len(label) * (1 - test_fraction))
    else:
        raise ValueError(f"split={split!r}: must be 'patient' or 'file'")
    categorical, cardinalities = _index_columns(raw, num_train, min_count)
    return ClickDataset(
        name="Diabetes 130-US hospitals",
        dense=dense,
        categorical=categorical,
        label=label,
        cardinalities=cardinalities,
        dense_names=tuple(dense_names),
        categorical_names=tuple(names),
        num_train=num_train,
    )


def _read_columns(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            columns = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zip, zlib and numpy each have their own way to say that a file is damaged
        raise DataFormatError(
            f"{path}: expected the columnar .npz file that prepare_diabetes writes, but {error}"
        ) from error
    expected = ["categorical_names", "numeric_names", "label", "patient"]
    expected += [f"code.{n}" for n in columns.get("categorical_names", ())]
    expected += [f"numeric.{n}" for n in columns.get("numeric_names", ())]
    missing = [key for key in expected if key not in columns]
    if missing:
        raise DataFormatError(f"{path}: expected a column {missing[0]!r} as prepare_diabetes writes it")
    rows = len(columns["label"])
    for key in expected[2:]:
        if columns[key].shape != (rows,) or columns[key].dtype.kind != "u":
            raise DataFormatError(
                f"{path}: column {key!r}: expected {rows} unsigned integers, "
                f"got shape {columns[key].shape} of {columns[key].dtype}"
            )
    return columns


# One line of Criteo's Kaggle train.txt: label, 13 integers, 26 hexadecimal hashes; empty = missing
CRITEO_INTEGERS, CRITEO_HASHES = 13, 26
_CRITEO_FIELDS = 1 + CRITEO_INTEGERS + CRITEO_HASHES
_CRITEO_LINE = re.compile(
    rb"[01](?:\t(?:-?[0-9]{1,18})?){%d}(?:\t[0-9a-fA-F]{0,8}){%d}" % (CRITEO_INTEGERS, CRITEO_HASHES)
)
_MISSING = -1  # below every 32-bit hash
_CHUNK_LINES = 16384


def load_criteo(
    path: str | Path,
    *,
    train_fraction: float = 0.8,
    min_count: int = 4,
    max_rows: int | None = None,
) -> ClickDataset:
    """Criteo display advertising data in the Kaggle ``train.txt`` format, plain or gzip compressed.

    The first ``train_fraction`` of the rows, in file order (they are ordered by time), are for training.
    Integers become ``log1p(max(x, 0))``, a missing one 0. A missing hash is a value like any other; values
    that occur fewer than ``min_count`` times in the training part become id 0. ``max_rows`` stops early.
    Needs about 600 bytes of memory per row while reading and 160 afterwards.

    Raises ``FileNotFoundError`` and :class:`DataFormatError` (file, line number, what was expected).
    """
    _check_fraction("train_fraction", train_fraction)
    path = Path(path)
    labels, integers, hashes = [], [], []
    for first_line, lines in _line_chunks(path, max_rows):
        label, ints, cats = _parse_criteo(lines, path, first_line)
        labels.append(label)
        integers.append(ints)
        hashes.append(cats)
    rows = sum(len(part) for part in labels)
    num_train = round(rows * train_fraction)
    if num_train == 0 or num_train == rows:
        raise DataFormatError(f"{path}: expected rows for a training and a test part, got {rows} in all")
    categorical, cardinalities = _index_columns(np.concatenate(hashes), num_train, min_count)
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


# MovieLens 100k: u.data is tab-separated, u.item and u.user are separated by bars
_GENRES = 19
_MOVIELENS = {"u.data": ("\t", 4), "u.item": ("|", 5 + _GENRES), "u.user": ("|", 5)}
_POSITIVE_RATING = 4


def load_movielens(
    directory: str | Path,
    *,
    train_fraction: float = 0.8,
    min_count: int = 4,
    max_rows: int | None = None,
) -> ClickDataset:
    """MovieLens 100k (Harper and Konstan 2015): ratings of movies by users, in the format of its archive.

    The label is 1 for ratings of 4 and 5 (55 %). Categorical fields are user, movie, gender, occupation, the
    first three characters of the zip code, and the year of release; dense ones are the log of the user's age
    and the movie's 19 genre flags. The last rows of ``u.data``, which is in random order, are for testing.
    ``max_rows`` keeps the first ratings only.

    Raises ``FileNotFoundError`` and :class:`DataFormatError` (file, line number, what was expected).
    """
    _check_fraction("train_fraction", train_fraction)
    directory = Path(directory)
    users = {fields[0]: fields for _, fields in _movielens_lines(directory / "u.user")}
    items = {fields[0]: fields for _, fields in _movielens_lines(directory / "u.item")}
    path = directory / "u.data"
    dense, texts, label = [], [], []
    for number, (user, item, rating, _) in _movielens_lines(path, max_rows):
        if user not in users or item not in items:
            unknown = ("a user of u.user", user) if user not in users else ("an item of u.item", item)
            raise DataFormatError(f"{path}: line {number}: expected {unknown[0]}, got {unknown[1][:40]!r}")
        if rating not in ("1", "2", "3", "4", "5"):
            raise DataFormatError(
                f"{path}: line {number}: expected a rating from 1 to 5, got {rating[:40]!r}"
            )
        _, age, gender, occupation, zip_code = users[user]
        released = items[item][2]
        label.append(float(int(rating) >= _POSITIVE_RATING))
        dense.append([float(age), *map(float, items[item][5:])])
        texts.append((user, item, gender, occupation, zip_code[:3], released[-4:]))
    num_train = round(len(label) * train_fraction)
    if num_train == 0 or num_train == len(label):
        raise DataFormatError(
            f"{path}: expected rows for a training and a test part, got {len(label)} in all"
        )
    numeric = np.array(dense, dtype=np.float32)
    numeric[:, 0] = np.log1p(numeric[:, 0])
    columns = [np.unique(column, return_inverse=True)[1] for column in np.array(texts).T]
    raw = np.stack(columns, axis=1).astype(np.int64)
    categorical, cardinalities = _index_columns(raw, num_train, min_count)
    return ClickDataset(
        name="MovieLens 100k",
        dense=numeric,
        categorical=categorical,
        label=np.array(label, dtype=np.float32),
        cardinalities=cardinalities,
        dense_names=("age", *(f"genre_{i}" for i in range(_GENRES))),
        categorical_names=("user", "item", "gender", "occupation", "zip", "year"),
        num_train=num_train,
    )


def _movielens_lines(path: Path, max_rows: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields) of one of the archive's files."""
    separator, count = _MOVIELENS[path.name]
    numeric = {"u.user": slice(1, 2), "u.item": slice(5, None)}.get(path.name, slice(0, 0))
    with open(path, encoding="latin-1", newline="\n") as file:
        for number, line in enumerate(itertools.islice(file, max_rows), 1):
            fields = line.rstrip("\r\n").split(separator)
            if len(fields) != count:
                what = "tab" if separator == "\t" else "bar"
                raise DataFormatError(
                    f"{path}: line {number}: expected {count} {what}-separated fields, got {len(fields)}"
                )
            for field in fields[numeric]:
                if not re.fullmatch("[0-9]{1,3}", field):
                    raise DataFormatError(f"{path}: line {number}: expected a number, got {field[:40]!r}")
            yield number, fields


def _index_columns(raw: Array, num_train: int, min_count: int) -> tuple[Array, tuple[int, ...]]:
    """Number the values of every column from 1, ascending; what is rare in the training part becomes 0.

    ``raw`` int64 [rows, F] -> (int32 [rows, F], cardinality of each column with id 0 counted).
    """
    ids = np.zeros(raw.shape, dtype=np.int32)
    cardinalities = []
    for f in range(raw.shape[1]):
        values, counts = np.unique(raw[:num_train, f], return_counts=True)
        values = values[counts >= min_count]
        if len(values):
            at = np.searchsorted(values, raw[:, f]).clip(max=len(values) - 1)
            ids[:, f] = np.where(values[at] == raw[:, f], at + 1, 0)
        cardinalities.append(len(values) + 1)
    return ids, tuple(cardinalities)


def epoch_batches(num_rows: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[Array]:
    """Row numbers of one epoch's batches, int64 [batch_size] each, shuffled by (seed, epoch).

    An incomplete last batch is dropped. Every rank draws the same batches and takes its own slice of each.
    """
    order = np.random.default_rng((seed, epoch)).permutation(num_rows)
    for start in range(0, num_rows - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name}={value}: must be between 0 and 1")
