"""Test-only: the Python of the real Transformer Engine, from a wheel, with torch in place of its kernels."""

from __future__ import annotations

import enum
import importlib
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from support import engine_jobs, megatron_cpu
from support.megatron_gpt import Job, Outcome, train_all

_TYPES = (
    "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1"
)
#: What Megatron imports where it is there, and does not use here.
_ABSENT = ("attention", "cpu_offload", "cross_entropy", "optimizers", "permutation")


class _Package(ModuleType):
    """A package of which nothing has run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = self


class _Mock(_Package):
    """A package that has any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=name))
        return getattr(self, name)


class _OnCuda:
    """A module, or the one inside it, whose ``is_available`` says yes."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name == "is_available":
            return lambda: True
        found = getattr(self._module, name)
        return _OnCuda(found) if name == "cuda" else found


class _LayerNorm(torch.nn.LayerNorm):
    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel


def _product(first: Any, second: Any, *_: Any, **options: Any) -> tuple[torch.Tensor, Any, None, None]:
    """Stand in for ``general_gemm``: x W^T, dy W or dy^T x, by its layout."""
    bias, layout, gradient = options.get("bias"), options.get("layout", "TN"), None
    if layout == "TN":
        result = torch.nn.functional.linear(second, first, bias)
    elif layout == "NN":
        result = second @ first
    else:
        first, second = (each.reshape(-1, each.shape[-1]) for each in (first, second))
        result, gradient = second.t() @ first, second.sum(0)
    return result, gradient, None, None


def _kernels(root: Path) -> None:
    """Make the module of the kernels, whose enumerations mirror those of the Python files."""
    kernels = _Mock("transformer_engine_torch")
    kernels.DType = enum.IntEnum("DType", _TYPES.split(), start=0)
    mirrored = re.compile(
        r'assert \{(?:f"(\w*_)\{)?m\.name.*? for m in (\w+)\} == set\((?:tex\.)?(\w+)\.__mem'
    )
    for text in (path.read_text() for path in root.rglob("*.py")):
        for prefix, name, theirs in mirrored.findall(text):
            body = re.search(rf"class {name}\(.*?\):(.*?)\n\S", text, re.DOTALL)
            members = re.findall(r"^    (\w+) = ", body[1], re.MULTILINE) if body else []
            setattr(kernels, theirs, enum.IntEnum(theirs, [prefix + each for each in members], start=0))
    kernels.rmsnorm_fwd = kernels.rmsnorm_bwd = None
    kernels.layernorm_fwd = lambda x, weight, bias, eps, *_: torch.native_layer_norm(
        x, x.shape[-1:], weight, bias, eps
    )
    kernels.layernorm_bwd = lambda dy, x, mean, rstd, weight, *_: torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], mean, rstd, weight, torch.zeros_like(weight), [True, True, True]
    )


def _install(root: Path, version: str) -> None:
    _kernels(root)
    for name in ("", ".common", ".pytorch", ".pytorch.module", ".pytorch.onnx_extensions", ".pytorch.router"):
        kind = _Package if name in ("", ".pytorch", ".pytorch.module") else _Mock
        package = kind(f"transformer_engine{name}")
        package.__path__ = [f"{root}/{package.__name__.replace('.', '/')}"]
        if name:
            parent, _, child = package.__name__.rpartition(".")
            setattr(sys.modules[parent], child, package)
    sys.modules["transformer_engine"].__version__ = version  # type: ignore[attr-defined]
    importlib.import_module("transformer_engine.common.recipe")
    pytorch: Any = sys.modules["transformer_engine.pytorch"]
    pytorch.torch_version = lambda: (2, 13, 0)
    if version != "2.5.0":  # each imports the other
        importlib.import_module("transformer_engine.pytorch.tensor")
    modules: list[Any] = [
        importlib.import_module(f"transformer_engine.pytorch.module.{name}")
        for name in ("linear", "layernorm_linear", "base")
    ]
    for module in modules:
        module.general_gemm, module.get_workspace = _product, lambda: None
    pytorch.Linear, pytorch.LayerNormLinear = modules[0].Linear, modules[1].LayerNormLinear
    modules[2].torch = _OnCuda(torch)
    for name in ("DotProductAttention", "GroupedLinear"):
        setattr(pytorch, name, type(name, (torch.nn.Module,), {}))
    pytorch.LayerNorm, pytorch.ops = _LayerNorm, SimpleNamespace(Sequential=object, FusibleOperation=object)
    importlib.import_module("transformer_engine.pytorch.fp8")
    for name in _ABSENT:
        sys.modules[f"transformer_engine.pytorch.{name}"] = None  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]


def train_with_source(rank: int, world_size: int, root: Path, version: str, jobs: list[Job]) -> list[Outcome]:
    """Several runs one after the other in the same processes, with the files in ``root``."""
    engine_jobs.forget_megatron()
    megatron_cpu.install()
    _install(root, version)
    return train_all(rank, world_size, jobs)
