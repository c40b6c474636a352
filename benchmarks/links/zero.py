"""DeepSpeed ZeRO-0 to 3: dense in fp32, dense with bf16 communication, and with ``dct`` sections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import deepspeed
from deepspeed.utils import groups
from torch import nn

from dct_plugin.data_parallel import exact_updates
from dct_plugin.recommender.links.method import Method

from .ddp import ADAMW
from .perceptron import BATCH, apart, batch, perceptron, width_of

#: The section of the ready files ``configs/deepspeed_zero*_dct.json``, without their dense start.
SECTION: dict[str, dict[str, Any]] = {
    "data_parallel": {"sparsity": 0.99, "value_dtype": "bf16", "feedback": "local"}
}
METHODS: dict[str, dict[str, Any]] = {
    "dense fp32": {},
    "dense bf16": {"communication_data_type": "bf16"},
    "DCT 0.99": {"dct": SECTION},
}
#: The same with AdamW, whose thresholds get step-ahead.
ADAMW_METHODS: dict[str, dict[str, Any]] = {
    name: {"dct": {"data_parallel": {"warmup_steps": 2, "sparsity_warmup_steps": 2, **settings}}}
    for name, settings in (
        ("DCT 0.99", {"sparsity": 0.99}),
        ("DCT 0.99, updates 0.97", {"sparsity": 0.99, "parameters": {}}),
        ("DCT 0 int8", {"sparsity": 0, "value_dtype": "int8"}),
    )
}
#: Under ZeRO-1 and 2, updated weights are thresholded, too.
UPDATES = {"data_parallel": {**SECTION["data_parallel"], "parameters": {}}}


class Zero:
    """Variants are ``ZeRO-0`` to ``ZeRO-3``, with momentum, or ``ZeRO-0, AdamW``, and so on; ``parameters``
    (millions) says how large the model is, ``batch`` how many samples a rank has.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._width, self._per_node = width_of(options["parameters"]), int(options.get("per_node", 1))
        self._data = batch(self._width, int(options.get("batch", BATCH)))
        self._engines: list[Any] = []

    def open(self, variant: str) -> list[Method]:
        adamw, stage = variant.endswith(ADAMW), int(variant.removeprefix("ZeRO-")[0])
        job = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}} if adamw else {}
        methods = []
        if stage == 0:
            engine = self._engine(stage, job)
            engine.allreduce_gradients = lambda *arguments, **keywords: None
            around = partial(apart, list(engine.module.parameters()))
            methods.append(Method("ideal", partial(self._step, engine), around=around))
        chosen = {**METHODS} if stage in (0, 3) else {**METHODS, "DCT 0.99, updates 0.97": {"dct": UPDATES}}
        if self._per_node > 1:
            chosen |= {
                f"{name}, nodes": {"dct": {"data_parallel": {**section["dct"]["data_parallel"], **nodes}}}
                for name, section in chosen.items()
                for nodes in [{"nodes": self._per_node}]
                if section.get("dct")
            }
            if stage == 3:  # as in large models, of which not all weights stay until the backward pass
                zero = {"stage": 3, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1}
                chosen = {name: {**section, "zero_optimization": zero} for name, section in chosen.items()}
                zero = zero | {"zero_hpz_partition_size": self._per_node}
                updates = {"data_parallel": {**UPDATES["data_parallel"], "nodes": self._per_node}}
                chosen |= {
                    "hpZ": {"zero_optimization": zero},
                    "DCT 0.99, updates 0.97, hpZ": {"zero_optimization": zero, "dct": updates},
                }
        if adamw:
            dense = {name: section for name, section in METHODS.items() if "dct" not in section}
            without = "DCT 0.99, updates 0.97" if stage in (0, 3) else ""
            chosen = dense | {name: s for name, s in ADAMW_METHODS.items() if name != without}
        return methods + [self._method(stage, name, job | section) for name, section in chosen.items()]

    def _method(self, stage: int, name: str, section: Mapping[str, Any]) -> Method:
        engine = self._engine(stage, section)
        attached = engine.__dict__.get("dct")
        metrics = [] if attached is None else [attached.metrics]
        return Method(name, partial(self._step, engine), metrics, warmup=3 if attached is None else 10)

    def close(self) -> None:
        for engine in self._engines:
            engine.destroy()
        self._engines.clear()
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # later engines of DeepSpeed would have copies, too

    def _engine(self, stage: int, section: Mapping[str, Any]) -> Any:
        model = perceptron(self._width)
        config = {
            "train_micro_batch_size_per_gpu": len(self._data[0]),
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            **section,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._engines.append(engine)
        return engine

    def _step(self, engine: Any) -> None:
        x, y = self._data
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()


#: Sections of fine-tuning, see ``docs/methods.md#exact-updates``.
FINE_TUNING: dict[str, dict[str, Any]] = {
    "dense": {},
    "exact": {"sparsity": 0, "value_dtype": "fp32", "parameters": "exact"},
    "exact, gradients in int8": {"sparsity": 0, "value_dtype": "int8", "parameters": "exact"},
    "DCT 0.99, exact": {"sparsity": 0.99, "feedback": "local"},
    "DCT 0.99, updates 0.97": {"sparsity": 0.99, "feedback": "local", "parameters": {}},
}


#: The same for ZeRO-3, whose passes gather the weights.
FINE_TUNING_3: dict[str, dict[str, Any]] = {
    "dense": {},
    "gradients in int8": {"sparsity": 0, "value_dtype": "int8", "feedback": "none"},
    "gradients and copies in int8": {
        "sparsity": 0, "value_dtype": "int8", "feedback": "none", "parameters": "int8",
    },
}  # fmt: skip


class FineTuning(Zero):
    """Fine-tuning at 1e-5 in bf16 with AdamW: variants are ``ZeRO-1`` to ``ZeRO-3``.

    DeepSpeed's own quantised gathers (qwZ) are not beside it: they need ZeRO-3 and kernels for CUDA.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        x, y = self._data
        self._data = x.bfloat16(), y.bfloat16()
        exact_updates.PERIOD = 16  # links change between the blocks of a method: it is to choose anew

    def open(self, variant: str) -> list[Method]:
        job = {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        }
        stage = int(variant.removeprefix("ZeRO-"))
        return [
            self._method(stage, name, {**job, **({"dct": {"data_parallel": section}} if section else {})})
            for name, section in (FINE_TUNING_3 if stage == 3 else FINE_TUNING).items()
        ]
