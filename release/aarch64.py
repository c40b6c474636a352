"""Run kernel tests of the aarch64 wheel on an x86-64 machine, under Debian's qemu-user.

    python release/aarch64.py                                  # golden bytes and the compiled kernels
    python release/aarch64.py tests/codecs/test_codecs.py      # other tests

Debian's arm64 Python and libraries are unpacked below .venv/aarch64, and torch for aarch64 with what the
tests need is taken from PyPI; nothing of it is installed. Needs root once, to ask apt for packages of another
architecture; an emulated test takes some thirty times as long.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from wheels import ROOT, build, run

FOLDER = ROOT / ".venv" / "aarch64"
TESTS = [
    "tests/codecs/test_golden_bytes.py",
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_packed_bits.py",
]
#: It compiles a library of its own, with the compiler of the machine that emulates.
DESELECTED = "tests/kernels/test_kernels.py::test_without_intrinsics_and_openmp"
DEBIAN = [
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "libgomp1",
    "zlib1g",
    "libssl3",
    "libffi8",
    "libbz2-1.0",
    "liblzma5",
    "libexpat1",
    "libsqlite3-0",
    "libuuid1",
    "libncursesw6",
    "libtinfo6",
    "libreadline8",
    "libcrypt1",
    "libnsl2",
    "libtirpc3",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
]
#: The oldest torch that is supported: its wheel for aarch64 needs no CUDA.
PYPI = [
    "torch==2.6.0",
    "numpy",
    "pydantic==2.11.0",
    "pydantic-core==2.33.0",
    "annotated-types",
    "typing-extensions",
    "typing-inspection",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "typer",
    "click",
    "shellingham",
    "packaging",
    "psutil",
    "pytest",
    "iniconfig",
    "pluggy",
    "pytest-timeout",
    "hypothesis",
    "sortedcontainers",
    "attrs",
    "filelock",
    "networkx==3.3",
    "sympy==1.13.1",
    "mpmath",
    "jinja2",
    "markupsafe",
    "fsspec",
]
TAGS = ["manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28"]


def debian(root: Path) -> None:
    """Unpack Debian's arm64 Python and libraries below ``root``."""
    packages = FOLDER / "debian"
    packages.mkdir(parents=True)
    run("apt-get", "install", "-y", "-q", "qemu-user-static")
    run("dpkg", "--add-architecture", "arm64")
    try:
        run("apt-get", "update", "-q")
        names = [f"{name}:arm64" for name in DEBIAN]
        subprocess.run(["apt-get", "download", "-q", *names], cwd=packages, check=True)
    finally:
        run("dpkg", "--remove-architecture", "arm64")
    for package in packages.glob("*.deb"):
        run("dpkg", "-x", str(package), str(root))


def pypi(site: Path) -> None:
    """Unpack the wheels of :data:`PYPI` for aarch64 into ``site``."""
    wheels = FOLDER / "wheels"
    platforms = [part for tag in TAGS for part in ("--platform", f"{tag}_aarch64")]
    target = [*platforms, "--python-version", "3.11", "--implementation", "cp"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    run(*command, "--dest", str(wheels), *target, *PYPI)
    for wheel in wheels.glob("*.whl"):
        unpack(wheel, site)


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def main() -> None:
    root, site, plugin = FOLDER / "root", FOLDER / "site", FOLDER / "plugin"
    if not site.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        debian(root)
        pypi(site)
    for folder in (plugin, FOLDER / "dist"):
        shutil.rmtree(folder, ignore_errors=True)
    (FOLDER / "dist").mkdir()
    unpack(build("linux-aarch64", FOLDER / "dist"), plugin)
    # Beside the tests, but not beside the sources: those would be imported instead of the wheel.
    for name in ("tests", "configs", "docs"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        shutil.copytree(ROOT / name, FOLDER / name)
    (FOLDER / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\npythonpath = tests\ntimeout = 3600\n")
    environment = {
        **os.environ,
        "PYTHONHOME": str(root / "usr"),
        "PYTHONPATH": os.pathsep.join([str(plugin), str(site)]),
        "OMP_NUM_THREADS": "1",
    }
    emulated = ["qemu-aarch64-static", "-L", str(root), str(root / "usr" / "bin" / "python3.11")]
    tests = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--deselect={DESELECTED}",
        *(sys.argv[1:] or TESTS),
    ]
    raise SystemExit(subprocess.run([*emulated, *tests], cwd=FOLDER, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
