"""Readers of the click data sets, the data file that ships, and the model trained on them."""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from prepare_diabetes import main as prepare_main
from prepare_diabetes import prepare
from support import DATA

from dct_plugin.recommender.data import (
    DIABETES_FILE,
    ClickDataset,
    DataFormatError,
    epoch_batches,
    load,
    load_criteo,
    load_diabetes,
)
from dct_plugin.recommender.models import DLRM, EmbeddingTables

ARCHIVE = DATA / "diabetes130" / "diabetes130.zip"
CRITEO = DATA / "criteo" / "train_40k.txt.gz"


def check_shape(clicks: ClickDataset, rows: int, dense: int, categorical: int) -> None:
    assert clicks.dense.shape == (rows, dense)
    assert clicks.categorical.shape == (rows, categorical)
    assert clicks.label.shape == (rows,)
    assert clicks.dense.dtype == clicks.label.dtype == np.float32
    assert clicks.categorical.dtype == np.int32
    assert len(clicks.cardinalities) == len(clicks.categorical_names) == categorical
    assert len(clicks.dense_names) == dense
    assert np.isfinite(clicks.dense).all()
    assert set(np.unique(clicks.label)) <= {0.0, 1.0}
    assert (clicks.categorical >= 0).all()
    assert (clicks.categorical < np.array(clicks.cardinalities)).all()
    assert len(clicks.train.label) == clicks.num_train
    assert len(clicks.train.label) + len(clicks.test.label) == rows == len(clicks)


# -- Diabetes 130-US ---------------------------------------------------------------------------------------


def test_shipped_diabetes_has_the_rows_and_fields_of_the_study() -> None:
    clicks = load_diabetes()
    check_shape(clicks, rows=101_766, dense=8, categorical=37)
    assert clicks.label.sum() == 35_545 + 11_357  # readmitted after and before 30 days
    assert "diag_1" in clicks.categorical_names
    assert "num_medications" in clicks.dense_names
    assert clicks.num_train == pytest.approx(0.8 * len(clicks), rel=0.01)


def test_shipped_file_is_small_and_names_its_source_and_licence() -> None:
    assert DIABETES_FILE.stat().st_size < 2_000_000
    text = (DIABETES_FILE.parent / "LICENSE-diabetes130.txt").read_text()
    for part in ("CC BY 4.0", "10.24432/C5230J", "Strack", "Changes made"):
        assert part in text


def test_known_values_of_the_first_rows() -> None:
    with np.load(DIABETES_FILE) as columns:
        race = columns["vocabulary.race"][columns["code.race"][:5]]
        assert list(race) == ["Caucasian", "Caucasian", "AfricanAmerican", "Caucasian", "Caucasian"]
        assert list(columns["numeric.num_lab_procedures"][:5]) == [41, 59, 11, 44, 51]
        assert list(columns["label"][:5]) == [0, 1, 0, 0, 0]
        numbers, patient = columns["numeric.num_lab_procedures"], columns["patient"]
    clicks = load_diabetes(seed=7)
    trained = np.random.default_rng(7).random(int(patient.max()) + 1)[patient] >= 0.2
    at = clicks.dense_names.index("num_lab_procedures")
    np.testing.assert_allclose(
        clicks.train.dense[:5, at], np.log1p(numbers[trained][:5].astype(float)), rtol=1e-6
    )


def test_patients_are_in_one_part_only_and_the_seed_decides_in_which() -> None:
    with np.load(DIABETES_FILE) as columns:
        patient, label = columns["patient"], columns["label"]
    in_test = np.random.default_rng(7).random(int(patient.max()) + 1)[patient] < 0.2
    clicks = load_diabetes(seed=7)
    np.testing.assert_array_equal(clicks.train.label, label[~in_test])
    np.testing.assert_array_equal(clicks.test.label, label[in_test])
    assert not set(patient[in_test]) & set(patient[~in_test])

    again, other = load_diabetes(seed=7), load_diabetes(seed=8)
    np.testing.assert_array_equal(clicks.categorical, again.categorical)
    assert clicks.num_train != other.num_train or not np.array_equal(clicks.label, other.label)


def test_rare_values_are_judged_by_the_training_part_alone() -> None:
    clicks = load_diabetes(seed=7)
    with np.load(DIABETES_FILE) as columns:
        patient = columns["patient"]
        trained = np.random.default_rng(7).random(int(patient.max()) + 1)[patient] >= 0.2
        for f, name in enumerate(clicks.categorical_names):
            code = columns[f"code.{name}"].astype(int)
            counts = np.bincount(code[trained], minlength=code.max() + 1)
            kept = counts[code] >= 4
            for part, where in ((clicks.train, trained), (clicks.test, ~trained)):
                np.testing.assert_array_equal(part.categorical[:, f] > 0, kept[where], err_msg=name)
            assert clicks.cardinalities[f] == (counts >= 4).sum() + 1


@pytest.mark.skipif(not ARCHIVE.exists(), reason="the original UCI archive is not beside the project")
def test_shipped_file_holds_what_the_original_archive_holds(tmp_path: Path) -> None:
    columns = prepare(ARCHIVE, tmp_path / "again.npz")
    with np.load(DIABETES_FILE) as shipped:
        assert set(shipped.files) == set(columns)
        for key in shipped.files:
            np.testing.assert_array_equal(shipped[key], columns[key], err_msg=key)

    with zipfile.ZipFile(ARCHIVE) as archive:
        member = next(n for n in archive.namelist() if n.endswith("/diabetic_data.csv"))
        with archive.open(member) as file:
            rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8", newline="")))
    for name in columns["categorical_names"]:
        text = columns[f"vocabulary.{name}"][columns[f"code.{name}"]]
        assert [row[name] for row in rows] == text.tolist()
    for name in columns["numeric_names"]:
        assert [int(row[name]) for row in rows] == columns[f"numeric.{name}"].tolist()
    assert [row["readmitted"] != "NO" for row in rows] == columns["label"].astype(bool).tolist()


def test_prepare_names_a_missing_column_and_a_short_line(tmp_path: Path) -> None:
    def archive(text: str) -> Path:
        path = tmp_path / "source.zip"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("diabetic_data.csv", text)
        return path

    with pytest.raises(DataFormatError, match=r"line 1: expected a column 'encounter_id'"):
        prepare(archive("a,b\n1,2\n"), tmp_path / "out.npz")
    with np.load(DIABETES_FILE) as shipped:
        names = [*shipped["categorical_names"], *shipped["numeric_names"]]
    header = ["encounter_id", "patient_nbr", "readmitted", "examide", "citoglipton", *names]
    with pytest.raises(DataFormatError, match=rf"line 2: expected {len(header)} fields, got 1"):
        prepare(archive(",".join(header) + "\n1\n"), tmp_path / "out.npz")
    assert prepare_main(["only one"]) == 2


def test_a_damaged_or_foreign_diabetes_file_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(DIABETES_FILE.read_bytes()[:50_000])
    with pytest.raises(DataFormatError, match=r"damaged\.npz: expected the columnar"):
        load_diabetes(damaged)
    foreign = tmp_path / "foreign.npz"
    np.savez(foreign, label=np.zeros(3, np.uint8))
    with pytest.raises(DataFormatError, match=r"foreign\.npz: expected a column 'categorical_names'"):
        load_diabetes(foreign)
    with np.load(DIABETES_FILE) as shipped:
        columns = {**shipped, "code.race": shipped["code.race"][:-1]}
    short = tmp_path / "short.npz"
    np.savez(short, **columns)
    with pytest.raises(DataFormatError, match=r"'code.race': expected 101766 unsigned integers"):
        load_diabetes(short)
    with pytest.raises(FileNotFoundError):
        load_diabetes(tmp_path / "absent.npz")


# -- Criteo ------------------------------------------------------------------------------------------------


def line(
    label: str = "0", integers: dict[int, str] | None = None, hashes: dict[int, str] | None = None
) -> str:
    """A line with the given fields (numbered from 1 as in the data's description), the others filled in."""
    ints = [(integers or {}).get(i, str(i)) for i in range(1, 14)]
    cats = [(hashes or {}).get(i, f"{i:08x}") for i in range(1, 27)]
    return "\t".join([label, *ints, *cats])


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    data = "".join(text + end for text in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_criteo_values(tmp_path: Path, name: str, end: str) -> None:
    lines = [line("1", {1: "", 2: "-2", 3: "0", 4: "1000"}, {1: "ffffffff", 2: "", 3: "ABCDEF01"})] * 4
    lines += [line("0", {1: "7"}, {3: "abcdef01"})] * 4
    lines += [line("1", hashes={1: "12345678", 2: ""})] * 2
    clicks = load_criteo(write(tmp_path / name, lines, end))
    check_shape(clicks, rows=10, dense=13, categorical=26)
    assert clicks.num_train == 8
    assert clicks.label.tolist() == [1] * 4 + [0] * 4 + [1] * 2
    np.testing.assert_allclose(clicks.dense[0, :5], np.log1p([0, 0, 0, 1000, 5]), rtol=1e-6)
    assert clicks.dense[4, 0] == pytest.approx(np.log1p(7))
    # Ids count up with the hash; 1 and ffffffff are known, 12345678 is not in the training part.
    assert clicks.categorical[:, 0].tolist() == [2] * 4 + [1] * 4 + [0] * 2
    # Missing is a value like any other, and comes before every hash.
    assert clicks.categorical[:, 1].tolist() == [1] * 4 + [2] * 4 + [1] * 2
    # Upper and lower case are the same number; 00000003 is not in the training part.
    assert clicks.categorical[:, 2].tolist() == [1] * 8 + [0] * 2
    assert clicks.cardinalities[:4] == (3, 3, 2, 2)


def test_criteo_without_a_last_line_end_and_over_several_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [line(str(rng.integers(2)), {2: str(rng.integers(100))}) for _ in range(40_000)]
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines))
    clicks = load_criteo(path)
    check_shape(clicks, rows=40_000, dense=13, categorical=26)
    assert clicks.label.tolist() == [float(text[0]) for text in lines]
    expected = np.log1p([float(text.split("\t")[2]) for text in lines])
    np.testing.assert_allclose(clicks.dense[:, 1], expected, rtol=1e-6)
    assert len(load_criteo(path, max_rows=20_000)) == 20_000


MALFORMED = {
    "too few fields": ("\t".join(line().split("\t")[:-1]), r"expected 40 tab-separated fields .* got 39"),
    "too many fields": (line() + "\t", r"expected 40 tab-separated fields .* got 41"),
    "blank": ("", r"expected 40 tab-separated fields .* got 1"),
    "label": (line("2"), r"field 1: expected the label 0 or 1, got '2'"),
    "no label": (line(""), r"field 1: expected the label 0 or 1, got ''"),
    "decimal": (line(integers={3: "1.5"}), r"field 4: expected an integer or nothing, got '1\.5'"),
    "underscore": (line(integers={1: "1_000"}), r"field 2: expected an integer or nothing, got '1_000'"),
    "blank integer": (line(integers={13: " "}), r"field 14: expected an integer or nothing, got ' '"),
    "huge integer": (line(integers={1: "9" * 100}), r"field 2: expected an integer .* got '9{40}\.\.\.'"),
    "no hash": (line(hashes={1: "xyz"}), r"field 15: expected a hash of at most 8 .* got 'xyz'"),
    "long hash": (line(hashes={26: "123456789"}), r"field 40: expected a hash .* got '123456789'"),
    "sign": (line(hashes={26: "-1"}), r"field 40: expected a hash of at most 8"),
    "not text": (line(hashes={26: "é"}), r"field 40: expected a hash of at most 8 .* got '\\\\xc3\\\\xa9'"),
    "comma": (line().replace("\t", ","), r"expected 40 tab-separated fields .* got 1"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_criteo_line_is_named(tmp_path: Path, case: str) -> None:
    text, expected = MALFORMED[case]
    path = write(tmp_path / "train.txt", [line(), text, line()])
    with pytest.raises(DataFormatError, match=rf"train\.txt: line 2: {expected}"):
        load_criteo(path)


def test_line_numbers_count_through_the_chunks(tmp_path: Path) -> None:
    lines = [line()] * 17_000
    lines[16_999] = "1\t2"
    with pytest.raises(DataFormatError, match=r"train\.txt: line 17000: expected 40"):
        load_criteo(write(tmp_path / "train.txt", lines))
    assert len(load_criteo(tmp_path / "train.txt", max_rows=16_999)) == 16_999


def test_criteo_files_that_are_none(tmp_path: Path) -> None:
    empty = write(tmp_path / "train.txt", [])
    with pytest.raises(DataFormatError, match=r"train\.txt: expected rows .* got 0"):
        load_criteo(empty)
    whole = write(tmp_path / "train.txt.gz", [line(integers={1: str(i)}) for i in range(500)])
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(DataFormatError, match=r"train\.txt\.gz: line \d+: expected more gzip data"):
        load_criteo(whole)
    with pytest.raises(FileNotFoundError):
        load_criteo(tmp_path / "absent.txt")


def test_load_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", [line()] * 10)
    assert len(load("criteo", path)) == 10
    assert len(load("diabetes", max_rows=100)) == 100
    with pytest.raises(ValueError, match="'criteo' needs the path"):
        load("criteo")
    with pytest.raises(ValueError, match="unknown data format 'csv'; known formats: diabetes, criteo"):
        load("csv", path)


@pytest.mark.skipif(
    not CRITEO.exists(), reason="Criteo's data may not be shipped and is not beside the project"
)
def test_real_criteo_file() -> None:
    clicks = load_criteo(CRITEO)
    check_shape(clicks, rows=40_000, dense=13, categorical=26)
    assert clicks.num_train == 32_000
    assert clicks.label.mean() == pytest.approx(0.224, abs=0.002)
    assert min(clicks.cardinalities) > 2
    assert sum(clicks.cardinalities) == 14_643


# -- batches -----------------------------------------------------------------------------------------------


def test_batches_cover_every_row_at_most_once_and_depend_on_seed_and_epoch() -> None:
    first = list(epoch_batches(103, 10, seed=0, epoch=0))
    assert [len(batch) for batch in first] == [10] * 10
    rows = np.concatenate(first)
    assert len(set(rows.tolist())) == 100
    assert rows.min() >= 0
    assert rows.max() < 103
    np.testing.assert_array_equal(first, list(epoch_batches(103, 10, seed=0, epoch=0)))
    assert not np.array_equal(first, list(epoch_batches(103, 10, seed=0, epoch=1)))
    assert not np.array_equal(first, list(epoch_batches(103, 10, seed=1, epoch=0)))
    assert list(epoch_batches(9, 10, seed=0, epoch=0)) == []


# -- model -------------------------------------------------------------------------------------------------


def test_model_depends_on_its_seed_alone() -> None:
    state = torch.random.get_rng_state()
    first = DLRM(4, [10, 3, 7], seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    second, other = DLRM(4, [10, 3, 7], seed=5), DLRM(4, [10, 3, 7], seed=6)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    assert any(not torch.equal(w, other.state_dict()[n]) for n, w in first.state_dict().items())


def test_model_computes_the_interaction_of_the_paper() -> None:
    model = DLRM(4, [10, 3, 7], embedding_dim=8, bottom=[6], top=[5], seed=0)
    dense, categorical = torch.randn(16, 4), torch.stack([torch.randint(n, (16,)) for n in (10, 3, 7)], dim=1)
    logits = model(dense, categorical)
    assert logits.shape == (16,)
    x = model.bottom(dense)
    tables = model.tables.weight.split([10, 3, 7])
    vectors = [x] + [table[categorical[:, f]] for f, table in enumerate(tables)]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    expected = model.top(torch.cat([x, torch.stack(products, dim=1)], dim=1)).squeeze(1)
    torch.testing.assert_close(logits, expected)


def test_embedding_gradients_are_dense_and_reach_the_looked_up_rows_only() -> None:
    tables = EmbeddingTables([3, 4], 2)
    tables(torch.tensor([[0, 3], [2, 3]])).sum().backward()
    grad = tables.weight.grad
    assert grad is not None
    assert not grad.is_sparse
    assert grad[:, 0].tolist() == [1, 0, 1, 0, 0, 0, 2]


def test_tables_can_be_replaced() -> None:
    class Zeros(torch.nn.Module):
        def forward(self, categorical: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*categorical.shape, 16)

    model = DLRM(4, [10, 3], tables=Zeros())
    assert model(torch.randn(5, 4), torch.zeros(5, 2, dtype=torch.int32)).shape == (5,)
    assert sum(p.numel() for p in model.tables.parameters()) == 0
