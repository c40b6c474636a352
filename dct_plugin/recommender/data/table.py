"""Any table with a column to predict: text with any separator, also compressed, or Parquet. Needs pyarrow."""

from __future__ import annotations

import codecs
import csv
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .dataset import CONSTANT, MIN_COUNT, Array, ClickDataset, DataFormatError, first_rows, index_columns


class Columns(NamedTuple):
    """The roles of a table's columns, and the layout of its text.

    ``label`` holds 0 and 1, or is compared: ``"rating>=4"``. Without ``dense`` and ``categorical`` columns of
    numbers with a fraction are dense and all others categorical; a column of which the test part has no
    frequent value is left out. ``separator`` and ``header`` (whether the first line has the names) are
    guessed if they are None. Without a header the columns are ``"1"``, ``"2"``, ...
    """

    label: str = "label"
    dense: Sequence[str] = ()
    categorical: Sequence[str] = ()
    separator: str | None = None
    header: bool | None = None

    @property
    def guessed(self) -> bool:
        """True if the roles follow from the values."""
        return not self.dense and not self.categorical


#: What a column holds; "mixed": numbers, but for a few cells.
Kind = Literal["number", "flag", "date", "category", "mixed"]
#: The largest share of cells that are taken for damaged numbers, not for categories.
_DAMAGED = 0.05

#: Separators that are looked for; of those that fit equally well the first one counts.
SEPARATORS = ("\t", "::", ";", "|", ",", " ")
#: In place of a separator of several characters, since pyarrow takes one.
_UNIT = "\x1f"
_SAMPLE = 1 << 18
_MISSING = ["", "?", "\\N", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None"]
_NUMBER = r"[+-]?([0-9]+[.,]?[0-9]*|[.,][0-9]+)([eE][+-]?[0-9]+)?"
_FLAG = "([Tt]rue|TRUE|[Ff]alse|FALSE)"
_WHOLE = r"[+-]?[0-9]+"
#: What pyarrow says of a cell that is no number; it counts columns from zero.
_NO_NUMBER = r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to double: invalid value '(.*)'"
#: What pyarrow says of a row with another number of fields.
_RAGGED = r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+): "
_DATE = (
    r"(?P<day>[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4}"
    r"|[0-9]{1,2}[- ][A-Za-z]{3,9}[- ][0-9]{4})"
    r"(?:[ T]+(?P<hour>[0-9]{1,2}):[0-9]{2}[^AaPp]*(?P<half>[AaPp])?.*)?"
)
#: Forms of the day, with a dash for every separator.
_DAYS = {
    "year-month-day": "%Y-%m-%d",
    "day-month name-year": "%d-%b-%Y",
    "day-month-year": "%d-%m-%Y",
    "month-day-year": "%m-%d-%Y",
}


def load_table(
    path: str | Path, columns: Columns, *, max_rows: int | None = None, min_count: int = MIN_COUNT
) -> ClickDataset:
    """A table, as :class:`Columns` says.

    The first 80 % of the rows, in file order, are for training. Dense columns are scaled by
    mean and deviation of the training part, a missing value becomes 0 then. Values of categorical columns are
    texts; a missing one is a value like any other, and those that occur fewer than *min_count* times in the
    training part become id 0. A date becomes its weekday and its hour. A table without dense columns gets one
    column of ones, :data:`CONSTANT`.

    Raises ``FileNotFoundError`` and :class:`DataFormatError` (file, column, what was expected).
    """
    path = Path(path)
    name, compared = _label(columns.label, path)
    opened = _Opened(path, columns, name)
    label_name, dense_names, names = _roles(opened.kinds, name, columns, path)
    table = opened.table([label_name, *dense_names, *names], {label_name, *dense_names}, max_rows)
    train = first_rows(path, table.num_rows)
    label = _labels(opened, table, label_name, compared)
    numbers = {column: _numbers(table, column, path) for column in dense_names}
    shares = {column: 1 - np.isfinite(values).mean() for column, values in numbers.items()}
    shares |= {column: _missing_share(table.column(column)) for column in names}
    dense = [_scaled(values, train) for values in numbers.values()]
    if not dense:
        dense, dense_names = [np.ones(len(label))], [CONSTANT]
    coded, dates = _coded_columns(table, names, opened.kinds)
    raw = np.stack([codes for _, codes in coded], axis=1)
    categorical, cardinalities = index_columns(raw, train, min_count)
    unseen = (categorical[train:] == 0).mean(axis=0)
    every = range(len(coded))
    kept = [at for at in every if unseen[at] < 1 or not columns.guessed] or list(every)
    roles = [
        f"label {columns.label}: {100 * label.mean():.0f} % of {len(label):,} rows are 1",
        f"dense: {', '.join(dense_names)}",
        *dates,
    ]
    if cells := [f"{column} {100 * share:.1f} %" for column, share in shares.items() if share]:
        roles.append(f"missing cells: {', '.join(cells)}")
    for at, (column, _) in enumerate(coded):
        if at in kept:
            values = f"{cardinalities[at] - 1:,} values, others in {100 * unseen[at]:.0f} % of the test rows"
        else:
            values = "left out, no test row has a value that is frequent in the training part"
        roles.append(f"categorical {column}: {values}")
    return ClickDataset(
        name=path.name,
        dense=np.stack(dense, axis=1).astype(np.float32),
        categorical=np.ascontiguousarray(categorical[:, kept]),
        label=label.astype(np.float32),
        cardinalities=tuple(cardinalities[at] for at in kept),
        dense_names=tuple(dense_names),
        categorical_names=tuple(coded[at][0] for at in kept),
        num_train=train,
        roles=(*opened.layout, *roles),
    )


def _coded_columns(
    table: Any, names: Sequence[str], kinds: dict[str, Kind]
) -> tuple[list[tuple[str, Array]], list[str]]:
    """Return the codes of categorical columns by name, and how dates were read, in words."""
    coded: list[tuple[str, Array]] = []
    dates = []
    for column in names:
        how, parts = _coded(table.column(column), column, kinds[column])
        coded += parts
        dates += [f"date {column}: {how}"] if how else []
    return coded, dates


def _labels(opened: _Opened, table: Any, column: str, compared: float | None) -> Array:
    """Return the labels, 0 and 1."""
    path = opened.path
    label = _numbers(table, column, path)
    if (missing := np.flatnonzero(np.isnan(label))).size:
        raise DataFormatError(
            f"{path}: column {column!r}: expected a label in every row, {len(missing):,} of {len(label):,} "
            f"have none, the first in {opened.place(missing[0])}"
        )
    if compared is not None:
        return label >= compared
    if (others := np.flatnonzero((label != 0) & (label != 1))).size:
        raise DataFormatError(
            f"{path}: column {column!r}: expected labels 0 and 1, got {label[others[0]]:g} in "
            f"{opened.place(others[0])}; compare it for others: '{column}>=NUMBER'"
        )
    return label


def _label(text: str, path: Path) -> tuple[str, float | None]:
    name, sign, number = text.partition(">=")
    if sign and not re.fullmatch(r"\s*-?[0-9]+(\.[0-9]+)?\s*", number):
        raise DataFormatError(f"{path}: label {text!r}: expected NAME or NAME>=NUMBER")
    return name.strip(), float(number) if sign else None


def _roles(
    kinds: dict[str, Kind], label: str, columns: Columns, path: Path
) -> tuple[str, list[str], list[str]]:
    """Label, dense and categorical columns."""
    chosen = [label, *columns.dense, *columns.categorical]
    for name in chosen:
        if name not in kinds:
            close = difflib.get_close_matches(name.lower(), [each.lower() for each in kinds], n=1)
            hint = [each for each in kinds if [each.lower()] == close]
            meant = f"; did you mean {hint[0]!r}?" if hint else ""
            raise DataFormatError(f"{path}: expected a column {name!r}; there are {', '.join(kinds)}{meant}")
    if twice := sorted({name for name in chosen if chosen.count(name) > 1}):
        raise DataFormatError(f"{path}: column {twice[0]!r} is given two meanings")
    dense, categorical = list(columns.dense), list(columns.categorical)
    if columns.guessed:
        others = [name for name in kinds if name != label]
        if mixed := [name for name in others if kinds[name] == "mixed"]:
            raise DataFormatError(
                f"{path}: column {mixed[0]!r}: numbers, but for a few cells among the first rows; make these "
                "cells empty, or name the roles of the columns with --dense and --categorical"
            )
        dense = [name for name in others if kinds[name] == "number"]
        categorical = [name for name in others if kinds[name] != "number"]
    if not categorical:
        raise DataFormatError(
            f"{path}: expected at least one categorical column; name them with --categorical"
        )
    return label, dense, categorical


class _Text(NamedTuple):
    """The layout of a table that is text."""

    separator: str
    names: list[str]
    encoding: str
    decimal_point: str
    where: str
    """The line that has the names."""
    skipped: int
    """Lines before the first row."""
    is_spaced: bool
    """True if a blank follows separators."""
    is_quoted: bool
    """False if quotes are part of the cells."""

    @classmethod
    def of(cls, sample: bytes, columns: Columns, label: str) -> _Text:
        """Guess what ``columns`` leaves open from the beginning of a file."""
        text, encoding = sample.decode("latin-1"), "latin-1"
        marked = sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        with suppress(UnicodeDecodeError):
            read = codecs.getincrementaldecoder("utf-16" if marked else "utf-8-sig")()
            text, encoding = read.decode(sample), "utf-16" if marked else "utf-8"
        lines = re.split(r"\r\n?|\n", text)
        # "sep=;" is a line for spreadsheets.
        comments = list(takewhile(lambda line: not line.strip() or line.startswith(("#", "sep=")), lines))
        lines = [line for line in lines[len(comments) :] if line.strip()]
        lines = lines[: min(200, len(lines) - (len(sample) == _SAMPLE))]  # the last one may be cut off
        if not lines:
            raise ValueError("expected rows, got none")
        separator = columns.separator or max(SEPARATORS, key=lambda each: _fits(lines, each))
        first, *rows = _fields(lines, separator)
        has_header = columns.header
        above: list[str] = []
        if label not in first:
            for row in _fields([line.lstrip("# ") for line in comments], separator):
                above = row if len(row) == len(first) > 1 and (label in row or has_header) else above
        if has_header is None:
            values = any(re.fullmatch(_NUMBER, field) for field in first) or "" in first[1:]
            has_header = label in first or not values
        numbers = [str(at) for at in range(1, len(first) + 1)]
        header = above or (first if has_header else numbers)
        names = [name or at for name, at in zip(header, numbers, strict=True)]
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"expected different names of columns, got {name!r} {count} times")
        fields = [field for row in rows for field in row if re.fullmatch(_NUMBER, field)]
        is_comma = any("," in field for field in fields) and not any("." in field for field in fields)
        where = "the first line" if header is first else "the comment above" if above else "no line"
        skipped = len(comments) + (header is first)
        point = "," if is_comma and separator != "," else "."
        is_spaced = separator != " " and any(separator + " " in line for line in lines)
        # A single quote would make one row of several.
        is_whole = len({line.count(separator) for line in lines}) == 1
        is_quoted = not (is_whole and any(line.count('"') % 2 for line in lines))
        return cls(separator, names, encoding, point, where, skipped, is_spaced, is_quoted)

    def __str__(self) -> str:
        return f"columns separated by {self.separator!r}, {self.where} has the names"


def _fields(lines: Sequence[str], separator: str) -> list[list[str]]:
    rows = (
        csv.reader(lines, delimiter=separator, skipinitialspace=separator != " ")
        if len(separator) == 1
        else (line.split(separator) for line in lines)
    )
    return [[field.strip() for field in row] for row in rows]


def _fits(lines: Sequence[str], separator: str) -> tuple[float, int]:
    """Return the share of lines with the most frequent number of fields, and that number."""
    try:
        rows = _fields(lines, separator)
    except csv.Error:
        return 0.0, 0
    if set(SEPARATORS).intersection(rows[0]):  # blanks around the separator
        return 0.0, 0
    counts = Counter(map(len, rows))
    fields, found = counts.most_common(1)[0]
    return (found / counts.total(), fields) if fields > 1 else (0.0, 1)


class _Opened:
    """A table's columns and batches; whatever pyarrow raises becomes :class:`DataFormatError`.

    Attributes:
        kinds: By column, what its first rows hold.
        layout: Sentences about the layout.
    """

    def __init__(self, path: Path, columns: Columns, label: str) -> None:
        try:
            import pyarrow
            from pyarrow import dataset
        except ImportError as error:
            raise DataFormatError(
                f"{path}: tables are read by pyarrow, not installed here: pip install 'dct-plugin[tables]'"
            ) from error
        self.arrow, self.path, self._dataset = pyarrow, path, dataset
        if not path.is_file():
            raise FileNotFoundError(2, "no such file", str(path))
        self._text: _Text | None = None
        self.kinds: dict[str, Kind] = {}
        self.layout: list[str] = []
        with self._reading():
            if path.suffix in (".parquet", ".pq"):
                schema = dataset.dataset(str(path), format="parquet").schema
                nested = [field.name for field in schema if pyarrow.types.is_nested(field.type)]
                names = [name for name in schema.names if name not in nested]
                self.layout += [f"left out, cells have several values: {', '.join(nested)}"] if nested else []
            else:
                with pyarrow.input_stream(str(path)) as file:
                    self._text = _Text.of(file.read(_SAMPLE), columns, label)
                names = self._text.names
        first = next(self.batches(names, set()), None)
        self.kinds = {name: "category" if first is None else _kind(first.column(name)) for name in names}
        self.layout += [] if self._text is None else [str(self._text)]

    def table(self, names: list[str], numbers: set[str], max_rows: int | None) -> Any:
        """Return the first rows of :meth:`batches` as one table."""
        parts: list[Any] = []
        rows = 0
        for batch in self.batches(names, numbers):
            parts.append(batch)
            rows += batch.num_rows
            if max_rows is not None and rows >= max_rows:
                break
        if not rows:
            raise DataFormatError(f"{self.path}: expected rows, got none")
        return self.arrow.Table.from_batches(parts).slice(0, max_rows)

    def place(self, row: int) -> str:
        """Return the place of a row, counted from 0, in words; lines as pyarrow counts them."""
        return f"row {row + 1}" if self._text is None else f"line {row + 1 + self._text.skipped}"

    def batches(self, names: list[str], numbers: set[str]) -> Iterator[Any]:
        """Yield batches of the columns ``names``; those of a text file are numbers, or else texts."""
        with self._reading():
            if self._text is None:
                yield from self._dataset.dataset(str(self.path), format="parquet").to_batches(columns=names)
            else:
                yield from self._batches_of_text(self._text, names, numbers)

    def _batches_of_text(self, layout: _Text, names: list[str], numbers: set[str]) -> Any:
        from pyarrow import csv as arrow_csv

        stream = self.arrow.input_stream(str(self.path))
        separator, encoding = layout.separator, layout.encoding
        if encoding == "utf-16":
            stream, encoding = self.arrow.transcoding_input_stream(stream, encoding, "utf-8"), "utf-8"
        text = self.arrow.string()
        plain = separator.isascii() and len(separator) == 1
        if not plain:
            stream = self.arrow.TransformInputStream(stream, _Joined(separator.encode(encoding)))
        if layout.is_spaced:
            stream = self.arrow.TransformInputStream(stream, _Unspaced(separator.encode(encoding)))
        return arrow_csv.open_csv(
            stream,
            # With threads pyarrow does not say in which row an error is.
            arrow_csv.ReadOptions(
                column_names=layout.names, skip_rows=layout.skipped, encoding=encoding, use_threads=False
            ),
            arrow_csv.ParseOptions(
                delimiter=separator if plain else _UNIT,
                quote_char='"' if plain and layout.is_quoted else False,
            ),
            arrow_csv.ConvertOptions(
                column_types={name: self._number(name) if name in numbers else text for name in names},
                include_columns=names,
                null_values=_MISSING,
                decimal_point=layout.decimal_point,
            ),
        )

    def _number(self, name: str) -> Any:
        return self.arrow.bool_() if self.kinds.get(name) == "flag" else self.arrow.float64()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (self.arrow.ArrowException, OSError, ValueError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            # pyarrow puts what it was doing, with the path, before what is wrong.
            names = [] if self._text is None else self._text.names
            if (cell := re.search(_NO_NUMBER, first)) and int(cell[1]) < len(names):
                line = f"line {cell[2]}, " if cell[2] else ""
                first = f"{line}column {names[int(cell[1])]!r}: expected a number, got {cell[3]!r}"
            wrong = re.sub(_RAGGED, r"line \1: expected \2 fields as in the first line, found \3: ", first)
            wrong = "".join(each if each.isprintable() else "?" for each in wrong.rpartition("Invalid: ")[2])
            raise DataFormatError(f"{self.path}: {wrong[:300]}") from error


class _Joined:
    """Writes one character in place of a separator of several, in bytes that come in parts."""

    def __init__(self, separator: bytes) -> None:
        self._separator, self._rest = separator, b""

    def __call__(self, part: Any) -> bytes:
        data = self._rest + bytes(part)
        kept = next(
            (n for n in range(len(self._separator) - 1, 0, -1) if data.endswith(self._separator[:n])), 0
        )
        data, self._rest = data[: len(data) - kept], data[len(data) - kept :]
        return data.replace(self._separator, _UNIT.encode())


class _Unspaced:
    """Takes out one blank behind each separator, in bytes that come in parts."""

    def __init__(self, separator: bytes) -> None:
        self._separator, self._is_behind = separator, False

    def __call__(self, part: Any) -> bytes:
        data = bytes(part)
        left = data.removeprefix(b" ") if self._is_behind else data
        self._is_behind = data.endswith(self._separator)
        return left.replace(self._separator + b" ", self._separator)


def _kind(column: Any) -> Kind:
    """Return what a column of the first batch holds."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_floating(column.type) or pyarrow.types.is_decimal(column.type):
        return "number"
    if pyarrow.types.is_timestamp(column.type) or pyarrow.types.is_date(column.type):
        return "date"
    if not pyarrow.types.is_string(column.type):
        return "category"
    known = column.filter(compute.invert(compute.is_in(column, pyarrow.array(_MISSING))))

    def share(pattern: str) -> float:
        if not len(known):
            return 0.0
        return float(compute.mean(compute.match_substring_regex(known, f"^{pattern}$")).as_py())

    if share(_DATE) == 1:
        return "date"
    if share(_FLAG) == 1:
        return "flag"
    numbers = share(f" *{_NUMBER} *")  # pyarrow reads numbers between blanks, too
    if numbers < 1 - _DAMAGED or share(f" *{_WHOLE} *") == numbers:
        return "category"
    return "number" if numbers == 1 else "mixed"


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


def _missing_share(column: Any) -> float:
    """Return the share of a categorical column's cells that are missing; text files have no nulls."""
    import pyarrow
    from pyarrow import compute

    if not pyarrow.types.is_string(column.type):
        return float(column.null_count / len(column))
    return float(compute.mean(compute.is_in(column, pyarrow.array([*_MISSING, None]))).as_py())


def _scaled(values: Array, train: int) -> Array:
    known = values[:train][np.isfinite(values[:train])]
    mean, deviation = (known.mean(), known.std()) if len(known) else (0.0, 1.0)
    scaled: Array = (values - mean) / (deviation or 1.0)
    return np.where(np.isfinite(scaled), scaled, 0.0)


def _coded(column: Any, name: str, kind: Kind) -> tuple[str, list[tuple[str, Array]]]:
    """Return how dates are read, and the names and codes of a column; a date has a weekday and an hour."""
    if kind != "date":
        return "", [(name, _codes(column))]
    import pyarrow
    from pyarrow import compute

    form, hours = "", None
    if pyarrow.types.is_string(column.type):
        parts = compute.extract_regex(column, f"^{_DATE}$")
        days, *time = (compute.struct_field(parts, key) for key in ("day", "hour", "half"))
        text = compute.binary_join_element_wise(time[0], compute.utf8_lower(time[1]), "")
        if compute.any(compute.not_equal(text, "")).as_py():
            hours = text
        form, found = _days(days)
        if found is None:
            return f"{form}, so a category", [(name, _codes(column))]
        column = found
    elif pyarrow.types.is_timestamp(column.type):
        hours = compute.hour(column)
    coded = [(f"{name} weekday", _codes(compute.day_of_week(column)))]
    return form, coded if hours is None else [*coded, (f"{name} hour", _codes(hours))]


def _days(texts: Any) -> tuple[str, Any]:
    """Return the form that most days have, and the days; None where day and month cannot be told apart."""
    from pyarrow import compute

    dashed = compute.replace_substring_regex(texts, "[/. ]", "-")
    parsed = {
        form: compute.strptime(dashed, format=pattern, unit="s", error_is_null=True)
        for form, pattern in _DAYS.items()
    }
    if compute.any(compute.match_substring(texts, ".")).as_py():  # the month never comes first with dots
        del parsed["month-day-year"]
    least = min(days.null_count for days in parsed.values())
    form, *others = (form for form, days in parsed.items() if days.null_count == least)
    return (f"{form} or {others[0]}", None) if others else (form, parsed[form])


def _codes(column: Any) -> Array:
    """A number for each value of a column, int64 [rows]; -1 for a missing one."""
    encoded = column.combine_chunks()
    if not hasattr(encoded, "indices"):
        encoded = encoded.dictionary_encode()
    codes: Array = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes
