"""``dct doctor``: one line for everything the plugin depends on: ok, warn or fail, and what to do."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .._version import __version__
from ..integrations.host.versions import how_tested, installed

DISTRIBUTION = "dct-plugin"

#: Packages that the plugin works with, and how to install them.
PACKAGES = {
    "torch": "pip install torch",
    "deepspeed": f"pip install '{DISTRIBUTION}[deepspeed]'",
    "megatron-core": f"pip install '{DISTRIBUTION}[megatron]'",
    "transformers": "pip install transformers",
    "accelerate": "pip install accelerate",
    "triton": "pip install triton",
}


class Finding(NamedTuple):
    """One line of the report; ``advice`` is empty where nothing is to be done."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    detail: str
    advice: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what is installed, which kernels run and how the plugin is activated; exits with 1 on failure."""
    findings = list(diagnose())
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for status, subject, detail, advice in findings:
            typer.echo(
                f"{status:4}  {subject:{width}}  {detail}" + (f"\n      -> {advice}" if advice else "")
            )
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def diagnose() -> Iterator[Finding]:
    """Run every check; one that breaks is itself a finding."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            advice = "report this with the output of pip list"
            yield Finding("fail", name, f"could not be checked: {error!r}", advice)


def _packages() -> Iterable[Finding]:
    yield Finding("ok", DISTRIBUTION, f"{__version__}, {os.path.dirname(os.path.dirname(__file__))}")
    yield from (_package(name, advice) for name, advice in PACKAGES.items())


def _package(name: str, advice: str) -> Finding:
    version, supported = installed(name), _supported(name)
    limits = ",".join(sorted(map(str, supported), reverse=True))
    wanted = f"supported: {limits}" if limits else "any version"
    if version is None:
        return Finding("ok", name, f"not installed ({advice})")
    if not supported.contains(Version(version).base_version):  # a build of a release is that release
        return Finding("warn", name, f"{version} ({wanted})", advice)
    state = how_tested(name, version)
    return Finding("ok", name, f"{version} ({wanted}{f'; {state}' if state else ''})")


def _supported(name: str) -> SpecifierSet:
    """Return the versions that the plugin's own metadata allows; all of them where it names none."""
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()
    found = (requirement for requirement in map(Requirement, required) if requirement.name == name)
    return next((requirement.specifier for requirement in found), SpecifierSet())


def _kernels() -> Iterable[Finding]:
    import torch

    from ..kernels import get_backend, problem_with
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
    advice = ""
    if backend.name == "reference" and not forced:
        advice = "install a C compiler (gcc or clang): without compiled kernels DCT rarely pays on a CPU"
    yield Finding("warn" if advice else "ok", "kernels", detail, advice)
    if torch.cuda.is_available():
        name, advice = get_backend("cuda").name, ""
        if problem := problem_with("triton", "cuda"):
            advice = "plain torch runs, several times slower; if triton is installed, report this output"
            name = f"{name}; triton: {problem}"
        elif name == "triton":
            name = "triton, equal to the reference on this device"
        yield Finding("warn" if advice else "ok", "cuda kernels", name, advice)


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
        yield Finding("ok", "activation", "a dct section in DeepSpeed's JSON is enough")


def _settings() -> Iterable[Finding]:
    detail = 'none to write ("dct": {}, attach(model, optimizer)); whether it pays: dct advise -- LAUNCH LINE'
    yield Finding("ok", "settings", detail)


CHECKS: list[Callable[[], Iterable[Finding]]] = [_packages, _kernels, _activation, _settings]
"""The checks that :func:`diagnose` runs, in order."""
