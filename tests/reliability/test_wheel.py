"""A wheel and the blocks of the pages work in a clean environment without a compiler."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from contextlib import closing
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from support import ROOT
from support.compiler import quick

from dct_plugin import cli
from dct_plugin.config import MetricsConfig
from dct_plugin.kernels import build
from dct_plugin.metrics import Metrics, Record

pytestmark = pytest.mark.slow

#: A job of two ranks, forks of one interpreter, that trains with the block of each page.
JOB = """
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import dct_plugin
from dct_plugin.kernels import get_backend
from torch.nn.parallel import DistributedDataParallel

for rank in 0, 1:
    if os.fork() == 0:
        break
else:
    sys.exit(any([os.wait()[1] for _ in range(2)]))
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
torch.manual_seed(0)
nodes, ranks_per_node = 2, 1
for block in json.load(open("blocks.json")):
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    model.layers = model[:]
    if "DistributedDataParallel" not in block and "fully_shard" not in block:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(block)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
backend = get_backend(torch.device("cpu"))
line = f"rank {dist.get_rank()} {backend.name} {backend.path} {dct_plugin.__file__}\\n"
os.write(1, line.encode())  # in one piece: both ranks write to one pipe
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that ``DCT_WHEEL`` names, or one built here."""
    if given := os.environ.get("DCT_WHEEL"):
        return Path(given)
    if not build.compilers():
        pytest.skip("no compiler to build the wheel with")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = {".git", ".venv", "build", "dist", "out", "tests", "benchmarks"}
    source.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ignored and not path.name.startswith(".") and path.suffix != ".egg-info":
            (source / path.name).symlink_to(path)
    code = "from setuptools import build_meta as b; print(b.build_wheel(OUT))"
    done = subprocess.run(
        [sys.executable, "-c", f"OUT = {str(folder)!r}\n{code}"],
        cwd=source,
        env={**os.environ, "CC": quick(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = folder.glob("*.whl")
    return made


class Clean(NamedTuple):
    """An environment that has the wheel, and nothing of this checkout.

    Attributes:
        folder: Of the environment.
        site: Where its packages are.
    """

    folder: Path
    site: Path

    def packages(self, *lines: str) -> Path:
        """Return a folder with links to the packages that these requirements bring."""
        pending, seen = [*map(Requirement, lines)], set()
        folder = self.folder / "_".join(re.findall(r"\w+", " ".join(lines)))
        folder.mkdir(exist_ok=True)
        while pending:
            needed = pending.pop()
            (package,) = list(metadata.distributions(name=needed.name, path=[str(self.site), *sys.path]))[:1]
            for extra in {"", *needed.extras} - {extra for name, extra in seen if name == needed.name}:
                seen.add((needed.name, extra))
                for each in map(Requirement, package.requires or ()):
                    if each.marker is None or each.marker.evaluate({"extra": extra}):
                        pending.append(each)
            for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                source = Path(str(package.locate_file(name)))
                if self.site not in source.parents and not (folder / name).exists():
                    (folder / name).symlink_to(source)
        return folder

    def run(
        self, packages: Path, *command: str, where: Path, path: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in a folder of its own, with ``path`` for other programs."""
        dropped = ("PYTHONPATH", "CC", "DCT_KERNELS")
        environment = {key: value for key, value in os.environ.items() if key not in dropped}
        environment |= {
            "PATH": os.pathsep.join(filter(None, [str(self.folder / "bin"), path])),
            "PYTHONPATH": str(packages),
            "HOME": str(where),
            "XDG_CACHE_HOME": str(where / "cache"),
            # With other paths to torch the tests' own would be compiled again, here and after this.
            "TORCH_EXTENSIONS_DIR": str(where / "extensions"),
            "OMP_NUM_THREADS": "1",
        }
        program = [self.folder / "bin" / command[0], *command[1:]]
        done = subprocess.run(program, cwd=where, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr[-3000:])
        return done


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    # Where PYTHONPATH names a checkout that is installed, pip would find nothing to do.
    others = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True, env=others)
    (site,) = folder.glob("lib/python*/site-packages")
    return Clean(folder, site)


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_a_wheel_is_tagged_for_its_platform(wheel: Path) -> None:
    assert wheel.name.startswith("dct_plugin-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def test_a_wheel_has_the_recommender_its_data_and_the_ready_configurations(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folder = "dct_plugin/recommender"
    for name in ("commands/demo.py", "data/diabetes130.npz", "data/LICENSE-diabetes130.txt"):
        assert f"{folder}/{name}" in names
    assert {f"dct_plugin/configs/{file.name}" for file in (ROOT / "configs").glob("*.json")} <= names
    assert all(name.startswith("dct_plugin") for name in names)


def test_blocks_of_ddp_and_fsdp_run_from_a_wheel_without_a_compiler(clean: Clean, tmp_path: Path) -> None:
    pages = ("README.md", "docs/ddp.md", "docs/fsdp.md")
    found = [next(block for block in blocks(page, "python") if "import" in block) for page in pages]
    (tmp_path / "blocks.json").write_text(json.dumps(found).replace('\\"cuda\\"', '\\"cpu\\"'))
    (tmp_path / "job.py").write_text(JOB)
    done = clean.run(clean.packages("dct-plugin"), "python", "job.py", where=tmp_path)
    # Lines that gloo writes in pieces may stand before them.
    lines = re.findall(r"rank (\d) (\w+) (/\S+) (/\S+)", done.stdout)
    assert sorted(rank for rank, *_ in lines) == ["0", "1"], done.stdout
    for _, backend, library, package in lines:
        assert backend == "cpu"
        assert library.startswith(str(clean.folder))
        assert library.endswith("_dct_kernels.so")
        assert package.startswith(str(clean.folder))
    assert not (tmp_path / "cache" / "dct_plugin").exists()


#: Every command with its help, then every command that needs an extra, without it.
HELP = """
import contextlib, io, json
from dct_plugin import cli
from typer.main import get_command

def words(command, *before):
    yield [*before, "--help"]
    for name, each in getattr(command, "commands", {}).items():
        yield from words(each, *before, name)

def said(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            cli.app(arguments)
        except SystemExit as end:
            return arguments, end.code, out.getvalue()

calls = [*words(get_command(cli.app)), *([each.name] for each in cli.COMMANDS if each.extra)]
print(json.dumps([cli.__file__, *map(said, calls)]))
"""


def test_help_needs_no_extra_and_what_needs_one_names_it(clean: Clean, tmp_path: Path) -> None:
    done = clean.run(clean.packages("dct-plugin"), "python", "-c", HELP, where=tmp_path)
    file, *said = json.loads(done.stdout.splitlines()[-1])
    assert file.startswith(str(clean.folder))
    lacking = {each.name: each.extra for each in cli.COMMANDS if each.extra}
    assert len(said) > 10 + len(lacking)
    for words, code, text in said:
        if "--help" in words:
            assert (code, "Usage: " in text) == (0, True), (words, text)
        else:
            assert code == 1, words
            assert f"pip install 'dct-plugin[{lacking[words[0]]}]'" in text


LAUNCH = "torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 1\n"

#: Every job in a fork, which finds the packages of its own folder: what all import is imported once.
FORKED = """
import importlib, json, os, runpy, sys
import torch
from dct_plugin import cli

for folder, calls in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.path = [folder if path == os.environ["PYTHONPATH"] else path for path in sys.path]
        importlib.invalidate_caches()
        for call in calls:
            if isinstance(call, str):
                exec(call)
                continue
            sys.argv = ["dct", *call]
            try:
                cli.main()
            except SystemExit as end:
                assert not end.code, call
        sys.stdout.flush()
        os._exit(0)
    if status := os.wait()[1]:
        sys.exit(f"{calls}: {status}")
"""


def test_commands_run_from_a_wheel(clean: Clean, tmp_path: Path) -> None:
    (section,) = blocks("docs/deepspeed.md", "json")
    (tmp_path / "ds.json").write_text(f'{{"train_batch_size": 8, {section}}}')
    (tmp_path / "train.sh").write_text(LAUNCH)
    ready = [file.stem for file in (ROOT / "configs").glob("*.json")]
    imports = (
        "from dct_plugin.recommender.commands import demo, dlrm; from dct_plugin.recommender import data"
    )
    calls: dict[str, list[list[str] | str]] = {
        "deepspeed": [
            f"config check ds.json {' '.join(ready)}".split(),
            ["config", "suggest", "--optimizer", "adamw", "--ranks", "4"],
            ["config", "show", "hybrid_dct"],
            ["doctor"],
        ],
        "megatron": [["patch-launch", "train.sh", "--config", "hybrid_dct", "--in-place"]],
        "demo,tables": [f"{imports}; assert len(data.load('diabetes', max_rows=600).label) == 600"],
    }
    forked = [[str(clean.packages(f"dct-plugin[{extra}]")), part] for extra, part in calls.items()]
    clean.run(clean.packages("dct-plugin"), "python", "-c", FORKED, json.dumps(forked), where=tmp_path)
    with closing(
        Metrics(MetricsConfig(path=str(tmp_path / "metrics.jsonl")), rank=0, world_size=2)
    ) as metrics:
        metrics.record(Record("gradient", 4000, 40, 1000, 9))
        metrics.step(1)
    # As its user starts it.
    clean.run(clean.packages("dct-plugin[report]"), "dct", "report", "metrics.jsonl", where=tmp_path)
    assert "-m dct_plugin.megatron --dct-config hybrid_dct" in (tmp_path / "train.sh").read_text()
    assert (tmp_path / "report.html").is_file()


@pytest.mark.long  # DeepSpeed compiles its communication op
def test_a_recommender_trains_from_a_wheel(clean: Clean, tmp_path: Path) -> None:
    call = "dlrm --config hybrid_dct --max-rows 600 --no-baseline --report report.json"
    packages = clean.packages("dct-plugin[demo,tables]")
    clean.run(packages, "dct", *call.split(), where=tmp_path, path=os.environ["PATH"])
    assert json.loads((tmp_path / "report.json").read_text())


START = ["ddp", "deepspeed", "dlrm", "fsdp", "huggingface", "megatron", "torchft", "demo"]


@pytest.mark.parametrize("name", START)
def test_the_install_line_of_a_page_brings_what_its_blocks_import(clean: Clean, name: str) -> None:
    page = f"docs/{name}.md"
    line = re.search(r"pip install (\S*dct-plugin\S*[ \w]*)", (ROOT / page).read_text())
    assert line is not None
    packages = clean.packages(*re.sub(r"[./']*(dct-plugin[],\w[]*)'?", r"\1", line[1]).split())
    commands = "\n".join(blocks(page, "bash"))
    scripts = [(ROOT / file).read_text() for file in re.findall(r"examples/\w+\.py", commands)]
    nodes = [node for code in [*blocks(page, "python")[:1], *scripts] for node in ast.walk(ast.parse(code))]
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {
        each for command in cli.COMMANDS if f"\ndct {command.name} " in commands for each in command.needs
    }
    modules |= {"deepspeed"} if "deepspeed " in commands else set()
    modules |= {"pyarrow"} if "--label" in commands else set()
    modules |= {"megatron"} if "dct_plugin.megatron" in commands else set()
    tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"dct_plugin"}
    assert tops - {top for top in tops if PathFinder.find_spec(top, [str(packages)])} == set()
