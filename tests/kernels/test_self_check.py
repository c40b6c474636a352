"""Kernels of a device are compared with the reference before ``auto`` uses them: by Triton's interpreter."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux only")

from support.launches import counted_launches

from dct_plugin import kernels
from dct_plugin.cli import doctor
from dct_plugin.codecs.message import MessageWriter
from dct_plugin.codecs.stats import Stats
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Job, get_backend, problem_with, self_check
from dct_plugin.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off: tests/gpu has these kernels"
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Register a backend that ``auto`` prefers for CPU tensors if it passes its self-check."""
    monkeypatch.delenv("DCT_KERNELS", raising=False)
    for state in ("_factories", "_instances", "_problems"):
        monkeypatch.setattr(kernels, state, dict(vars(kernels)[state]))

    def register(factory: Callable[[], Any]) -> None:
        kernels.register_backend("interpreted", factory, device_types=("cpu",), self_check=True)

    return register


def test_kernels_that_equal_the_reference_are_used(
    registered: Callable[[Callable[[], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = []
    compare = self_check.first_difference

    def counted(backend: Any, device: torch.device) -> str | None:
        found.append(compare(backend, device))
        return found[-1]

    monkeypatch.setattr(self_check, "first_difference", counted)
    registered(TritonBackend)
    with caplog.at_level(logging.WARNING, logger="dct_plugin.kernels"), counted_launches() as launches:
        backends = [get_backend("cpu") for _ in range(3)]
    assert self_check._NUMEL <= 4096
    assert len(launches) < 600, len(launches)  # short on a GPU, which compiles every form once
    assert {type(backend) for backend in backends} == {TritonBackend}
    assert found == [None]  # once in a process
    assert problem_with("interpreted", "cpu") is None
    assert not caplog.records


def test_what_is_needed_for_kernels_that_are_not_available_is_said(
    registered: Callable[[Callable[[], Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> Any:
        raise OSError("no module named triton")

    kernels.register_backend("triton", absent, device_types=("cpu",), self_check=True)
    with caplog.at_level(logging.WARNING, logger="dct_plugin.kernels"):
        assert get_backend("cpu").name != "triton"
    (record,) = caplog.records
    assert "'triton' is not available (no module named triton)" in record.getMessage()
    assert "a C compiler and Python's headers are needed" in record.getMessage()


class _WrongPayload(TritonBackend):
    def compress(self, job: Job) -> Stats:
        stats = super().compress(job)
        if job.value_dtype is ValueDtype.INT4 and not job.dense:
            job.out[stats.nbytes - 1] ^= 1
        return stats


class _WrongResidual(TritonBackend):
    def compress(self, job: Job) -> Stats:
        stats = super().compress(job)
        if job.residual_out is not None and stats.nbytes:
            job.residual_out.view(torch.int32)[17] ^= 1
        return stats


class _WrongSum(TritonBackend):
    def sum_messages(self, messages: Any, outs: Any, scale: float = 1.0) -> None:
        super().sum_messages(messages, outs, scale)
        outs[4].view(torch.int32 if outs[4].dtype == torch.float32 else torch.int16)[2000] ^= 1


class _WrongValue(TritonBackend):
    def decode_add(self, payload: Any, out: Tensor) -> int:
        nnz = super().decode_add(payload, out)
        out.view(torch.int32)[3000] ^= 1
        return nnz


class _WrongThreshold(TritonBackend):
    def exact_threshold(self, grad: Tensor, residual: Tensor | None, k: int) -> Tensor:
        return super().exact_threshold(grad, residual, k) * (1 + 2**-23)


class _WrongSlot(TritonBackend):
    def write_slots(self, writer: MessageWriter, buffer: Tensor, *others: Any) -> None:
        super().write_slots(writer, buffer, *others)
        buffer[600] ^= 1


class _NoPacking(TritonBackend):
    def pack(self, values: Tensor, out: Tensor, exponents: Tensor | None, seed: int) -> None:
        raise RuntimeError("no kernel image for this device")


@pytest.mark.parametrize(
    ("check", "factory", "said"),
    [
        ("selection", _WrongPayload, "selection: int4, threshold 0.4: 1 of "),
        ("selection", _WrongResidual, "selection: fp32, threshold 0.0: 1 of 3001 entries differ"),
        ("decoding", _WrongValue, "decoding: fp32, threshold 0.0: 1 of 3001 entries differ"),
        ("sums", _WrongSum, "sums: 1 of 3001 entries differ"),
        ("batches and slots", _WrongSlot, "batches and slots: a message in a slot is refused"),
        ("thresholds", _WrongThreshold, "thresholds: torch.float32: 1 of 1 entries differ"),
        ("residuals", _NoPacking, "residuals: RuntimeError: no kernel image for this device"),
    ],
)
def test_kernels_with_a_wrong_bit_are_not_used(
    registered: Callable[[Callable[[], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    check: str,
    factory: Callable[[], Any],
    said: str,
) -> None:
    monkeypatch.setattr(self_check, "CHECKS", {check: self_check.CHECKS[check]})  # the others take long
    registered(factory)
    kernels._factories.pop("cpu")  # which auto would take next
    with caplog.at_level(logging.WARNING, logger="dct_plugin.kernels"):
        assert [get_backend("cpu").name for _ in range(2)] == ["reference"] * 2
    (record,) = caplog.records  # once
    assert said in record.getMessage()
    assert "report" in record.getMessage()
    assert said in str(problem_with("interpreted", "cpu"))
    assert isinstance(get_backend("cpu", "interpreted"), factory)  # who asks by name gets it


def test_the_doctor_shows_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCT_KERNELS", raising=False)
    problems: dict[tuple[str, str], str | None] = {("triton", "cuda"): None}
    monkeypatch.setattr(kernels, "_problems", problems)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    *_, finding = doctor._kernels()
    assert finding[:3] == ("ok", "cuda kernels", "triton, equal to the reference on this device")
    problems["triton", "cuda"] = "self-check: sums: 1 of 9 entries differ"
    *_, finding = doctor._kernels()
    assert finding[:3] == ("warn", "cuda kernels", f"reference; triton: {problems['triton', 'cuda']}")
    assert "report" in finding.advice


def test_kernels_are_not_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(OSError, match="torch is built for ROCm"):
        TritonBackend()
