"""megatron-core on CPU with gloo, for tests and measurements; ``install()`` comes before its import.

megatron-core asks for CUDA devices, streams and random-number states by name; here they are the CPU's.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


class _Stream:
    """A stream or an event: everything has already happened."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None


def forget_megatron() -> None:
    """Have megatron-core, and what the plugin holds of it, imported anew."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "megatron" or name.startswith("dct_plugin.integrations.megatron"):
            del sys.modules[name]


def install() -> None:
    """Make torch's CUDA interface serve the CPU. Idempotent."""
    owner: Any = torch
    if getattr(owner, "_dct_cpu_shim", False):
        return
    owner._dct_cpu_shim = True
    _replace_cuda(owner.cuda)
    owner.accelerator.is_available = lambda: False  # torch 2.15's optimizers ask for its stream
    factories = (
        "empty zeros ones full tensor as_tensor arange rand randn empty_like zeros_like ones_like full_like"
    )
    for name in factories.split():
        make_on_cpu(owner, name)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        make_on_cpu(owner.Tensor, name)
    for kind in (owner.Tensor, owner.nn.Module):
        make_on_cpu(kind, "to", first=True)
        kind.cuda = lambda self, *a, **k: self
    owner.Tensor.type = _named_for_optimizers(owner.Tensor.type)


def _replace_cuda(cuda: Any) -> None:
    """Make the module ``torch.cuda`` answer for a device where everything has already happened."""
    constants = {
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (8, 0),
        "memory_allocated": 0,
    }
    constants |= {"max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0}
    constants |= {"get_device_name": "cpu", "set_device": None, "synchronize": None, "empty_cache": None}
    for name, value in constants.items():
        setattr(cuda, name, lambda *a, _value=value, **k: _value)
    cuda.memory_stats = lambda *a, **k: collections.defaultdict(int)
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None
    cuda.manual_seed_all = lambda seed: None  # torch.manual_seed() calls this one
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *a, **k: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *a, **k: None)


def make_on_cpu(owner: Any, name: str, *, first: bool = False) -> None:
    """Have a function make tensors on the CPU where it is asked for CUDA, also by its ``first`` argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if keywords and _is_cuda(keywords.get("device")):
            keywords["device"] = "cpu"
        if first and len(arguments) > 1 and _is_cuda(arguments[1]):
            arguments = (arguments[0], "cpu", *arguments[2:])
        return original(*arguments, **keywords)

    setattr(owner, name, wrapper)


def _named_for_optimizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type``: Megatron's optimizers tell tensors by the names of their CUDA types."""

    def type_name(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = original(self, *arguments, **keywords)
        if isinstance(result, str) and "/optimizer/" in sys._getframe(1).f_code.co_filename:
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_name


def patch_megatron() -> None:
    """Patch two places inside megatron-core; call it after :func:`install`."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    def norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **keywords: Any) -> torch.nn.Module:
        made: Any = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.data = parameter.data.to(config.params_dtype)
            parameter.sequence_parallel = config.sequence_parallel
        return made

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(norm)  # the original refuses sequence parallelism
