"""MovieLens 100k (Harper and Konstan 2015), from the directory of its archive."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .dataset import ClickDataset, DataFormatError, first_rows, index_columns

# MovieLens 100k: u.data is tab-separated, u.item and u.user are separated by bars
_GENRES = 19
_MOVIELENS = {"u.data": ("\t", 4), "u.item": ("|", 5 + _GENRES), "u.user": ("|", 5)}
_POSITIVE_RATING = 4


def load_movielens(directory: str | Path, *, max_rows: int | None = None) -> ClickDataset:
    """MovieLens 100k (Harper and Konstan 2015): ratings of movies by users, in the format of its archive.

    The label is 1 for ratings of 4 and 5 (55 %). Categorical fields are user, movie, gender, occupation, the
    first three characters of the zip code, and the year of release; dense ones are the log of the user's age
    and the movie's 19 genre flags. The last rows of ``u.data``, which is in random order, are for testing.
    ``max_rows`` keeps the first ratings only.

    Raises ``FileNotFoundError`` and :class:`DataFormatError` (file, line number, what was expected).
    """
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
    num_train = first_rows(path, len(label))
    numeric = np.array(dense, dtype=np.float32)
    numeric[:, 0] = np.log1p(numeric[:, 0])
    columns = [np.unique(column, return_inverse=True)[1] for column in np.array(texts).T]
    raw = np.stack(columns, axis=1).astype(np.int64)
    categorical, cardinalities = index_columns(raw, num_train)
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
