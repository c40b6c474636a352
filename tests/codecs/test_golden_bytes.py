"""Payloads of fixed inputs, byte for byte: whoever changes one of these changes the wire format."""

from __future__ import annotations

import hashlib

import pytest
import torch

from dct_plugin.codecs.payload import payload_bound
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Job
from dct_plugin.kernels.backend import Backend
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend

NUMEL = 70_001
# First 16 hex digits of the payload's SHA-256, by type of values in the order of their numbers.
GOLDEN = {
    "all": (
        "f6ed41fe842b7ee9",
        "d32053ade87a4edf",
        "b9ab77508028f2bd",
        "830bee343c4f238c",
        "8b6453c517ba0045",
        "2d6c8010cca7c824",
        "19d9b8b1e1222be0",
        "33114d4550dbb1e3",
    ),
    "many": (
        "da48c2311c939526",
        "b916d9e2fe32c615",
        "2aae49c5079d3e9c",
        "dc85ff0c7a325221",
        "b7b676f039f9105e",
        "fb327a21ff8703c8",
        "b4de61961e7c1648",
        "cefe9b730c94f2d9",
    ),
    "few": (
        "20e6b13f54c958c9",
        "49a89c5a134f054f",
        "e9a41318bdd0ef1e",
        "6744d1f72a83d361",
        "4186d7785d921575",
        "6b4805ae335b4ddd",
        "7e61a9450465d06e",
        "f34615e0c384f122",
    ),
}


def gradient() -> torch.Tensor:
    """Values in [-32, 32) by integer arithmetic alone, the same with every version of torch."""
    scrambled = (torch.arange(NUMEL) * 2654435761) % 2**32
    return (scrambled - 2**31).to(torch.float32) / 2**26


#: Thresholds that keep all entries, three in four (a bitmap), and 1.6 % of them (Elias-Fano code).
TAUS = {"all": 0.0, "many": 8.0, "few": 31.5}


@pytest.mark.parametrize("kernels", [ReferenceBackend(), CpuBackend()], ids=["reference", "cpu"])
@pytest.mark.parametrize("value_dtype", list(ValueDtype), ids=lambda value: value.label)
@pytest.mark.parametrize("kept", TAUS)
def test_bytes_are_those_of_the_first_release(kernels: Backend, kept: str, value_dtype: ValueDtype) -> None:
    out = torch.empty(payload_bound(NUMEL, None, value_dtype), dtype=torch.uint8)
    stats = kernels.compress(Job(gradient(), None, TAUS[kept], out, value_dtype=value_dtype))
    data = out[: stats.nbytes]
    assert hashlib.sha256(bytes(data.tolist())).hexdigest()[:16] == GOLDEN[kept][value_dtype]
