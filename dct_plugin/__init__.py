"""Dynamic Communication Thresholding: send only the entries that reach a threshold.

Public names are imported on first use, so that importing this package costs no more than reading this file:
``torch`` imports it in every process through the entry point that activates the DeepSpeed integration.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._version import __version__
    from .codecs.payload import Payload
    from .compression.stream import Compressor
    from .config import DCTConfig
    from .errors import ConfigError, DCTError, DesyncError, PayloadError, VersionError
    from .integrations.attach import attach, detach
    from .integrations.ddp import DCTState, dct_hook

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
    "attach",
    "dct_hook",
    "detach",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home: ModuleType
    if name == "__version__":
        from . import _version as home
    elif name in ("attach", "detach"):
        from .integrations import attach as home
    elif name in ("DCTState", "dct_hook"):
        from .integrations import ddp as home
    elif name == "DCTConfig":
        from . import config as home
    elif name == "Compressor":
        from .compression import stream as home
    elif name == "Payload":
        from .codecs import payload as home
    else:
        from . import errors as home
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
