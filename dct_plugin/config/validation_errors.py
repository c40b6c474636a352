"""Validation, and its errors in words: the path, the value, and what is allowed there."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .options import allowed, models, show
from .renamed_keys import replacement

_DEEPEST = 32  # no section has more than five levels

_Model = TypeVar("_Model", bound=BaseModel)


def validated(
    cls: type[_Model], section: Any, source: str, *, rank: int | None = None, where: str | None = None
) -> _Model:
    """Return ``section`` as a model.

    Args:
        source: Path of the section, the first part of every key named in an error.
        rank, where: Rank and file, named in the error when given.

    Raises:
        ConfigError: All errors of the section, one per line.
    """
    origin = (f" in {where}" if where else "") + (f" on rank {rank}" if rank is not None else "")
    try:
        section = _plain(section)
    except RecursionError:
        raise ConfigError(
            f"invalid {source.split('.')[0]} configuration{origin}: nested too deeply"
        ) from None
    try:
        return cls.model_validate(section)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        lines = list(dict.fromkeys(_line(cls, section, item, source) for item in items))
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    raise ConfigError(
        f"invalid {source.split('.')[0]} configuration{origin} ({count}):\n  " + "\n  ".join(lines)
    )


def _plain(value: Any, depth: int = 0) -> Any:
    """Return mappings of other kinds (ordered, read-only) as the dicts that strict validation wants.

    Raises:
        RecursionError: They are nested more deeply than any section.
    """
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    return value


def _line(cls: type[BaseModel], section: Any, item: Any, source: str) -> str:
    """Return one pydantic error as one line: the path, the value, and what is allowed there."""
    model, path, field, value = cls, source, None, section
    unknown = None
    keys = list(item["loc"])
    while keys:
        key = keys.pop(0)
        if key not in model.model_fields:
            unknown = str(key)
            break
        path, field = f"{path}.{key}", model.model_fields[key]
        value = value.get(key) if isinstance(value, Mapping) else None
        choices = models(field)
        if not choices or not (isinstance(value, Mapping) or item["type"] == "missing"):
            break
        model = choices[0]
        if len(choices) > 1 and keys:  # pydantic names the chosen class of a union next
            label = keys.pop(0)
            model = next(choice for choice in choices if choice.label() == label)
    if item["type"] == "extra_forbidden" and unknown is not None:
        return _unknown_key(cls, model, path, unknown, item["input"])
    if item["type"] == "dct_conflict":
        return f"{path}: {item['msg']}"
    if item["type"] == "dct_limit":
        return f"{path} = {show(value)}: must be {item['msg']}"
    wanted = f"must be {allowed(field) if field else 'a JSON object'}"
    if item["type"] == "missing" and isinstance(item["loc"][-1], str):  # a key, not an entry of a list
        return f"{path}: missing; {wanted}"
    # An error inside a pair is reported for the pair as a whole.
    return f"{path} = {show(value)}: {replacement(path, value) or wanted}"


def _unknown_key(cls: type[BaseModel], model: type[BaseModel], path: str, key: str, value: Any) -> str:
    # Control characters and outer spaces are made visible; the rest is shown as it was written.
    plain = key.isprintable() and key == key.strip() != ""
    shown = key if plain else json.dumps(key)
    hint = replacement(f"{path}.{key}", value)
    return f"{path}.{shown} = {show(value)}: " + (hint or f"unknown key; {_closest(key, model, path)}")


def _closest(key: str, model: type[BaseModel], path: str) -> str:
    valid = list(model.model_fields)
    if match := difflib.get_close_matches(key.lower(), valid, n=1):
        return f"did you mean {path}.{match[0]}?"
    for name, field in model.model_fields.items():  # a key of a sub-section, written one level too high
        keys = [key for sub in models(field) for key in sub.model_fields]
        if match := difflib.get_close_matches(key.lower(), keys, n=1, cutoff=0.8):
            return f"did you mean {path}.{name}.{match[0]}?"
    return "allowed are " + ", ".join(valid)
