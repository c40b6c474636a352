"""A device with one hardware queue gets its work in an order that blocks nobody.

torch.cuda is a stub: there is no device.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dct_plugin.data_parallel.reducer import Overlap

BUCKETS = range(4)


def test_a_bucket_is_decoded_when_the_next_one_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CUDA_DEVICE_MAX_CONNECTIONS=1`: work of all streams runs in the order in which it is queued. Decoding
    waits for messages; what is queued behind it waits, too. So the backward pass of a bucket comes before.
    """
    queue: list[str] = []

    def stream(name: str) -> Any:
        return SimpleNamespace(
            device="cuda", wait_stream=lambda other: queue.append(f"{name} waits for {other.name}"), name=name
        )

    own, main = stream("own"), stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    group = SimpleNamespace(device=torch.device("cuda"), backend=SimpleNamespace(batches=True))
    reducer: Any = SimpleNamespace(group=group, finish=lambda: queue.append("figures"))
    overlap = Overlap(reducer)
    for bucket in BUCKETS:
        queue.append(f"backward {bucket}")
        reduction: Any = SimpleNamespace(
            post=lambda bucket=bucket: queue.append(f"send {bucket}"),
            finish=lambda bucket=bucket: queue.append(f"decode {bucket}"),
        )
        overlap.submit(reduction)
    overlap.wait()
    work = [each for each in queue if "waits" not in each]
    assert work == [
        *("backward 0", "send 0"),
        *("backward 1", "decode 0", "send 1"),
        *("backward 2", "decode 1", "send 2"),
        *("backward 3", "decode 2", "send 3"),
        *("decode 3", "figures"),
    ]
    # The stream of the reductions waits for the gradients of each; the pass waits once, at its end.
    assert [each for each in queue if "waits" in each] == ["own waits for main"] * 5 + ["main waits for own"]
    assert queue[-1] == "main waits for own"
