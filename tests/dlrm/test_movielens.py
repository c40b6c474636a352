"""The MovieLens-100k reader, on a small archive written here."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from dct_plugin.integrations.dlrm.data import DataFormatError, load, load_movielens


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """100 ratings of 8 movies by 5 users, in the format of the archive."""
    draw = random.Random(0)
    users = [f"{u}|{20 + u}|{'MF'[u % 2]}|writer|{55000 + 100 * u}\n" for u in range(1, 6)]
    items = []
    for i in range(1, 9):
        flags = "|".join(str(int(g == i)) for g in range(19))
        items.append(f"{i}|Caf\u00e9 {i}|01-Jan-{1990 + i}||http://example.org|{flags}\n")
    items[7] = items[7].replace("01-Jan-1998", "")  # a movie without a date
    ratings = [
        f"{draw.randint(1, 5)}\t{draw.randint(1, 8)}\t{draw.randint(1, 5)}\t88125094\n" for _ in range(100)
    ]
    for name, lines in (("u.user", users), ("u.item", items), ("u.data", ratings)):
        (tmp_path / name).write_text("".join(lines), encoding="latin-1")
    return tmp_path


def test_fields_and_labels(archive: Path) -> None:
    clicks = load("movielens", archive)
    assert (len(clicks), clicks.num_train) == (100, 80)
    assert clicks.dense.shape == (100, 20)
    assert clicks.categorical.shape == (100, 6)
    assert clicks.categorical_names == ("user", "item", "gender", "occupation", "zip", "year")
    assert (clicks.categorical < np.array(clicks.cardinalities)).all()
    ratings = [line.split("\t") for line in (archive / "u.data").read_text().splitlines()]
    assert clicks.label.tolist() == [float(int(rating) >= 4) for _, _, rating, _ in ratings]
    assert np.allclose(clicks.dense[:, 0], [np.log1p(20 + int(user)) for user, *_ in ratings])
    genres = clicks.dense[:, 1:]
    assert [int(row.argmax()) for row in genres] == [int(item) for _, item, _, _ in ratings]
    # Equal users have equal ids, and other users other ones (all occur often enough here).
    users = np.array([int(user) for user, *_ in ratings])
    assert len({(a, b) for a, b in zip(users, clicks.categorical[:, 0], strict=True)}) == len(set(users))


def test_first_rows_only(archive: Path) -> None:
    assert len(load_movielens(archive, max_rows=30)) == 30


def test_faults_name_file_and_line(archive: Path) -> None:
    data = archive / "u.data"
    good = data.read_text()
    for bad, message in [
        ("1\t2\t3\n", "line 101: expected 4 tab-separated fields, got 3"),
        ("1\t2\t9\t0\n", "line 101: expected a rating from 1 to 5, got '9'"),
        ("77\t2\t3\t0\n", "line 101: expected a user of u.user, got '77'"),
        ("1\t99\t3\t0\n", "line 101: expected an item of u.item, got '99'"),
    ]:
        data.write_text(good + bad)
        with pytest.raises(DataFormatError, match=message):
            load_movielens(archive)
    data.write_text(good)
    user = archive / "u.user"
    user.write_text(user.read_text().replace("1|21|", "1|old|"))
    with pytest.raises(DataFormatError, match=r"u\.user: line 1: expected a number, got 'old'"):
        load_movielens(archive)
    user.unlink()
    with pytest.raises(FileNotFoundError):
        load_movielens(archive)
    with pytest.raises(ValueError, match="needs the directory"):
        load("movielens")
