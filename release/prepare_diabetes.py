"""Write the compact columnar form of Diabetes 130-US hospitals that ships with the package.

    python release/prepare_diabetes.py diabetes130.zip diabetes130.npz

Source: Clore, J., Cios, K., DeShazo, J., Strack, B. (2014), UCI Machine Learning Repository, CC BY 4.0,
https://doi.org/10.24432/C5230J. Every row is kept. Left out are the encounter number, two medicines that
nobody was given (``examide``, ``citoglipton``), and the distinction between readmission before and after 30
days; patients are numbered in order of first appearance.
"""

from __future__ import annotations

import csv
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

from dct_plugin.recommender.data.dataset import DataFormatError

NUMERIC = (
    "time_in_hospital",
    "num_lab_procedures",
    "num_procedures",
    "num_medications",
    "number_outpatient",
    "number_emergency",
    "number_inpatient",
    "number_diagnoses",
)
NOT_FEATURES = ("encounter_id", "patient_nbr", "readmitted")
CONSTANT = ("examide", "citoglipton")


def prepare(source: Path, target: Path) -> dict[str, np.ndarray]:
    """Read ``diabetic_data.csv`` out of the archive ``source``, write ``target`` (.npz), return the columns.

    Columns: ``label`` uint8 [rows], ``patient`` uint32 [rows], ``numeric.NAME`` uint8 [rows], ``code.NAME``
    uint8 or uint16 [rows] with ``vocabulary.NAME`` (text of each code, sorted), ``numeric_names``,
    ``categorical_names``.
    """
    with zipfile.ZipFile(source) as archive:
        name = "diabetic_data.csv"
        member = next((n for n in archive.namelist() if n.endswith("/" + name)), name)
        with archive.open(member) as file:
            header, *rows = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""))
    absent = [n for n in (*NOT_FEATURES, *NUMERIC, *CONSTANT) if n not in header]
    if absent:
        raise DataFormatError(f"{source}: {member}: line 1: expected a column {absent[0]!r}")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            where = f"{source}: {member}: line {number}"
            raise DataFormatError(f"{where}: expected {len(header)} fields, got {len(row)}")
    table = dict(zip(header, zip(*rows, strict=True), strict=True))

    categorical = [n for n in header if n not in (*NOT_FEATURES, *NUMERIC, *CONSTANT)]
    patients: dict[str, int] = {}
    columns = {
        "categorical_names": np.array(categorical),
        "numeric_names": np.array(NUMERIC),
        "label": np.array([value != "NO" for value in table["readmitted"]], dtype=np.uint8),
        "patient": np.array([patients.setdefault(p, len(patients)) for p in table["patient_nbr"]], np.uint32),
    }
    for name in NUMERIC:
        columns[f"numeric.{name}"] = np.array([int(value) for value in table[name]], dtype=np.uint8)
    for name in categorical:
        vocabulary, codes = np.unique(np.array(table[name]), return_inverse=True)
        columns[f"vocabulary.{name}"] = vocabulary
        columns[f"code.{name}"] = codes.astype(np.uint8 if len(vocabulary) <= 256 else np.uint16)
    with open(target, "wb") as out:
        np.savez_compressed(out, **columns)  # type: ignore[arg-type]
    return columns


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: prepare_diabetes.py diabetes130.zip diabetes130.npz", file=sys.stderr)
        return 2
    columns = prepare(Path(arguments[0]), Path(arguments[1]))
    print(f"{arguments[1]}: {len(columns['label'])} rows, {Path(arguments[1]).stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
