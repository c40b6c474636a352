"""Versions that the test suite was run with; docs/support.md says what was run."""

from __future__ import annotations

from packaging.version import Version

#: By distribution, from the oldest to the newest.
TESTED = {
    "torch": ("2.6.0", "2.13.0", "2.15.0"),
    "deepspeed": ("0.19.0", "0.19.6", "0.19.8"),
    "megatron-core": ("0.16.0", "0.16.1", "0.19.2"),
    "transformers": ("5.23.0",),
    "accelerate": ("1.15.0",),
    "lightning": ("2.6.6",),
}


def describe(name: str, version: str) -> str:
    """Say whether a version was tested; builds of a release (``2.13.0+cpu``) count as that release."""
    tested = TESTED.get(name, ())
    if not tested or Version(version).base_version in tested:
        return "tested" if tested else ""
    return f"not tested (tested: {', '.join(tested)})"
