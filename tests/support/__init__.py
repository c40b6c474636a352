"""What the tests share: worker processes, jobs of the host frameworks, and where things lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
#: Data sets for the tests that use real data; they skip where it is missing.
DATA = ROOT.parent / "shared" / "data"


def with_local_feedback(section: Any) -> Any:
    """Return a ``dct`` section whose feedback does not follow the optimizer, unless it names one itself.

    Most tests compare what holds for any feedback, and run too few steps for a start.
    """
    data = section.get("data_parallel", {}) if isinstance(section, dict) else None
    if not isinstance(data, dict):
        return section
    return {**section, "data_parallel": {"feedback": "local", **data}}


def add_on_of(reducer: Any, kind: type[_Kind]) -> _Kind:
    """Return a reducer's add-on of a kind."""
    return next(each for each in reducer.add_ons if isinstance(each, kind))
