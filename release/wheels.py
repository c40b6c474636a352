"""Build what a release uploads: wheels for every platform and a source distribution, into dist/.

    python release/wheels.py                    # all of them, checked
    python release/wheels.py --only any sdist

One machine builds all: zig (``pip install ziglang``) compiles the kernels for other systems. Two builds of
one commit give the same bytes: times are those of the commit, and libraries hold no paths.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
#: The oldest glibc that a supported torch runs on (2.17, torch 2.6).
GLIBC = "2.17"


class Platform(NamedTuple):
    """A platform of a wheel: Python's and zig's names for it, and the tag of its wheels."""

    system: str
    machine: str
    zig: str
    tag: str


PLATFORMS = {
    "linux-x86_64": Platform(
        "linux", "x86_64", f"x86_64-linux-gnu.{GLIBC}", "manylinux_2_17_x86_64.manylinux2014_x86_64"
    ),
    "linux-aarch64": Platform(
        "linux", "aarch64", f"aarch64-linux-gnu.{GLIBC}", "manylinux_2_17_aarch64.manylinux2014_aarch64"
    ),
    "macos-arm64": Platform("darwin", "arm64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
}
PRODUCTS = [*PLATFORMS, "any", "sdist"]


def run(*command: str, **environment: str) -> str:
    """Run a command in the root of the project and return what it printed.

    Raises:
        SystemExit: It failed; its output is printed.
    """
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"failed: {' '.join(command)}")
    return done.stdout


def commit_time() -> str:
    """Return the time of the commit in seconds, or what ``SOURCE_DATE_EPOCH`` says."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct").strip()


def build(product: str, folder: Path) -> Path:
    """Build one product into ``folder`` and return its file."""
    before = set(folder.glob("*"))
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    environment = {"SOURCE_DATE_EPOCH": commit_time(), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    if product == "sdist":
        run(*command, "--sdist", **environment)
    elif product == "any":
        run(*command, "--wheel", DCT_WHEEL_TARGET="none", **environment)
    else:
        platform = PLATFORMS[product]
        target = f"{platform.system}/{platform.machine}/{platform.tag}"
        compiler = f"{sys.executable} -m ziglang cc -target {platform.zig} -s"
        if platform.system == "darwin":  # otherwise the temporary name of the output
            compiler += " -install_name @rpath/_dct_kernels.so"
        run(*command, "--wheel", DCT_WHEEL_TARGET=target, CC=compiler, **environment)
    (made,) = set(folder.glob("*")) - before
    if product == "sdist":
        normalise(made, int(environment["SOURCE_DATE_EPOCH"]))
    return made


def normalise(archive: Path, time: int) -> None:
    """Write a source distribution anew with one order, one owner and one time."""
    with tarfile.open(archive) as file:
        members = sorted(file.getmembers(), key=lambda member: member.name)
        contents = {m.name: handle.read() for m in members if (handle := file.extractfile(m)) is not None}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as file:
        for member in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            content = contents.get(member.name)
            file.addfile(member, None if content is None else io.BytesIO(content))
    archive.write_bytes(gzip.compress(packed.getvalue(), mtime=time))


def check(files: list[Path]) -> None:
    """Hold the files against what PyPI and installers ask for.

    Raises:
        SystemExit: A file is not as it should be.
    """
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    wheels = [str(file) for file in files if file.suffix == ".whl"]
    if wheels:
        # W009: the package and nothing else at the top; kernels lie beside Python files on purpose.
        run(sys.executable, "-m", "check_wheel_contents", *wheels)
    for wheel in wheels:
        if "manylinux" in wheel:
            shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
            if "manylinux_2_17" not in shown.replace('"', " "):
                raise SystemExit(f"{wheel} needs more than glibc {GLIBC}:\n{shown}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PRODUCTS, default=PRODUCTS)
    parser.add_argument("--out", type=Path, default=DIST)
    arguments = parser.parse_args()
    folder = arguments.out.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = [build(product, folder) for product in arguments.only]
    check(files)
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {digest[:16]}  {file.name}")


if __name__ == "__main__":
    main()
