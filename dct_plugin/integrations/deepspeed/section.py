"""The ``dct`` section in a DeepSpeed configuration: its name, where it is found, and what is close to it.

This module imports the standard library only: it is read for every engine, with or without the section.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from ..host.deepspeed_keys import near_misses
from ..host.measured_job import FACTS, VARIABLE
from ..host.measured_job import SECTION as MEASURING

SECTION = "dct"

#: Keys of the section.
KEYS = frozenset(("enabled", "data_parallel", "model_parallel", "embedding", "kernels", "metrics"))

#: Top-level keys of the JSON that the plugin reads.
READ_BY_PLUGIN = (SECTION, "dlrm")

#: The topic of the agreement between ranks at start-up, see :mod:`..host.startup`.
TOPIC = "deepspeed"

#: The attribute in which an optimizer names its own class of gradient path. Such an optimizer asks for the
#: plugin, with or without a section.
PATH_ATTRIBUTE = "dct_gradient_path"


def configuration_of(engine: Any) -> Any:
    """Return an engine's JSON as it was written; None where it cannot be found."""
    config = getattr(engine.__dict__.get("_config"), "_param_dict", None)
    return config if isinstance(config, dict) else engine.__dict__.get("config")


def inner_optimizer(engine: Any) -> Any:
    """Return the optimizer that makes the steps, without DeepSpeed's wrapper around it."""
    optimizer = engine.__dict__.get("optimizer")
    return getattr(optimizer, "optimizer", optimizer)


def gradient_path_of_optimizer(engine: Any) -> Any:
    """Return the class of gradient path that the engine's optimizer brings; None for ordinary optimizers."""
    return getattr(inner_optimizer(engine), PATH_ATTRIBUTE, None)


def find_section(engine: Any) -> Any:
    """Return the ``dct`` section of an engine's JSON as it was written, None where there is none.

    An optimizer with a gradient path of its own needs no section: it gets an empty one, hence the defaults.
    """
    if VARIABLE in os.environ:  # the job is measured by `dct advise`
        FACTS["stage"] = engine.zero_optimization_stage()
        return MEASURING
    config = configuration_of(engine)
    if not isinstance(config, dict):
        warnings.warn(
            "dct-plugin: the configuration of this DeepSpeed cannot be read; "
            f"a {SECTION!r} section has no effect",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return config.get(SECTION, None if gradient_path_of_optimizer(engine) is None else {})


def backend_name(config: Any) -> Any:
    """Return ``optimizer.params.comm_backend_name`` of a JSON, None where it is not set."""
    try:
        return config["optimizer"]["params"].get("comm_backend_name")
    except (AttributeError, KeyError, TypeError):
        return None


def asks_for_slot(config: Any) -> bool:
    """Return whether a JSON has momentum exchanged through the plugin."""
    return bool(backend_name(config) == SECTION)


def asks(config: Any) -> bool:
    """Return whether a JSON asks for the plugin."""
    return isinstance(config, dict) and (SECTION in config or asks_for_slot(config))


def misplaced_section(config: Any) -> tuple[str, Any] | None:
    """Return what is wrong with a JSON whose section nothing reads, and that section; None if it has none.

    It has a mistyped name, or stands inside another object.
    """
    content = config if isinstance(config, dict) else {}
    for key in near_misses(content, SECTION):
        hint = f"did you mean {SECTION!r}? (A leading underscore keeps it out of the way.)"
        return f"the DeepSpeed configuration has a section {key!r}, which nothing reads; {hint}", content[key]
    for outer, value in content.items():
        if isinstance(value, dict) and SECTION in value:
            hint = "move it one level up, to the top of the file"
            return f"{outer}.{SECTION}: nothing reads the section there; {hint}", value[SECTION]
    return None
