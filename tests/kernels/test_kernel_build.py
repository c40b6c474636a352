"""Finding, building and caching the compiled kernels; which backend is used, and what is said about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.compiler import copier, quick
from support.forked import forked_interpreters

from dct_plugin.kernels import build, get_backend

# What a training process does.
USE = """
    import logging, sys
    for name in [name for name in sys.modules if name.startswith("dct_plugin")]:
        del sys.modules[name]  # of the process that forks
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    from dct_plugin.kernels import build, get_backend
    build.PREBUILT = PREBUILT
    for _ in range(3):
        backend = get_backend("cpu")
    print(backend.name, getattr(backend, "path", ""))
"""
# The same without torch, which takes seconds to import.
LOAD = f"""
    import importlib.util
    spec = importlib.util.spec_from_file_location("build", {build.__file__!r})
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    build.PREBUILT = PREBUILT
    print("cpu", build.load()[1])
"""
LIBRARY = f"dct_kernels-{build.build_id()}.so"


def python(code: str, *, prebuilt: Path | str = "none.so", **env: str | None) -> subprocess.Popen[str]:
    """Start a Python process with changed environment variables (None: unset)."""
    code = f"from pathlib import Path\nPREBUILT = Path({str(prebuilt)!r})\n" + textwrap.dedent(code)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DCT_KERNELS": "", **env}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={k: v for k, v in variables.items() if v is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip(), err.strip()


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that several processes, started at once, have filled. One of them compiles, the others copy."""
    cache, folder = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("compilers")
    copying = copier(folder, build.load()[1])
    path = f"{Path(quick(folder)).parent}{os.pathsep}{os.environ['PATH']}"
    processes = [python(LOAD, XDG_CACHE_HOME=str(cache), PATH=path, CC=cc) for cc in (None, *[copying] * 5)]
    for process in processes:
        out, err = finish(process)
        assert out == f"cpu {cache / 'dct_plugin' / LIBRARY}"
        assert not err
    return cache


def test_many_processes_fill_one_cache(warm_cache: Path) -> None:
    folder = warm_cache / "dct_plugin"
    assert [path.name for path in folder.iterdir()] == [LIBRARY]
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_cache_is_used_without_a_compiler(warm_cache: Path) -> None:
    library = warm_cache / "dct_plugin" / LIBRARY
    before = library.stat().st_mtime_ns
    with forked_interpreters():
        out, _ = finish(python(USE, XDG_CACHE_HOME=str(warm_cache), PATH="", CC=None))
    assert out.startswith("cpu ")
    assert library.stat().st_mtime_ns == before


@pytest.mark.slow
def test_no_compiler_falls_back_and_says_so_once(tmp_path: Path) -> None:
    with forked_interpreters():
        out, err = finish(python(USE, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path), PATH="", CC=None))
    assert out == "reference"
    assert err.count("\n") == 0
    assert err.startswith("WARNING")
    assert "no C compiler found" in err
    assert "plain torch" in err


@pytest.mark.slow
def test_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'cannot find as' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with forked_interpreters():
        out, err = finish(python(USE, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path), CC=str(compiler)))
    assert out == "reference"
    assert "broken-cc failed: cannot find as" in err
    assert not list((tmp_path / "dct_plugin").glob("*.tmp"))


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("DCT_KERNELS", name)
    assert get_backend("cpu").name == name
    assert get_backend("cpu", "reference").name == "reference"


@pytest.mark.slow
def test_backend_asked_for_by_name_does_not_fall_back(tmp_path: Path) -> None:
    code = """
        import sys
        for name in [name for name in sys.modules if name.startswith("dct_plugin")]:
            del sys.modules[name]
        from dct_plugin.kernels import build, get_backend
        build.PREBUILT = PREBUILT
        for name, error in [("auto", OSError), ("cpu", OSError), ("fpga", ValueError)]:
            try:
                get_backend("cpu", name)
            except error as caught:
                print(type(caught).__name__, caught)
        print(get_backend("cpu", "reference").name)
        import os
        os.environ["DCT_KERNELS"] = "gpu"
        get_backend("cpu")
    """
    with forked_interpreters():
        process = python(
            code, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path), PATH="", CC=None, DCT_KERNELS="cpu"
        )
        out, err = process.communicate()
    lines = out.splitlines()
    assert lines[0].startswith("BuildError no C compiler")
    assert lines[1].startswith("BuildError no C compiler")
    allowed = 'must be one of "auto", "reference", "cpu", "triton"'
    assert lines[2] == f'ConfigError dct.kernels.backend = "fpga": {allowed}'
    assert lines[3] == "reference"
    assert f'DCT_KERNELS = "gpu": {allowed}' in err


def test_cpu_kernels_do_not_serve_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCT_KERNELS", raising=False)
    assert get_backend("meta").name == "reference"
    with pytest.raises(ValueError, match="'cpu' serves cpu tensors, not meta"):
        get_backend("meta", "cpu")
    monkeypatch.setenv("DCT_KERNELS", "cpu")
    assert get_backend("meta").name == "reference"  # the variable means "where it can serve"


@pytest.mark.slow
def test_damaged_library_is_built_again(tmp_path: Path, warm_cache: Path) -> None:
    folder = tmp_path / "dct_plugin"
    folder.mkdir(mode=0o700)
    library = folder / LIBRARY
    library.write_bytes(b"not a library")
    compiler = copier(tmp_path, warm_cache / "dct_plugin" / LIBRARY)
    out, err = finish(python(LOAD, XDG_CACHE_HOME=str(tmp_path), CC=compiler))
    assert out == f"cpu {library}"
    assert err == ""


@pytest.mark.parametrize("place", ["library", "prebuilt"])
def test_a_fifo_in_place_of_a_file_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "dct_plugin"
    folder.mkdir(mode=0o700)
    library, prebuilt = folder / LIBRARY, tmp_path / "prebuilt.so"
    os.mkfifo({"library": library, "prebuilt": prebuilt}[place], 0o600)
    whole, path = build.load()
    assert whole
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    monkeypatch.setattr(
        build, "compile_library", lambda target: os.replace(shutil.copy(path, f"{target}.tmp"), target)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[Path] = []
    loader = threading.Thread(target=lambda: found.append(build.load()[1]), daemon=True)
    loader.start()
    loader.join(20)
    assert found == [library]


@pytest.mark.slow
def test_cache_that_others_can_write_to_is_not_trusted(tmp_path: Path, warm_cache: Path) -> None:
    folder = tmp_path / "cache" / "dct_plugin"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    private = tmp_path / "tmp"
    private.mkdir()
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(private)}
    compiler = copier(tmp_path, warm_cache / "dct_plugin" / LIBRARY)
    out, _ = finish(python(LOAD, CC=compiler, **variables))
    assert out.startswith(f"cpu {private}")
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_prebuilt_library_is_preferred_unless_stale(tmp_path: Path, warm_cache: Path) -> None:
    prebuilt = tmp_path / "_dct_kernels.so"
    prebuilt.write_bytes((warm_cache / "dct_plugin" / LIBRARY).read_bytes())
    out, _ = finish(python(LOAD, prebuilt=prebuilt, XDG_CACHE_HOME=str(warm_cache)))
    assert out == f"cpu {prebuilt}"
    # The same library with another build id: of an older source.
    stale = prebuilt.read_bytes().replace(build.build_id().encode(), b"0" * len(build.build_id()))
    prebuilt.write_bytes(stale)
    out, _ = finish(python(LOAD, prebuilt=prebuilt, XDG_CACHE_HOME=str(warm_cache)))
    assert out.startswith(f"cpu {warm_cache}")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", build.compilers(), ids=lambda command: Path(command[0]).name)
def test_source_compiles_without_warnings(tmp_path: Path, compiler: list[str]) -> None:
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Werror", "-fsyntax-only"]
    done = subprocess.run(
        [*compiler, *build.FLAGS, *warnings, str(build.SOURCE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("compiler", build.compilers()[:1], ids=["cc"])
def test_source_compiles_without_intrinsics(tmp_path: Path, compiler: list[str]) -> None:
    """As on any other architecture."""
    flags = [*build.FLAGS, "-DDCT_PORTABLE", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*compiler, *flags, str(build.SOURCE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compile_command_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache gcc -m64")
    assert build.compilers() == [["ccache", "gcc", "-m64"]]
