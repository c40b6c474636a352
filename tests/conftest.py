"""A test that starts processes is marked ``slow``: the others refuse to start any."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.process
import os
import subprocess
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import interpreter

# Until all tests are collected. What is imported stays: passes over it find nothing.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests. The one that starts pytest-xdist's workers runs none."""
    if config.pluginmanager.hasplugin("dsession"):
        return
    with contextlib.suppress(ImportError):  # a machine that only tests its GPU may lack it
        import hypothesis

        # On a busy machine an example takes any time. Each run has the same examples; new ones are for those
        # who look for faults: HYPOTHESIS_PROFILE=explore, which `make test-slow` sets.
        hypothesis.settings.register_profile("dct", deadline=None, derandomize=True)
        hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
        hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dct"))
    # Without a GPU the Triton kernels are run by Triton's interpreter, which has to be known before triton is
    # imported, here and in the processes that tests start.
    if not _has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


#: Files that take more than 14 seconds, the longest first.
LONGEST = (
    "cli/test_pages.py",
    "recommender/test_demo.py",
    "data_parallel/test_triton_reducer.py",
    "megatron/test_megatron_hooks.py",
    "reliability/test_peers.py",
    "kernels/test_triton.py",
    "links/test_summary.py",
    "host/test_compiled.py",
    "deepspeed/test_deepspeed.py",
    "deepspeed/test_deepspeed_hpz.py",
    "cli/test_advise.py",
    "fsdp/test_shards.py",
    "fsdp/test_shards_saved.py",
    "fsdp/test_fsdp.py",
    "torchft/test_torchft.py",
    "megatron/test_megatron_launch.py",
    "megatron/test_megatron_step_ahead.py",
    "frameworks/test_sample_of_suites.py",
    "megatron/test_megatron_parameters.py",
    "reliability/test_wheel.py",
    "ddp/test_restarts.py",
    "host/test_lost_peers.py",
    "huggingface/test_huggingface.py",
    "huggingface/test_trainer_shards.py",
    "megatron/test_megatron_instances.py",
    "deepspeed/test_autoload.py",
    "ddp/test_ddp.py",
    "data_parallel/test_deferred.py",
    "megatron/test_megatron_automatic.py",
    "data_parallel/test_data_parallel.py",
    "megatron/test_patch_limits.py",
    "megatron/test_megatron_activations.py",
    "deepspeed/test_deepspeed_startup.py",
    "links/test_links.py",
    "deepspeed/test_deepspeed_exact_updates.py",
    "deepspeed/test_deepspeed_zero3.py",
    "deepspeed/test_deepspeed_pipeline.py",
    "embedding/test_sharding.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, or all others. Put the longest files first, so that short ones fill the gaps when
    pytest-xdist shares them out.
    """
    wanted = config.getoption("--long")
    by_length: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        by_length[item.get_closest_marker("long") is not None].append(item)
    config.hook.pytest_deselected(items=by_length[not wanted])
    items[:] = by_length[wanted]
    if hasattr(config, "workerinput"):
        here = Path(__file__).parent
        order = {here / name: number for number, name in enumerate(LONGEST)}
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (order.get(item.path, len(order)), item.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors, since tests also wait."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    collected = yield
    gc.freeze()
    gc.enable()
    interpreter.spare()
    if not session.config.option.collectonly and any(i.get_closest_marker("slow") for i in session.items):
        from support import processes  # it needs more than a machine that only tests its GPU may have

        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        processes.start_server()
        capture.suspend_global_capture()
    return collected


@pytest.fixture(scope="module")
def shared_ranks() -> Generator[None, None, None]:
    """Let the jobs of a file run in the same processes: for jobs that leave nothing behind in a process."""
    from support import processes

    with processes.shared_ranks():
        yield


@pytest.fixture(autouse=True)
def _only_slow_tests_start_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU Triton starts a compiler.
    if request.node.get_closest_marker("slow") is None and not _has_gpu():

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("this test starts a process: mark it with @pytest.mark.slow")

        execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        def refuse_others(process: Any, command: Any, *rest: Any, **keywords: Any) -> None:
            # matplotlib's and megatron-core's (0.19), when they are first imported
            if command[0] not in ("fc-list", "git"):
                refuse()
            execute(process, command, *rest, **keywords)

        monkeypatch.setattr(subprocess.Popen, "_execute_child", refuse_others)
        monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
