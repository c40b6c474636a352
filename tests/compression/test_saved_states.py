"""States that an earlier version wrote load, and go on bitwise.

The files in ``data`` and the digests were written by version 0.1 before streams were rebuilt (commit
415a36c): four steps of what :func:`_reduce` and :func:`_stream_digests` do, saved, and four more. Checksums
were added to the rank files since; what they are of is as it was written then. The compressor's state and
digests were written before momentum correction was removed, without it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run

from dct_plugin import Compressor, checkpoint
from dct_plugin.config import DataParallelConfig, PipelineConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.model_parallel import ActivationStream, FixedMessages

DATA = Path(__file__).parent / "data"
SETTINGS = {"sparsity": 0.9, "exchange": "two_phase", "min_numel": 100}
RAMP = {"sparsity": 0.9, "sparsity_warmup_steps": 6}
STEPS = range(4, 8)


def data(numel: int, step: int, rank: int = 0) -> torch.Tensor:
    """Entries without a random generator, whose numbers could change with the version of torch."""
    numbers = torch.arange(numel) * 7919 + step * 104_729 + rank * 1_299_709
    return (numbers * numbers % 1_000_003).float() / 1e5 - 5


def digest(*tensors: torch.Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()[:16]


def _reduce(rank: int, world_size: int, folder: str) -> list[str]:
    reducer = GradientReducer(DataParallelConfig.of(SETTINGS), transactional=True)
    found = checkpoint.StateFiles(rank, world_size).read(folder)
    assert found is not None
    reducer.load_state_dict(found.state)
    digests = []
    for step in STEPS:
        entries = [("weight", data(700, step, rank)), ("bias", data(20, step, rank))]
        reducer.all_reduce(entries, scale=0.5)
        digests.append(digest(*(tensor for _, tensor in entries)))
        reducer.end_step(skipped=step == 5)
    return digests


def _stream_digests(states: dict[str, Any]) -> dict[str, list[str]]:
    compressor = Compressor(name="weight", rank=1, **RAMP)
    compressor.load_state_dict(states["compressor"])
    activations = ActivationStream(
        PipelineConfig.of(forward={"method": "threshold", "sparsity": 0.8}), name="layer", rank=1
    )
    activations.load_state_dict(states["activation"])
    messages = FixedMessages(activations)
    digests: dict[str, list[str]] = {"compressor": [], "activation": []}
    for step in STEPS:
        digests["compressor"].append(digest(compressor.compress(data(500, step)).data))
        parts = [messages.encode(data(400, 2 * step + part), part)[1].content for part in range(2)]
        digests["activation"].append(digest(*parts))
        activations.end_step()
    return digests


def test_streams_go_on_bitwise() -> None:
    expected = json.loads((DATA / "digests.json").read_text())
    found = _stream_digests(torch.load(DATA / "streams.pt", weights_only=True))
    assert found == {kind: expected[kind] for kind in found}


@pytest.mark.slow
def test_reducers_go_on_bitwise() -> None:
    expected = json.loads((DATA / "digests.json").read_text())
    assert run(2, _reduce, str(DATA)) == [expected["reducer"]] * 2
