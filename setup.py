"""Compiles the CPU kernels into the package if there is a C compiler; all else is in pyproject.toml.

The compiled kernels are optional: without a compiler the installation succeeds, and they are built on first
use or replaced by plain torch. A wheel that carries them is tagged ``py3-none-<platform>``, another one
``py3-none-any``.

``DCT_WHEEL_TARGET`` is for releases (``release/wheels.py``): ``SYSTEM/MACHINE/TAG``, for example
``linux/aarch64/manylinux2014_aarch64`` with a cross-compiler in ``CC``, or ``none`` for no kernels.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import tempfile
import warnings
from pathlib import Path

from setuptools import Distribution, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "dct_plugin" / "kernels"
SYSTEM, MACHINE, TAG = (*os.environ.get("DCT_WHEEL_TARGET", "").split("/"), "", "")[:3]


@functools.cache
def compiled_kernels() -> Path | None:
    """Compile the library into a temporary folder; None where that is not wanted or cannot be."""
    if SYSTEM == "none":
        return None
    # Loaded from its file: the package itself needs torch, which is not there when a wheel is built.
    spec = importlib.util.spec_from_file_location("_dct_build", KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    folder = tempfile.mkdtemp(prefix="dct_plugin-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = Path(folder) / build.PREBUILT.name
    try:
        build.compile_library(target, *([build.Target(SYSTEM, MACHINE)] if MACHINE else []))
    except OSError as error:
        if MACHINE:
            raise
        print(f"dct_plugin: CPU kernels not compiled ({error}); they will be built on first use, or not used")
        return None
    return target


class BuildPy(build_py):
    """Puts the compiled kernels beside kernels/build.py: in the wheel, or in the source tree if editable."""

    def run(self) -> None:
        super().run()
        library = compiled_kernels()
        if library is not None:
            folder = KERNELS if self.editable_mode else Path(self.build_lib) / "dct_plugin" / "kernels"
            folder.mkdir(parents=True, exist_ok=True)
            # Not onto the old file: a running process may have it mapped.
            staged = folder / f"{library.name}.new"
            shutil.copy2(library, staged)
            staged.replace(folder / library.name)


class BinaryDistribution(Distribution):
    """Goes to the platform's own folder if it carries the compiled kernels."""

    def has_ext_modules(self) -> bool:
        return compiled_kernels() is not None


class BdistWheel(bdist_wheel):
    """Tags the wheel for this platform and any Python 3 if it carries the compiled kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", TAG or tag[2])


# An editable installation of a source tree is what it says: no news.
warnings.filterwarnings("ignore", message="Editable installation")

setup(
    packages=find_namespace_packages(str(ROOT), include=["dct_plugin*"], exclude=["*__pycache__*"]),
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
    distclass=BinaryDistribution,
)
