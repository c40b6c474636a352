"""Any table with a column to predict: CSV, TSV (also compressed) and Parquet, read by pyarrow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .dataset import Array, ClickDataset, DataFormatError, first_rows, index_columns

#: Name of the dense column of ones that a purely categorical table gets: every model has a bias for dense
#: features, and DLRM's bottom MLP then gives one learned vector for all samples.
CONSTANT = "(constant)"


class Columns(NamedTuple):
    """The roles of a table's columns.

    ``label`` holds 0 and 1, or is compared: ``"rating>=4"``. Without ``dense`` and ``categorical`` columns of
    floating-point numbers are dense and all others categorical.
    """

    label: str = "label"
    dense: Sequence[str] = ()
    categorical: Sequence[str] = ()


def load_table(path: str | Path, columns: Columns, *, max_rows: int | None = None) -> ClickDataset:
    """A table whose first line (or schema) names its columns; ``.tsv`` and ``.tab`` are separated by tabs.

    The first 80 % of the rows, in file order, are for training. Dense columns are scaled by
    mean and deviation of the training part, a missing value becomes 0 then. Values of categorical columns are
    texts; a missing one is a value like any other, and those that are rare in the training part become
    id 0. A table without dense columns gets one column of ones, :data:`CONSTANT`.

    Raises ``FileNotFoundError`` and :class:`DataFormatError` (file, column, what was expected).
    """
    path = Path(path)
    name, compared = _label(columns.label, path)
    opened = _Opened(path)
    label_name, dense_names, names = _roles(opened.types, name, columns, path)
    parts: list[Any] = []
    rows = 0
    for batch in opened.batches([label_name, *dense_names, *names], {label_name, *dense_names}):
        parts.append(batch)
        rows += batch.num_rows
        if max_rows is not None and rows >= max_rows:
            break
    table = opened.arrow.Table.from_batches(parts) if parts else None
    if table is None or not table.num_rows:
        raise DataFormatError(f"{path}: expected rows, got none")
    table = table.slice(0, max_rows)
    train = first_rows(path, table.num_rows)
    label = _numbers(table, label_name, path)
    if compared is not None:
        label = np.where(np.isnan(label), np.nan, label >= compared)
    elif not np.isin(label, (0.0, 1.0)).all():
        raise DataFormatError(
            f"{path}: column {label_name!r}: expected labels 0 and 1; compare it for others: "
            f"'{label_name}>=NUMBER'"
        )
    if np.isnan(label).any():
        raise DataFormatError(f"{path}: column {label_name!r}: expected a label in every row")
    dense = [_scaled(_numbers(table, column, path), train) for column in dense_names]
    if not dense:
        dense, dense_names = [np.ones(len(label))], [CONSTANT]
    raw = np.stack([_codes(table, column) for column in names], axis=1)
    categorical, cardinalities = index_columns(raw, train)
    return ClickDataset(
        name=path.name,
        dense=np.stack(dense, axis=1).astype(np.float32),
        categorical=categorical,
        label=label.astype(np.float32),
        cardinalities=cardinalities,
        dense_names=tuple(dense_names),
        categorical_names=tuple(names),
        num_train=train,
    )


def _label(text: str, path: Path) -> tuple[str, float | None]:
    name, sign, number = text.partition(">=")
    if sign and not re.fullmatch(r"\s*-?[0-9]+(\.[0-9]+)?\s*", number):
        raise DataFormatError(f"{path}: label {text!r}: expected NAME or NAME>=NUMBER")
    return name.strip(), float(number) if sign else None


def _roles(
    types: dict[str, bool], label: str, columns: Columns, path: Path
) -> tuple[str, list[str], list[str]]:
    """Label, dense and categorical columns; ``types`` says which columns hold floating-point numbers."""
    chosen = [label, *columns.dense, *columns.categorical]
    for name in chosen:
        if name not in types:
            raise DataFormatError(f"{path}: expected a column {name!r}; there are {', '.join(types)}")
    if twice := sorted({name for name in chosen if chosen.count(name) > 1}):
        raise DataFormatError(f"{path}: column {twice[0]!r} is given two meanings")
    dense, categorical = list(columns.dense), list(columns.categorical)
    if not dense and not categorical:
        others = [name for name in types if name != label]
        dense, categorical = [n for n in others if types[n]], [n for n in others if not types[n]]
    if not categorical:
        raise DataFormatError(
            f"{path}: expected at least one categorical column; name them with --categorical"
        )
    return label, dense, categorical


class _Opened:
    """A table's columns and batches; whatever pyarrow raises becomes :class:`DataFormatError`.

    Attributes:
        types: By column, whether it holds floating-point numbers.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import dataset
        except ImportError as error:
            raise DataFormatError(
                f"{path}: tables are read by pyarrow, not installed here: pip install 'dct-plugin[tables]'"
            ) from error
        self.arrow, self._path, self._dataset = pyarrow, path, dataset
        if not path.is_file():
            raise FileNotFoundError(2, "no such file", str(path))
        self._parquet = path.suffix in (".parquet", ".pq")
        with self._reading():
            schema = self._open({}).schema
        self.types = {field.name: pyarrow.types.is_floating(field.type) for field in schema}

    def batches(self, names: list[str], numbers: set[str]) -> Iterator[Any]:
        """Yield batches of the columns ``names``; those of a text file are numbers, or else texts."""
        kinds = {n: self.arrow.float64() if n in numbers else self.arrow.string() for n in names}
        with self._reading():
            yield from self._open(kinds).to_batches(columns=names)

    def _open(self, types: dict[str, Any]) -> Any:
        if self._parquet:
            return self._dataset.dataset(str(self._path), format="parquet")
        from pyarrow import csv

        stem = self._path.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".zst")
        text = self._dataset.CsvFileFormat(
            parse_options=csv.ParseOptions(delimiter="\t" if stem.endswith((".tsv", ".tab")) else ","),
            convert_options=csv.ConvertOptions(column_types=types),
        )
        return self._dataset.dataset(str(self._path), format=text)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (self.arrow.ArrowException, OSError, ValueError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            # pyarrow puts what it was doing, with the path, before what is wrong.
            raise DataFormatError(f"{self._path}: {first.rpartition('Invalid: ')[2][:300]}") from error


def _numbers(table: Any, name: str, path: Path) -> Array:
    """A column as fp64; what is missing is NaN."""
    import pyarrow

    column = table.column(name)
    try:
        if pyarrow.types.is_boolean(column.type):
            column = column.cast(pyarrow.int8())
        found: Array = column.cast(pyarrow.float64()).to_numpy()
    except pyarrow.ArrowException as error:
        raise DataFormatError(f"{path}: column {name!r}: expected numbers, got {column.type}") from error
    return found


def _scaled(values: Array, train: int) -> Array:
    known = values[:train][np.isfinite(values[:train])]
    mean, deviation = (known.mean(), known.std()) if len(known) else (0.0, 1.0)
    scaled: Array = (values - mean) / (deviation or 1.0)
    return np.where(np.isfinite(scaled), scaled, 0.0)


def _codes(table: Any, name: str) -> Array:
    """A number for each value of a column, int64 [rows]; -1 for a missing one."""
    encoded = table.column(name).combine_chunks()
    if not hasattr(encoded, "indices"):
        encoded = encoded.dictionary_encode()
    codes: Array = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes
