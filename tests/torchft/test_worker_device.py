"""Threads of the plugin do not work on device 0 by default. torch.cuda is a stub: there is no device."""

from __future__ import annotations

import ast
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dct_plugin

os.environ.setdefault("RUST_LOG", "error")  # which torchft reads when it is imported

#: Where the plugin starts threads. All but torchft's use sockets, files and the key-value store alone.
THREADS = {
    "integrations/torchft/process_groups.py",
    "integrations/host/lost_peers.py",
    "transport/exchange.py",
    "transport/lost_ranks.py",
    "transport/tcp_connect.py",
}


class StubCuda:
    """The current device and stream of each thread, as CUDA has them: a new thread has device 0."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.waited: list[Any] = []
        self.streams: list[Any] = []

    @property
    def current(self) -> int:
        return getattr(self._of_thread, "device", 0)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._of_thread.device = self.current, device.index
        yield
        self._of_thread.device = before

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._of_thread.stream = stream
        with self.device(torch.device("cuda", stream.device)):
            yield

    def new_stream(self, device: torch.device | None = None) -> Any:
        place = self.current if device is None else device.index
        stream = SimpleNamespace(device=place, wait_event=self.waited.append, synchronize=lambda: None)
        self.streams.append(stream)
        return stream

    def current_stream(self, device: Any = None) -> Any:
        return self._of_thread.stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StubCuda:
    """The stub in place of torch.cuda."""
    pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    from dct_plugin.integrations.torchft import process_groups

    stub = StubCuda()
    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(stub, name))
    monkeypatch.setattr(torch.cuda, "Stream", stub.new_stream)
    process_groups._stream_of.cache_clear()
    return stub


def run_on(pool: ThreadPoolExecutor, ready: Any, work: Callable[[], Any]) -> None:
    """Run a reduction as a process group does whose worker ``pool`` is."""
    from dct_plugin.integrations.torchft.process_groups import _ThresholdedGroup

    group: Any = SimpleNamespace(_failure=None)
    pool.submit(_ThresholdedGroup._run, group, [work], ready, work).result()
    assert group._failure is None


@pytest.mark.parametrize("index", [0, 3])
def test_torchfts_worker_works_on_the_device_of_the_tensors(cuda: StubCuda, index: int) -> None:
    ready = SimpleNamespace(device=torch.device("cuda", index))
    found: list[tuple[int, int]] = []

    def work() -> None:
        found.append((cuda.current, torch.cuda.current_stream().device))  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as pool:
        run_on(pool, ready, work)
        pool.submit(lambda: found.append((cuda.current, index))).result()
    assert found == [(index, index), (index, index), (0, index)]
    assert cuda.waited == [ready]


def test_a_process_group_of_torchft_keeps_one_stream_for_all_its_reductions(cuda: StubCuda) -> None:
    """A stream keeps the memory of what ran on it. Each reduction waits for its own tensors."""
    events = [SimpleNamespace(device=torch.device("cuda", 0)) for _ in range(6)]
    used: list[list[Any]] = [[], []]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for number, event in enumerate(events):
            place = used[number % 2]
            run_on((first, second)[number % 2], event, lambda: place.append(torch.cuda.current_stream()))  # noqa: B023
    assert [len(set(map(id, streams))) for streams in used] == [1, 1]
    assert len(cuda.streams) == 2
    assert cuda.waited == events


def test_no_other_thread_of_the_plugin_has_work_for_a_device() -> None:
    """A thread that is added has to take the device of its tensors, and stands in the list above then."""
    root, found = Path(dct_plugin.__file__).parent, set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "attr", getattr(node, "id", None))
            if isinstance(node, ast.Attribute | ast.Name) and name in (
                "Thread",
                "ThreadPoolExecutor",
                "Timer",
            ):
                found.add(file.relative_to(root).as_posix())
    assert found == THREADS


def test_every_stream_names_its_device() -> None:
    root = Path(dct_plugin.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cuda.Stream"):
                assert node.args or node.keywords, f"{file}:{node.lineno}: a stream on the thread's device"
