"""A plugin of pytest (``-p outcomes``) that tells :mod:`run` what becomes of each test.

It writes a line of JSON for each test to ``DCT_OUTCOMES``, and the name of the test that runs to
``DCT_CURRENT_TEST``. ``DCT_PRELOAD`` names modules that a fork server of the tests imports once.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
from typing import Any

import pytest

_outcomes: dict[str, dict[str, str]] = {}


def pytest_configure() -> None:
    if modules := os.environ.get("DCT_PRELOAD"):
        multiprocessing.set_forkserver_preload(modules.split(","))


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> None:
    """Register DeepSpeed's classes that are fixtures: pytest 8.4 and later do not find them."""
    if inspect.isclass(obj) and getattr(obj, "is_dist_fixture", False):
        pytest.register_fixture(name=name, func=obj, node=collector)


def pytest_runtest_logstart(nodeid: str) -> None:
    with open(os.environ["DCT_CURRENT_TEST"], "w") as file:
        file.write(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst outcome of a test's phases."""
    known = _outcomes.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "text": ""})
    if report.failed:
        known.update(outcome="failed", text=known["text"] + str(report.longrepr))
    elif report.skipped and known["outcome"] == "passed":
        known.update(outcome="skipped", text=str(report.longrepr))
    if report.when == "teardown":  # at once: a host's suite may end by a signal
        with open(os.environ["DCT_OUTCOMES"], "a") as file:
            file.write(json.dumps(known) + "\n")
