"""Activations within a bound of the error, in one process; between processes: test_deepspeed_experts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dct_plugin.config import DCTConfig, TensorConfig
from dct_plugin.errors import ConfigError, PayloadError
from dct_plugin.model_parallel import ActivationStream


def stream(error_bound: float, **more: Any) -> ActivationStream:
    config = TensorConfig.of({"forward": {"method": "bound", "error_bound": error_bound}, **more})
    return ActivationStream(config, name="x")


def crossed(own: ActivationStream, x: Tensor) -> tuple[Tensor, int]:
    """What arrives of ``x``, and in how many bytes."""
    (message,) = own.activations.encode([x]).messages
    assert message.numel() <= own.activations.nbytes(x.shape, x.dtype)
    out = torch.zeros_like(x)
    own.activations.decode(message, out, 0)
    return out, message.numel()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 300),
    bound=st.floats(1e-6, 2.0),
    scale=st.floats(1e-20, 1e20),
    seed=st.integers(0, 99),
)
def test_no_entry_is_further_off_than_the_bound(
    rows: int, width: int, bound: float, scale: float, seed: int
) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    out, _ = crossed(stream(error_bound=bound), x)
    mean = float(x.double().square().mean().sqrt()) if rows else 0.0
    assert bool(((out - x).double().abs() <= bound * mean * (1 + 1e-5)).all())


def test_bytes_follow_the_bound_and_gradients_have_their_own() -> None:
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    own = stream(error_bound=0.5, backward={"method": "bound", "error_bound": 0.01})
    coarse, fine = crossed(own, x)[1], crossed(stream(error_bound=0.01), x)[1]
    assert coarse < 0.09 * 4 * x.numel() < 0.26 * 4 * x.numel() > fine
    gradient, encoded = own.gradients.encode(x, None)
    back = torch.zeros_like(x)
    own.gradients.decode(gradient, None, back)
    assert float((back - x).abs().max()) <= 0.0101 * float(x.square().mean().sqrt())
    assert encoded.stats[0].nbytes == gradient.numel() == fine


def test_zeros_non_finite_entries_and_damage() -> None:
    own = stream(error_bound=0.1)
    zeros, size = crossed(own, torch.zeros(64, 64))
    assert not zeros.any()
    assert size < 128
    x = torch.randn(64, 64)
    x[3, 4] = float("inf")
    assert bool(crossed(own, x)[0].isnan().all())
    (message,) = own.activations.encode([torch.randn(64, 64)]).messages
    for damaged in (message[:40], message[:-9], torch.cat([message[:50], message[60:]])):
        with pytest.raises(PayloadError):
            own.activations.decode(damaged, torch.zeros(64, 64), 0)


@pytest.mark.parametrize(
    ("where", "section", "message"),
    [
        ("tensor", {"forward": "bound"}, "forward.error_bound: missing; must be a number > 0"),
        ("experts", {"backward": "bound"}, "backward.error_bound: missing; must be a number > 0"),
        ("pipeline", {"forward": "bound"}, 'pipeline.forward = "bound": must be one of "threshold"'),
        ("experts", {"forward": "transform"}, 'experts.forward = "transform": must be one of'),
    ],
)
def test_faults(where: str, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as fault:
        DCTConfig.parse({"model_parallel": {where: section}})
    assert message in str(fault.value)
