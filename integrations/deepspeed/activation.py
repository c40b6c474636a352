"""Activation by the JSON alone: every DeepSpeed engine whose JSON has a ``dct`` section is attached to.

An engine whose JSON has no section is left as it is. For one that has, :mod:`.attach` is imported, and what
it raises reaches the user. Until then only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from types import ModuleType
from typing import Any

from ..host.patches import Function, intercept_for_good
from ..host.post_import import when_imported
from .features import FEATURES, Feature
from .section import SECTION, TOPIC, configuration_of, find_section, misplaced_section

ENGINE_CLASS = "DeepSpeedEngine"

_WRAPPED = "_dct_wrapped"
_DEPTH = "_dct_init_depth"


def hook_engines(module: ModuleType) -> None:
    """Have :func:`engine_ready` called for every engine once its outermost ``__init__`` has returned.

    Args:
        module: ``deepspeed.runtime.engine``.
    """
    engine_class = getattr(module, ENGINE_CLASS)
    if engine_class.__dict__.get(_WRAPPED):
        return
    previous = engine_class.__dict__.get("__init_subclass__")

    def __init_subclass__(subclass: type, **keywords: Any) -> None:
        if previous is not None:
            previous.__get__(None, subclass)(**keywords)
        else:
            super(engine_class, subclass).__init_subclass__(**keywords)
        _wrap_init(subclass)

    engine_class.__init_subclass__ = classmethod(__init_subclass__)
    for known in _with_subclasses(engine_class):
        _wrap_init(known)
    setattr(engine_class, _WRAPPED, True)
    for feature in FEATURES:
        for name in feature.modules:
            when_imported(name, functools.partial(_prepare, feature))


def _prepare(feature: Feature, module: ModuleType) -> None:
    try:
        assert feature.load is not None
        feature.load().prepare(module)
    except Exception as error:
        warnings.warn(
            f"dct-plugin: could not hook {module.__name__}: {error!r}; {feature.name} will not work",
            RuntimeWarning,
            stacklevel=2,
        )


def _with_subclasses(cls: type) -> list[type]:
    found = [cls]
    subclass: type
    for subclass in cls.__subclasses__():
        found += _with_subclasses(subclass)
    return found


def _wrap_init(cls: type) -> None:
    if "__init__" in cls.__dict__:
        intercept_for_good(cls, "__init__", _init)


def _init(original: Function, engine: Any, *args: Any, **keywords: Any) -> None:
    state = engine.__dict__  # not by attribute: torch modules take none before their own __init__
    depth = state.get(_DEPTH, 0)
    state[_DEPTH] = depth + 1
    try:
        original(engine, *args, **keywords)
    except Exception as error:
        if explanation := _explanation(engine):
            raise explanation from error
        raise
    finally:
        state[_DEPTH] = depth
    if depth == 0:
        del state[_DEPTH]
        engine_ready(engine)


def _explanation(engine: Any) -> Exception | None:
    """Return a better error than DeepSpeed's for an engine that could not be made; None if there is none."""
    with contextlib.suppress(ImportError):
        for feature in FEATURES:
            if feature.load is not None and (error := feature.load().explain(configuration_of(engine))):
                return error
    return None


def engine_ready(engine: Any) -> None:
    """Attach to a finished engine if its configuration has a ``dct`` section.

    Raises:
        DCTError: The section is wrong, ranks disagree, or this DeepSpeed is not supported.
        ImportError: There is a section, but the plugin is not completely installed.
    """
    section = find_section(engine)
    if section is None:
        _announce_absence()
        _refuse_misplaced(engine)
        return
    try:
        from .attach import attach
    except ImportError as error:
        raise ImportError(
            f"the DeepSpeed configuration has a {SECTION!r} section, but dct-plugin is not completely "
            f"installed ({error}); install it with: pip install 'dct-plugin[deepspeed]'"
        ) from error
    attach(engine, section)


def _announce_absence() -> None:
    # A courtesy to the other ranks: without a process group or a store they find out by waiting.
    with contextlib.suppress(Exception):
        if sys.modules["torch.distributed"].is_initialized():
            from ..host.startup import join

            join(TOPIC).abstain()


def _refuse_misplaced(engine: Any) -> None:
    """Raise an error for a section that nothing reads: the job would train dense without a word."""
    if found := misplaced_section(configuration_of(engine)):
        from dct_plugin.errors import ConfigError

        raise ConfigError(found[0])
