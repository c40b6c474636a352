"""Every way of writing positions has room at every size and sparsity."""

from __future__ import annotations

import pytest
import torch

from dct_plugin import Compressor


@pytest.mark.parametrize("encoding", ["auto", "bitmap", "gaps8", "block16", "rice"])
@pytest.mark.parametrize("numel", [1, 5, 300, 5000, 70_000])
def test_a_chosen_encoding_has_room(encoding: str, numel: int) -> None:
    """The room was that of the smallest encoding, whichever was asked for."""
    for sparsity in (0.0, 0.3, 0.5, 0.99):
        stream = Compressor(sparsity=sparsity, index_encoding=encoding, value_dtype="fp32")
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        received = stream.decompress(stream.compress(gradient))
        assert stream.residual is not None
        assert torch.equal(received + stream.residual.current, gradient)
