"""The command line of ``python -m dct_plugin.megatron``: the plugin's arguments, the script and its own.

Imports nothing but the standard library until an option or a configuration is read.
"""

from __future__ import annotations

import difflib
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dct_plugin.errors import ConfigError

if TYPE_CHECKING:
    from dct_plugin.config import ActivationConfig, DCTConfig, OptionDoc

#: Path of a configuration file, used where no ``--dct-config`` is given.
CONFIG_VARIABLE = "DCT_CONFIG"
_PREFIX = "--dct-"

_USAGE = """\
usage: torchrun ... -m dct_plugin.megatron [--dct-...] SCRIPT [ARGS...]
       torchrun ... -m dct_plugin.megatron [--dct-...] -m MODULE [ARGS...]
       python -m dct_plugin.megatron --dct-help
"""

# torch.distributed.launch and deepspeed put this before the arguments of what they start.
_LOCAL_RANK = ("--local-rank", "--local_rank")

# A section of the configuration for recommenders, which has no options here.
_ELSEWHERE = "dct.embedding."


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
        ConfigError: an unknown or incomplete ``--dct-`` argument, no script, no configuration, or a wrong
        one.
    """
    own, rest = _separate(arguments)
    target, is_module, rest = _find_target(rest)
    config, source = _read_config(own, environment)
    return CommandLine(target, is_module, rest, config, source)


def help_text() -> str:
    """Return the usage, and every ``--dct-`` option with what it does, its default and what is allowed."""
    lines = [
        _USAGE,
        "The plugin's arguments may stand anywhere; the script does not see them. The configuration comes",
        f"from --dct-config, else from the file that {CONFIG_VARIABLE} names; single options override it.",
        "Without a file, only the parts that an option names are active. A value is JSON or a name:",
        """--dct-model-parallel-pipeline-forward '{"method": "threshold", "sparsity": 0.9}'""",
        "",
        "  --dct-config FILE    JSON file with a dct section, or the bare section",
        "  --dct-help           this text",
    ]
    for option in _options():
        lines.append(f"  {_PREFIX}{_name(option.path)} VALUE")
        text = f"{option.description} Default {json.dumps(option.default)}; {option.allowed}."
        lines += textwrap.wrap(text, 100, initial_indent="        ", subsequent_indent="        ")
    return "\n".join(lines)


def _separate(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    own, rest = [], []
    items: Iterator[str] = iter(arguments)
    for item in items:
        if not item.startswith(_PREFIX):
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
    """Return the target, whether it is a module, and its arguments with a launcher's local rank."""
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
                raise ConfigError(f"{item} needs the name of a module\n{_USAGE}")
            return rest[0], True, moved + rest[1:]
        elif item.startswith("-"):
            raise ConfigError(
                f"argument {item!r} before the script is neither the plugin's nor a launcher's\n{_USAGE}"
            )
        else:
            return item, False, moved + rest
    raise ConfigError(f"no script to run\n{_USAGE}")


def _read_config(own: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> tuple[DCTConfig, str]:
    """Return the configuration, and where it came from."""
    from dct_plugin.config import DCTConfig

    paths = {_name(option.path): option.path for option in _options()}
    file: str | None = None
    given: dict[str, Any] = {}
    for flag, value in own:
        if flag == "--dct-config":
            file = value
        else:
            given[_resolve(flag, paths)] = _value(value)
    changes: dict[str, Any] = {}
    for path, value in given.items():
        _set(changes, path, value)
    count = f"{len(given)} option(s)"
    source = file
    if file is None and (file := environment.get(CONFIG_VARIABLE)):
        source = f"{file} (from {CONFIG_VARIABLE})"
    if file:
        config = DCTConfig.from_file(file, rank=launcher_rank(environment))
        return (config.updated(changes), f"{source} and {count}") if given else (config, str(source))
    if not given:
        raise ConfigError(
            "no configuration: give --dct-config FILE, or single options (see --dct-help), or set "
            + CONFIG_VARIABLE
        )
    # Without a file, what has a switch of its own is off unless an option names it.
    for path in paths.values():
        part, _, key = path.rpartition(".")
        if key == "enabled" and part != "dct" and path not in given:
            _set(changes, path, any(other.startswith(f"{part}.") for other in given))
    return DCTConfig().updated(changes), f"{count} of the command line"


def _set(changes: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")[1:]
    for section in sections:
        changes = changes.setdefault(section, {})
    changes[key] = value


def _options() -> list[OptionDoc]:
    """Return every option that means something to Megatron."""
    from dct_plugin.config import DCTConfig, options

    return [option for option in options(DCTConfig()) if not option.path.startswith(_ELSEWHERE)]


def _name(path: str) -> str:
    """Return ``data-parallel-sparsity`` for ``dct.data_parallel.sparsity``."""
    return "-".join(path.split(".")[1:]).replace("_", "-")


def _resolve(flag: str, names: Mapping[str, str]) -> str:
    """Return the path of the option that a flag names."""
    wanted = flag.removeprefix(_PREFIX).replace("_", "-")
    if wanted.startswith("embedding-"):
        raise ConfigError(f"{flag} is for recommenders (DLRM) and does nothing with Megatron")
    if wanted in names:
        return names[wanted]
    close = difflib.get_close_matches(wanted, ["config", "help", *names], n=1)
    raise ConfigError(
        f"unknown argument {flag}; " + (f"did you mean {_PREFIX}{close[0]}?" if close else "see --dct-help")
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


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
    if not config.enabled:
        return dict.fromkeys(("pipeline", "tensor", "data_parallel"), "dct.enabled = false")
    model, data = config.model_parallel, config.data_parallel
    thresholds = data.sparsity or data.quality or data.parameters is not None
    nothing_left_out = {
        "model_parallel.pipeline": _nothing_compressed(model.pipeline),
        "model_parallel.tensor": _nothing_compressed(model.tensor),
        "data_parallel": "" if thresholds else "sparsity = 0",
    }
    states = {}
    for path, reason in nothing_left_out.items():
        reason = reason if pass_through else ""
        if path == "data_parallel" and not data.enabled:
            reason = "enabled = false"
        states[path.rpartition(".")[2]] = f"dct.{path}.{reason}" if reason else ""
    return states


def _nothing_compressed(section: ActivationConfig) -> str:
    """Return the setting because of which a section leaves everything to Megatron; empty if it does not."""
    if section.compresses:
        return ""
    return 'forward = "none"' if section.forward.label() == "none" else "forward.sparsity = 0"
