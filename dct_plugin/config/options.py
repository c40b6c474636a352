"""The options of a section: where each stands, its value, and what may be written there."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class OptionDoc(NamedTuple):
    """One option of the configuration."""

    path: str
    """The place of the option, such as ``dct.data_parallel.sparsity``."""
    value: Any
    """The value of the option, as JSON."""
    default: Any
    """The default, as JSON."""
    allowed: str
    """The allowed values, in words."""
    description: str
    """The text that says what the option does."""


def options(section: BaseModel) -> Iterator[OptionDoc]:
    """Yield every option of a ``dct`` section in order.

    An object that a key such as ``"kind"`` selects, and a section that is absent, are one option.
    """
    for path, part, name in _places(section, "dct"):
        field = type(part).model_fields[name]
        default = as_json(field.get_default(call_default_factory=True))
        description, _ = documentation(type(part), name)
        yield OptionDoc(path, as_json(getattr(part, name)), default, allowed(field), description)


def option_values(section: BaseModel) -> dict[str, Any]:
    """Return the value of every option of a ``dct`` section, as JSON, by its path."""
    return {path: as_json(getattr(part, name)) for path, part, name in _places(section, "dct")}


def _places(section: BaseModel, prefix: str) -> Iterator[tuple[str, BaseModel, str]]:
    """Yield the path of every option in order, the section that has it, and its name there."""
    for name in type(section).model_fields:
        value, path = getattr(section, name), f"{prefix}.{name}"
        if isinstance(value, BaseModel) and not hasattr(value, "label"):
            yield from _places(value, path)
        else:
            yield path, section, name


def as_json(value: Any) -> Any:
    """Return a value as it stands in JSON, in its shortest form."""
    if hasattr(value, "short"):
        return value.short()
    return list(value) if isinstance(value, tuple) else value


def members(annotation: Any) -> list[Any]:
    """Return the types of an annotation: those of a union, or the one that it is."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (None, Literal, tuple):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in members(part)]


def models(field: FieldInfo) -> list[Any]:
    """Return the section models that a field may hold."""
    kinds = members(field.annotation)
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)]


def allowed(field: FieldInfo) -> str:
    """Return what may be written for a field, in words: type, range or choices."""
    if isinstance(field.json_schema_extra, dict) and "allowed" in field.json_schema_extra:
        return str(field.json_schema_extra["allowed"])
    kinds = [kind for kind in members(field.annotation) if kind is not type(None)]
    optional = " or null" if type(None) in members(field.annotation) else ""
    if labels := ", ".join(map(show, choices(field))):
        variants = f', or an object with "{models(field)[0].selector}" and settings' if models(field) else ""
        return f"one of {labels}{variants}{optional}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a non-empty string"}
    return words.get(kinds[0], "a JSON object") + _range(field) + optional


def choices(field: FieldInfo) -> list[Any]:
    """Return the values that a field chooses from; none for numbers and texts."""
    labels = [model.label() for model in models(field) if hasattr(model, "label")]
    literals = [kind for kind in members(field.annotation) if get_origin(kind) is Literal]
    return labels or [choice for kind in literals for choice in get_args(kind)]


def _range(field: FieldInfo) -> str:
    signs = {"ge": (">=", "["), "gt": (">", "("), "le": ("<=", "]"), "lt": ("<", ")")}
    bounds = [
        (*signs[key], getattr(item, key))
        for key in signs
        for item in field.metadata
        if getattr(item, key, None) is not None
    ]
    if len(bounds) == 2:
        (_, opening, low), (_, closing, high) = bounds
        return f" in {opening}{low}, {high}{closing}"
    return "".join(f" {sign} {bound}" for sign, _, bound in bounds)


def show(value: Any) -> str:
    """Return a value as it stands in JSON, shortened."""
    try:
        text = json.dumps(as_json(value))
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def documentation(model: type[BaseModel], name: str) -> tuple[str, str]:
    """Return what an option does, and when to change it: the paragraphs of the text below its field."""
    # A section may give a field of its base class another default only.
    bases = [cls for cls in model.__mro__ if issubclass(cls, BaseModel) and name in cls.model_fields]
    text = next((text for cls in bases if (text := cls.model_fields[name].description)), "")
    what, _, when = text.partition("\n\n")
    return " ".join(what.split()), " ".join(when.split())
