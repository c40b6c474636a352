"""Dynamic Communication Thresholding: send only what passes a threshold.

Public names are resolved on first use, so that importing this package costs no more than reading this file:
``torch`` imports it in every process through the entry point that activates the DeepSpeed integration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .codecs.payload import Payload
    from .config import DCTConfig
    from .errors import ConfigError, DCTError, DesyncError, PayloadError, VersionError
    from .stream import Compressor

_PUBLIC = {
    "Compressor": "stream",
    "ConfigError": "errors",
    "DCTConfig": "config",
    "DCTError": "errors",
    "DCTState": "integrations.ddp",
    "DesyncError": "errors",
    "Payload": "codecs.payload",
    "PayloadError": "errors",
    "VersionError": "errors",
    "dct_hook": "integrations.ddp",
}

__all__ = [
    "Compressor",
    "ConfigError",
    "DCTConfig",
    "DCTError",
    "DCTState",
    "DesyncError",
    "Payload",
    "PayloadError",
    "VersionError",
    "__version__",
    "dct_hook",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
