"""Puts the plugin into what the hosts' own tests train, in processes with this folder on ``PYTHONPATH``.

Every DeepSpeed engine gets a section, every DistributedDataParallel without a hook of its own gets one, every
Accelerator attaches, and torchft's group of gloo becomes the plugin's. The section changes no result. Without
``DCT_INJECTED`` in the environment the plugin stays out.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from types import ModuleType
from typing import Any

from dct_plugin.integrations.host.patching import when_imported

#: Everything passes the thresholding code, and nothing is left out.
SECTION = {"data_parallel": {"sparsity": 0, "value_dtype": "fp32", "min_numel": 1, "warmup_steps": 0}}


def note() -> None:
    """Note that the plugin took part in the test that runs."""
    with open(os.environ["DCT_CURRENT_TEST"]) as current, open(os.environ["DCT_INJECTED"], "a") as notes:
        notes.write(f"{current.read()}\n")


def replaced(owner: Any, name: str) -> Any:
    """Replace a function by the decorated one, which gets the original as its first argument."""
    original = getattr(owner, name)

    def decorate(function: Any) -> Any:
        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return function(original, *arguments, **keywords)

        setattr(owner, name, call)
        return function

    return decorate


def ddp(module: ModuleType) -> None:
    @replaced(module.DistributedDataParallel, "_pre_forward")
    def _pre_forward(original: Any, model: Any, *inputs: Any, **keywords: Any) -> Any:
        if not model._comm_hooks and "dct_tried" not in model.__dict__:
            from dct_plugin import DCTState

            model.__dict__["dct_tried"] = True
            DCTState(SECTION).register(model)
            note()
        return original(model, *inputs, **keywords)


def accelerate(module: ModuleType) -> None:
    @replaced(module.Accelerator, "prepare")
    def prepare(original: Any, accelerator: Any, *objects: Any, **keywords: Any) -> Any:
        import torch

        from dct_plugin.accelerate import attach

        prepared = original(accelerator, *objects, **keywords)
        each = prepared if isinstance(prepared, tuple) else (prepared,)
        models = [m for m in each if isinstance(m, torch.nn.parallel.DistributedDataParallel)]
        optimizers = [o for o in each if isinstance(o, torch.optim.Optimizer)]
        if len(models) == len(optimizers) == 1 and not models[0]._comm_hooks:
            attach(accelerator, models[0], optimizers[0], SECTION)
            note()
        return prepared


def fp16_on_cpu(module: ModuleType) -> None:
    """Have DeepSpeed take fp16 on CPUs: only its list of types lacks it, and most of its tests use it."""
    import torch

    if (accelerator := module.get_accelerator()).device_name() == "cpu":
        accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
        accelerator.is_fp16_supported = lambda: True


def bf16_on_cpu(module: ModuleType) -> None:
    """Have DeepSpeed's tests of bf16 run on CPUs: they ask for CUDA's version alone."""
    module.bf16_required_version_check = lambda accelerator_check=True: True  # type: ignore[attr-defined]


def deepspeed(module: ModuleType) -> None:
    @replaced(module, "initialize")
    def initialize(original: Any, *arguments: Any, **keywords: Any) -> Any:
        given = inspect.signature(original).bind_partial(*arguments, **keywords).arguments
        path = getattr(given.get("args"), "deepspeed_config", None)
        config = given.get("config") or given.get("config_params") or path
        if isinstance(config, str) and os.path.exists(config):
            with open(config) as file:
                config = json.load(file)
        if isinstance(config, dict):
            given["config"] = {"dct": SECTION, **config}
            given.pop("config_params", None)
            if path is not None:
                given["args"].deepspeed_config = None
            note()
        return original(**given)


def torchft(module: ModuleType) -> None:
    from dct_plugin.torchft import ProcessGroupGloo

    class Injected(ProcessGroupGloo):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(SECTION, **inspect.signature(plain).bind(*arguments, **keywords).arguments)

    plain = module.ProcessGroupGloo
    module.ProcessGroupGloo = module.process_group.ProcessGroupGloo = Injected

    @replaced(module.Manager, "__init__")
    def __init__(original: Any, manager: Any, *arguments: Any, **keywords: Any) -> None:
        original(manager, *arguments, **keywords)
        group = manager._pg
        while group is not None and not isinstance(group, Injected):
            group = getattr(group, "__dict__", {}).get("_pg")
        if group is not None:
            group.follow(manager)
            note()


when_imported("deepspeed.accelerator", fp16_on_cpu)
when_imported("unit.util", bf16_on_cpu)
if "DCT_INJECTED" in os.environ:
    when_imported("torch.nn.parallel.distributed", ddp)
    when_imported("accelerate", accelerate)
    when_imported("deepspeed", deepspeed)
    when_imported("torchft", torchft)
