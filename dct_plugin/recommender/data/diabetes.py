"""Diabetes 130-US hospitals 1999-2008 (Strack et al. 2014, CC BY 4.0); the file ships with the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .dataset import MIN_COUNT, TEST_FRACTION, Array, ClickDataset, DataFormatError, index_columns

DIABETES_FILE = Path(__file__).parent / "diabetes130.npz"


def load_diabetes(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    max_rows: int | None = None,
    min_count: int = MIN_COUNT,
) -> ClickDataset:
    """Diabetes 130-US hospitals 1999-2008: 101,766 hospital stays, 37 categorical and 8 numeric fields.

    The label is 1 when the patient was readmitted (``readmitted != "NO"``, 46 %). Whole patients are drawn
    into the test part by ``seed``, so that no patient is in both parts; file order is kept within the parts.
    Numeric fields are counts and become ``log1p(count)``. Values that occur fewer than *min_count*
    times in the training part become id 0. ``max_rows`` keeps the first rows only.

    Raises :class:`DataFormatError` when the file is not one written by ``prepare_diabetes``.
    """
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

    num_patients = int(patient.max()) + 1
    in_test = np.random.default_rng(seed).random(num_patients)[patient] < TEST_FRACTION
    order = np.argsort(in_test, kind="stable")
    label, dense, raw = label[order], dense[order], raw[order]
    num_train = int(len(label) - in_test.sum())
    categorical, cardinalities = index_columns(raw, num_train, min_count)
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
    for key in ("categorical_names", "numeric_names"):
        if key in columns and not columns[key].size:
            raise DataFormatError(f"{path}: expected at least one name in {key!r}, got none")
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
