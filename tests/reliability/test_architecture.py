"""docs/architecture.md says which files a gradient, an activation and an embedding row pass: so they do."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.forked import forked_interpreters
from support.processes import run
from support.trace import Trace

from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.transport import collective

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[[tool.importlinter.contracts]]")
WAYS = dict(re.findall(r"^## (The way of [^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def imported(file: Path) -> set[Path]:
    """Return the files of the project that a file imports, also within functions and for types."""
    package = file.relative_to(ROOT).with_suffix("").parts
    if package[-1] == "__init__":
        package = package[:-1]
        here = package
    else:
        here = package[:-1]
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else ()
            module = [*start, *(node.module.split(".") if node.module else [])]
            names = [module, *([*module, alias.name] for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for name in names:
            for path in (Path(*name).with_suffix(".py"), Path(*name, "__init__.py")):
                if name and (ROOT / path).exists():
                    found.add((ROOT / path).resolve())
    # A name that a package offers comes from one of its files.
    packages = [each for each in found if each.name == "__init__.py" and each != file.resolve()]
    return found.union(*(_offered(each) for each in packages))


def _offered(package: Path) -> set[Path]:
    names = re.findall(r"^from \.(\w+) import", package.read_text(encoding="utf-8"), re.M)
    return {(package.parent / f"{name}.py").resolve() for name in names}


@pytest.mark.parametrize("way", WAYS)
def test_every_file_of_a_way_imports_one_that_comes_before_or_after(way: str) -> None:
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", WAYS[way], re.M)
    assert len(named) >= 4, way
    files = [ROOT / "dct_plugin" / name for name in named]
    for file in files:
        assert file.exists(), file
    for before, after in itertools.pairwise(files):
        linked = after.resolve() in imported(before) or before.resolve() in imported(after)
        assert linked, f"{way}: neither of {before.name} and {after.name} imports the other"


def _traced(rank: int, world_size: int) -> list[str]:
    """The files of the package that a reduction enters, in the order in which it first enters them."""
    reducer = GradientReducer(DataParallelConfig(sparsity=0.9))
    with Trace() as trace:
        reducer.all_reduce([("weight", torch.ones(50_000))])
    return list(trace.calls)


@pytest.mark.slow
def test_a_reduction_enters_the_files_of_its_way() -> None:
    way = next(text for title, text in WAYS.items() if "gradient" in title)
    _, *named = re.findall(r"^\d+\. `([\w/]+\.py)`", way, re.M)
    for entered in run(2, _traced):
        found = [name for name in entered if name in named]
        assert set(found) == set(named)
        assert found[0] == named[0]  # the last one is entered before its messages are added


def test_the_table_of_what_differs_by_device_is_the_code() -> None:
    page = (ROOT / "docs" / "gpu-internals.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+: [^|]*) \| ([^|]*) \| ([^|]*) \|$", page, re.M)
    table = {key.strip(): (host.strip(), device.strip()) for key, host, device in rows}
    assert CpuBackend.lengths_on_host
    entries = table["kernel backend: messages of a bucket"][0].replace(",", "")
    assert f"{CpuBackend.message_entries} entries" in entries
    for name in re.findall(r"`(\w+)`", table["transport: bytes move by"][1]):
        assert f"dist.{name}" in inspect.getsource(collective)
    triton = (ROOT / "dct_plugin" / "kernels" / "triton" / "backend.py").read_text(encoding="utf-8")
    assert "lengths_on_host = False\n" in triton
    assert "message_entries = math.inf" in triton


#: Packages of ``data_parallel`` that can be deleted; what goes with each: files, a row of the add-ons.
DELETABLE: dict[str, tuple[list[str], str]] = {
    "autotune": (["cli/advise.py", "integrations/advice.py"], "AutomaticSparsity"),
    "step_ahead": ([], "StepAheadAddOn"),
    "local_steps": ([], "LocalSteps"),
    "nodes": ([], "no row"),
}
#: Imports what is left, and reduces a gradient between two ranks.
WITHOUT_IT = """
import importlib, sys
import torch, torch.distributed as dist
for name in [name for name in sys.modules if name.startswith("dct_plugin")]:
    del sys.modules[name]  # of the process that forks
store, rank, *modules = sys.argv[1:]
import dct_plugin
assert dct_plugin.__file__ == store.replace("store", "dct_plugin/__init__.py")
for each in modules:
    importlib.import_module(each)
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
gradient = torch.linspace(0, 1, 50_000)
GradientReducer(DataParallelConfig(sparsity=0.9)).all_reduce([("weight", gradient)])
assert 4_000 < gradient.count_nonzero() < 6_000
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", DELETABLE)
def test_a_package_can_be_deleted(package: str, tmp_path: Path) -> None:
    copy, (files, row) = tmp_path / "dct_plugin", DELETABLE[package]
    # With the compiled modules, but not those that a process writes just now.
    shutil.copytree(ROOT / "dct_plugin", copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.rmtree(copy / "data_parallel" / package)
    for file in files:
        (copy / file).unlink()
    table = copy / "data_parallel" / "add_ons.py"
    rows = re.sub(
        rf"^from .* import {row}\n|, {row}(?=[,)])", "", table.read_text(encoding="utf-8"), flags=re.M
    )
    table.write_text(rows, encoding="utf-8")
    hosts = ["ddp", "fsdp", "host"] + [each for each in ("deepspeed", "megatron") if find_spec(each)]
    modules = [
        ".".join(path.relative_to(tmp_path).with_suffix("").parts)
        for folder in ("data_parallel", "policy", "report", *(f"integrations/{each}" for each in hosts))
        for path in (copy / folder).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with forked_interpreters():
        command = [sys.executable, "-c", WITHOUT_IT, str(tmp_path / "store")]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *modules],
                env=environment,
                cwd=tmp_path,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for each in ranks:
            _, errors = each.communicate()
            assert each.returncode == 0, errors


#: Folders of tests that are no module: across modules, on a GPU, the hosts' own, the benchmarks' links, and
#: what tests share.
BESIDE = {"reliability", "frameworks", "gpu", "links", "support"}
#: Modules whose tests lie with what they are for.
ELSEWHERE = {"accelerate": "huggingface", "lightning": "huggingface"}


def test_the_links_at_the_top_are_for_readers() -> None:
    """Modules are imported by one path: no package is a link but the folder of data, and no link imports."""
    links = {path.name for path in (ROOT / "dct_plugin").rglob("*") if path.is_symlink()}
    assert links == {"configs"}
    assert (ROOT / "integrations").resolve() == ROOT / "dct_plugin" / "integrations"
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) integrations\b", path.read_text(encoding="utf-8"), re.M)


def test_folders_of_tests_are_those_of_the_modules() -> None:
    roots = (ROOT / "dct_plugin", ROOT / "dct_plugin" / "integrations")
    packages = {path.parent.name for root in roots for path in root.glob("*/__init__.py")}
    modules = {path.stem for root in roots for path in root.glob("*.py")}
    tests = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert tests - BESIDE - set(ELSEWHERE.values()) <= packages | modules
    assert packages - {"integrations"} - tests <= ELSEWHERE.keys()
    assert set(ELSEWHERE.values()) <= tests
    for path in (ROOT / "tests").glob("test_*.py"):
        assert path.stem.removeprefix("test_") in modules, path


def test_the_modules_and_layers_of_the_page_are_the_code() -> None:
    modules, layers = (block.strip("\n") for block in re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)[:2])
    folders, count = [ROOT], 0
    for line in modules.splitlines():
        if names := re.match(r"( *)((?:\w+/?, )*\w+/?)  +", line + "  "):
            depth = len(names[1]) // 2
            if depth > 2:
                continue  # the end of a sentence
            for name in names[2].split(", "):
                path = folders[depth] / name.rstrip("/")
                assert path.is_dir() if name.endswith("/") else path.with_suffix(".py").is_file(), name
                folders[depth + 1 :] = [path]
                count += 1
    assert count >= 25
    contract = next(text for text in CONTRACTS if 'name = "Layers"' in text)
    allowed = [set(re.findall(r"\w+", row)) for row in re.findall(r'^    "(.*)",$', contract, re.M)]
    drawn = [set(re.findall(r"\w+", layer)) for layer in layers.split("->")]
    assert drawn[1:] == allowed[1:]
    assert drawn[0] <= allowed[0]
