"""Compressor: one stream's threshold, residual and codec together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dct_plugin import Compressor, ConfigError, Payload, PayloadError
from dct_plugin.compression.feedback import Residual
from dct_plugin.compression.thresholds import Threshold, wanted
from dct_plugin.config import DataParallelConfig, KernelConfig
from dct_plugin.config.data_parallel import SparsitySchedule


def gradients(steps: int, numel: int, seed: int = 0, mean: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drift = mean * torch.randn(numel, generator=generator)
    return [torch.randn(numel, generator=generator) + drift for _ in range(steps)]


def test_public_example() -> None:
    compressor = Compressor(sparsity=0.99)
    gradient = torch.randn(300, 400)
    payload = compressor.compress(gradient)
    assert isinstance(payload, Payload)
    received = compressor.decompress(payload)
    assert received.shape == gradient.shape
    assert received.dtype == torch.float32
    kept = received != 0
    assert kept.sum() == payload.nnz
    assert payload.density == pytest.approx(0.01, rel=0.2)
    assert received[kept].allclose(gradient[kept], rtol=1 / 128)
    assert gradient[kept].abs().min() > gradient[~kept].abs().max() * 0.99


@pytest.mark.parametrize("value_dtype", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_lost(value_dtype: str, dtype: torch.dtype) -> None:
    """Sent + kept = gradient + old residual, bitwise in fp32, at every step."""
    compressor = Compressor(sparsity=0.9, value_dtype=value_dtype)
    residual = torch.zeros(5000)
    for gradient in gradients(6, 5000):
        gradient = gradient.to(dtype)
        sent = compressor.decompress(compressor.compress(gradient))
        assert compressor.residual is not None
        kept = compressor.residual.current
        assert torch.equal(sent + kept, gradient.float() + residual)
        residual = kept.clone()


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(0, 3000),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999]),
    value_dtype=st.sampled_from(["fp32", "bf16", "fp16", "int8"]),
    threshold=st.sampled_from(["sample", "topk"]),
    seed=st.integers(0, 1000),
)
def test_conservation_at_every_size(
    numel: int, sparsity: float, value_dtype: str, threshold: str, seed: int
) -> None:
    compressor = Compressor(sparsity=sparsity, value_dtype=value_dtype, expert={"threshold": threshold})
    old = torch.zeros(numel)
    for gradient in gradients(3, numel, seed):
        payload = compressor.compress(gradient)
        kept = compressor.residual.current  # type: ignore[union-attr]
        assert torch.equal(compressor.decompress(payload) + kept, gradient + old)
        assert payload.nbytes == payload.data.numel()
        old = kept.clone()


def test_sparsity_zero_is_lossless() -> None:
    compressor = Compressor(sparsity=0.0, value_dtype="fp32")
    gradient = torch.randn(1000)
    payload = compressor.compress(gradient)
    assert payload.density == 1
    assert torch.equal(compressor.decompress(payload), gradient)


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0])
def test_density_stays_near_the_target(mean: float) -> None:
    """Under error feedback, with noise alone and with a mean gradient, and while gradients shrink."""
    compressor = Compressor(sparsity=0.99)
    densities = []
    for step, gradient in enumerate(gradients(150, 50_000, mean=mean)):
        densities.append(compressor.compress(gradient * 0.99**step).density)
    assert sum(densities[20:]) / len(densities[20:]) == pytest.approx(0.01, rel=0.05)
    assert max(densities) <= 0.016
    assert min(densities) >= 0.006


def test_paper_lifespan_without_tracking_drifts() -> None:
    """Why the life-span is only an upper limit: taken literally it sends several times the wanted share."""
    threshold = Threshold(mode="fixed", lifespan=1000, band=(1e-9, 1e9))
    assert [step for step in range(40) if _due_at(threshold, step)] == [0, 1, 2, 4, 8, 16, 32]


def _due_at(threshold: Threshold, step: int) -> bool:
    threshold.tau, threshold.density, threshold.age, threshold.step = 1.0, 0.01, 0, step
    return threshold.due(0.01)


def test_threshold_is_measured_again_after_its_lifespan_and_out_of_band() -> None:
    threshold = Threshold(mode="fixed", lifespan=10)
    threshold.tau, threshold.density, threshold.step, threshold.age = 1.0, 0.01, 33, 9
    assert not threshold.due(0.01)
    threshold.age = 10
    assert threshold.due(0.01)
    threshold.age = 1
    threshold.observe(above=wanted(0.01, 100_000) * 3, numel=100_000)
    assert threshold.out_of_band
    assert threshold.due(0.01)


def test_a_gradient_of_zeros_is_not_measured_in_every_step() -> None:
    compressor = Compressor(sparsity=0.99)
    (dense,) = gradients(1, 100_000)
    rows = dense * (torch.arange(100_000) < 100)  # a tenth of what is wanted, as of a table's rows
    for _ in range(34):
        assert compressor.compress(rows).nnz == 100
    assert compressor.threshold.refreshes == 7  # steps 0, 1, 2, 4, 8, 16, 32
    compressor.compress(dense)
    assert not compressor.threshold.out_of_band  # the small sample of each step has seen it


def test_capacity_limits_the_message_and_keeps_the_rest() -> None:
    compressor = Compressor(sparsity=0.99, expert={"threshold": "fixed"})
    for gradient in gradients(4, 100_000):
        compressor.compress(gradient * 0.01)
    old = compressor.residual.current.clone()  # type: ignore[union-attr]
    burst = torch.randn(100_000) * 10  # nearly everything passes the old threshold
    compressor.threshold.step, compressor.threshold.age, compressor.threshold.out_of_band = 33, 1, False
    payload = compressor.compress(burst)
    assert payload.nnz == 2 * 1000 + 64
    kept = compressor.residual.current  # type: ignore[union-attr]
    assert torch.equal(compressor.decompress(payload) + kept, burst + old)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 2.0**126])
@pytest.mark.parametrize("threshold", ["sample", "topk"])
@pytest.mark.parametrize("clean_steps", [0, 1, 3])
def test_a_poisoned_tensor_leaves_the_state_bitwise(poison: float, threshold: str, clean_steps: int) -> None:
    """Residual and the whole threshold, tau included; before the first measurement and at one."""
    compressor, unharmed = (Compressor(sparsity=0.9, expert={"threshold": threshold}) for _ in range(2))
    *clean, bad, after = gradients(clean_steps + 2, 10_000)
    for gradient in clean:
        compressor.compress(gradient)
        unharmed.compress(gradient)
    bad[4321] = poison
    payload = compressor.compress(bad)
    assert payload.nonfinite
    assert compressor.decompress(payload).isnan().all()
    assert compressor.compress(after).to_bytes() == unharmed.compress(after).to_bytes()
    assert same_state(compressor.state_dict(), unharmed.state_dict())


def same_state(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(mine[key], other[key]) if isinstance(mine[key], torch.Tensor) else mine[key] == other[key]
        for key in mine.keys() | other.keys()
    )


def test_rollback_is_bitwise_and_commit_keeps() -> None:
    steps = gradients(6, 20_000)
    plain, careful = Compressor(sparsity=0.99), Compressor(sparsity=0.99, transactional=True)
    for step, gradient in enumerate(steps):
        if step % 2:  # a step of two reductions that is thrown away
            careful.compress(torch.randn_like(gradient) * 100)
            careful.compress(torch.randn_like(gradient))
            careful.end_step(skipped=True)
        expected = plain.compress(gradient)
        assert expected.to_bytes() == careful.compress(gradient).to_bytes()
        careful.end_step()
    assert torch.equal(plain.residual.current, careful.residual.current)  # type: ignore[union-attr]


def test_a_residual_without_a_transaction_is_lost_once() -> None:
    residual = Residual(4, torch.device("cpu"))
    residual.current.fill_(1.0)
    residual.rollback()
    assert not residual.current.any()
    residual.current.fill_(1.0)
    residual.arm()
    residual.end(residual.begin()[1].fill_(2.0), 0)
    assert residual.current.tolist() == [2.0] * 4
    residual.rollback()
    assert residual.current.tolist() == [1.0] * 4


def test_loss_scale_change_rescales() -> None:
    steps = gradients(8, 20_000)
    plain, scaled = (
        Compressor(sparsity=0.99, value_dtype="fp32"),
        Compressor(sparsity=0.99, value_dtype="fp32"),
    )
    scale = 1.0
    for step, gradient in enumerate(steps):
        if step in (2, 5):
            factor = 1024.0 if step == 2 else 0.25
            scale *= factor
            scaled.rescale(factor)
        expected = plain.decompress(plain.compress(gradient))
        assert torch.equal(scaled.decompress(scaled.compress(gradient * scale)) / scale, expected)


def test_resume_is_bitwise() -> None:
    steps = gradients(9, 30_000)
    whole = Compressor(sparsity=0.99, name="w")
    expected = [whole.compress(g).to_bytes() for g in steps]
    first = Compressor(sparsity=0.99, name="w")
    for gradient in steps[:5]:
        first.compress(gradient)
    second = Compressor(sparsity=0.99, name="w")
    second.load_state_dict(first.state_dict())
    assert [second.compress(g).to_bytes() for g in steps[5:]] == expected[5:]


def test_a_residual_in_cpu_memory() -> None:
    """Byte for byte what a residual of one's own gives; what the host does to the memory counts."""
    own, lent = Compressor(sparsity=0.9), Compressor(sparsity=0.9)
    memory = torch.zeros(5000)
    for step, gradient in enumerate(gradients(6, 5000)):
        lent.use_residual_memory(memory)
        if step == 3:
            assert own.residual is not None
            own.residual.current.zero_()
            memory.zero_()
        assert torch.equal(own.compress(gradient).data, lent.compress(gradient).data)
        assert own.residual is not None
        assert torch.equal(own.residual.current, memory)
    resumed = Compressor(sparsity=0.9)
    resumed.load_state_dict(lent.state_dict())
    other = torch.zeros(5000)
    resumed.use_residual_memory(other)
    assert torch.equal(other, memory)


@pytest.mark.parametrize("transactional", [False, True])
def test_what_is_left_is_sent_once_where_a_resumed_run_keeps_nothing(transactional: bool) -> None:
    first = Compressor(sparsity=0.9)
    first.compress(torch.randn(1000))
    state = first.state_dict()
    left = state["residual"].clone()
    resumed = Compressor(sparsity=0.0, value_dtype="fp32", feedback="none", transactional=transactional)
    resumed.load_state_dict(state)
    poisoned, gradient = torch.full((1000,), float("nan")), torch.randn(1000)
    resumed.compress(poisoned)
    if transactional:  # others lose what a skipped step had
        resumed.end_step(skipped=True)
    assert torch.equal(resumed.decompress(resumed.compress(gradient)), gradient + left)
    if transactional:
        resumed.end_step(skipped=True)
        assert torch.equal(resumed.decompress(resumed.compress(gradient)), gradient + left)
        resumed.end_step()
    assert torch.equal(resumed.decompress(resumed.compress(gradient)), gradient)
    assert resumed.residual is None


def test_resume_with_another_size_is_refused() -> None:
    first, second = Compressor(), Compressor()
    first.compress(torch.randn(5000))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="5000"):
        second.compress(torch.randn(6000))


def test_wrong_input_is_named() -> None:
    compressor = Compressor(name="layer.weight")
    with pytest.raises(TypeError, match=r"layer\.weight.*int64"):
        compressor.compress(torch.arange(10))
    compressor.compress(torch.randn(5000))
    with pytest.raises(ValueError, match=r"layer\.weight.*5000.*6000"):
        compressor.compress(torch.randn(6000))
    with pytest.raises(PayloadError):
        compressor.decompress(torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"sparsity"):
        Compressor(sparsity=1.5)
    with pytest.raises(ConfigError, match=r"sparsity"):
        Compressor(sparsty=0.5)


def test_a_section_or_single_settings() -> None:
    section = DataParallelConfig(sparsity=0.9)
    assert Compressor(section).config == Compressor(sparsity=0.9).config == section
    assert Compressor(section, value_dtype="int8").config == DataParallelConfig(
        sparsity=0.9, value_dtype="int8"
    )


def test_an_unknown_kernel_backend_is_named_with_its_key() -> None:
    compressor = Compressor(kernels=KernelConfig(backend="cdua"))
    with pytest.raises(
        ConfigError, match=r'dct\.kernels\.backend = "cdua": must be one of "auto", "reference", "cpu"'
    ):
        compressor.compress(torch.randn(10))


def test_double_precision_and_strided_input() -> None:
    compressor = Compressor(sparsity=0.0, value_dtype="fp32")
    matrix = torch.randn(50, 60, dtype=torch.float64).t()
    assert torch.equal(compressor.decompress(compressor.compress(matrix)), matrix.float())


def test_schedule_starts_dense_and_falls_to_the_target() -> None:
    schedule = SparsitySchedule(0.99, warmup_steps=3, ramp_steps=4)
    densities = [schedule.density(step) for step in range(10)]
    assert densities[:3] == [1.0] * 3
    assert densities[3:8] == sorted(densities[3:8], reverse=True)
    assert densities[3] == pytest.approx(0.01**0.2)
    assert densities[7:] == [pytest.approx(0.01)] * 3


def test_density_falls_with_a_power_of_the_step() -> None:
    """With the square from 60 dense steps on, the target of 0.01 is reached after ten times as many."""
    schedule = SparsitySchedule(0.99, warmup_steps=60, ramp_steps=540, by_power=True)
    assert [schedule.density(step) for step in (0, 59)] == [1.0, 1.0]
    assert schedule.density(119) == pytest.approx(0.25, rel=2e-3)
    assert schedule.density(239) == pytest.approx(0.0625, rel=4e-3)
    assert [schedule.density(step) for step in (600, 5000)] == [pytest.approx(0.01)] * 2
    densities = [schedule.density(step) for step in range(59, 605)]
    assert densities == sorted(densities, reverse=True)
    assert schedule.starting(599)
    assert not schedule.starting(600)
