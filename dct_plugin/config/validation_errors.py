"""Validation, and its faults in words: the path, the value, and what is allowed there."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from .options import allowed, show

_DEEPEST = 32  # no section has more than four levels

_Model = TypeVar("_Model", bound=BaseModel)


def validated(
    cls: type[_Model], section: Any, source: str, *, rank: int | None = None, where: str | None = None
) -> _Model:
    """``section`` as a model.

    Args:
        source: Path of the section, the first part of every key named in an error.
        rank, where: Rank and file, named in the error when given.

    Raises:
        ConfigError: All faults of the section, one per line.
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
        faults = list(dict.fromkeys(_fault(cls, section, item, source) for item in items))
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    raise ConfigError(
        f"invalid {source.split('.')[0]} configuration{origin} ({count}):\n  " + "\n  ".join(faults)
    )


def _plain(value: Any, depth: int = 0) -> Any:
    """Mappings of other kinds (ordered, read-only) as the dicts that strict validation wants.

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


def _fault(cls: type[BaseModel], section: Mapping[str, Any], item: Any, source: str) -> str:
    """One pydantic error as one line: the path, the value, and what is allowed there."""
    model, path, field, value = cls, source, None, section
    unknown = None
    for key in item["loc"]:
        if key not in model.model_fields:
            unknown = str(key)
            break
        path, field, value = f"{path}.{key}", model.model_fields[key], value[key]
        section_model = _section_model(field)
        if section_model is None:
            break
        model = section_model
    if item["type"] == "extra_forbidden" and unknown is not None:
        # Control characters and outer spaces are made visible; the rest is shown as it was written.
        plain = unknown.isprintable() and unknown == unknown.strip() != ""
        shown = unknown if plain else json.dumps(unknown)
        return f"{path}.{shown} = {show(item['input'])}: unknown key; {_closest(unknown, model, path)}"
    if item["type"] == "dct_conflict":
        return f"{path}: {item['msg']}"
    if item["type"] == "dct_limit":
        return f"{path} = {show(value)}: must be {item['msg']}"
    # An error inside a pair is reported for the pair as a whole.
    return f"{path} = {show(value)}: must be {allowed(field) if field else 'a JSON object'}"


def _section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section itself."""
    kind = field.annotation
    # Python 3.10 takes tuple[float, float] for a type, but not for the argument of issubclass.
    if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel):
        return kind
    return None


def _closest(key: str, model: type[BaseModel], path: str) -> str:
    valid = list(model.model_fields)
    if match := difflib.get_close_matches(key.lower(), valid, n=1):
        return f"did you mean {path}.{match[0]}?"
    for name, field in model.model_fields.items():  # a key of a sub-section, written one level too high
        sub = _section_model(field)
        keys = list(sub.model_fields) if sub else []
        if match := difflib.get_close_matches(key.lower(), keys, n=1, cutoff=0.8):
            return f"did you mean {path}.{name}.{match[0]}?"
    return "allowed are " + ", ".join(valid)
