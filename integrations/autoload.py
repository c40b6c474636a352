"""Activation by the JSON alone: what torch imports, in every process, at the end of ``import torch``.

torch loads the entry points of group ``torch.backends`` (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches that
off) and an exception in one of them breaks ``import torch``. So this module imports nothing but the standard
library, does nothing but wait for ``deepspeed.runtime.engine``, and never raises. A DeepSpeed engine whose
JSON has no ``dct`` section is left as it is; for one that has,
:mod:`dct_plugin.integrations.deepspeed.attach` is imported and what it raises reaches the user.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

ENGINE_MODULE = "deepspeed.runtime.engine"
ENGINE_CLASS = "DeepSpeedEngine"
SECTION = "dct"

#: Key, in the default process group's store, under which rank ``rank`` says what its engine number ``number``
#: runs. Engines without the section say so too: a rank whose JSON lacks it is then named at once, not after a
#: time limit.
STORE_KEY = "dct_plugin/engine{number}/{rank}"
ABSENT = '{"absent": true}'

_WRAPPED = "_dct_wrapped"
_DEPTH = "_dct_init_depth"
_engines = 0


def autoload() -> None:
    """Watch for the DeepSpeed engine, or hook it if it is already there. Idempotent; never raises."""
    try:
        module = sys.modules.get(ENGINE_MODULE)
        if module is not None and hasattr(module, ENGINE_CLASS):
            install(module)
        elif not any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _EngineFinder())
    except Exception as error:
        _warn(f"could not wait for DeepSpeed: {error!r}")


def install(module: ModuleType) -> None:
    """Look at every engine (subclasses too) once its outermost ``__init__`` has returned."""
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


class _EngineFinder(MetaPathFinder):
    """Finds the engine's module through the other finders and hooks it once it has run; then it is gone."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != ENGINE_MODULE or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                spec.loader = _HookingLoader(spec.loader, self)
            return spec
        finally:
            self._busy = False


class _HookingLoader(Loader):
    """The module's own loader, and then :func:`install`."""

    def __init__(self, loader: Any, finder: _EngineFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        # Only now: a failed import may be tried again.
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        try:
            install(module)
        except Exception as error:
            _warn(f"could not hook {ENGINE_MODULE}: {error!r}; a {SECTION!r} section will have no effect")


def _with_subclasses(cls: type) -> list[type]:
    found = [cls]
    subclass: type
    for subclass in cls.__subclasses__():
        found += _with_subclasses(subclass)
    return found


def _wrap_init(cls: Any) -> None:
    original = cls.__dict__.get("__init__")
    if original is None or getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        state = self.__dict__  # not by attribute: torch modules take none before their own __init__
        depth = state.get(_DEPTH, 0)
        state[_DEPTH] = depth + 1
        try:
            original(self, *args, **keywords)
        finally:
            state[_DEPTH] = depth
        if depth == 0:
            del state[_DEPTH]
            engine_ready(self)

    setattr(__init__, _WRAPPED, True)
    cls.__init__ = __init__


def engine_ready(engine: Any) -> None:
    """Called with every finished engine: attach to it if its configuration has a ``dct`` section.

    Raises:
        DCTError: The section is wrong, ranks disagree, or this DeepSpeed is not supported.
        ImportError: There is a section, but the plugin is not completely installed.
    """
    global _engines
    number, _engines = _engines, _engines + 1
    section = find_section(engine)
    if section is None:
        _announce_absence(number)
        return
    try:
        from .deepspeed.attach import attach
    except ImportError as error:
        raise ImportError(
            f"the DeepSpeed configuration has a {SECTION!r} section, but dct-plugin is not completely "
            f"installed ({error}); install it with: pip install 'dct-plugin[deepspeed]'"
        ) from error
    attach(engine, section, number=number)


def find_section(engine: Any) -> Any:
    """The ``dct`` section of an engine's JSON as written there, None when there is none."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return config.get(SECTION) if isinstance(config, dict) else None


def _announce_absence(number: int) -> None:
    try:
        distributed = sys.modules["torch.distributed.distributed_c10d"]
        if distributed.is_initialized():
            key = STORE_KEY.format(number=number, rank=distributed.get_rank())
            distributed._get_default_store().set(key, ABSENT)
    except Exception:  # a courtesy to the other ranks: without a store they find out by waiting
        return


def _warn(message: str) -> None:
    warnings.warn(f"dct-plugin: {message}", RuntimeWarning, stacklevel=3)
