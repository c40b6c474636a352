"""A cache of compiled kernels that is damaged, contended or somebody else's."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from support.compiler import copier

from dct_plugin.kernels import build

pytestmark = pytest.mark.slow  # compilers are processes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", copier(folder, build.load()[1]))
        build.compile_library(folder / "library.so")
    return folder / "library.so"


@pytest.fixture
def cache(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library in an otherwise empty cache; to compile it is to copy it."""
    monkeypatch.setenv("CC", copier(tmp_path, compiled))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none.so")
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    folder = tmp_path / "dct_plugin"
    folder.mkdir(mode=0o700)
    path = folder / f"dct_kernels-{build.build_id()}.so"
    shutil.copy(compiled, path)
    return path


@pytest.mark.parametrize("size", [0, 100, 20_000, -1])
def test_a_truncated_library_is_built_again(cache: Path, size: int) -> None:
    """To load it would end the process with SIGBUS."""
    whole = cache.read_bytes()
    cache.write_bytes(whole[:size])
    _, path = build.load()
    assert path == cache
    assert cache.read_bytes() == whole


def test_a_flipped_bit_is_found(cache: Path) -> None:
    whole = cache.read_bytes()
    cache.write_bytes(whole[:30_000] + bytes([whole[30_000] ^ 4]) + whole[30_001:])
    build.load()
    assert cache.read_bytes() == whole


def test_a_library_that_others_can_write_is_replaced(cache: Path) -> None:
    cache.chmod(0o775)
    build.load()
    assert cache.stat().st_mode & 0o022 == 0


def test_a_folder_that_a_group_can_write_is_refused(cache: Path) -> None:
    cache.parent.chmod(0o770)
    _, path = build.load()
    assert path.parent.parent == cache.parent.parent / "tmp"


def test_what_a_killed_build_left_is_removed(cache: Path) -> None:
    cache.unlink()
    old, young = (cache.parent / f"dct_kernels-{name}.tmp" for name in ("old", "young"))
    for path in (old, young):
        path.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    build.load()
    assert not old.exists()
    assert young.exists()


def test_a_compiler_command_with_open_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", '"')
    with pytest.raises(build.BuildError, match='CC=": not a command: No closing quotation'):
        build.compilers()
