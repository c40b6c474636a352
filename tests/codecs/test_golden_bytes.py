"""Payloads of fixed inputs, byte for byte: whoever changes one of these changes the wire format."""

from __future__ import annotations

import hashlib

import pytest
import torch

from dct_plugin.codecs.index import IndexEncoding
from dct_plugin.codecs.payload import payload_bound
from dct_plugin.codecs.values import ValueDtype
from dct_plugin.kernels import Job
from dct_plugin.kernels.backend import Backend
from dct_plugin.kernels.cpu import CpuBackend
from dct_plugin.kernels.reference import ReferenceBackend

NUMEL = 70_001
# First 16 hex digits of the payload's SHA-256, by type of values in the order of their numbers.
GOLDEN = {
    "dense": (
        "c38a4647bdf75b80",
        "a6223fd459a1896e",
        "9c74f928d3bde12b",
        "4b1cc907b0caafcb",
        "4947380d87eed961",
        "b37028989fd900a0",
        "f4d01c98b22ec814",
        "25b77cafd2241e89",
    ),
    "bitmap": (
        "6890d1784c206419",
        "892370d9b8741dbe",
        "f84dc8caac7cf694",
        "31cffb84f3f6281d",
        "9522c23208a93be0",
        "16c7425fb075785e",
        "d5275a01f8ec7b54",
        "d2462d8e58c1f818",
    ),
    "gaps8": (
        "e8c8af848d8428fa",
        "bdff2fabbddef356",
        "62c1df181bb9d768",
        "0b0efe96777664c4",
        "2e1e441a88558843",
        "76a406a2dcbd73ed",
        "f9f9b2cbbfc50906",
        "712234944eb93eaa",
    ),
    "block16": (
        "adc6007825ac8c32",
        "29b8389c7394f039",
        "7adda759582bd2ba",
        "867fb6f840d93b14",
        "ac7fb236146f6fe4",
        "74b06bb0c492e817",
        "98429022b0250d82",
        "d8f415115ffc3109",
    ),
    "rice": (
        "d2f8c3d8abe44689",
        "881e6f29bcb93481",
        "1ef4719c02d883e3",
        "71c4b97a88b92edd",
        "e945bcd0e7f87584",
        "3efa4b7c80741c2f",
        "eb6a624df9c7a065",
        "3ed339f89f677dd4",
    ),
}


def gradient() -> torch.Tensor:
    """Values in [-32, 32) by integer arithmetic alone, the same with every version of torch."""
    scrambled = (torch.arange(NUMEL) * 2654435761) % 2**32
    return (scrambled - 2**31).to(torch.float32) / 2**26


def payload(kernels: Backend, encoding: IndexEncoding, value_dtype: ValueDtype) -> torch.Tensor:
    tau = 0.0 if encoding is IndexEncoding.DENSE else 31.5
    out = torch.empty(payload_bound(NUMEL, None, value_dtype, encoding), dtype=torch.uint8)
    stats = kernels.compress(Job(gradient(), None, tau, out, value_dtype=value_dtype, encoding=encoding))
    return out[: stats.nbytes]


@pytest.mark.parametrize("kernels", [ReferenceBackend(), CpuBackend()], ids=["reference", "cpu"])
@pytest.mark.parametrize("value_dtype", list(ValueDtype), ids=lambda value: value.label)
@pytest.mark.parametrize("encoding", list(IndexEncoding), ids=lambda value: value.label)
def test_bytes_are_those_of_the_first_release(
    kernels: Backend, encoding: IndexEncoding, value_dtype: ValueDtype
) -> None:
    data = payload(kernels, encoding, value_dtype)
    assert hashlib.sha256(bytes(data.tolist())).hexdigest()[:16] == GOLDEN[encoding.label][value_dtype]
