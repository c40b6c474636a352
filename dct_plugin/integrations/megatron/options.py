"""The command line of ``python -m dct_plugin.megatron``: the plugin's arguments, the script and its own.

Imports nothing but the standard library until an option or a configuration is read.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dct_plugin.errors import ConfigError

if TYPE_CHECKING:
    from dct_plugin.config import DCTConfig

#: Path of a configuration file, used where no ``--dct-config`` is given.
CONFIG_VARIABLE = "DCT_CONFIG"
_SECTION, _FILE = "--dct", "--dct-config"

USAGE = """\
usage: torchrun ... -m dct_plugin.megatron [--dct SECTION] [--dct-config FILE] SCRIPT [ARGS...]
       torchrun ... -m dct_plugin.megatron [--dct SECTION] [--dct-config FILE] -m MODULE [ARGS...]

  --dct SECTION        the dct section as JSON, e.g. '{"data_parallel": {"sparsity": 0.99}}'
  --dct-config FILE    JSON file with a dct section, or the bare section; else the file that DCT_CONFIG names
  --dct-help           this text

These arguments may stand anywhere; the script does not see them. SECTION overrides FILE. `dct config show`
prints a section with all defaults.
"""

# torch.distributed.launch and deepspeed put this before the arguments of what they start.
_LOCAL_RANK = ("--local-rank", "--local_rank")


class CommandLine(NamedTuple):
    """The request of a command line: ``target`` is a path or, when ``is_module``, a module's name.

    ``arguments`` are what the target is to see, without its own name; ``source`` says where ``config`` came
    from.
    """

    target: str
    is_module: bool
    arguments: list[str]
    config: DCTConfig
    source: str


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """Separate the plugin's arguments from the script's, wherever they stand, and read the configuration.

    Raises:
        ConfigError: an unknown or incomplete ``--dct`` argument, no script, no configuration, or a wrong one.
    """
    own, rest = _separate(arguments)
    target, is_module, rest = _find_target(rest)
    config, source = _read_config(own, environment)
    return CommandLine(target, is_module, rest, config, source)


def _separate(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the plugin's arguments by their names, and the script's arguments."""
    own: dict[str, str] = {}
    rest, items = [], iter(arguments)
    for item in items:
        name, equals, value = item.partition("=")
        if name in (_SECTION, _FILE):
            own[name] = value if equals else next(items, "")
            if not own[name] or own[name].startswith("--"):
                raise ConfigError(f"{name} needs a value" + (f", got {own[name]!r}" if own[name] else ""))
        elif name.startswith(f"{_SECTION}-"):
            raise ConfigError(f"unknown argument {name}\n{USAGE}")
        else:
            rest.append(item)
    return own, rest


def _find_target(arguments: list[str]) -> tuple[str, bool, list[str]]:
    """Return the target, whether it is a module, and its arguments with a launcher's local rank."""
    moved, items = [], iter(arguments)
    for item in items:
        if item.partition("=")[0] in _LOCAL_RANK:
            moved += [item, *itertools.islice(items, int("=" not in item))]
        elif item in ("-m", "--module"):
            target = next(items, "-")
            if target.startswith("-"):
                raise ConfigError(f"{item} needs the name of a module\n{USAGE}")
            return target, True, [*moved, *items]
        elif item.startswith("-"):
            raise ConfigError(
                f"argument {item!r} before the script is neither the plugin's nor a launcher's\n{USAGE}"
            )
        else:
            return item, False, [*moved, *items]
    raise ConfigError(f"no script to run\n{USAGE}")


def _read_config(own: Mapping[str, str], environment: Mapping[str, str]) -> tuple[DCTConfig, str]:
    """Return the configuration, and where it came from."""
    from dct_plugin.config import DCTConfig
    from dct_plugin.config.dct import no_duplicates

    rank, source = launcher_rank(environment), own.get(_FILE, "")
    if not source and (file := environment.get(CONFIG_VARIABLE)):
        config, source = DCTConfig.from_file(file, rank=rank), f"{file} (from {CONFIG_VARIABLE})"
    else:
        config = DCTConfig.from_file(source, rank=rank) if source else DCTConfig()
    if _SECTION not in own:
        if not source:
            raise ConfigError(f"no configuration: give {_SECTION} or {_FILE}\n{USAGE}")
        return config, source
    try:
        section = json.loads(own[_SECTION], object_pairs_hook=no_duplicates)
        if not isinstance(section, dict):
            raise ValueError(f"it is a {type(section).__name__}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_SECTION} = {own[_SECTION]}: must be a JSON object: {error}") from None
    changed = config.updated(section) if source else DCTConfig.parse(section, rank=rank)
    return changed, " and ".join(filter(None, (source, _SECTION)))


def launcher_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank by the variables of torchrun, deepspeed, srun or mpirun."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def hook_states(config: DCTConfig, *, pass_through: bool = True) -> dict[str, str]:
    """Return every hook by name, and why it is not active; an empty text means that it is.

    Args:
        config: The whole configuration.
        pass_through: Whether what leaves nothing out is left to Megatron.
    """
    from dct_plugin.policy import compresses

    if not config.enabled:
        return dict.fromkeys(("pipeline", "tensor", "data_parallel"), "dct.enabled = false")
    states, model, data = {}, config.model_parallel, config.data_parallel
    for name, section in ("pipeline", model.pipeline), ("tensor", model.tensor):
        reason = 'forward = "none"' if section.forward.label() == "none" else "forward.sparsity = 0"
        is_left = pass_through and not section.compresses
        states[name] = f"dct.model_parallel.{name}.{reason}" if is_left else ""
    is_left = pass_through and data.parameters is None and not compresses(data)
    reason = "sparsity = 0" if is_left else ""
    if not data.enabled:
        reason = "enabled = false"
    return {**states, "data_parallel": f"dct.data_parallel.{reason}" if reason else ""}
