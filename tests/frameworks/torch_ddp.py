"""torch's own tests of DistributedDataParallel, ``distributed_test`` of its wheel, with gloo on CPUs."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

import pytest
from support import processes
from torch.testing._internal.distributed import distributed_test

pytestmark = pytest.mark.slow


class TestDDP(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests that train with DistributedDataParallel."""

    def setUp(self) -> None:
        super().setUp()

        def process(target: Any, name: str, args: Any, kwargs: Any) -> Any:
            return processes.context().Process(
                target=_run, name=name, args=(dict(os.environ), target, args, kwargs)
            )

        self._start_processes(process)


def _run(variables: dict[str, str], run: Callable[..., None], arguments: Any, keywords: Any) -> None:
    os.environ.update(variables)
    run(*arguments, **keywords)


def _trains(test: Any) -> bool:
    source = inspect.getsource(inspect.unwrap(test)).lower()
    return "ddp" in source or "distributeddataparallel" in source


for name, test in inspect.getmembers(TestDDP, inspect.isfunction):
    if name.startswith("test_") and not _trains(test):
        setattr(TestDDP, name, None)
del name, test
