"""Transformer Engine's linears under the tensor-parallel hook, on CPU with gloo.

Transformer Engine does not import without CUDA. A stub with its order of communication stands in for it
(``tests/support/engine_stub``); where ``TRANSFORMER_ENGINE_WHEELS`` names a folder of its wheels, so does its
own Python, with torch in place of its kernels. megatron-core is the real one.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import json
import os
import re
import sys
import zipfile
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from support import ROOT, megatron_cpu, processes
from support.megatron_cpu import forget_megatron
from support.megatron_gpt import Job, Outcome, freeze_linears, train_all
from test_megatron_hooks import assert_learns, assert_same, losses, ratio, section

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

SIGNATURES = Path(__file__).with_name("transformer_engine_signatures.json")
#: Also what ``pip download --no-deps transformer_engine==VERSION`` brings there.
WHEELS = sorted(
    Path(os.environ.get("TRANSFORMER_ENGINE_WHEELS", "/nowhere")).glob("transformer_engine-*.whl")
)
needs_wheels = pytest.mark.skipif(
    not WHEELS,
    reason="TRANSFORMER_ENGINE_WHEELS names no folder with wheels: pip download --no-deps transformer_engine",
)
TENSOR, SEQUENCE = (
    Job(micro_batches=2, tp=2, engine=True),
    Job(micro_batches=2, tp=2, sequence_parallel=True, engine=True),
)
EXACT = section(tensor=0.0, gather=True)


def _use_stub() -> None:
    """Have megatron-core imported anew, with the stub of Transformer Engine."""
    forget_megatron()
    sys.path.insert(0, str(ROOT / "tests" / "support" / "engine_stub"))


def _train_with_engine(rank: int, world_size: int, jobs: list[Job]) -> list[Outcome]:
    """Make several runs one after the other in the same processes."""
    _use_stub()
    return train_all(rank, world_size, jobs)


def run(*jobs: Job) -> list[list[Outcome]]:
    return [list(each) for each in zip(*processes.run(2, _train_with_engine, list(jobs)), strict=True)]


def told(outcomes: list[Outcome]) -> str:
    (line,) = (line for line in outcomes[0].log if "active: " in line)
    return line.partition("active: ")[2]


def test_with_sequence_parallelism() -> None:
    job = replace(SEQUENCE, evaluate=True)
    megatron, plain, same, frozen, frozen_same, sparse, gathered, recomputed = run(
        replace(job, engine=False),
        job,
        job.with_dct(EXACT, through_codec=True),
        replace(job, prepare=freeze_linears),
        replace(job.with_dct(EXACT, through_codec=True), prepare=freeze_linears),
        job.with_dct(section(tensor=0.9), lr=2e-3, steps=6),
        job.with_dct(section(tensor=0.9, gather=True), lr=2e-3, steps=6),
        job.with_dct(section(tensor=0.9, gather=True), lr=2e-3, steps=6, recompute="full"),
    )
    # The stub trains what Megatron's own linears train. Rounding depends on where their memory lies.
    assert losses(plain) == pytest.approx(losses(megatron), rel=1e-6)
    assert_same(plain, same, {"tensor"})
    assert_same(frozen, frozen_same, {"tensor"})
    for outcomes in (sparse, gathered, recomputed):
        assert_learns(outcomes)
    assert losses(recomputed) == losses(gathered)
    assert ratio(sparse, "tensor") > 8
    assert ratio(sparse, "tensor_gradient") > 12
    assert ratio(gathered, "tensor") > 8
    # Inputs of column-parallel linears cross, forward and, for the weight's gradient, backward.
    crossed = [some[0].classes["tensor"]["dense_bytes"] for some in (sparse, gathered)]
    assert crossed[1] > 2 * crossed[0]
    assert told(sparse) == "tensor on 4 of 9 parallel linear layers"
    assert told(gathered) == "tensor on 8 of 9 parallel linear layers"


def test_without_sequence_parallelism() -> None:
    megatron, plain, same, sparse = run(
        replace(TENSOR, engine=False),
        TENSOR,
        TENSOR.with_dct(EXACT, through_codec=True),
        TENSOR.with_dct(section(tensor=0.9), lr=2e-3, steps=6),
    )
    assert losses(plain) == pytest.approx(losses(megatron), rel=1e-6)
    assert_same(plain, same, {"tensor"})
    assert_learns(sparse)
    assert ratio(sparse, "tensor") > 8
    assert told(sparse) == "tensor on 4 of 9 parallel linear layers"


# -- the Python of the real one, with torch in place of its kernels ---

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


def _train_with_source(
    rank: int, world_size: int, root: Path, version: str, jobs: list[Job]
) -> list[Outcome]:
    """Make several runs one after the other in the same processes, with the files in ``root``."""
    forget_megatron()
    megatron_cpu.install()
    _install(root, version)
    return train_all(rank, world_size, jobs)


@needs_wheels
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name.split("-")[1])
def test_with_the_python_of_the_real_one(wheel: Path, tmp_path: Path) -> None:
    """Its kernels are torch's here. Gathers, sums and their order are its own."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    jobs = [
        replace(SEQUENCE, engine=False),
        SEQUENCE,
        SEQUENCE.with_dct(EXACT, through_codec=True),
        SEQUENCE.with_dct(section(tensor=0.9, gather=True)),
        TENSOR,
        TENSOR.with_dct(EXACT, through_codec=True),
    ]
    version = wheel.name.split("-")[1]
    found = zip(*processes.run(2, _train_with_source, tmp_path, version, jobs), strict=True)
    megatron, plain, same, sparse, tensor, tensor_same = (list(each) for each in found)
    assert losses(plain) == losses(megatron)
    assert_same(plain, same, {"tensor"})
    assert_same(tensor, tensor_same, {"tensor"})
    assert ratio(sparse, "tensor") > 8
    assert ratio(sparse, "tensor_gradient") > 12


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    _use_stub()
    megatron_cpu.install()
    import transformer_engine as te
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine as extension
    from transformer_engine.pytorch.module import layernorm_linear, linear

    from dct_plugin.errors import DCTError
    from dct_plugin.integrations.host.patching import Patches
    from dct_plugin.integrations.megatron import engine

    originals = {name: getattr(layernorm_linear, name) for name in dir(layernorm_linear)}
    collectives = SimpleNamespace(gather_trip=None)

    def enter(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    def made() -> tuple[engine.EngineLinears, Patches]:
        patches = Patches()
        return engine.EngineLinears(patches, enter, lambda *_: (collectives, None), gather=True), patches

    def bare(kind: type, **attributes: Any) -> Any:
        module = kind.__new__(kind)
        vars(module).update(attributes)
        return module

    parallel = {"parallel_mode": "row", "tp_size": 2, "tp_group": None, "sequence_parallel": True}
    rows = {**parallel, "gemm_bias_unfused_add": False}
    found: dict[str, str] = {}
    engines, patches = made()
    row, fused = extension.TERowParallelLinear, extension.TELayerNormColumnParallelLinear
    assert engines.mode(bare(row, **rows), "here") == "row"
    assert engines.mode(bare(row, **{**rows, "gemm_bias_unfused_add": True}), "here") is None
    assert engines.mode(bare(row, **{**rows, "tp_size": 1}), "here") is None
    assert engines.mode(bare(te.pytorch.Linear, **{**parallel, "tp_size": 1}), "here") is None
    assert engine.is_engine_linear(bare(extension.TEFusedMLP))
    assert not engine.is_engine_linear(bare(te.pytorch.DotProductAttention))
    gathers = [vars(module)["gather_along_first_dim"] for module in (layernorm_linear, linear)]
    assert gathers[0] is not gathers[1] is te.pytorch.distributed.gather_along_first_dim

    def quantized() -> None:
        with te.pytorch.fp8.fp8_autocast():
            engines.linears[0].forward(bare(row, **rows), SimpleNamespace(device=None))

    def gathered() -> None:
        gather = engine._Gather(collectives, None)
        engines._during(gather, lambda: layernorm_linear.gather_along_first_dim(None, None, False, "scales"))

    def old() -> None:
        utils._te_version, te.__version__ = None, "2.4.0"
        try:
            made()
        finally:
            utils._te_version, te.__version__ = None, "2.6.0"

    def moved() -> None:
        del layernorm_linear.reduce_scatter_along_first_dim
        made()

    cases = {
        "alone": lambda: engines.mode(bare(te.pytorch.Linear, **parallel), "layer 2: mlp"),
        "fused": lambda: engines.mode(bare(extension.TEFusedMLP), "layer 2: mlp"),
        "attribute": lambda: engines.mode(bare(fused, **parallel), "layer 2: mlp"),
        "fp8": quantized,
        "quantizer": gathered,
        "old": old,
        "moved": moved,
    }
    for name, case in cases.items():
        try:
            case()
        except DCTError as error:
            found[name] = str(error)
        if name == "quantizer":
            patches.undo()
            assert originals == {each: getattr(layernorm_linear, each) for each in originals}
            assert "forward" not in vars(row)
    return found


def test_what_cannot_work_is_refused_by_name() -> None:
    (found,) = processes.run(1, _refusals)
    assert "layer 2: mlp is Transformer Engine's Linear, which communicates inside" in found["alone"]
    assert "use Megatron's TERowParallelLinear, " in found["alone"]
    assert "Transformer Engine's TEFusedMLP" in found["fused"]
    assert "TELayerNormColumnParallelLinear has no gemm_bias_unfused_add" in found["attribute"]
    assert "Transformer Engine's fp8 or fp4: leave out fp8_autocast, --fp8-format" in found["fp8"]
    assert "Transformer Engine's str: leave out" in found["quantizer"]
    assert "Transformer Engine 2.4.0 is not supported" in found["old"]
    assert "use --transformer-impl local" in found["old"]
    assert "reduce_scatter_along_first_dim" in found["moved"]


def signatures(root: Path) -> dict[str, str]:
    """The parameters of what the hook replaces or calls in the files of Transformer Engine below ``root``."""
    from dct_plugin.integrations.megatron import engine

    found = {}
    for target in engine.TARGETS:
        if target.module.startswith("megatron"):
            continue
        file = root / f"{target.module.replace('.', '/')}.py"
        body: Any = ast.parse(file.read_text()).body
        imported = {each.name for node in body if isinstance(node, ast.ImportFrom) for each in node.names}
        if target.name in imported:
            body = ast.parse((file.parents[1] / "distributed.py").read_text()).body
        for part in target.name.split("."):
            node = next(node for node in body if getattr(node, "name", "") == part)
            body = node.body
        given = [*node.args.args, *([node.args.vararg] if node.args.vararg else [])]
        found[f"{target.module}.{target.name}"] = " ".join(each.arg for each in given)
    for name in ("linear", "layernorm_linear"):
        text = (root / f"transformer_engine/pytorch/module/{name}.py").read_text()
        written = {each for each in engine.ATTRIBUTES if f"self.{each} = " in text}
        base = (root / "transformer_engine/pytorch/module/base.py").read_text()
        written |= {each for each in ("tp_group",) if f"self.{each} = " in base}
        found[name] = " ".join(sorted(written))
    return found


def test_signatures_of_known_versions() -> None:
    """Every version that the hook takes has all functions that it replaces."""
    from dct_plugin.integrations.megatron import engine

    known = json.loads(SIGNATURES.read_text())
    assert next(iter(known)) == "2.5.0"
    for version, found in known.items():
        assert version in engine.SUPPORTED
        for target in engine.TARGETS:
            if not target.module.startswith("megatron"):
                parameters = found[f"{target.module}.{target.name}"].split()
                expected = target.parameters.split()
                assert parameters[: len(expected)] == expected, (version, target)
        for name in ("linear", "layernorm_linear"):
            assert found[name].split() == sorted(engine.ATTRIBUTES), version


@needs_wheels
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name.split("-")[1])
def test_signatures_of_wheels(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert signatures(tmp_path) == json.loads(SIGNATURES.read_text())[wheel.name.split("-")[1]]
