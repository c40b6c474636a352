"""The compiled CPU kernels: finding them, or building them.

Order: the library beside this file (put there at installation) if it belongs to this source; the user's
cache; a build into that cache. Standard library only: the installation runs this file on its own.

Any number of processes may do this at once, also on a shared home directory: each builds for itself, in about
two seconds, into a temporary file that replaces the final one atomically. A library ends with a digest of
itself: loading a truncated one would end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ABI_VERSION = 3
SOURCE = Path(__file__).with_name("csrc") / "dct_kernels.c"
PREBUILT = Path(__file__).with_name("_dct_kernels.so")
# No -march: the library runs on every machine that shares the cache; it picks its instructions at run time.
# No contraction to fused multiply-add: results must not depend on the machine.
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
COMPILE_TIMEOUT = 300.0  # seconds; a build takes about two
#: Before the digest at the end of a library.
_SEAL = b"\ndct_plugin sha256 "


class BuildError(OSError):
    """The library can be neither loaded nor built; the message says why."""


class Target(NamedTuple):
    """The machines that a library is for, as Python names them there."""

    system: str = sys.platform
    machine: str = platform.machine()


def build_id(target: Target = Target()) -> str:  # noqa: B008 - immutable
    """Return the digest of source, flags and target: libraries of one id are interchangeable."""
    digest = hashlib.sha256()
    for part in sorted(SOURCE.parent.glob("*.c")):  # the others are included by SOURCE
        digest.update(part.read_bytes())
    digest.update(" ".join([*FLAGS, *target, str(ABI_VERSION)]).encode())
    return digest.hexdigest()[:20]


def compilers() -> list[list[str]]:
    """Return the commands of the C compilers to try: ``$CC`` alone if it is set, else cc, gcc, clang."""
    if chosen := os.environ.get("CC", "").strip():
        try:
            return [shlex.split(chosen)]
        except ValueError as error:
            raise BuildError(f"CC={chosen}: not a command: {error}") from None
    return [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]


def compile_library(path: Path, target: Target = Target()) -> None:  # noqa: B008 - immutable
    """Compile the kernels to ``path``, atomically; for another target ``$CC`` has to be a cross-compiler.

    Raises:
        BuildError: no compiler, or none that succeeds (with the first one's message).
    """
    if os.name != "posix":
        raise BuildError(f"no compiled kernels for {sys.platform}")
    candidates = compilers()
    if not candidates:
        raise BuildError("no C compiler found (looked for cc, gcc, clang)")
    problems = []
    # In a folder of its own, under the final name: a Mach-O library contains the name of its file.
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent) as folder:
        made = os.path.join(folder, path.name)
        for compiler in candidates:
            command = [*compiler, *FLAGS, f'-DDCT_BUILD_ID="{build_id(target)}"', str(SOURCE), "-o", made]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"{compiler[0]}: {error}")
                continue
            if done.returncode == 0:
                _seal(made, target)
                os.chmod(made, 0o755)
                os.replace(made, path)
                return
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            problems.append(
                f"{compiler[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}"
            )
    raise BuildError(problems[0])


def _seal(path: str, target: Target) -> None:
    """Append the digest, and have it all on the disk before the file gets its name."""
    with open(path, "r+b") as file:
        if _sealed(target):
            digest = hashlib.sha256(file.read()).hexdigest()
            file.write(_SEAL + digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _sealed(target: Target) -> bool:
    """Return whether libraries end with a digest: not where code is signed, which covers the whole file."""
    return target.system != "darwin"


def _check(path: Path) -> None:
    """Raise :class:`BuildError` unless a library is a whole, regular file: reading a FIFO would never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise BuildError(f"{path} is not a regular file")
    if _sealed(Target()):
        content, _, digest = path.read_bytes().rpartition(_SEAL)
        if hashlib.sha256(content).hexdigest().encode() != digest:
            raise BuildError(f"{path} is damaged")


def _foreign(path: Path) -> bool:
    """Return whether another user could have written a file or folder."""
    info = path.stat()
    owner = hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0)
    return owner or bool(info.st_mode & (stat.S_IWOTH | stat.S_IWGRP))


def cache_dirs() -> list[Path]:
    """Return the folders of built libraries: the user's cache, else a private folder among the temporary
    ones.
    """
    home_cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else 0
    return [Path(home_cache) / "dct_plugin", Path(tempfile.gettempdir()) / f"dct_plugin-{user}"]


def _private(folder: Path) -> None:
    """Create ``folder`` if need be; refuse one that another user could have put a library into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _foreign(folder):
        raise BuildError(f"{folder} belongs to or can be written by another user (chmod go-w)")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(f"{folder} is not writable")


def _sweep(folder: Path) -> None:
    """Remove temporary files of builds that were killed."""
    for path in folder.glob("dct_kernels-*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 2 * COMPILE_TIMEOUT:
                shutil.rmtree(path)


def _open(path: Path) -> ctypes.CDLL:
    """Load a library and check that it belongs to this source."""
    try:
        _check(path)
        library = ctypes.CDLL(str(path))
        library.dct_abi_version.restype = ctypes.c_int32
        library.dct_build_id.restype = ctypes.c_char_p
        found = library.dct_abi_version(), library.dct_build_id().decode()
    except BuildError:
        raise
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    if found != (ABI_VERSION, build_id()):
        raise BuildError(f"{path} was built from another version of the source")
    return library


def load() -> tuple[ctypes.CDLL, Path]:
    """Return the kernels and the file they come from, built first if need be.

    Raises:
        BuildError: They can be neither loaded nor built; the message says why.
    """
    if PREBUILT.exists():
        with contextlib.suppress(BuildError):
            return _open(PREBUILT), PREBUILT
    problem: OSError | None = None
    for folder in cache_dirs():
        path = folder / f"dct_kernels-{build_id()}.so"
        try:
            _private(folder)
            if path.exists() and _foreign(path):
                path.unlink()
            if not path.exists():
                _sweep(folder)
                compile_library(path)
            try:
                return _open(path), path
            except BuildError:  # damaged, or its C library is not this machine's: once more
                compile_library(path)
                return _open(path), path
        except OSError as error:
            problem = problem or error
    raise BuildError(str(problem))
