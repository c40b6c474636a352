"""State files that are damaged, mixed or of another: found at load, on the rank that has them, before use."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import launch, run
from support.state_files import save_state

from dct_plugin import checkpoint
from dct_plugin.compression.stream import Compressor
from dct_plugin.errors import DCTError

SIZES = {"a": 1000, "b.weight": 400}


def state(seed: int = 0, step: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    streams = {}
    for name, numel in SIZES.items():
        stream = Compressor(sparsity=0.9, name=name, rank=seed)
        stream.compress(torch.randn(numel, generator=generator))
        streams[name] = stream.state_dict()
    return {"step": step, "loss_scale": 1.0, "streams": streams}


def written(folder: Path, ranks: int = 2, *, identity: str = "first", step: int = 7) -> Path:
    for rank in range(ranks):
        save_state(folder, state(rank, step), rank=rank, world_size=ranks, identity=identity)
    return checkpoint.StateFiles(1, 0).file(folder)


def refused(folder: Path, rank: int = 1, world_size: int = 2) -> str:
    with pytest.raises(DCTError) as refusal:
        checkpoint.StateFiles(rank, world_size, sizes=SIZES).read(folder)
    return str(refusal.value)


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The file with its content changed, and checksums that fit."""
    content = checkpoint.read(path)
    change(content)
    checkpoint.write(path, {k: v for k, v in content.items() if k not in ("format", "version")})


def test_a_flipped_bit_is_found_and_its_file_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole, residual = path.read_bytes(), state(1)["streams"]["b.weight"]["residual"]
    at = whole.index(residual.numpy().tobytes())
    path.write_bytes(whole[: at + 41] + bytes([whole[at + 41] ^ 1]) + whole[at + 42 :])
    words = "not a readable state of dct-plugin: ValueError: damaged: it does not have the checksum"
    assert refused(tmp_path).startswith(f"{path}: {words}")
    for other in (0, 3):  # also for whoever reads it for another number of ranks
        assert str(path) in refused(tmp_path, rank=other, world_size=4)


def plain(value: Any) -> Any:
    """Return a state in which tensors are types and bytes, to be compared."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return (value.dtype, value.numpy().tobytes()) if isinstance(value, torch.Tensor) else value


def outcome(path: Path) -> Any:
    """The content of a file, or that it was refused in one line with its name."""
    try:
        return plain(checkpoint.read(path))
    except DCTError as error:
        named = str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return "refused" if named else str(error)


def test_no_mutation_loads_as_something_else(tmp_path: Path) -> None:
    """Bits, pieces and ends of the file: refused by name, or what was written."""
    path, generator = written(tmp_path), random.Random(0)
    whole, expected = path.read_bytes(), checkpoint.read(path)
    for _ in range(400):
        data = bytearray(whole)
        kind, at = generator.randrange(4), generator.randrange(len(data))
        if kind == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            data[at : at + 64] = generator.randbytes(64)
        elif kind == 2:
            del data[at:]
        else:
            data[at : at + 1] = data[at : at + generator.randrange(1, 200)]
        path.write_bytes(data)
        assert outcome(path) in ("refused", plain(expected))


def test_swapped_files(tmp_path: Path) -> None:
    path = written(tmp_path)
    first = checkpoint.StateFiles(0, 0).file(tmp_path)
    first.rename(tmp_path / "aside")
    path.rename(first)
    (tmp_path / "aside").rename(path)
    assert refused(tmp_path) == f"{path}: written as dct_rank_00000.pt, the file of another rank"
    assert "written as dct_rank_0000" in refused(tmp_path, rank=2, world_size=3)


def test_a_residual_that_is_not_finite_or_of_another_shape(tmp_path: Path) -> None:
    path = written(tmp_path)

    def poison(content: dict[str, Any]) -> None:
        content["state"]["streams"]["a"]["residual"][3] = float("nan")

    def grow(content: dict[str, Any]) -> None:
        content["state"]["streams"]["b.weight"]["residual"] = torch.zeros(401)

    rewritten(path, poison)
    assert refused(tmp_path) == f"{path}: the residual of a holds values that are not finite"
    written(tmp_path)
    rewritten(path, grow)
    words = "the residual of b.weight has shape (401,), the model has 400 entries there"
    assert refused(tmp_path) == f"{path}: {words}"


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("state"),
        lambda content: content.pop("world_size"),
        lambda content: content.pop("unit"),
        lambda content: content["state"].pop("streams"),
        lambda content: content["state"].update(step="seven"),
        lambda content: content["state"].update(step=None),
    ],
)
def test_what_is_missing_is_no_key_error(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = written(tmp_path)
    rewritten(path, change)
    assert str(path) in refused(tmp_path)


def test_a_file_that_claims_a_billion_ranks(tmp_path: Path) -> None:
    path = written(tmp_path)
    rewritten(path, lambda content: content.update(world_size=10**9))
    with pytest.raises(checkpoint.NoState, match=r"dct_rank_00002.pt is missing"):
        checkpoint.StateFiles(1, 2).read(tmp_path)


def test_a_fifo_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """To open one waits for its other end, on one rank or on all."""
    path = written(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert "dct_rank_00001.pt: not a readable state of dct-plugin: OSError: no regular file" in refused(
        tmp_path
    )
    os.mkfifo(path.with_name("dct_rank_00001.pt.tmp"))
    written(tmp_path)
    assert checkpoint.StateFiles(1, 2).read(tmp_path).state["streams"]


def test_streams_of_a_part_are_compared_with_their_part(tmp_path: Path) -> None:
    saved = state()
    saved["streams"] = {"a[0:600]": {**saved["streams"]["a"], "residual": torch.zeros(600)}}
    save_state(tmp_path, saved, rank=0, world_size=1)
    checkpoint.StateFiles(0, 1, sizes=SIZES).read(tmp_path)
    saved["streams"] = {"a[0:600]": {**saved["streams"]["a[0:600]"], "residual": torch.zeros(599)}}
    save_state(tmp_path, saved, rank=0, world_size=1)
    assert "the residual of a[0:600] has shape (599,), the model has 600" in refused(tmp_path, 0, 1)


def test_streams_that_the_model_does_not_have() -> None:
    kept, strange = checkpoint.known_to({"a": 1000}, state())
    assert list(kept["streams"]) == ["a"]
    assert strange == ["b.weight"]


# -- all ranks act alike ---


def _loads(rank: int, world_size: int, folder: str, expected: str | None) -> bool:
    return checkpoint.StateFiles(rank, world_size, sizes=SIZES).load(folder, expected=expected) is not None


def stopped(folder: Path, *, ranks: int = 2, expected: str | None = None) -> str:
    """What every rank says."""
    texts = []
    for kind, text in launch(ranks, _loads, str(folder), expected):
        assert kind == "error"
        message, _, _ = text.partition("\nTraceback")
        assert message.startswith("DCTError: cannot load residuals\n")
        assert "or remove its dct_*.pt files, and training goes on with residuals of zero" in message
        texts.append(message)
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.slow
def test_files_of_two_saves_stop_all_ranks(tmp_path: Path) -> None:
    path = written(tmp_path / "step7")
    shutil.copy(written(tmp_path / "step12", identity="second", step=12), path)
    text = stopped(tmp_path / "step7")
    assert "rank 0: " in text
    assert "its file is of step 7, dct-plugin" in text
    assert "its file is of step 12, dct-plugin" in text
    # Another number of ranks reads them all.
    assert "of another save (step 12" in stopped(tmp_path / "step7", ranks=3)


@pytest.mark.slow
def test_files_of_another_save_than_the_frameworks_state(tmp_path: Path) -> None:
    written(tmp_path)
    assert run(2, _loads, str(tmp_path), "first") == [True, True]
    assert "the files are of another save (step 7" in stopped(tmp_path, expected="second")
    (tmp_path / checkpoint.UNFINISHED).touch()
    assert "a save over an older checkpoint did not end" in stopped(tmp_path, expected="first")


@pytest.mark.slow
def test_one_damaged_file_stops_all_ranks(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    assert f"  rank 1: {path}: not a readable state" in stopped(tmp_path)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    written(tmp_path)
    found = checkpoint.StateFiles(1, 2, sizes=SIZES).read(tmp_path)
    assert found is not None
    assert found.save == "first"
    for name, stream in state(1)["streams"].items():
        assert torch.equal(found.state["streams"][name]["residual"], stream["residual"])
        assert found.state["streams"][name]["threshold"] == stream["threshold"]
