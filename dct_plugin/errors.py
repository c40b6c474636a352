"""Every error the plugin raises on purpose; all derive from :class:`DCTError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class DCTError(RuntimeError):
    """Base of all errors of the plugin."""


class PayloadError(DCTError, ValueError):
    """A payload is truncated, corrupted, foreign, or does not fit the tensor it is decoded into.

    Attributes:
        message: Where several messages are decoded at once, the number of the one it is about.
    """

    message: int = 0


class ConfigError(DCTError, ValueError):
    """The ``dct`` section is wrong: names the key, the value and what is allowed.

    Attributes:
        faults: The lines of a section with several faults.
    """

    faults: tuple[str, ...] = ()


class VersionError(DCTError):
    """A host framework has a version, or a patched function a signature, that is not supported."""


class DesyncError(DCTError):
    """Ranks disagree (configuration, version, order or shape of tensors), or a peer reported a failure."""


@contextmanager
def blamed(culprit: str) -> Iterator[None]:
    """Put ``culprit``, and a colon, before the text of a :class:`PayloadError` in the block."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"{culprit}: {error}") from error
