"""The report on lost ranks takes sys.excepthook while a job needs it, and puts it back."""

from __future__ import annotations

import gc
import sys

import pytest

from dct_plugin.integrations.host import lost_peers


@pytest.fixture(autouse=True)
def _a_hook_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of other tests in this process may have left theirs behind another hook."""
    monkeypatch.setattr(lost_peers, "_excepthook", type(lost_peers._excepthook)())


class Job:
    step = 3


def watched() -> Job:
    job = Job()
    lost_peers.watch(job, lambda job: job.step)
    return job


def test_the_excepthook_is_put_back_when_the_last_job_is_gone() -> None:
    before, first, second = sys.excepthook, watched(), watched()
    del first
    gc.collect()
    assert sys.excepthook is not before
    del second
    gc.collect()
    assert sys.excepthook is before


def test_a_hook_of_somebody_else_in_front_stays_and_is_not_called_in_a_circle() -> None:
    before, calls, job = sys.excepthook, [], watched()
    ours = sys.excepthook

    def other(*error: object) -> None:
        calls.append(error)
        assert len(calls) < 3
        ours(*error)  # type: ignore[arg-type]

    sys.excepthook = other
    del job
    gc.collect()
    again = watched()
    try:
        assert sys.excepthook is other
        sys.excepthook(ValueError, ValueError("expected"), None)
        assert len(calls) == 1
    finally:
        sys.excepthook = ours
        del again
        gc.collect()
    assert sys.excepthook is before
