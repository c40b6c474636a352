"""The memory that ``dct advise --memory`` prints, beside what reducers of one rank hold.

Messages go back to their sender: nothing but the transport differs from a job of so many ranks. Kernels of a
GPU are stood for by a backend that leaves figures on its device, and so keeps a step's messages.
"""

from __future__ import annotations

import gc

import pytest
import torch
from result_tables import read
from support.deferred_backend import DeferredBackend, OnDevice
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the looped transport is beside Triton's stubs")

from benchmarks.host_work import LoopedPeers
from dct_plugin import cli
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.data_parallel import GradientReducer, pending_exchanges
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.kernels import register_backend
from dct_plugin.metrics import format_bytes
from dct_plugin.policy import memory as memory_jobs
from dct_plugin.policy.evidence import Training
from dct_plugin.policy.memory import Job, kept_in_words, memory
from dct_plugin.policy.resolve import resolve

TENSORS, WIDTH = 8, 1 << 10
STEPS = 4


def _held() -> int:
    """Return the bytes of all tensors that live."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def _measured(job: Job, parameters: int, backend: str) -> int:
    """Return the bytes that a reducer adds to those of weights and gradients, before a step is closed."""
    shape = WIDTH, parameters // TENSORS // WIDTH
    weights = [(f"layer {i}", nn.Parameter(torch.zeros(shape))) for i in range(TENSORS)]
    gradients = [(name, torch.empty(weight.numel())) for name, weight in weights]
    before, per = _held(), TENSORS // 4
    written, training = DataParallelConfig.of(job.section), Training(["AdamW"], ranks=job.ranks)
    reducer = GradientReducer(
        resolve(written, training).settings if written.trains_alone else written,
        LoopedPeers(0, range(job.ranks)),
        transactional=job.transactional,
        kernels=KernelConfig(backend=backend),
    )
    ahead, local = None, reducer.add_ons.local_steps
    if local is not None:
        held = dict(weights)
        local.attach(nn.ParameterList(held.values()), held, [torch.optim.AdamW(held.values())])
    if reducer.config.feedback.looks_ahead:
        optimizer = torch.optim.AdamW([weight for _, weight in weights])
        ahead = reducer.add_ons.step_ahead.prepare(weights, units_of(optimizer))
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        for _, gradient in gradients:
            gradient.normal_(generator=generator)
        if ahead is not None:
            ahead.displace()
            ahead.restore()
        for bucket in range(4):
            reducer.begin(gradients[bucket * per : (bucket + 1) * per]).finish()
        if step < STEPS - 1:
            reducer.finish()
            reducer.end_step()
    return _held() - before


AHEAD = {"feedback": "step_ahead"}
UPDATES = {"exchange_of": "updates"}
JOBS = [
    (Job("", {"feedback": "local"}, 2, in_slots=False), "auto"),
    (Job("", AHEAD | {"sparsity": 0.99}, 2, weight_bytes=4.0, transactional=True, in_slots=False), "auto"),
    (Job("", AHEAD, 8, weight_bytes=4.0, in_slots=False), "auto"),
    (Job("", {"feedback": "local", "residual_dtype": "int8"}, 8, in_slots=False), "auto"),
    (Job("", UPDATES, 2, weight_bytes=4.0, in_slots=False), "auto"),
    (Job("", UPDATES, 8, weight_bytes=4.0, in_slots=False), "auto"),
    (Job("", UPDATES | {"residual_dtype": "int8"}, 8, weight_bytes=4.0, in_slots=False), "auto"),
    (Job("", {"feedback": "local"}, 2), "deferred"),
    (Job("", AHEAD, 8, weight_bytes=4.0), "deferred"),
]


@pytest.mark.parametrize("parameters", [12 << 20, pytest.param(96 << 20, marks=pytest.mark.long)])
@pytest.mark.parametrize(("job", "backend"), JOBS)
def test_memory_is_what_a_reducer_holds(job: Job, backend: str, parameters: int) -> None:
    register_backend("deferred", DeferredBackend)
    parameters = parameters if backend == "auto" else parameters // 12
    shape = WIDTH, parameters // TENSORS // WIDTH
    found = _measured(job, parameters, backend)
    # Moments are those of these shapes. Beside the kept buffers lies scratch memory: two tensors at most.
    expected = memory(job, parameters, width=2 * parameters // (TENSORS * sum(shape)))
    total, scratch = sum(expected.values()), 2 * 4 * parameters // TENSORS
    assert 0.95 * total < found < 1.05 * total + scratch, expected


def test_large_messages_are_checked_before_the_next_ones_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a dense start all entries cross. Memory for a step's would be that of several models."""
    register_backend("deferred", DeferredBackend)

    def reads(most: int) -> list[int]:
        monkeypatch.setattr(pending_exchanges, "MOST_PENDING", most)
        config = DataParallelConfig(sparsity=0.5, feedback="local")
        kernels = KernelConfig(backend="deferred")
        reducer = GradientReducer(config, LoopedPeers(0, range(2)), kernels=kernels)
        found = []
        for _ in range(3):
            before = OnDevice.reads
            for bucket in range(4):
                reducer.begin([(f"weight {bucket}", torch.randn(20_000))]).finish()
            reducer.finish()
            reducer.end_step()
            found.append(OnDevice.reads - before)
        return found[1:]

    assert reads(1 << 26) == [1, 1]
    assert reads(15_000) == [2, 2]
    assert reads(5_000) == [4, 4]


def test_a_writer_gives_large_memory_back_after_a_small_message() -> None:
    writer = MessageWriter(torch.device("cpu"))
    for nbytes, kept in ((1 << 24, 1 << 24), (1 << 22, 1 << 24), (1 << 20, 1 << 24), (1 << 20, 1 << 20)):
        writer.clear()
        writer.reserve(nbytes)
        writer.advance(nbytes)
        assert kept <= writer._buffers[0].numel() < 1.5 * kept


def test_the_command_prints_a_table_without_a_job() -> None:
    result = CliRunner().invoke(cli.app, ["advise", "--memory", "--parameters", "7e9"])
    assert result.exit_code == 0
    rows = {line[:30].strip(): line for line in result.output.splitlines()}
    assert "7B" in rows["framework and setting"]
    total = sum(memory(memory_jobs.JOBS[0], 7e9).values())
    assert format_bytes(total) in result.output
    assert "4.00 displaced weights" in result.output


def test_the_page_has_the_table() -> None:
    rows = [list(row.values()) for row in read("memory")]
    for job in memory_jobs.JOBS:
        totals = [format_bytes(sum(memory(job, size).values())) for size in (125e6, 1e9, 8e9)]
        assert [job.name, *totals] in [row[:4] for row in rows]


def test_memory_is_said_where_it_is_over_a_tenth_of_what_is_free() -> None:
    def said(free: float, **settings: object) -> str:
        made = DataParallelConfig.of({"feedback": "step_ahead", **settings})
        return kept_in_words(made, 1e6, 2e6, free)

    assert said(61e6) == ""
    assert said(59e6) == (
        "this rank keeps 4.0 MB of residual and 2.0 MB of displaced weights (10 % of the free memory); "
        "smaller: "
        '"residual_dtype": "int8" keeps 3.0 MB, or "sparsity": 0, "value_dtype": "int8", "feedback": "none" '
        "keeps nothing"
    )
    local = said(8e6, feedback="local", residual_dtype="int8")
    assert local.startswith("this rank keeps 1.0 MB of residual (13 % of the free memory); smaller: ")
    assert "residual_dtype" not in local
    assert said(0.0, feedback="none") == ""
    updates = {"feedback": "local", "exchange_of": "updates"}
    assert '; smaller: "residual_dtype": "int8" keeps 3.0 MB, or ' in said(59e6, **updates)
    assert 'smaller: "sparsity"' in said(29e6, **updates, residual_dtype="int8")
