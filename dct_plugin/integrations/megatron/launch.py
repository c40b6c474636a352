"""``python -m dct_plugin.megatron SCRIPT ARGS...``: run an unmodified Megatron script with the plugin.

Takes the plugin's own arguments out of ``sys.argv``, waits until the script imports ``megatron.core``, checks
its version and the signatures of everything that is to be replaced, installs the hooks, and lets the script
go on as ``__main__``. Nothing but the standard library is imported before the configuration has been read.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dct_plugin._version import __version__
from dct_plugin.errors import ConfigError, DesyncError, VersionError

from ..host.patching import Function, Patches, when_imported
from .options import USAGE, CommandLine, hook_states, launcher_rank, parse

if TYPE_CHECKING:
    from dct_plugin.config import DCTConfig

_HINT = "it was not started through dct_plugin.megatron, or with dct.enabled = false"


class _StartupError(DesyncError):
    """Ranks were started with different configurations or versions, or one of them never came."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); return the exit status if the script does not exit.

    A wrong configuration, an unsupported Megatron, or ranks that differ end with one message and without a
    traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        # Before the script -h and --help are ours; behind it they are the script's.
        if "--dct-help" in arguments or arguments[:1] in (["-h"], ["--help"]):
            print(USAGE)
            return 0
        run(parse(arguments, os.environ))
    except (ConfigError, VersionError, _StartupError) as error:
        prefix = f"rank {launcher_rank() or 0}: "
        print(f"dct: error on {prefix}{str(error).removeprefix(prefix)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def run(launch: CommandLine) -> None:
    """Run the script as ``python`` would, with hooks put into ``megatron.core`` once it is imported.

    Raises:
        ConfigError: the script does not exist, or the hooks refuse the configuration.
        VersionError: the Megatron that the script imports is not supported.
    """
    if not launch.is_module and not Path(launch.target).is_file():
        raise ConfigError(f"cannot run {launch.target!r}: no such file in {os.getcwd()}")
    if launch.config.enabled:
        when_imported("megatron.core", lambda core: _patch(core, launch))
    else:
        _say(f"switched off by {launch.source}; {launch.target} runs without the plugin")

    if launch.is_module:
        sys.argv = ["-m", *launch.arguments]  # run_module puts the module's file there
        _find_module(launch.target)
        runpy.run_module(launch.target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [launch.target, *launch.arguments]
        # As with `python SCRIPT`: its folder instead of the current one. Otherwise megatron.core might come
        # from somewhere else than the rest of Megatron, whose namespace package spans several places.
        folder = str(Path(launch.target).resolve().parent)
        if sys.path and sys.path[0] in ("", os.getcwd()) and not getattr(sys.flags, "safe_path", False):
            sys.path[0] = folder
        else:
            sys.path.insert(0, folder)
        # Absolute, as __file__ is in a script that python runs; sys.argv[0] becomes so, too.
        runpy.run_path(os.path.abspath(launch.target), run_name="__main__")
    if launch.config.enabled and "megatron.core" not in sys.modules:
        print(
            f"dct: warning: {launch.target} never imported megatron.core; nothing was thresholded",
            file=sys.stderr,
        )


def _find_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)  # imports the packages around it
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        found = None
    if found is None:
        raise ConfigError(f"cannot run module {name!r}: there is none, looking from {os.getcwd()}")


def _patch(core: ModuleType, launch: CommandLine) -> None:
    """Check everything and then install the hooks, when ``megatron.core`` has been imported."""
    from . import versions

    states = hook_states(launch.config)
    versions.require_supported(core, [name for name, reason in states.items() if not reason])
    from . import hooks

    active = hooks.install(launch.config)
    _agree_with_groups(launch.config, str(core.__version__))
    _say(f"dct-plugin {__version__}, configuration {launch.config.fingerprint()} from {launch.source}")
    _say(f"megatron-core {core.__version__} from {os.path.dirname(core.__file__ or '')}")
    _say("active hooks: " + (", ".join(f"{name} ({how})" for name, how in active.items()) or "none"))
    if off := [f"{name} ({reason})" for name, reason in states.items() if name not in active]:
        _say("not active: " + ", ".join(off))


def agree(config: DCTConfig, core_version: str, *, limit: float | None = None) -> None:
    """Compare configuration and versions with all ranks of the default process group.

    Args:
        config: Of this rank.
        core_version: Of this rank's megatron-core.
        limit: Seconds to wait for the other ranks; None: as long as the process group waits.

    Raises:
        DesyncError: ranks differ, or one did not report within the limit; names the ranks and the options.
    """
    import torch.distributed as dist

    from ..host import startup

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    facts = startup.facts_of(config, {"version of megatron-core": core_version})
    startup.join("megatron", limit=limit, hint=_HINT).confirm(facts)


def _agree_with_groups(config: DCTConfig, core_version: str) -> None:
    """Have the ranks agree when the model-parallel groups are first made."""
    from megatron.core import parallel_state

    patches = Patches()

    def initialize(original: Function, *arguments: Any, **keywords: Any) -> Any:
        patches.undo()
        try:
            agree(config, core_version)
        except DesyncError as error:
            raise _StartupError(str(error)) from error
        return original(*arguments, **keywords)

    patches.intercept(parallel_state, "initialize_model_parallel", initialize)


def _say(text: str) -> None:
    if not launcher_rank():
        print(f"dct: {text}", flush=True)
