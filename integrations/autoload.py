"""Activation by the JSON alone: what torch imports, in every process, at the end of ``import torch``.

torch loads the entry points of group ``torch.backends`` (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches that
off) and an exception in one of them breaks ``import torch``. So this module imports nothing but the standard
library, does nothing but wait for ``deepspeed.runtime.engine``, and never raises. A DeepSpeed engine whose
JSON has no ``dct`` section is left as it is; for one that has,
:mod:`dct_plugin.integrations.deepspeed.attach` is imported and what it raises reaches the user.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

ENGINE_MODULE = "deepspeed.runtime.engine"
ENGINE_CLASS = "DeepSpeedEngine"
SECTION = "dct"

#: What engines agree on at start-up, see :mod:`.host.startup`. Those without the section say so there: a rank
#: whose JSON lacks it is then named at once, not after a time limit.
TOPIC = "deepspeed"

#: Modules with a slot for compressed momentum, and their optimizers; DeepSpeed has them up to 0.19.6.
ONEBIT_MODULES = {
    "deepspeed.runtime.fp16.onebit.adam": "OnebitAdam",
    "deepspeed.runtime.fp16.onebit.lamb": "OnebitLamb",
    "deepspeed.runtime.fp16.onebit.zoadam": "ZeroOneAdam",
}
#: What their ``comm_backend_name`` is for the plugin.
BACKEND_NAME = "dct"

_WRAPPED = "_dct_wrapped"
_DEPTH = "_dct_init_depth"


def autoload() -> None:
    """Watch for the DeepSpeed engine, or hook it if it is already there. Idempotent; never raises."""
    try:
        # Here, so that not even an incomplete installation breaks "import torch".
        from .host import build_lock
        from .host.post_import import when_imported

        when_imported(build_lock.MODULE, build_lock.watch)
        when_imported(ENGINE_MODULE, _install_safely)
        for name in ONEBIT_MODULES:
            when_imported(name, _offer_backend)
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


def _install_safely(module: ModuleType) -> None:
    try:
        install(module)
    except Exception as error:
        _warn(f"could not hook {ENGINE_MODULE}: {error!r}; a {SECTION!r} section will have no effect")


def _offer_backend(module: ModuleType) -> None:
    try:
        importlib.import_module(".deepspeed.onebit", __package__).offer(module)
    except Exception as error:
        _warn(f"could not hook {module.__name__}: {error!r}; it does not take {BACKEND_NAME!r} as a backend")


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
        except Exception as error:
            _explain(self, error)
            raise
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
    section = find_section(engine)
    if section is None:
        _announce_absence()
        _refuse_near_misses(engine)
        return
    try:
        # By name: the package of that module imports this one.
        attach = importlib.import_module(".deepspeed.attach", __package__).attach
    except ImportError as error:
        raise ImportError(
            f"the DeepSpeed configuration has a {SECTION!r} section, but dct-plugin is not completely "
            f"installed ({error}); install it with: pip install 'dct-plugin[deepspeed]'"
        ) from error
    attach(engine, section, topic=TOPIC)


def configuration_of(engine: Any) -> Any:
    """An engine's JSON as it was written."""
    config = getattr(engine.__dict__.get("_config"), "_param_dict", None)
    return config if isinstance(config, dict) else engine.__dict__.get("config")


def find_section(engine: Any) -> Any:
    """The ``dct`` section of an engine's JSON as written there, None when there is none; the defaults where
    the optimizer asks for the plugin as its backend.
    """
    config = configuration_of(engine)
    if not isinstance(config, dict):
        _warn(f"the configuration of this DeepSpeed cannot be read; a {SECTION!r} section has no effect")
        return None
    return config.get(SECTION, {} if asks_for_backend(config) else None)


def asks_for_backend(config: Any) -> bool:
    """Whether the optimizer of a JSON is to exchange its momentum through the plugin."""
    try:
        return bool(config["optimizer"]["params"]["comm_backend_name"] == BACKEND_NAME)
    except (KeyError, TypeError):
        return False


def _explain(engine: Any, error: Exception) -> None:
    """What a DeepSpeed without the slot says does not help."""
    if not asks_for_backend(configuration_of(engine)):
        return
    try:
        present = [importlib.util.find_spec(name) is not None for name in ONEBIT_MODULES]
    except ImportError:
        present = []
    if not any(present):
        from dct_plugin.errors import VersionError

        version = getattr(sys.modules.get("deepspeed"), "__version__", "")
        raise VersionError(
            f"DeepSpeed {version} has no 1-bit Adam, 1-bit LAMB and 0/1 Adam, and with them no place for "
            f"optimizer.params.comm_backend_name = {BACKEND_NAME!r}: the last version that has them is "
            f"0.19.6. The {SECTION!r} section does the same job for every optimizer: take "
            '"optimizer": {"type": "AdamW", ...} and "dct": {"data_parallel": {"sparsity": 0.99, '
            '"error_feedback": "step_ahead", "warmup_steps": N}}, where N was freeze_step'
        ) from error


def _announce_absence() -> None:
    # A courtesy to the other ranks: without a process group or a store they find out by waiting.
    with contextlib.suppress(Exception):
        if sys.modules["torch.distributed"].is_initialized():
            from .host.startup import abstain

            abstain(TOPIC)


def _refuse_near_misses(engine: Any) -> None:
    """A mistyped section would train dense without a word."""
    from .host.deepspeed_keys import near_misses

    config = configuration_of(engine)
    if found := near_misses(config if isinstance(config, dict) else (), SECTION):
        from dct_plugin.errors import ConfigError

        raise ConfigError(
            f"the DeepSpeed configuration has a section {found[0]!r}, which nothing reads; did you mean "
            f"{SECTION!r}? (A leading underscore keeps it out of the way.)"
        )


def _warn(message: str) -> None:
    warnings.warn(f"dct-plugin: {message}", RuntimeWarning, stacklevel=3)
