"""Time the way from ``pip install`` of a wheel to a first DDP job, in a new environment without a compiler.

    python release/first_job.py dist/dct_plugin-*manylinux*x86_64*.whl

torch is installed first and timed apart, since most users have it. A job of two ranks on this machine then
trains three steps with the hook.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from wheels import ROOT

JOB = """
import torch
import torch.distributed as dist
from dct_plugin.integrations.ddp import DCTState
from dct_plugin.kernels import get_backend
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(128, 128))
DCTState({"data_parallel": {"sparsity": 0.9, "min_numel": 0}}).register(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
assert get_backend(torch.device("cpu")).name == "cpu", "the kernels of the wheel were not used"
dist.destroy_process_group()
"""


def timed(what: str, *command: str, path: str) -> None:
    """Run a command with ``path`` as the only folder of programs, and print its seconds.

    Raises:
        SystemExit: It failed; the end of its output is printed.
    """
    began = time.perf_counter()
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CC")}
    done = subprocess.run(
        command, env={**environment, "PATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stdout}{done.stderr[-3000:]}")
    print(f"{time.perf_counter() - began:6.1f} s  {what}")


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = f"{folder}/bin"
        install = (f"{programs}/python", "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"))
        timed("pip install torch", *install, "torch", path=programs)
        timed("pip install dct-plugin", *install, wheel, path=programs)
        script = Path(folder, "job.py")
        script.write_text(JOB)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        timed("a first job of two ranks", f"{programs}/python", *launcher, str(script), path=programs)


if __name__ == "__main__":
    main(*sys.argv[1:])
