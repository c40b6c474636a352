"""The options of a section: where each stands, what it is set to, and what may be written there."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class OptionDoc(NamedTuple):
    """One option of the section: where it stands, what it is set to, and what may be written there."""

    path: str
    value: Any
    default: Any
    allowed: str
    description: str


def options(section: BaseModel, prefix: str = "dct") -> Iterator[OptionDoc]:
    """Every leaf option of a section in order; ``prefix`` is the path at which the section stands."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        path = f"{prefix}.{name}"
        if isinstance(value, BaseModel):
            yield from options(value, path)
        else:
            default = field.get_default(call_default_factory=True)
            yield OptionDoc(path, value, default, allowed(field), field.description or "")


def allowed(field: FieldInfo) -> str:
    """What may be written for a field, in words: type, range or choices."""
    if isinstance(field.json_schema_extra, dict) and "allowed" in field.json_schema_extra:
        return str(field.json_schema_extra["allowed"])
    kind = field.annotation
    optional = ""
    if get_origin(kind) in (Union, types.UnionType):
        optional = " or null" if type(None) in get_args(kind) else ""
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        choices = [show(choice) for choice in get_args(kind)]
        return "one of " + ", ".join(choices) + optional
    if kind is bool:
        return "true or false" + optional
    if kind is int or kind is float:
        return ("an integer" if kind is int else "a number") + _range(field) + optional
    if kind is str:
        return "a non-empty string" + optional
    return "a JSON object" + optional


def _range(field: FieldInfo) -> str:
    bounds = {
        key: getattr(item, key)
        for item in field.metadata
        for key in ("ge", "gt", "le", "lt")
        if getattr(item, key, None) is not None
    }
    low = bounds.get("ge", bounds.get("gt"))
    high = bounds.get("le", bounds.get("lt"))
    if low is not None and high is not None:
        return f" in {'[' if 'ge' in bounds else '('}{low}, {high}{']' if 'le' in bounds else ')'}"
    if low is not None:
        return f" {'>=' if 'ge' in bounds else '>'} {low}"
    if high is not None:
        return f" {'<=' if 'le' in bounds else '<'} {high}"
    return ""


def show(value: Any) -> str:
    """A value as it stands in JSON, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
