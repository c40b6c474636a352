"""The ``dct`` section in a DeepSpeed JSON, and the facts of its job.

This module imports neither torch nor DeepSpeed: it is read for every engine, and by ``dct config check``.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..host.measured_job import SECTION as MEASURING
from ..host.measured_job import VARIABLE
from ..host.versions import installed


def near_misses(keys: Iterable[object], section: str) -> list[str]:
    """Return the keys that were probably meant to be ``section``, which is not among them.

    Such a key is the plugin's whole name, or the section's name in another case, with letters in another
    order, or one edit away from it (one letter more, fewer or different, with the same first letter).
    """
    found = []
    for key in map(str, keys):
        plain = re.sub(r"[^a-z]", "", key.lower())
        least = 0.66 if plain[:1] == section[:1] else 0.8
        is_near = difflib.SequenceMatcher(None, plain, section).ratio() > least
        ours = plain in (section, f"{section}plugin", f"{section}section") or sorted(plain) == sorted(section)
        if key != section and key[:1] not in "_#/":
            found += [key] if ours or (is_near and abs(len(plain) - len(section)) < 2) else []
    return found


SECTION = "dct"

#: Keys of the section.
KEYS = frozenset(("enabled", "data_parallel", "model_parallel", "embedding", "kernels", "metrics"))

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
    """Return ``optimizer.params.comm_backend_name`` of a JSON, None where it is not set; ``"dct"`` has the
    momentum exchanged through the plugin.
    """
    try:
        return config["optimizer"]["params"].get("comm_backend_name")
    except (AttributeError, KeyError, TypeError):
        return None


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


#: ZeRO stages, as they may be written.
STAGES = {str(stage): stage for stage in range(4)}


@dataclass(frozen=True)
class Job:
    """A DeepSpeed job, as far as the plugin depends on it.

    Attributes:
        stage: ZeRO stage.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        optimizer: Name of the optimizer's class; empty where it is not known yet.
        momentum: Momentum of the optimizer's groups, the largest.
        clips: Whether gradients are clipped by their norm.
        lr: Highest learning rate of optimizer and scheduler; infinity where the JSON does not say one.
        steps: Optimizer steps for which the JSON's scheduler is made; None where it does not say.
        trains: Whether there is an optimizer.
        exchanges_momentum: Whether the optimizer exchanges its momentum through the plugin.
        own_backend: The backend by which the optimizer exchanges its momentum by itself.
        pipeline: Whether it is the pipeline engine.
        tied_weights: Whether stages of the pipeline have weights in common.
        experts: Whether layers have experts on several ranks.
        tables: Whether there are sharded tables that DeepSpeed takes for copies of each other.
        gathers_weights: Whether DeepSpeed gathers weights after a step, where updates can be thresholded.
        engine, wrapper: Names of the classes of the engine and of DeepSpeed's wrapper around the optimizer,
            if they are not supported; else empty.
        offload: Keys and devices of what is offloaded; empty without.
        model_parallel: Tensor or model parallelism, in words; empty without.
        sequence_ranks: Ranks of sequence parallelism; 0 without.
        quantized_gradients, zenflow, deepcompile, autoep: Features of DeepSpeed that are on.
        unmanaged_accumulation: Whether the script decides in each ``step()`` where a step ends.
        autocast_fp16: Whether ``torch_autocast`` scales the loss.
        ranks_per_copy: ZeRO-3: ranks that have a copy of the weights between them (hpZ); 1 without.
        version: Version of DeepSpeed; empty where none is installed.
    """

    stage: int = 0
    precision: str = "fp32"
    optimizer: str = ""
    momentum: float = 0.0
    clips: bool = False
    lr: float = math.inf
    steps: int | None = None
    trains: bool = True
    exchanges_momentum: bool = False
    own_backend: str | None = None
    pipeline: bool = False
    tied_weights: bool = False
    experts: bool = False
    tables: bool = False
    gathers_weights: bool = False
    engine: str = ""
    wrapper: str = ""
    offload: str = ""
    model_parallel: str = ""
    sequence_ranks: int = 0
    quantized_gradients: bool = False
    zenflow: bool = False
    unmanaged_accumulation: bool = False
    deepcompile: bool = False
    autoep: bool = False
    autocast_fp16: bool = False
    ranks_per_copy: int = 1
    version: str = ""

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Job:
        """Return what a DeepSpeed JSON says; what the script decides (the model, ``"auto"``) is left out.

        A section that compresses pipeline stages or experts says that the model has them.
        """
        old_form = content.get("zero_optimization") is True
        zero = {"stage": 1} if old_form else _object(content, "zero_optimization")
        stage = STAGES.get(str(zero.get("stage", 0)), 0)
        kinds = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
        precision = next((kind for key, kind in kinds.items() if _on(content, key)), "fp32")
        optimizer, backend = _object(content, "optimizer"), backend_name(content)
        given = _object(optimizer, "params")
        places = _object(_object(content, SECTION), "model_parallel")
        pipeline = bool(_object(places, "pipeline")) or "pipeline" in content
        dtype = str(_object(content, "torch_autocast").get("dtype"))
        ranks = int(_number(_object(content, "tensor_parallel").get("autotp_size")))
        sequence = content.get("sequence_parallel_size", 1)
        version, schedule = installed("deepspeed") or "", _object(_object(content, "scheduler"), "params")
        return cls(
            stage=stage,
            precision=precision,
            optimizer=str(optimizer.get("type", "")),
            momentum=_number(given.get("momentum")),
            clips=_number(content.get("gradient_clipping")) > 0,
            lr=max(_number(given.get("lr")), _number(schedule.get("warmup_max_lr"))) or math.inf,
            steps=int(_number(schedule.get("total_num_steps"))) or None,
            exchanges_momentum=backend == SECTION,
            own_backend=None if backend == SECTION else backend,
            pipeline=pipeline,
            experts=bool(_object(places, "experts")) or places.get("expert_gradients") is True,
            gathers_weights=stage in (1, 2) or (stage == 0 and precision == "bf16" and pipeline),
            engine="DeepSpeedHybridEngine" if _on(content, "hybrid_engine") else "",
            offload=", ".join(
                f"zero_optimization.{key}.device = {device}"
                for key in ("offload_optimizer", "offload_param")
                if (device := _object(zero, key).get("device", "none")) != "none"
            ),
            model_parallel=f"tensor parallelism (tensor_parallel.autotp_size = {ranks})" if ranks > 1 else "",
            sequence_ranks=sequence if isinstance(sequence, int) and sequence > 1 else 0,
            quantized_gradients=zero.get("zero_quantized_gradients") is True,
            zenflow=bool(zero.get("zenflow")),
            unmanaged_accumulation=content.get("managed_gradient_accumulation") is False,
            deepcompile=_object(content, "compile").get("deepcompile") is True,
            autoep=_on(content, "expert_parallel"),
            autocast_fp16=_on(content, "torch_autocast")
            and dtype in ("fp16", "float16", "half", "torch.float16"),
            ranks_per_copy=int(_number(zero.get("zero_hpz_partition_size", 1))),
            version=version,
        )


def _object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


def _on(content: Mapping[str, Any], key: str) -> bool:
    return _object(content, key).get("enabled") is True


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
