"""CSV, TSV and Parquet files of any columns."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from dct_plugin.recommender.data import ClickDataset, Columns, DataFormatError, load
from dct_plugin.recommender.data.table import CONSTANT

pyarrow = pytest.importorskip("pyarrow")

ROWS = [(f"u{i % 7}", i % 5, 20 + i % 30, "" if i % 4 == 0 else f"{i / 3:.4f}", i % 6) for i in range(400)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ratings.csv"
    lines = ["user,item,age,price,rating", *(",".join(map(str, row)) for row in ROWS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def same(first: ClickDataset, second: ClickDataset) -> None:
    assert first.cardinalities == second.cardinalities
    for name in ("dense", "categorical", "label"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_roles_follow_the_types(file: Path) -> None:
    clicks = load("table", file, columns=Columns("rating>=4"))
    assert clicks.dense_names == ("price",)
    assert clicks.categorical_names == ("user", "item", "age")
    assert clicks.cardinalities == (8, 6, 31)
    assert clicks.label.tolist() == [float(row[4] >= 4) for row in ROWS]
    assert len(clicks) == 400
    assert clicks.num_train == 320
    known = clicks.dense[[i for i in range(320) if i % 4], 0]
    assert abs(known.mean()) < 1e-6
    assert abs(known.std() - 1) < 1e-6
    assert not clicks.dense[::4].any()  # missing


def test_a_purely_categorical_table_gets_a_constant(file: Path) -> None:
    clicks = load("table", file, columns=Columns("rating>=4", [], ["user", "item"]))
    assert clicks.dense_names == (CONSTANT,)
    assert clicks.dense.dtype == np.float32
    assert np.array_equal(clicks.dense, np.ones((400, 1)))
    assert clicks.categorical_names == ("user", "item")


def test_the_same_from_tsv_gzip_and_parquet(file: Path, tmp_path: Path) -> None:
    from pyarrow import csv, parquet

    columns = Columns("rating>=4", ["age", "price"], ["user", "item"])
    expected = load("table", file, columns=columns)
    tabs, zipped, rows = (tmp_path / name for name in ("r.tsv", "r.tsv.gz", "r.parquet"))
    tabs.write_text(file.read_text().replace(",", "\t"))
    zipped.write_bytes(gzip.compress(tabs.read_bytes()))
    parquet.write_table(csv.read_csv(file), rows)
    for path in (tabs, zipped, rows):
        same(load("table", path, columns=columns), expected)
    assert len(load("table", zipped, columns=columns, max_rows=90)) == 90


def text_of(rows: list[list[str]], separator: str) -> bytes:
    return "".join(separator.join(row) + "\n" for row in rows).encode("latin-1")


@pytest.mark.parametrize("separator", ["\t", "::", ";", "|", ",", " ", "#~#", "\xa7"])
@pytest.mark.parametrize("has_header", [True, False])
def test_separator_and_header_are_guessed_or_given(tmp_path: Path, separator: str, has_header: bool) -> None:
    rows = [
        [f"{i % 7}", f"Ren\xe9e:{i % 5}", f"{i % 6}"] for i in range(90_000 if separator == "::" else 400)
    ]
    path = tmp_path / "ratings.data"
    path.write_bytes(text_of([["user", "item", "rating"]] * has_header + rows, separator))
    columns = Columns("rating>=4" if has_header else "3>=4")
    if separator in ("#~#", "\xa7"):
        with pytest.raises(DataFormatError, match="expected a column"):
            load("table", path, columns=columns)
        columns = columns._replace(separator=separator, header=has_header)
    clicks = load("table", path, columns=columns)
    assert clicks.label.tolist() == [float(i % 6 >= 4) for i in range(len(rows))]
    assert clicks.categorical_names == (("user", "item") if has_header else ("1", "2"))
    assert clicks.cardinalities == (8, 6)
    assert clicks.roles[0].startswith(f"columns separated by {separator!r}")


def test_ids_dates_and_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [
        f"{10**19 + 7919 * i};2015-0{1 + i // 120}-0{1 + i % 9} {i % 3:02d}:10:00;2014/02/0{1 + i % 7}"
        f";{i / 8:.3f};{'' if i % 2 else 's'};{'new' if i > 300 else 's0'};{i % 2}".replace(".", ",")
        for i in range(400)
    ]
    path.write_text("\n".join(["id;at;day;price;seen;site;click", *rows]) + "\n")
    clicks = load("table", path, columns=Columns("click"))
    assert clicks.dense_names == ("price",)
    assert clicks.categorical_names == ("at weekday", "at hour", "day weekday", "seen", "site")
    assert clicks.cardinalities == (8, 4, 8, 3, 3)
    assert clicks.roles == (
        "columns separated by ';', the first line has the names",
        "label click: 50 % of 400 rows are 1",
        "dense: price",
        "date at: year-month-day",
        "date day: year-month-day",
        "missing cells: seen 50.0 %",
        "categorical id: left out, no test row has a value that is frequent in the training part",
        "categorical at weekday: 7 values, others in 0 % of the test rows",
        "categorical at hour: 3 values, others in 0 % of the test rows",
        "categorical day weekday: 7 values, others in 0 % of the test rows",
        "categorical seen: 2 values, others in 0 % of the test rows",
        "categorical site: 2 values, others in 0 % of the test rows",
    )
    path.write_text(
        path.read_text().replace("click", "n").replace(";1\n", ";True\n").replace(";0\n", ";False\n")
    )
    assert load("table", path, columns=Columns("n")).label.tolist() == clicks.label.tolist()
    path.write_text("\n".join(["id;at;day;price;seen;site;click", *rows]) + "\n")
    asked = load("table", path, columns=Columns("click", categorical=["id", "site"]))
    assert asked.categorical_names == ("id", "site")
    assert asked.cardinalities[0] == 1
    assert "categorical id: 0 values, others in 100 % of the test rows" in asked.roles


def test_dates_in_the_forms_of_other_countries(tmp_path: Path) -> None:
    days = [datetime(2015, 1 + i % 12, 1 + i % 28, i % 24, 5) for i in range(400)]
    forms = {
        "us": ("%m/%d/%Y %I:%M:%S %p", "month-day-year"),
        "eu": ("%d/%m/%Y %H:%M", "day-month-year"),
        "de": ("%d.%m.%Y %H:%M", "day-month-year"),
        "en": ("%d-%b-%Y %H:%M", "day-month name-year"),
        "iso": ("%Y-%m-%dT%H:%M:%SZ", "year-month-day"),
        "sql": ("%Y-%m-%d %H:%M:%S", "year-month-day"),
    }
    path = tmp_path / "log.csv"
    rows = [
        ",".join([*(day.strftime(form) for form, _ in forms.values()), f"{day:%m/%m/%Y},{i % 2}"])
        for i, day in enumerate(days)
    ]
    path.write_text("\n".join([",".join([*forms, "either", "click"]), *rows]) + "\n")
    clicks = load("table", path, columns=Columns("click"))
    of_forms = [f"{name} {part}" for name in forms for part in ("weekday", "hour")]
    assert clicks.categorical_names == (*of_forms, "either")
    assert clicks.cardinalities == (*(8, 25) * len(forms), 13)
    for column in range(4, 2 * len(forms)):
        assert np.array_equal(clicks.categorical[:, column], clicks.categorical[:, column % 2 + 2])
    assert [line for line in clicks.roles if line.startswith("date ")] == [
        *(f"date {name}: {form}" for name, (_, form) in forms.items()),
        "date either: day-month-year or month-day-year, so a category",
    ]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig", "utf-8"])
@pytest.mark.parametrize("separator", ["::", ","])
def test_encodings_comments_and_no_header(tmp_path: Path, encoding: str, separator: str) -> None:
    path = tmp_path / "log.csv"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    rows = [separator.join([f"Ren\xe9e{i % 7}", f"{i % 5}", f"{i % 2}"]) for i in range(400)]
    names = separator.join(["user", "item", "click"])
    for before, columns, where in [
        ([names], Columns("click"), "the first line has"),
        (["# of May", "", names], Columns("click"), "the first line has"),
        ([f"# {names}", names], Columns("click"), "the first line has"),
        ([f"# {names}", "# of May", ""], Columns("click"), "the comment above has"),
        ([], Columns("3"), "no line has"),
        (["# of May", "# and June"], Columns("3"), "no line has"),
    ]:
        path.write_bytes((mark + "\r\n".join([*before, *rows])).encode(encoding))
        clicks = load("table", path, columns=columns)
        assert clicks.cardinalities == (8, 6), before
        assert clicks.label.tolist() == [i % 2 for i in range(400)]
        assert clicks.categorical_names == (("1", "2") if columns.label == "3" else ("user", "item"))
        assert clicks.roles[0] == f"columns separated by {separator!r}, {where} the names"


def test_a_blank_behind_separators_is_not_part_of_the_values(tmp_path: Path) -> None:
    rows = [
        (f"{i / 3:.2f}", "?" if i % 9 == 0 else f"u{i % 7}", f"2015-01-{1 + i % 28:02d}") for i in range(400)
    ]
    lines = [f'{price},"{user}, x",{day},{i % 2 == 0}' for i, (price, user, day) in enumerate(rows)]
    expected, spaced = tmp_path / "expected.csv", tmp_path / "spaced.csv"
    expected.write_text("\n".join(["price,user,day,click", *lines]))
    spaced.write_text("\n".join(["price,user,day,click", *lines]).replace(",", ", "))
    clicks = load("table", spaced, columns=Columns("click"))
    assert clicks.dense_names == ("price",)
    assert clicks.categorical_names == ("user", "day weekday")
    same(clicks, load("table", expected, columns=Columns("click")))


def test_numbers_between_blanks_are_numbers(tmp_path: Path) -> None:
    expected, spaced = tmp_path / "expected.csv", tmp_path / "spaced.csv"
    expected.write_text("click,price,user\n" + "".join(f"{i % 2},{i / 3:.2f},{i % 7}\n" for i in range(400)))
    spaced.write_text(expected.read_text().replace(",", " , "))
    clicks = load("table", spaced, columns=Columns("click"))
    assert clicks.dense_names == ("price",)
    same(clicks, load("table", expected, columns=Columns("click")))


@pytest.mark.parametrize("separator", ["\t", ",", "::"])
def test_a_quote_that_nothing_closes_is_part_of_its_cell(tmp_path: Path, separator: str) -> None:
    users = [f'"u{i % 7}' if i % 17 < 5 else f"u{i % 7}" for i in range(400)]
    lines = ["user|price|click", *(f"{user}|{i / 7:.3f}|{i % 2}" for i, user in enumerate(users))]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines).replace("|", separator))
    clicks = load("table", path, columns=Columns("click"))
    assert clicks.label.tolist() == [i % 2 for i in range(400)]
    assert clicks.cardinalities == (15,)


def test_columns_of_lists_are_left_out(tmp_path: Path) -> None:
    from pyarrow import parquet

    values = {"click": [i % 2 for i in range(400)], "user": [i % 7 for i in range(400)]}
    nested = {"tags": [["a", "b"]] * 400, "place": [{"x": 1}] * 400}
    path = tmp_path / "clicks.parquet"
    parquet.write_table(pyarrow.table({**nested, **values}), path)
    clicks = load("table", path, columns=Columns("click"))
    assert clicks.categorical_names == ("user",)
    assert clicks.roles[0] == "left out, cells have several values: tags, place"


@pytest.fixture
def several_cores() -> Iterator[None]:
    """Let pyarrow use threads, whatever the environment says."""
    cores = pyarrow.cpu_count()
    pyarrow.set_cpu_count(2)
    yield
    pyarrow.set_cpu_count(cores)


@pytest.mark.usefixtures("several_cores")
def test_a_ragged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = ["# of May", "user,click", *(f"u{i % 7},{i % 2}" for i in range(300_000))]
    for line, found in ((9, "u1"), (299_000, "u1,0,7")):
        path.write_text("\n".join([*rows[: line - 1], found, *rows[line - 1 :]]))
        fields = found.count(",") + 1
        with pytest.raises(DataFormatError) as fault:
            load("table", path, columns=Columns("click"))
        wanted = f"{path}: line {line}: expected 2 fields as in the first line, found {fields}: {found}"
        assert str(fault.value) == wanted


@pytest.mark.usefixtures("several_cores")
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (Columns("Ratng>=4"), "there are user, item, age, price, rating; did you mean 'rating'?"),
        (Columns("click"), "expected a column 'click'; there are user, item, age, price, rating"),
        (Columns("rating"), "column 'rating': expected labels 0 and 1, got 2 in line 4; compare it"),
        (Columns("rating>=many"), "expected NAME or NAME>=NUMBER"),
        (Columns("rating>=4", ["user"], ["item"]), "line 2, column 'user': expected a number, got 'u0'"),
        (Columns("rating>=4", ["age"], ["age"]), "column 'age' is given two meanings"),
        (Columns("rating>=4", ["age"]), "expected at least one categorical column"),
        (Columns("price>=4", ["age"], ["user"]), "in every row, 100 of 400 have none, the first in line 2"),
    ],
)
def test_faults_name_file_and_column(file: Path, columns: Columns, words: str) -> None:
    with pytest.raises(DataFormatError) as fault:
        load("table", file, columns=columns)
    assert str(fault.value).startswith(f"{file}: ")
    assert words in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv.gz", "a.csv"])
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(FileNotFoundError):
        load("table", path)
    for content in (b"", b"\x1f\x8b\x00garbage", b"PAR1 and nothing", bytes(range(256))):
        path.write_bytes(content)
        with pytest.raises(DataFormatError, match=name):
            load("table", path)


@pytest.mark.parametrize("cell", ["abc", "inf", "1.2.3"])
def test_a_bad_cell_does_not_change_the_role_of_a_column(tmp_path: Path, cell: str) -> None:
    rows = [["user", "price", "label"]] + [[f"u{i % 7}", f"{i / 7:.3f}", str(i % 2)] for i in range(400)]
    rows[9][1] = cell
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join(map(",".join, rows)) + "\n")
    with pytest.raises(DataFormatError, match=r"column 'price': numbers, but for a few cells"):
        load("table", path, columns=Columns("label"))
    if cell != "inf":
        with pytest.raises(DataFormatError, match=rf"column 'price': expected a number, got '{cell}'"):
            load("table", path, columns=Columns("label", ["price"], ["user"]))
    assert load("table", path, columns=Columns("label", [], ["user", "price"])).dense_names == (CONSTANT,)


def test_facts_of_the_data_are_said(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    rows = [f"u{i % 7},{'' if i % 4 else i / 8},x,2.5,{int(i % 10 < 3)}" for i in range(400)]
    path.write_text("\n".join(["user,price,shop,fee,click", *rows]) + "\n")
    clicks = load("table", path, columns=Columns("click"))
    assert "missing cells: price 75.0 %" in clicks.roles
    assert clicks.facts() == [
        "training part: 320 rows, 30.0 % (96) are 1",
        "test part: 80 rows, 30.0 % (24) are 1",
        "constant in the training part: fee, shop",
    ]
    rare = load("table", path, columns=Columns("click"), min_count=46)
    assert clicks.cardinalities == (8, 2)
    assert rare.cardinalities == (6, 2)  # 320 rows: five users occur 46 times, two 45 times
    again = load("table", path, columns=Columns("click"), min_count=46)
    assert clicks.digest() != rare.digest() == again.digest()
    only_ids = load("table", path, columns=Columns("click", [], ["user"]))
    assert len(only_ids.facts()) == 2  # its column of ones is no news
