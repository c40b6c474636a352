"""Do locally what can be done locally before a release.

    python release/check.py

Builds every product twice and compares the bytes, builds a wheel offline from the source distribution, runs
the tests of an installed wheel, times the way from ``pip install`` to a first job, writes the bill of
materials (CycloneDX), and holds the version against the changelog and the citation file. What is left is the
upload, which the workflow does on a tag.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from wheels import DIST, PRODUCTS, ROOT, build, check, run


def version() -> str:
    """Return the version of the package."""
    text = (ROOT / "dct_plugin" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "(.+)"', text)
    assert found is not None
    return found[1]


def versions_agree() -> None:
    """Check that the changelog and the citation file have this version.

    Raises:
        SystemExit: One has not.
    """
    number = version()
    if f"version: {number}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        raise SystemExit(f"CITATION.cff: version: must be {number}, as in dct_plugin/_version.py")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    tag = os.environ.get("GITHUB_REF_NAME", "")
    if tag.startswith("v") and (tag != f"v{number}" or f"## [{number}]" not in changelog):
        raise SystemExit(f"tag {tag}: the version is {number}, and CHANGELOG.md needs a heading for it")


def reproducible(folder: Path) -> list[Path]:
    """Build everything twice and return the files.

    Raises:
        SystemExit: Two builds differ.
    """
    second = folder / "second"
    second.mkdir()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    files = [build(product, DIST) for product in PRODUCTS]
    for product, file in zip(PRODUCTS, files, strict=True):
        if build(product, second).read_bytes() != file.read_bytes():
            raise SystemExit(f"{file.name}: two builds differ")
    return files


def builds_offline(sdist: Path, folder: Path) -> None:
    """Build a wheel from the source distribution without an index and without this checkout."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("dct_plugin-*")
    code = f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, stdout=subprocess.DEVNULL)
    data = "dct_plugin/recommender/data/diabetes130.npz"
    for name in (
        "tests/conftest.py",
        "configs/README.md",
        "docs/architecture.md",
        "Makefile",
        "LICENSE",
        data,
    ):
        if not (source / name).exists():
            raise SystemExit(f"{sdist.name} lacks {name}")


def main() -> None:
    versions_agree()
    print("the version is the same everywhere")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = reproducible(folder)
        print("two builds give the same bytes")
        check(files)
        print("twine, check-wheel-contents and auditwheel are content")
        builds_offline(next(file for file in files if file.name.endswith(".tar.gz")), folder)
        print("the source distribution is complete and builds offline")
    wheel = next(file for file in files if "manylinux" in file.name and "x86_64" in file.name)
    python = os.environ.get("TEST_PYTHON", sys.executable)
    tests = ["-m", "pytest", "-q", "tests/reliability/test_wheel.py"]
    for which in ([], ["--long"]):
        environment = {**os.environ, "DCT_WHEEL": str(wheel)}
        subprocess.run([python, *tests, *which], cwd=ROOT, check=True, env=environment)
    subprocess.run([sys.executable, "release/first_job.py", str(wheel)], cwd=ROOT, check=True)
    bill = DIST / f"dct_plugin-{version()}.cdx.json"
    run(
        *(sys.executable, "-m", "cyclonedx_py", "requirements", "locks/demo.lock"),
        *("--pyproject", "pyproject.toml", "--output-reproducible", "--output-file", str(bill)),
    )
    for file in [*files, bill]:
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}")


if __name__ == "__main__":
    main()
