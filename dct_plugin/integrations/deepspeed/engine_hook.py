"""Activation by the JSON alone: every DeepSpeed engine whose JSON has a ``dct`` section is attached to.

The constructor of the engine is wrapped, and nothing else. An engine whose JSON has no section is left as it
is. For one that has, :mod:`.attachment` is imported, and what it raises reaches the user. Until then only the
standard library is imported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

from ..host.patching import Function, Patches
from .section import KEYS, SECTION, backend_name, configuration_of, find_section, misplaced_section

_hooked: set[type] = set()


def hook_engine(cls: type) -> None:
    """Have :func:`engine_ready` called for every engine of a class whose constructor has returned.

    Args:
        cls: ``DeepSpeedEngine``, or a class derived from it.
    """
    if cls not in _hooked:
        _hooked.add(cls)
        Patches().intercept(cls, "__init__", functools.partial(_init, cls))


def _init(cls: type, original: Function, engine: Any, *args: Any, **keywords: Any) -> None:
    if cls is not next(base for base in type(engine).__mro__ if base in _hooked):
        original(engine, *args, **keywords)  # the constructor of a derived class goes on
        return
    _take_off_earlier(*args, *keywords.values())
    given = getattr(keywords.get("config_class"), "_param_dict", None)
    with contextlib.ExitStack() as prepared:
        if backend_name(given) == SECTION:
            from . import onebit

            prepared.enter_context(onebit.prepared())
        original(engine, *args, **keywords)
    engine_ready(engine)


def _take_off_earlier(*arguments: Any) -> None:
    """Take off what is attached to the modules of a new engine, which is about to read their weights."""
    attachment = sys.modules.get("dct_plugin.integrations.host.attachment")
    if attachment is not None:
        for argument in arguments:
            if hasattr(argument, "named_modules"):
                attachment.take_off(argument)


def engine_ready(engine: Any) -> None:
    """Attach to a finished engine if its configuration has a ``dct`` section.

    Raises:
        DCTError: The section is wrong, ranks disagree, or this DeepSpeed is not supported.
        ImportError: There is a section, but the plugin is not completely installed.
    """
    section = find_section(engine)
    if section is None:  # where one stands elsewhere nothing reads it, and the job trains dense
        found = misplaced_section(configuration_of(engine))
        if found is not None and _is_section(found[1]) and engine.__dict__.get("global_rank", 0) == 0:
            logging.getLogger("dct_plugin").warning("dct: %s; this job trains without dct", found[0])
        return
    try:
        from .attachment import attach
    except ImportError as error:
        raise ImportError(
            f"the DeepSpeed configuration has a {SECTION!r} section, but dct-plugin is not completely "
            f"installed ({error}); install it with: pip install 'dct-plugin[deepspeed]'"
        ) from error
    attach(engine, section)


def _is_section(content: Any) -> bool:
    """Return whether a mapping has keys of the section; ``enabled``, which others have, not beside theirs."""
    known = KEYS & content.keys() if isinstance(content, Mapping) else frozenset()
    return bool(known - {"enabled"}) or 0 < len(known) == len(content)
