"""Tests on a GPU, or in a dry run; else skipped. They need torch, triton and pytest, and install nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gpu import DRY

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available() and not DRY:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
