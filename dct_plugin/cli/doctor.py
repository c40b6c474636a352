"""``dct doctor``: one line for everything the plugin depends on: ok, warn or fail, and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .._version import __version__
from ..errors import ConfigError, VersionError
from ..integrations.host.versions import how_tested, installed

DISTRIBUTION = "dct-plugin"


class Finding(NamedTuple):
    """One line of the report; ``advice`` is empty where nothing is to be done."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    detail: str
    advice: str = ""


class Package(NamedTuple):
    """A package that the plugin works with: what it is for, and how to install it."""

    name: str
    use: str
    advice: str
    required: bool = False


PACKAGES = (
    Package("torch", "everything needs it", "pip install torch", required=True),
    Package("deepspeed", "needed only to train with it", f"pip install '{DISTRIBUTION}[deepspeed]'"),
    Package("megatron-core", "needed only to train with it", f"pip install '{DISTRIBUTION}[megatron]'"),
    Package("transformers", "its Trainer passes the dct section on to DeepSpeed", "pip install transformers"),
    Package("accelerate", "passes the dct section on to DeepSpeed", "pip install accelerate"),
    Package("triton", "kernels for CUDA tensors; plain torch without it", "pip install triton"),
    Package("tensorboard", "needed only for dct.metrics.tensorboard", "pip install tensorboard"),
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    megatron: Annotated[
        Path | None,
        typer.Option(help="Megatron-LM checkout to check in place of the installed megatron-core."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration: list its Megatron hooks, and why some are not active.")
    ] = None,
) -> None:
    """Check what is installed, which kernels run and how the plugin is activated; exits with 1 on failure."""
    findings = list(diagnose(megatron, config))
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def diagnose(megatron: Path | None = None, config: Path | None = None) -> Iterator[Finding]:
    """Run every check; one that breaks is itself a finding.

    Args:
        megatron: a Megatron-LM checkout instead of the installed megatron-core.
        config: the configuration whose Megatron hooks are listed.
    """
    for check in CHECKS:
        try:
            yield from _megatron(megatron, config) if check is _megatron else check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            yield Finding(
                "fail", name, f"could not be checked: {error!r}", "report this with the output of pip list"
            )


def _plugin() -> Iterable[Finding]:
    yield Finding("ok", "dct-plugin", f"{__version__}, {os.path.dirname(os.path.dirname(__file__))}")


def _python() -> Iterable[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")


def _packages() -> Iterable[Finding]:
    for package in PACKAGES:
        yield _package(package)
    if not any(installed(name) for name in ("deepspeed", "megatron-core")):
        advice = (
            f"pip install '{DISTRIBUTION}[deepspeed]', or use the hook for torch's DistributedDataParallel"
        )
        yield Finding("warn", "host framework", "neither DeepSpeed nor Megatron-core is installed", advice)


def _cuda() -> Iterable[Finding]:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Finding("ok", "cuda", f"{torch.cuda.device_count()} device(s): {', '.join(sorted(names))}")
    else:
        yield Finding("ok", "cuda", "not available, tensors stay on the CPU")


def _deepspeed() -> Iterable[Finding]:
    """List which features of the installed DeepSpeed the plugin works with; import nothing of DeepSpeed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return
    from ..integrations.deepspeed.features import FEATURES

    folder = Path(spec.submodule_search_locations[0])
    has = {feature.name: (folder / feature.file).is_file() for feature in FEATURES}
    detail = ", ".join(feature for feature in has if has[feature])
    if missing := ", ".join(feature for feature in has if not has[feature]):
        detail += f"; this version does not have: {missing}"
    yield Finding("ok", "deepspeed allows", detail)


def _compilers() -> Iterable[Finding]:
    from ..kernels.build import BuildError, compilers

    try:
        found = [" ".join(command) for command in compilers()]
    except BuildError as error:
        yield Finding("warn", "compiler", str(error), "correct CC, or unset it")
        return
    detail = ", ".join(found) if found else "none; needed where no wheel brought the kernels in C"
    yield Finding("ok", "compiler", detail)


def _kernels() -> Iterable[Finding]:
    import torch

    from ..kernels import get_backend
    from ..kernels.cpu import CpuBackend

    forced = os.environ.get("DCT_KERNELS")
    try:
        backend = get_backend(torch.device("cpu"))
    except (ValueError, OSError) as error:
        advice = "unset DCT_KERNELS" if forced else "reinstall the plugin"
        yield Finding("fail", "kernels", str(error), advice)
        return
    compiled = f", {backend.path}" if isinstance(backend, CpuBackend) else ""
    detail = backend.name + compiled + (f" (DCT_KERNELS={forced})" if forced else "")
    if backend.name == "reference" and not forced:
        advice = "install a C compiler (gcc or clang): without compiled kernels DCT rarely pays on a CPU"
        yield Finding("warn", "kernels", detail, advice)
    else:
        yield Finding("ok", "kernels", detail)
    if torch.cuda.is_available():
        yield _cuda_kernels()


def _cuda_kernels() -> Finding:
    """Say which kernels CUDA tensors take, after their self-check."""
    from ..kernels import get_backend, problem_with

    name = get_backend("cuda").name
    if problem := problem_with("triton", "cuda"):
        advice = "plain torch runs, several times slower; if triton is installed, report this output"
        return Finding("warn", "cuda kernels", f"{name}; triton: {problem}", advice)
    detail = "triton, equal to the reference on this device" if name == "triton" else name
    return Finding("ok", "cuda kernels", detail)


def _activation() -> Iterable[Finding]:
    by_hand = "import dct_plugin.integrations.deepspeed in the training script"
    entries = importlib.metadata.entry_points(group="torch.backends")
    if not any(entry.name == "dct_plugin" for entry in entries):
        advice = f"install the plugin with pip, or {by_hand}"
        yield Finding("fail", "activation", "no entry point in group torch.backends", advice)
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        advice = f"unset it, or {by_hand}"
        yield Finding("warn", "activation", "entry point disabled by TORCH_DEVICE_BACKEND_AUTOLOAD=0", advice)
    else:
        yield Finding(
            "ok", "activation", "entry point in group torch.backends; a dct section in the JSON is enough"
        )


def _megatron(checkout: Path | None = None, config: Path | None = None) -> Iterable[Finding]:
    """Compare what the Megatron hooks would replace with the sources; import nothing of Megatron."""
    from ..integrations.megatron import versions

    try:
        found = versions.find_installation(checkout)
    except VersionError as error:
        yield Finding("fail", "megatron", str(error), "give the folder of a Megatron-LM checkout")
        return
    if found is not None:
        supported = found.version in versions.SUPPORTED
        advice = "" if supported else f"use a release from {versions.SUPPORTED}"
        wanted: Literal["ok", "warn", "fail"] = "ok" if supported else "fail" if checkout else "warn"
        yield Finding(wanted, "megatron sources", f"{found.version}, {found.folder}", advice)
        probes = versions.inspect_files(found) if supported else []
        for part in dict.fromkeys(probe.target.part for probe in probes):
            own = [probe for probe in probes if probe.target.part == part]
            name = f"megatron {part}"
            if wrong := [probe for probe in own if probe.problem]:
                detail = "; ".join(
                    f"expected {probe.target}, found {probe.found}: {probe.problem}" for probe in wrong
                )
                advice = f"use an unmodified release from {versions.SUPPORTED}"
                yield Finding("fail" if checkout else "warn", name, detail, advice)
            else:
                replaced = ", ".join(probe.target.name for probe in own)
                yield Finding("ok", name, f"signatures as expected of {replaced}")
    if config is not None:
        from ..config import DCTConfig
        from ..integrations.megatron import launch

        try:
            states = launch.hook_states(DCTConfig.from_file(config))
        except ConfigError as error:
            yield Finding("fail", "configuration", str(error), f"correct {config}")
            return
        for hook, reason in states.items():
            detail = f"not active: {reason}" if reason else "active"
            yield Finding("ok", f"{config.name}: {hook}", detail)


def _distributed() -> Iterable[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding(
            "fail", "torch.distributed", "not in this build of torch", "install a build that has it"
        )
        return
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    found = [name for name, available in backends.items() if available()]
    if {"gloo", "nccl"} & set(found):
        yield Finding("ok", "torch.distributed", f"backends: {', '.join(found)}")
    else:
        advice = "install a build of torch with gloo or nccl"
        yield Finding("fail", "torch.distributed", f"backends: {', '.join(found) or 'none'}", advice)


CHECKS: list[Callable[[], Iterable[Finding]]] = [
    _plugin,
    _python,
    _packages,
    _cuda,
    _deepspeed,
    _compilers,
    _kernels,
    _activation,
    _megatron,
    _distributed,
]
"""The checks that :func:`diagnose` runs, in order."""


def _package(package: Package) -> Finding:
    name, use, advice, required = package
    version, supported = installed(name), _supported(name)
    limits = ",".join(sorted(map(str, supported), reverse=True))
    wanted = f"supported: {limits}" if limits else "any version"
    if version is None and not required:
        return Finding("ok", name, f"not installed; {use} ({advice})")
    if version is None:
        return Finding("fail", name, f"not installed ({wanted}); {use}", advice)
    if not supported.contains(Version(version).base_version):  # a build of a release is that release
        return Finding("fail" if required else "warn", name, f"{version} ({wanted}); {use}", advice)
    state = how_tested(name, version)
    return Finding("ok", name, f"{version} ({wanted}{f'; {state}' if state else ''}); {use}")


def _supported(name: str) -> SpecifierSet:
    """Return the versions that the plugin's own metadata allows; all of them where it names none."""
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()
    found = (requirement for requirement in map(Requirement, required) if requirement.name == name)
    return next((requirement.specifier for requirement in found), SpecifierSet())


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for status, subject, detail, advice in findings:
        what = Text(detail)
        if advice:
            what.append(f"\n-> {advice}", style="bold")
        table.add_row(Text(status, style=styles[status]), Text(subject), what)
    Console().print(table)
