"""The data set that all readers return: rows with dense and categorical features, and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dct_plugin.errors import DCTError

Array = npt.NDArray[Any]

#: Share of the rows that are for testing.
TEST_FRACTION = 0.2
#: Values that are less frequent in the training part are taken together, by default.
MIN_COUNT = 4
#: Name of the dense column of ones that a purely categorical table gets: every model has a bias for dense
#: features, and DLRM's bottom MLP then gives one learned vector for all samples.
CONSTANT = "(constant)"


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
    the training part. Rows ``[0, num_train)`` are for training, the others for testing. ``roles`` are
    sentences on how the columns of a table were read.
    """

    name: str
    dense: Array
    categorical: Array
    label: Array
    cardinalities: tuple[int, ...]
    dense_names: tuple[str, ...]
    categorical_names: tuple[str, ...]
    num_train: int
    roles: tuple[str, ...] = ()

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

    def facts(self) -> list[str]:
        """Return sentences on the labels of both parts and on constant columns."""
        parts = (("training", self.train.label), ("test", self.test.label))
        said = [
            f"{name} part: {len(label):,} rows, {100 * label.mean():.1f} % ({int(label.sum()):,}) are 1"
            for name, label in parts
        ]
        named = [*zip(self.dense_names, self.train.dense.T, strict=True)]
        named += zip(self.categorical_names, self.train.categorical.T, strict=True)
        constant = [name for name, column in named if (column == column[0]).all() and name != CONSTANT]
        return [*said, f"constant in the training part: {', '.join(constant)}"] if constant else said

    def digest(self) -> str:
        """Return a digest of the training part: 16 hexadecimal digits."""
        made = hashlib.sha256()
        for column in self.train:
            made.update(np.ascontiguousarray(column).data)
        return made.hexdigest()[:16]


def index_columns(raw: Array, num_train: int, min_count: int = MIN_COUNT) -> tuple[Array, tuple[int, ...]]:
    """Number the values of every column from 1, ascending; values that occur fewer than *min_count* times in
    the training part become 0.

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


def first_rows(path: Path, rows: int) -> int:
    """Number of rows for training, the first 80 % of them.

    Raises:
        DataFormatError: There are too few for two parts.
    """
    train = round(rows * (1 - TEST_FRACTION))
    if train in (0, rows):
        raise DataFormatError(f"{path}: expected rows for a training and a test part, got {rows} in all")
    return train


def check_parts(clicks: ClickDataset) -> None:
    """Check that both parts hold both labels: otherwise there is nothing to learn, or no AUC.

    Raises:
        DataFormatError: A part has one label alone.
    """
    for name, rows in (("training", clicks.train), ("test", clicks.test)):
        if len(np.unique(rows.label)) < 2:
            raise DataFormatError(
                f"{clicks.name}: expected rows with label 0 and with label 1 in the {name} part, got "
                f"{len(rows.label)} rows of one label"
            )


def epoch_batches(num_rows: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[Array]:
    """Row numbers of one epoch's batches, int64 [batch_size] each, shuffled by (seed, epoch).

    An incomplete last batch is dropped. Every rank draws the same batches and takes its own slice of each.
    """
    order = np.random.default_rng((seed, epoch)).permutation(num_rows)
    for start in range(0, num_rows - batch_size + 1, batch_size):
        yield order[start : start + batch_size]
