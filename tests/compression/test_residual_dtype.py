"""``residual_dtype``: what is kept in 2 or about 1 byte per entry obeys the same laws, up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.state_files import save_state

from dct_plugin import checkpoint
from dct_plugin.compression.feedback import PackedTensor, unpacked
from dct_plugin.compression.stream import Compressor
from dct_plugin.errors import DCTError

NUMEL = 10_000
SMALL = pytest.mark.parametrize("dtype", ["bf16", "int8"])


def gradients(steps: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator) for _ in range(steps)]


def compressor(dtype: str, **more: Any) -> Compressor:
    return Compressor(**{"sparsity": 0.95, "value_dtype": "fp32", "residual_dtype": dtype, **more})


def kept(stream: Compressor) -> torch.Tensor:
    assert stream.residual is not None
    return stream.residual.current


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@SMALL
def test_nothing_is_lost_but_rounding(dtype: str) -> None:
    """Within a step of the type at every optimizer step, and on average over streams not at all."""
    names, steps = 60, 8
    drift = torch.zeros(NUMEL, dtype=torch.float64)
    largest = 0.0
    for name in range(names):
        stream, old = compressor(dtype, name=f"w{name}"), torch.zeros(NUMEL)
        for gradient in gradients(steps):
            sent = stream.decompress(stream.compress(gradient))
            lost = gradient + old - sent - kept(stream)
            bound = (kept(stream).abs() + 1e-6) / 64 if dtype == "bf16" else kept(stream).abs().max() / 32
            assert bool((lost.abs() <= bound).all())
            drift += lost
            old, largest = kept(stream), max(largest, float(lost.abs().max()))
    mean = drift / names
    assert float(mean.abs().max()) < 6 * largest * (steps / names) ** 0.5
    assert abs(float(mean.mean())) < 4 * largest * (steps / names / NUMEL) ** 0.5


@SMALL
def test_memory(dtype: str) -> None:
    stream = compressor(dtype)
    stream.compress(gradients(1)[0])
    held = stream.residual._committed  # type: ignore[union-attr]
    assert isinstance(held, PackedTensor)
    each = held.values.nbytes + (0 if held.exponents is None else held.exponents.nbytes)
    assert each <= NUMEL * {"bf16": 2, "int8": 1.02}[dtype]


@SMALL
@pytest.mark.parametrize("poison", [float("nan"), 2.0**126])
def test_a_poisoned_tensor_leaves_it_bitwise(dtype: str, poison: float) -> None:
    stream, unharmed = compressor(dtype), compressor(dtype)
    *clean, bad, after = gradients(5)
    for gradient in clean:
        stream.compress(gradient)
        unharmed.compress(gradient)
    bad[4321] = poison
    assert stream.compress(bad).nonfinite
    assert same(stream.state_dict(), unharmed.state_dict())
    assert stream.compress(after).to_bytes() == unharmed.compress(after).to_bytes()


@SMALL
def test_rollback_and_loss_scale_are_bitwise(dtype: str) -> None:
    plain, careful = compressor(dtype), compressor(dtype, transactional=True)
    for step, gradient in enumerate(gradients(6)):
        if step % 2:
            careful.compress(torch.randn_like(gradient) * 100)
            careful.compress(torch.randn_like(gradient))
            careful.end_step(skipped=True)
        if step == 3:
            careful.rescale(1024.0)
            careful.rescale(1 / 1024)
        assert plain.compress(gradient).to_bytes() == careful.compress(gradient).to_bytes()
        careful.end_step()
    before = kept(plain)
    plain.rescale(0.25)
    assert torch.equal(kept(plain), before * 0.25)


@SMALL
def test_unused_gradients_return_to_the_residual(dtype: str) -> None:
    stream = compressor(dtype, transactional=True)
    stream.compress(gradients(1)[0])
    stream.end_step()
    before = kept(stream)
    stream.compress(torch.zeros(NUMEL))
    left = kept(stream)
    assert stream.residual is not None
    stream.residual.add(before - left)
    assert float((kept(stream) - before).abs().max()) <= float(before.abs().max()) / 32
    stream.end_step(skipped=True)
    assert torch.equal(kept(stream), before)


def files(folder: Path, dtype: str, ranks: int = 2) -> list[Compressor]:
    streams = []
    for rank in range(ranks):
        stream = compressor(dtype, name="w", rank=rank)
        for gradient in gradients(3, rank):
            stream.compress(gradient)
        state = {"step": 3, "loss_scale": 1.0, "streams": {"w": stream.state_dict()}}
        save_state(folder, state, rank=rank, world_size=ranks)
        streams.append(stream)
    return streams


@SMALL
def test_a_resumed_stream_goes_on_bitwise(dtype: str, tmp_path: Path) -> None:
    for rank, whole in enumerate(files(tmp_path, dtype)):
        found = checkpoint.StateFiles(rank, 2, sizes={"w": NUMEL}).read(tmp_path)
        assert found is not None
        rest = compressor(dtype, name="w", rank=rank)
        rest.load_state_dict(found.state["streams"]["w"])
        for gradient in gradients(3, 10 + rank):
            assert rest.compress(gradient).to_bytes() == whole.compress(gradient).to_bytes()
        assert same(rest.state_dict(), whole.state_dict())
    least = 2 if dtype == "bf16" else 1
    assert checkpoint.StateFiles(0, 0).file(tmp_path).stat().st_size < least * NUMEL * 1.02 + 6000


@SMALL
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_ranks_get_the_mean(dtype: str, world_size: int, tmp_path: Path) -> None:
    """Exactly, in fp32; whoever keeps it in fewer bytes rounds it once."""
    streams = files(tmp_path, dtype)
    found = checkpoint.StateFiles(world_size - 1, world_size, sizes={"w": NUMEL}).read(tmp_path)
    assert found is not None
    mean = (kept(streams[0]) + kept(streams[1])) / 2
    assert torch.equal(found.state["streams"]["w"]["residual"], mean)
    after = compressor(dtype)
    after.load_state_dict(found.state["streams"]["w"])
    gradient = gradients(1, 9)[0]
    sent = after.decompress(after.compress(gradient))
    lost = gradient + mean - sent - kept(after)
    assert float(lost.abs().max()) < float(kept(after).abs().max()) / 16


@pytest.mark.parametrize("before", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("after", ["fp32", "bf16", "int8"])
def test_the_type_may_change_with_a_restart(before: str, after: str) -> None:
    old, new = compressor(before), compressor(after, sparsity=0.5)
    old.compress(gradients(1)[0])
    new.compress(gradients(1)[0])
    new.load_state_dict(old.state_dict())
    error = (kept(new) - kept(old)).abs()
    assert float(error.max()) <= (0 if after in (before, "fp32") else float(kept(old).abs().max()) / 32)
    assert torch.equal(unpacked(old.state_dict()["residual"]), kept(old))


def test_exponents_out_of_range_are_refused(tmp_path: Path) -> None:
    files(tmp_path, "int8")
    path = checkpoint.StateFiles(1, 0).file(tmp_path)
    content = checkpoint.read(path)
    for change, words in (
        (lambda saved: saved["exponents"].fill_(127), "has exponents out of range"),
        (lambda saved: saved.update(exponents=saved["exponents"][1:]), "exponents for 10000 entries"),
        (lambda saved: saved.pop("values"), "is not a tensor, nor values and exponents"),
    ):
        broken = {k: v for k, v in content.items() if k not in ("format", "version")}
        change(broken["state"]["streams"]["w"]["residual"])
        checkpoint.write(path, broken)
        with pytest.raises(DCTError, match=words) as refusal:
            checkpoint.StateFiles(1, 2, sizes={"w": NUMEL}).read(tmp_path)
        assert "rank_00001.pt: the residual of w" in str(refusal.value)
