"""Validation, and its errors in words: the path, the value, and what is allowed there."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .options import allowed, models, show

#: Keys that tell a DeepSpeed JSON without a "dct" section from a file that is the section itself.
DEEPSPEED_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler", "zero_optimization", "zero_allow_untested_optimizer", "fp16", "bf16",
    "steps_per_print",
}  # fmt: skip

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
    what = f"{source.split('.')[0]} configuration{origin}"
    try:
        section = _plain(section)
    except RecursionError:
        raise ConfigError(f"invalid {what}: nested too deeply") from None
    try:
        return cls.model_validate(section)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        # An object where a word could stand, too: its own errors say more.
        items = [each for each in items if not _wants_word_alone(each)]
        lines = list(dict.fromkeys(_line(cls, section, item, source) for item in items))
    raise faulty(lines, what)


def _wants_word_alone(item: Any) -> bool:
    """Return whether a pydantic error says that an object is not a word, in a union of both."""
    return isinstance(item["input"], Mapping) and "".join(map(str, item["loc"][-1:])).startswith("literal[")


def faulty(faults: Sequence[str], what: str) -> ConfigError:
    """Return the error that lists what is wrong with ``what``, one fault per line."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    error = ConfigError(f"invalid {what} ({count}):\n  " + "\n  ".join(faults))
    error.faults = tuple(faults)
    return error


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
        classes = models(field)
        if not classes or not (isinstance(value, Mapping) or item["type"] == "missing"):
            break
        model = classes[0]
        if len(classes) > 1 and keys:  # pydantic names the chosen class of a union next
            label = keys.pop(0)
            model = next(each for each in classes if each.label() == label)
        elif keys and keys[0] == model.__name__:  # in a union with words
            keys.pop(0)
    if item["type"] == "extra_forbidden" and unknown is not None:
        owners = [each.label() for each in (models(field) if field else ()) if unknown in each.model_fields]
        if owners:
            return f"{path}.{unknown} = {show(item['input'])}: only {' and '.join(map(show, owners))} has it"
        return _unknown_key(cls, model, path, unknown, item["input"])
    if item["type"] == "dct_conflict":
        return f"{path}: {item['msg']}"
    if item["type"] == "dct_limit":
        return f"{path} = {show(value)}: must be {item['msg']}"
    wanted = f"must be {allowed(field) if field else 'a JSON object'}"
    if item["type"] == "missing" and isinstance(item["loc"][-1], str):  # a key, not an entry of a list
        return f"{path}: missing; {wanted}"
    # An error inside a pair is reported for the pair as a whole.
    return f"{path} = {show(value)}: {wanted}"


def _unknown_key(cls: type[BaseModel], model: type[BaseModel], path: str, key: str, value: Any) -> str:
    # Control characters and outer spaces are made visible; the rest is shown as it was written.
    plain = key.isprintable() and key == key.strip() != ""
    shown = key if plain else json.dumps(key)
    return f"{path}.{shown} = {show(value)}: unknown key; {_closest(cls, key, model, path)}"


def _closest(cls: type[BaseModel], key: str, model: type[BaseModel], path: str) -> str:
    """Return where the key was probably meant to stand: here, further below, anywhere else."""
    if key in DEEPSPEED_KEYS:
        return f'DeepSpeed reads it at the top of the file, beside "{path.split(".")[0]}"'
    places = [*_places(model, path), *_places(cls, path.split(".")[0])]
    names = dict(reversed(places))
    word = re.sub(r"[\s-]+", "_", key.strip().lower())
    if match := difflib.get_close_matches(word, names, n=1, cutoff=0.75):
        return f"did you mean {names[match[0]]}?"
    return "allowed are " + ", ".join(model.model_fields)


def _places(model: type[BaseModel], path: str) -> list[tuple[str, str]]:
    """Return name and path of the keys of a section and of those below it, the highest first."""
    found = []
    for name, field in model.model_fields.items():
        found.append((name, f"{path}.{name}"))
        for below in models(field):
            found += _places(below, f"{path}.{name}")
    return sorted(found, key=lambda place: place[1].count("."))
