"""Which megatron-core is supported, and what the hooks replace in it.

Two ways to look at an installation: :func:`inspect_files` reads the sources without importing them (``dct
doctor``), :func:`require_supported` looks at the imported modules, before anything is patched.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dct_plugin.errors import VersionError

__all__ = [
    "SUPPORTED",
    "TARGETS",
    "Installation",
    "Probe",
    "Target",
    "find_installation",
    "inspect_files",
    "inspect_imported",
    "is_supported",
    "require_supported",
]

#: First supported release, and the first one that is not.
SUPPORTED = ("0.16.0", "0.20.0")
CORE = "megatron.core"

Hook = Literal["all", "pipeline", "tensor", "data_parallel"]


class Target(NamedTuple):
    """A function or method that a hook replaces or wraps.

    ``parameters`` are the leading parameters that it must have, in this order; more may follow.
    ``attributes`` are names that the function's module must define besides.
    """

    hook: Hook
    module: str
    name: str
    parameters: tuple[str, ...]
    attributes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({', '.join(self.parameters)}, ...)"


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_P2P_OPS = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next", "group")
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_LAYERS = "megatron.core.tensor_parallel.layers"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"

#: Equal in 0.16.1, 0.17.1, 0.18.2 and 0.19.0.
TARGETS = (
    Target(
        "all",
        _SCHEDULES,
        "forward_backward_no_pipelining",
        ("forward_step_func",),
        ("get_forward_backward_func",),
    ),
    Target("all", _SCHEDULES, "forward_backward_pipelining_with_interleaving", ("forward_step_func",)),
    Target("all", _SCHEDULES, "forward_backward_pipelining_without_interleaving", ("forward_step_func",)),
    Target(
        "pipeline",
        _P2P,
        "P2PCommunicator._communicate",
        (
            "self",
            "tensor_send_next",
            "tensor_send_prev",
            "recv_prev",
            "recv_next",
            "tensor_shape",
            "wait_on_reqs",
        ),
    ),
    Target("pipeline", _P2P, "_batched_p2p_ops", _P2P_OPS),
    Target("pipeline", _P2P, "_p2p_ops", _P2P_OPS),
    Target("pipeline", _SCHEDULES, "forward_step", ("forward_step_func", "data_iterator", "model")),
    Target("tensor", _MAPPINGS, "_ReduceFromModelParallelRegion.forward", ("ctx", "input_", "group")),
    Target("tensor", _MAPPINGS, "_ReduceScatterToSequenceParallelRegion.forward", ("ctx", "input_", "group")),
    Target("tensor", _LAYERS, "RowParallelLinear.forward", ("self", "input_")),
    Target("tensor", _LAYERS, "ColumnParallelLinear.forward", ("self", "input_")),
    Target(
        "tensor",
        _LAYERS,
        "linear_with_grad_accumulation_and_async_allreduce",
        ("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"),
    ),
    Target("tensor", "megatron.core.transformer.transformer_layer", "TransformerLayer.forward", ("self",)),
    Target(
        "data_parallel",
        _BUFFERS,
        "_ParamAndGradBucketGroup.start_grad_sync",
        ("self", "force_all_reduce"),
        ("_ParamAndGradBucket",),
    ),
    Target(
        "data_parallel",
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.__init__",
        ("self", "config", "ddp_config", "module"),
    ),
    Target(
        "data_parallel",
        "megatron.core.optimizer.optimizer",
        "MixedPrecisionOptimizer.prepare_grads",
        ("self",),
    ),
)


class Probe(NamedTuple):
    """What was found for one target: a signature or a reason; ``problem`` is empty where it fits."""

    target: Target
    found: str
    problem: str = ""


class Installation(NamedTuple):
    """A megatron-core as it lies on disk: version and the folder of ``megatron/core``."""

    version: str
    folder: Path


def is_supported(version: str) -> bool:
    """Whether a megatron-core version lies in :data:`SUPPORTED`; suffixes (``rc0``, ``+abc``) are ignored."""
    first, end = (_numbers(limit) for limit in SUPPORTED)
    return first <= _numbers(version) < end


def find_installation(checkout: str | os.PathLike[str] | None = None) -> Installation | None:
    """The megatron-core that ``import`` would take, or the one of a checkout; nothing is imported.

    Raises:
        VersionError: ``checkout`` holds no megatron-core, or its version cannot be read.
    """
    if checkout is not None:
        folder = Path(checkout) / "megatron" / "core"
        if not (folder / "__init__.py").is_file():
            raise VersionError(f"{checkout}: no Megatron checkout (there is no megatron/core/__init__.py)")
        return Installation(_version_of(folder), folder)
    # find_spec("megatron.core") would import the package "megatron", which can be anything: look without.
    spec = (
        importlib.util.find_spec("megatron")
        if "megatron" not in sys.modules
        else sys.modules["megatron"].__spec__
    )
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "core"
        if (folder / "__init__.py").is_file():
            return Installation(_version_of(folder), folder)
    return None


def inspect_files(installation: Installation, targets: Iterable[Target] = TARGETS) -> list[Probe]:
    """Compare the sources of an installation with what the hooks expect, without importing it."""
    return [_probe_file(installation.folder, target) for target in targets]


def inspect_imported(targets: Iterable[Target] = TARGETS) -> list[Probe]:
    """Compare the modules that ``import`` gives with what the hooks expect."""
    return [_probe_imported(target) for target in targets]


def require_supported(core: Any, hooks: Sequence[str] | None = None) -> None:
    """Stop unless the imported ``megatron.core`` is one that the hooks are made for.

    Args:
        core: the module ``megatron.core``.
        hooks: names of the hooks whose targets are looked at; ``None`` is all.

    Raises:
        VersionError: says what was found, what is supported, and what to do.
    """
    version = str(getattr(core, "__version__", "unknown"))
    where = os.path.dirname(getattr(core, "__file__", None) or "unknown place")
    if not is_supported(version):
        raise VersionError(
            f"megatron-core {version} ({where}) is not supported\n"
            f"  supported: {SUPPORTED[0]} up to, not including, {SUPPORTED[1]}\n"
            f"  what to do: {_advice(version, where)}"
        )
    wanted = None if hooks is None else {"all", *hooks} if hooks else set()
    targets = [target for target in TARGETS if wanted is None or target.hook in wanted]
    if problems := [probe for probe in inspect_imported(targets) if probe.problem]:
        lines = "\n".join(
            f"  {probe.target.module}.{probe.target.name} (hook {probe.target.hook})\n"
            f"    expected: {_expected(probe.target)}\n    found:    {probe.found}: {probe.problem}"
            for probe in problems
        )
        raise VersionError(
            f"megatron-core {version} ({where}) is not what the hooks were made for; nothing was patched\n"
            f"{lines}\n  what to do: use an unmodified megatron-core {SUPPORTED[0]} up to, not including, "
            f"{SUPPORTED[1]}, or switch these hooks off in the dct section"
        )


def _advice(version: str, where: str) -> str:
    if _numbers(version) < (0, 5):
        return (
            "this looks like Megatron-DeepSpeed, where DeepSpeed communicates: put the dct section into the "
            "DeepSpeed JSON and launch the script without dct_plugin.megatron"
        )
    if "site-packages" in where:
        return f"pip install 'megatron-core>={SUPPORTED[0]},<{SUPPORTED[1]}'"
    return "check out a supported release of Megatron-LM, e.g. git checkout core_v0.16.1"


def _expected(target: Target) -> str:
    return f"({', '.join(target.parameters)}, ...)" + (
        f", and {', '.join(target.attributes)} beside it" if target.attributes else ""
    )


def _compare(target: Target, found: Sequence[str]) -> str:
    if tuple(found[: len(target.parameters)]) == target.parameters:
        return ""
    return f"does not start with ({', '.join(target.parameters)})"


def _probe_imported(target: Target) -> Probe:
    try:
        module = importlib.import_module(target.module)
    except ImportError as error:
        return Probe(target, "no such module", str(error))
    function: Any = module
    for part in target.name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        return Probe(target, "missing", f"{target.module} has no {target.name}")
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        return Probe(target, "no signature", str(error))
    problem = _compare(target, parameters)
    if not problem and (missing := [name for name in target.attributes if not hasattr(module, name)]):
        problem = f"{target.module} has no {', '.join(missing)}"
    return Probe(target, f"({', '.join(parameters)})", problem)


def _probe_file(folder: Path, target: Target) -> Probe:
    file = folder.joinpath(*target.module.split(".")[2:]).with_suffix(".py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except OSError:
        return Probe(target, "no such module", f"there is no {file}")
    except (SyntaxError, ValueError) as error:
        return Probe(target, "not readable", f"{file}: {error}")
    body: Sequence[ast.stmt] = tree.body
    found: ast.AST | None = None
    for part in target.name.split("."):
        found = _definition(body, part)
        body = getattr(found, "body", [])
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return Probe(target, "missing", f"{file} does not define {target.name}")
    arguments = found.args
    parameters = [
        argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]
    problem = _compare(target, parameters)
    if not problem and (
        missing := [name for name in target.attributes if _definition(tree.body, name) is None]
    ):
        problem = f"{file} does not define {', '.join(missing)}"
    return Probe(target, f"({', '.join(parameters)})", problem)


def _definition(body: Sequence[ast.stmt], name: str) -> ast.AST | None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next((item for item in body if isinstance(item, kinds) and item.name == name), None)


def _version_of(folder: Path) -> str:
    """The version from ``package_info.py``, by its ``MAJOR``, ``MINOR`` ... or its ``__version__``."""
    file = folder / "package_info.py"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise VersionError(f"{file}: cannot be read: {error.strerror or error}") from error
    # __version__ is computed from these in most releases, and a literal in the others.
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    numbers = [part[1] for part in parts if part]
    if len(numbers) == 3:
        suffix = re.search(r"^PRE_RELEASE\s*=\s*['\"]([^'\"]*)", text, re.MULTILINE)
        return ".".join(numbers) + (suffix[1] if suffix else "")
    if match := re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE):
        return match[1]
    raise VersionError(f"{file}: holds no version")


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
