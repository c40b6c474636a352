"""The facts of a DeepSpeed job, from its engine or its JSON, that decide how it takes its ``dct`` section.

:mod:`.rules` judges it. :func:`.support.job_of` reads the same of an engine. This module imports neither
torch nor DeepSpeed: ``dct config check`` starts at once, and on machines that have neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..host.versions import installed, parse
from .section import SECTION, backend_name

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
        steps: Optimizer steps for which the JSON's scheduler is made; None where it does not say.
        trains: Whether there is an optimizer.
        exchanges_momentum: Whether the optimizer exchanges its momentum through the plugin.
        own_backend: The backend by which the optimizer exchanges its momentum by itself.
        pipeline: Whether it is the pipeline engine.
        tied_weights: Whether stages of the pipeline have weights in common.
        experts: Whether layers have experts on several ranks.
        gathers_weights: Whether DeepSpeed gathers weights after a step, where updates can be thresholded.
        engine, wrapper: Names of the classes of the engine and of DeepSpeed's wrapper around the optimizer,
            if they are not supported; else empty.
        offload: Key and device of what is offloaded.
        model_parallel: Tensor or model parallelism, in words; empty without.
        sequence_ranks: Ranks of sequence parallelism.
        quantized_gradients, zenflow, deepcompile, autoep: Features of DeepSpeed that are on.
        autocast_fp16: Whether ``torch_autocast`` scales the loss.
        separate_gradients: Whether ZeRO reduces gradients that are not contiguous, and may lose them on CPU.
        ranks_per_copy: ZeRO-3: ranks that have a copy of the weights between them (hpZ); 1 without.
        version: Version of DeepSpeed; empty where none is installed.
    """

    stage: int = 0
    precision: str = "fp32"
    optimizer: str = ""
    momentum: float = 0.0
    steps: int | None = None
    trains: bool = True
    exchanges_momentum: bool = False
    own_backend: str | None = None
    pipeline: bool = False
    tied_weights: bool = False
    experts: bool = False
    gathers_weights: bool = False
    engine: str = ""
    wrapper: str = ""
    offload: tuple[tuple[str, str], ...] = ()
    model_parallel: str = ""
    sequence_ranks: int = 1
    quantized_gradients: bool = False
    zenflow: bool = False
    deepcompile: bool = False
    autoep: bool = False
    autocast_fp16: bool = False
    separate_gradients: bool = False
    ranks_per_copy: int = 1
    version: str = ""

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Job:
        """Return what a DeepSpeed JSON says; what the script decides (the model, ``"auto"``) is left out.

        A section that compresses pipeline stages or experts says that the model has them.
        """
        zero = _object(content, "zero_optimization")
        stage = STAGES.get(str(zero.get("stage", 0)), 0)
        precision = "fp16" if _on(content, "fp16") else "bf16"
        if precision == "bf16" and not (_on(content, "bf16") or _on(content, "bfloat16")):
            precision = "fp32"
        optimizer, backend = _object(content, "optimizer"), backend_name(content)
        places = _object(_object(content, SECTION), "model_parallel")
        pipeline = bool(_object(places, "pipeline")) or "pipeline" in content
        dtype = str(_object(content, "torch_autocast").get("dtype"))
        ranks = int(_number(_object(content, "tensor_parallel").get("autotp_size")))
        sequence = content.get("sequence_parallel_size", 1)
        version, schedule = installed("deepspeed") or "", _object(_object(content, "scheduler"), "params")
        loses_loose = () < parse(version) <= (0, 19, 0)
        return cls(
            stage=stage,
            precision=precision,
            optimizer=str(optimizer.get("type", "")),
            momentum=_number(_object(optimizer, "params").get("momentum")),
            steps=int(_number(schedule.get("total_num_steps"))) or None,
            exchanges_momentum=backend == SECTION,
            own_backend=None if backend == SECTION else backend,
            pipeline=pipeline,
            experts=bool(_object(places, "experts")) or places.get("expert_gradients") is True,
            gathers_weights=stage in (1, 2) or (stage == 0 and precision == "bf16" and pipeline),
            engine="DeepSpeedHybridEngine" if _on(content, "hybrid_engine") else "",
            offload=tuple(
                (key, str(_object(zero, key)["device"]))
                for key in ("offload_optimizer", "offload_param")
                if _object(zero, key).get("device", "none") != "none"
            ),
            model_parallel=f"tensor parallelism (tensor_parallel.autotp_size = {ranks})" if ranks > 1 else "",
            sequence_ranks=int(_number(sequence)) or 1,
            quantized_gradients=zero.get("zero_quantized_gradients") is True,
            zenflow=bool(zero.get("zenflow")),
            deepcompile=_object(content, "compile").get("deepcompile") is True,
            autoep=_on(content, "expert_parallel"),
            autocast_fp16=_on(content, "torch_autocast")
            and dtype in ("fp16", "float16", "half", "torch.float16"),
            separate_gradients=stage in (1, 2) and zero.get("contiguous_gradients") is False and loses_loose,
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
