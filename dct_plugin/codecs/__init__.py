"""Wire formats: header and payload, index encodings, value types, messages."""

from __future__ import annotations

from .index import IndexEncoding, decode_indices, encode_indices
from .message import MessageWriter, read_messages
from .payload import HEADER_NBYTES, OVERFLOW_MAGNITUDE, Header, Payload, parse_payload, payload_bound
from .stats import Stats, read_stats
from .values import ValueDtype, decode_values, encode_values, value_nbytes

__all__ = [
    "HEADER_NBYTES",
    "OVERFLOW_MAGNITUDE",
    "Header",
    "IndexEncoding",
    "MessageWriter",
    "Payload",
    "Stats",
    "ValueDtype",
    "decode_indices",
    "decode_values",
    "encode_indices",
    "encode_values",
    "parse_payload",
    "payload_bound",
    "read_messages",
    "read_stats",
    "value_nbytes",
]
