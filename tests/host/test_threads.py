"""Threads of the plugin end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A job that ends with its thread idle. What is registered first is called last at the end.
JOB = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
import torch
import torch.distributed as dist
from dct_plugin.config import DataParallelConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.integrations.host.overlap import ThreadOverlap
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
overlap = ThreadOverlap(GradientReducer(DataParallelConfig()), "dct gradients")
overlap.submit(lambda: overlap.reducer.all_reduce([("weight", torch.ones(5000))]))
overlap.wait()
assert "dct gradients" in [thread.name for thread in threading.enumerate()]
"""


def end() -> None:
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['MainThread']"


@pytest.mark.slow
def test_a_thread_has_ended_when_the_interpreter_ends() -> None:
    end()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_jobs_end() -> None:
    for _ in range(50):
        end()
