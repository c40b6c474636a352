"""Read and replace regular files, and keep a copy of what is replaced."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .finder import LaunchError

#: What a backup's name ends with.
BACKUP = ".dct-orig"
#: Bytes of the largest file that is taken for a shell script.
LARGEST = 16 * 2**20

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def read(path: Path) -> str:
    """Return the text of a regular file. Bytes that are no UTF-8, and all line ends, survive :func:`write`.

    Raises:
        LaunchError: it cannot be read, is no regular file, or too large for a script.
    """
    require_regular(path, "read")
    try:
        # It may have become a FIFO since: opening must not wait for somebody to write into it.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > LARGEST:
        raise LaunchError(f"{path}: cannot be read: more than {LARGEST // 2**20} MiB, too large for a script")
    return content.decode("utf-8", "surrogateescape")


def write(path: Path, text: str, *, like: Path) -> None:
    """Replace a regular file, or the one a link leads to, in one step, with the permissions of another.

    Raises:
        LaunchError: it cannot be written, or something else than a regular file is there.
    """
    try:
        if path.exists():
            require_regular(path, "written")
        target = path.resolve()
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode("utf-8", "surrogateescape"))
            os.chmod(temporary, stat.S_IMODE(like.stat().st_mode))
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise LaunchError(f"{path}: cannot be written: {error.strerror or error}") from error


def require_regular(path: Path, what: str) -> None:
    """Refuse FIFOs, devices, sockets and folders without opening them.

    Raises:
        LaunchError: it is none, or does not exist; ``what`` says what cannot be done to it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise LaunchError(f"{path}: cannot be {what}: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise LaunchError(f"{path}: cannot be {what}: it is {kind}, not a regular file")


def same_file(first: Path, second: Path) -> bool:
    """Return whether two paths lead to one file, by links or another spelling."""
    try:
        return first.samefile(second)
    except OSError:
        return False


def backup_of(path: Path) -> Path:
    """Return where the original of a script is kept."""
    return path.with_name(path.name + BACKUP)


def keep(path: Path, content: str) -> Path:
    """Write the backup of a script, and say where; an older one of another content is kept, too.

    Raises:
        LaunchError: it cannot be read or written.
    """
    number = 0
    place = backup = backup_of(path)
    while place.exists() and read(place) != content:
        number += 1
        place = backup.with_name(f"{backup.name}.{number}")
    write(place, content, like=path)
    return place
