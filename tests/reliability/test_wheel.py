"""A wheel holds the compiled kernels, and works in a clean environment without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from support import ROOT

from dct_plugin.kernels import build

pytestmark = pytest.mark.slow

HOOK = """
import os

import torch
import torch.distributed as dist
import dct_plugin
from dct_plugin.integrations.ddp import DCTState, dct_hook
from dct_plugin.kernels import get_backend
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(128, 128))
model.register_comm_hook(DCTState({"data_parallel": {"sparsity": 0.9, "min_numel": 0}}), dct_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture
def clean(wheel: Path, tmp_path: Path) -> Path:
    """Return the Python of an environment that has the wheel, and nothing of this checkout."""
    venv.create(tmp_path / "clean", with_pip=False)
    (site,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # What the wheel needs is taken from where this suite has it; its own editable installation is not seen.
    (site / "needs.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return tmp_path / "clean" / "bin" / "python"


def test_a_wheel_is_tagged_for_its_platform(wheel: Path) -> None:
    assert wheel.name.startswith("dct_plugin-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def test_a_wheel_has_the_recommender_and_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folder = "dct_plugin/recommender"
    for name in ("commands/demo.py", "data/diabetes130.npz", "data/LICENSE-diabetes130.txt"):
        assert f"{folder}/{name}" in names
    assert all(name.startswith("dct_plugin") for name in names)


def test_ddp_runs_from_a_wheel_without_a_compiler(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    dropped = ("PYTHONPATH", "CC", "DCT_KERNELS")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {
        "PATH": str(clean.parent),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [str(clean), *launcher, "hook.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("rank")]
    assert {line[1] for line in lines} == {"0", "1"}
    for _, _, backend, library, package in lines:
        assert backend == "cpu"
        assert library.startswith(str(clean.parents[1]))
        assert library.endswith("_dct_kernels.so")
        assert package.startswith(str(clean.parents[1]))
    assert not (tmp_path / "cache" / "dct_plugin").exists()
