"""Finds or builds the compiled CPU kernels.

Order: the library beside this file (put there at installation) if it belongs to this source; the user's
cache; a build into that cache. Standard library only: the installation runs this file on its own.

Any number of processes may do this at once, also on a shared home directory: a build goes to a temporary file
that replaces the final one atomically. A lock keeps the others waiting instead of building too, but nothing
depends on it.
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
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: no build either
    fcntl = None  # type: ignore[assignment]

ABI_VERSION = 2
SOURCE = Path(__file__).with_name("csrc") / "dct_kernels.c"
PREBUILT = Path(__file__).with_name("_dct_kernels.so")
# No -march: the library runs on every machine that shares the cache; it picks its instructions at run time.
# No contraction to fused multiply-add: results must not depend on the machine.
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
COMPILE_TIMEOUT = 300.0  # seconds; a build takes about two


class BuildError(OSError):
    """The library can be neither loaded nor built; the message says why."""


def build_id() -> str:
    """Digest of source, flags and platform: libraries of one id are interchangeable."""
    digest = hashlib.sha256()
    for part in sorted(SOURCE.parent.glob("*.c")):  # the others are included by SOURCE
        digest.update(part.read_bytes())
    digest.update(" ".join([*FLAGS, sys.platform, platform.machine(), str(ABI_VERSION)]).encode())
    return digest.hexdigest()[:20]


def compilers() -> list[list[str]]:
    """Command prefixes of the C compilers to try: ``$CC`` alone if it is set, else cc, gcc, clang."""
    if os.environ.get("CC"):
        return [shlex.split(os.environ["CC"])]
    return [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]


def compile_library(target: Path) -> None:
    """Compile the kernels to ``target``, atomically.

    Raises:
        BuildError: no compiler, or none that succeeds (with the first one's message).
    """
    if os.name != "posix":
        raise BuildError(f"no compiled kernels for {sys.platform}")
    candidates = compilers()
    if not candidates:
        raise BuildError("no C compiler found (looked for cc, gcc, clang)")
    handle, temporary = tempfile.mkstemp(prefix=target.stem, suffix=".tmp", dir=target.parent)
    os.close(handle)
    problems = []
    try:
        for compiler in candidates:
            command = [*compiler, *FLAGS, f'-DDCT_BUILD_ID="{build_id()}"', str(SOURCE), "-o", temporary]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"{compiler[0]}: {error}")
                continue
            if done.returncode == 0:
                os.chmod(temporary, 0o755)
                os.replace(temporary, target)
                return
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            problems.append(
                f"{compiler[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}"
            )
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    raise BuildError(problems[0])


def cache_dirs() -> list[Path]:
    """Where built libraries are kept: the user's cache, else a private folder among the temporary ones."""
    home_cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else 0
    return [Path(home_cache) / "dct_plugin", Path(tempfile.gettempdir()) / f"dct_plugin-{user}"]


def _private(folder: Path) -> None:
    """Create ``folder`` if need be; refuse one that another user could have put a library into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    foreign = hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0)
    if foreign or info.st_mode & stat.S_IWOTH:
        raise BuildError(f"{folder} belongs to or can be written by another user")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(f"{folder} is not writable")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, if the file system has them."""
    with open(path, "w") as handle:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _open(path: Path) -> ctypes.CDLL:
    """Load a library and check that it belongs to this source."""
    try:
        library = ctypes.CDLL(str(path))
        library.dct_abi_version.restype = ctypes.c_int32
        library.dct_build_id.restype = ctypes.c_char_p
        found = library.dct_abi_version(), library.dct_build_id().decode()
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    if found != (ABI_VERSION, build_id()):
        raise BuildError(f"{path} was built from another version of the source")
    return library


def load() -> tuple[ctypes.CDLL, Path]:
    """The kernels and the file they come from, built first if need be.

    Raises:
        BuildError: with the reason.
    """
    if PREBUILT.exists():
        with contextlib.suppress(BuildError):
            return _open(PREBUILT), PREBUILT
    problem: OSError | None = None
    for folder in cache_dirs():
        path = folder / f"dct_kernels-{build_id()}.so"
        try:
            _private(folder)
            if not path.exists():
                with _locked(folder / f"{path.stem}.lock"):
                    if not path.exists():
                        compile_library(path)
            try:
                return _open(path), path
            except BuildError:  # damaged, or its C library is not this machine's: once more
                compile_library(path)
                return _open(path), path
        except OSError as error:
            problem = problem or error
    raise BuildError(str(problem))
