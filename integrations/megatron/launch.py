"""``python -m dct_plugin.megatron SCRIPT ARGS...``: run an unmodified Megatron script with the plugin.

Takes the plugin's own arguments out of ``sys.argv``, waits until the script imports ``megatron.core``, checks
its version and the signatures of everything that is to be replaced, installs the hooks, and lets the script
go on as ``__main__``. Nothing but the standard library is imported before the configuration has been read.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import os
import runpy
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from dct_plugin._version import __version__
from dct_plugin.errors import ConfigError, DesyncError, VersionError

from ..host.post_import import when_imported

if TYPE_CHECKING:
    from dct_plugin.config import DCTConfig, OptionDoc

__all__ = ["CONFIG_VARIABLE", "Launch", "hook_states", "main", "parse", "run"]

#: Path of a configuration file, used where no ``--dct-config`` is given.
CONFIG_VARIABLE = "DCT_CONFIG"
PREFIX = "--dct-"

USAGE = """\
usage: torchrun ... -m dct_plugin.megatron [--dct-...] SCRIPT [ARGS...]
       torchrun ... -m dct_plugin.megatron [--dct-...] -m MODULE [ARGS...]
       python -m dct_plugin.megatron --dct-help
"""

# torch.distributed.launch and deepspeed put this before the arguments of what they start.
_LOCAL_RANK = ("--local-rank", "--local_rank")

_STORE_KEY = "dct_plugin/megatron"

# A section of the configuration for recommenders, which has no options here.
_ELSEWHERE = "dct.embedding."


class Launch(NamedTuple):
    """What a command line asks for: ``target`` is a path or, when ``is_module``, a module's name.

    ``arguments`` are what the target is to see, without its own name; ``source`` says where ``config`` came
    from.
    """

    target: str
    is_module: bool
    arguments: list[str]
    config: DCTConfig
    source: str


class _DifferentRanksError(DesyncError):
    """Ranks were started with different configurations or versions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); the exit status, unless the script exits itself.

    A wrong configuration, an unsupported Megatron, or ranks that differ end with one message and without a
    traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if _wants_help(arguments):
            _print(help_text())
            return 0
        run(parse(arguments, os.environ))
    except (ConfigError, VersionError, _DifferentRanksError) as error:
        print(f"dct: error on rank {_rank()}: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def run(launch: Launch) -> None:
    """Run the script as ``python`` would, with hooks put into ``megatron.core`` once it is imported.

    Raises:
        ConfigError: the script does not exist, or the hooks refuse the configuration.
        VersionError: the Megatron that the script imports is not supported.
    """
    if not launch.is_module and not Path(launch.target).is_file():
        raise ConfigError(f"cannot run {launch.target!r}: no such file in {os.getcwd()}")
    state: dict[str, Any] = {"patched": False}
    if launch.config.enabled:
        when_imported("megatron.core", lambda core: _patch(core, launch, state))
        when_imported("megatron.training.arguments", lambda module: _show_in_arguments(module, launch))
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
    if launch.config.enabled and not state["patched"]:
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


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Separate the plugin's arguments from the script's, wherever they stand, and read the configuration.

    Raises:
        ConfigError: an unknown or incomplete ``--dct-`` argument, no script, no configuration, or a wrong
        one.
    """
    own, rest = _separate(arguments)
    target, is_module, rest = _find_target(rest)
    config, source = _read_config(own, environment)
    return Launch(target, is_module, rest, config, source)


def help_text() -> str:
    """Usage, and every ``--dct-`` option with what it does, its default and what is allowed."""
    lines = [
        USAGE,
        "The plugin's arguments may stand anywhere; the script does not see them. The configuration comes",
        f"from --dct-config, else from the file that {CONFIG_VARIABLE} names; single options override it.",
        "Without a file, only the parts that an option names are switched on. An option may be shortened",
        "to its end (--dct-pipeline-sparsity) where that is unambiguous.",
        "",
        "  --dct-config FILE    JSON file with a dct section, or the bare section",
        "  --dct-help           this text",
    ]
    for option in _options():
        lines.append(f"  {PREFIX}{_name(option.path)} VALUE")
        text = f"{option.description} Default {json.dumps(option.default)}; {option.allowed}."
        lines += textwrap.wrap(text, 100, initial_indent="        ", subsequent_indent="        ")
    return "\n".join(lines)


def _wants_help(arguments: Sequence[str]) -> bool:
    if "--dct-help" in arguments:
        return True
    # Before the script these are ours; behind it they are the script's.
    return arguments[:1] in (["-h"], ["--help"])


def _print(text: str) -> None:
    """To standard output, which may be closed early, as by ``head``."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _separate(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    own, rest = [], []
    items: Iterator[str] = iter(arguments)
    for item in items:
        if not item.startswith(PREFIX):
            rest.append(item)
            continue
        name, equals, value = item.partition("=")
        if not equals:
            following = next(items, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{name} needs a value" + (f", got {following!r}" if following else ""))
            value = following
        own.append((name, value))
    return own, rest


def _find_target(arguments: list[str]) -> tuple[str, bool, list[str]]:
    """Target, whether it is a module, and its arguments; a launcher's local rank is moved behind it."""
    moved: list[str] = []
    rest = list(arguments)
    while rest:
        item = rest.pop(0)
        if item in _LOCAL_RANK:
            moved += [item, *rest[:1]]
            del rest[:1]
        elif item.startswith(tuple(f"{name}=" for name in _LOCAL_RANK)):
            moved.append(item)
        elif item in ("-m", "--module"):
            if not rest or rest[0].startswith("-"):
                raise ConfigError(f"{item} needs the name of a module\n{USAGE}")
            return rest[0], True, moved + rest[1:]
        elif item.startswith("-"):
            raise ConfigError(
                f"argument {item!r} before the script is neither the plugin's nor a launcher's\n{USAGE}"
            )
        else:
            return item, False, moved + rest
    raise ConfigError(f"no script to run\n{USAGE}")


def _read_config(own: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> tuple[DCTConfig, str]:
    from dct_plugin.config import DCTConfig

    names = {_name(option.path): option.path for option in _options()}
    file: str | None = None
    changes: dict[str, Any] = {}
    named: list[str] = []
    for flag, value in own:
        if flag == "--dct-config":
            file = value
            continue
        path = _resolve(flag, names)
        *sections, key = path.split(".")[1:]
        place = changes
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = _value(value)
        named.append(path)
    source = "the command line"
    if file is None and environment.get(CONFIG_VARIABLE):
        file, source = environment[CONFIG_VARIABLE], CONFIG_VARIABLE
    if file is not None:
        config = DCTConfig.from_file(file, rank=_rank_or_none())
        origin = f"{file} (from {source})" if source == CONFIG_VARIABLE else file
        return (
            (config.updated(changes), f"{origin} and {len(named)} option(s)") if named else (config, origin)
        )
    if not named:
        raise ConfigError(
            "no configuration: give --dct-config FILE, or single options (see --dct-help), or set "
            + CONFIG_VARIABLE
        )
    return DCTConfig().updated(
        _only(named, changes, names.values())
    ), f"{len(named)} option(s) of the command line"


def _only(named: Sequence[str], changes: Mapping[str, Any], paths: Any) -> dict[str, Any]:
    """``changes``, and every section that has a switch of its own switched off unless an option names it."""
    result = json.loads(json.dumps(changes))
    for path in paths:
        *sections, key = path.split(".")[1:]
        if key != "enabled" or not sections or path in named:
            continue
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place["enabled"] = any(other.startswith(path.removesuffix("enabled")) for other in named)
    return result


def _options(config: DCTConfig | None = None) -> list[OptionDoc]:
    """Every option that means something to Megatron."""
    from dct_plugin.config import options

    return [option for option in options(config) if not option.path.startswith(_ELSEWHERE)]


def _name(path: str) -> str:
    """``dct.data_parallel.sparsity`` as ``data-parallel-sparsity``."""
    return "-".join(path.split(".")[1:]).replace("_", "-")


def _resolve(flag: str, names: Mapping[str, str]) -> str:
    """The path of the option that a flag names: in full, or by its last parts if only one option ends so."""
    wanted = flag.removeprefix(PREFIX).replace("_", "-")
    if wanted.startswith("embedding-"):
        raise ConfigError(f"{flag} is for recommenders (DLRM) and does nothing with Megatron")
    if wanted in names:
        return names[wanted]
    ends: dict[str, list[str]] = {}
    for path in names.values():
        parts = path.split(".")[1:]
        for first in range(1, len(parts)):
            ends.setdefault("-".join(parts[first:]).replace("_", "-"), []).append(path)
    found = ends.get(wanted, [])
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{flag} is ambiguous: " + ", ".join(f"{PREFIX}{_name(path)}" for path in found))
    known = ["config", "help", *names, *ends]
    close = difflib.get_close_matches(wanted, known, n=1)
    raise ConfigError(
        f"unknown argument {flag}; " + (f"did you mean {PREFIX}{close[0]}?" if close else "see --dct-help")
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def hook_states(config: DCTConfig) -> dict[str, str]:
    """Every hook by name, and why it is not active; an empty text means that it is."""
    if not config.enabled:
        return dict.fromkeys(("pipeline", "tensor", "data_parallel"), "dct.enabled = false")
    pipeline, tensor = config.model_parallel.pipeline, config.model_parallel.tensor
    sections: dict[str, tuple[str, Any, bool]] = {
        "pipeline": (
            "dct.model_parallel.pipeline",
            pipeline,
            bool(pipeline.sparsity) or any(pipeline.boundary_sparsity),
        ),
        "tensor": ("dct.model_parallel.tensor", tensor, bool(tensor.sparsity)),
        "data_parallel": ("dct.data_parallel", config.data_parallel, bool(config.data_parallel.sparsity)),
    }
    return {
        name: f"{path}.enabled = false" if not section.enabled else "" if some else f"{path}.sparsity = 0"
        for name, (path, section, some) in sections.items()
    }


def _patch(core: ModuleType, launch: Launch, state: dict[str, Any]) -> None:
    """Called when ``megatron.core`` has been imported: check everything, then install the hooks."""
    from . import versions

    states = hook_states(launch.config)
    versions.require_supported(core, [name for name, reason in states.items() if not reason])
    from . import hooks

    active = hooks.install(launch.config)
    state["patched"] = True
    _check_ranks_agree(launch.config, str(core.__version__))
    _say(f"dct-plugin {__version__}, configuration {launch.config.fingerprint()} from {launch.source}")
    _say(f"megatron-core {core.__version__} from {os.path.dirname(core.__file__ or '')}")
    _say("active hooks: " + (", ".join(str(hook) for hook in active) or "none"))
    names = {hook.name for hook in active}
    if off := [f"{name} ({reason})" for name, reason in states.items() if name not in names]:
        _say("not active: " + ", ".join(off))


def _check_ranks_agree(config: DCTConfig, core_version: str) -> None:
    """Compare configuration and versions of all ranks when the model-parallel groups are first made."""
    from megatron.core import parallel_state

    original = parallel_state.initialize_model_parallel
    done = False

    @functools.wraps(original)
    def initialize_model_parallel(*arguments: Any, **keywords: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            _compare_ranks(config, core_version)
        return original(*arguments, **keywords)

    parallel_state.initialize_model_parallel = initialize_model_parallel


def _compare_ranks(config: DCTConfig, core_version: str) -> None:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    about = {"dct-plugin": __version__, "megatron-core": core_version, "config": config.canonical_json()}
    store.set(f"{_STORE_KEY}/{rank}", json.dumps(about))
    # Rank 0 reads what all say and tells the verdict: work grows with the ranks, not with their square.
    if rank == 0:
        faults = []
        for other in range(1, size):
            theirs = json.loads(store.get(f"{_STORE_KEY}/{other}"))
            faults += [f"  rank {other}: {text}" for text in _differences(about, theirs)]
        more = [f"  and {len(faults) - 20} more"] if len(faults) > 20 else []
        store.set(f"{_STORE_KEY}/verdict", "\n".join(faults[:20] + more) or "ok")
    verdict = store.get(f"{_STORE_KEY}/verdict").decode()
    if verdict != "ok":
        raise _DifferentRanksError(
            f"ranks were started differently (value on rank 0 != value there)\n{verdict}"
        )


def _differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    if versions := [
        f"{key} {mine[key]} != {theirs[key]}" for key in mine if key != "config" and mine[key] != theirs[key]
    ]:
        return versions
    if mine["config"] == theirs["config"]:
        return []
    from dct_plugin.config import DCTConfig

    return DCTConfig.parse(json.loads(mine["config"])).differences(
        DCTConfig.parse(json.loads(theirs["config"]))
    )


def _show_in_arguments(module: ModuleType, launch: Launch) -> None:
    """Have the configuration in Megatron's ``args``: in the dump at start, and in checkpoints."""
    original = getattr(module, "add_megatron_arguments", None)
    if original is None:
        return
    values = {
        f"dct_{_name(option.path).replace('-', '_')}": option.value for option in _options(launch.config)
    }
    values |= {"dct_config": launch.source, "dct_fingerprint": launch.config.fingerprint()}

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any, *arguments: Any, **keywords: Any) -> Any:
        parser = original(parser, *arguments, **keywords)
        parser.set_defaults(**values)
        return parser

    module.add_megatron_arguments = add_megatron_arguments  # type: ignore[attr-defined]


def _say(text: str) -> None:
    if _rank() == 0:
        print(f"dct: {text}", flush=True)


def _rank() -> int:
    return _rank_or_none() or 0


def _rank_or_none() -> int | None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None
