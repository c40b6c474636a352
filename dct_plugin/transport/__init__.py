"""Transport of payloads between ranks."""

from __future__ import annotations

from .exchange import Exchange

__all__ = ["Exchange"]
