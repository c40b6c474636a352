"""The whole ``dct`` section, and how it is read from JSON."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import Field

from ..errors import ConfigError
from .data_parallel import DataParallelConfig
from .embedding import EmbeddingChannelConfig
from .model_parallel import ModelParallelConfig
from .options import show
from .section import Section
from .validation_errors import DEEPSPEED_KEYS, validated

SECTION = "dct"
#: The ready configurations.
_READY = Path(__file__).parents[1] / "configs"


class MetricsConfig(Section):
    """Reports about bytes, density and time."""

    section_path = "dct.metrics"

    path: str | None = Field(default=None, min_length=1)
    """JSON lines file of rank 0, or of every rank if the name holds '{rank}'.

    To keep the [metrics](metrics.md) of a run.
    """
    every: int = Field(default=50, ge=1)
    """Steps between two reports of their averages, a line per tensor class.

    1 for studies.
    """
    tensors: bool = False
    """Also write density and threshold of every thresholded gradient, a line per tensor and report.

    To find tensors that miss their density.
    """
    tensorboard: str | None = Field(default=None, min_length=1)
    """Directory for a TensorBoard writer of the plugin; null uses only the framework's monitor.

    If the framework has no monitor.
    """


class KernelConfig(Section):
    """The implementation of selection, encoding and decoding."""

    section_path = "dct.kernels"

    backend: str = Field(
        default="auto",
        pattern=r"^[A-Za-z0-9_.-]+$",
        json_schema_extra={"allowed": '"auto", "reference", "cpu", "triton" or another registered name'},
    )
    """Kernels: plain torch (reference), the compiled CPU library (cpu), Triton (triton), another registered
    backend, or the fastest for the tensor's device (auto, which the environment variable `DCT_KERNELS`
    overrides).

    `reference` to find out whether a fault is in the compiled kernels.
    """


class DCTConfig(Section):
    """The whole ``dct`` section."""

    enabled: bool = True
    """Use the plugin. false leaves the framework unchanged.

    `false` for a run to compare with.
    """
    data_parallel: DataParallelConfig = DataParallelConfig()
    """Gradients between data-parallel ranks."""
    model_parallel: ModelParallelConfig = ModelParallelConfig()
    """Activations and their gradients between model-parallel ranks."""
    embedding: EmbeddingChannelConfig = EmbeddingChannelConfig()
    """Vectors of sharded embedding tables between their owner and the samples' rank."""
    metrics: MetricsConfig = MetricsConfig()
    """Reports on bytes, density, time."""
    kernels: KernelConfig = KernelConfig()
    """Implementation of the hot loops."""

    @classmethod
    def parse(cls, section: Mapping[str, Any] | DCTConfig | None, *, rank: int | None = None) -> DCTConfig:
        """Validate a ``dct`` section.

        Args:
            section: The section as read from JSON, or an already validated one (returned as it is).
                ``None`` (there is no section) gives a disabled configuration.
            rank: Named in the error when given.

        Raises:
            ConfigError: All errors of the section, one per line: key, value, what is allowed, and for an
                unknown key the closest valid one.
        """
        if isinstance(section, DCTConfig):
            return section
        if section is None:
            return cls(enabled=False)
        return validated(cls, section, SECTION, rank=rank)

    @classmethod
    def given(cls, section: Mapping[str, Any] | DCTConfig | None, *, rank: int | None = None) -> DCTConfig:
        """Validate the section that a script passes: as :meth:`parse`, but None stands for the defaults, and
        the section may be the value of a key ``dct``, as in a whole DeepSpeed JSON.
        """
        if isinstance(section, Mapping) and isinstance(section.get(SECTION), Mapping):
            section = section[SECTION]
        return cls.parse({} if section is None else section, rank=rank)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, rank: int | None = None) -> DCTConfig:
        """Read a section from a JSON file: a DeepSpeed configuration with a ``dct`` key, or the bare section.

        Raises:
            ConfigError: The file cannot be read, is not JSON, holds no section, or the section is wrong.
        """
        where, content = os.fspath(path), read_json(path)
        if SECTION in content:
            content = content[SECTION]
        elif found := sorted(DEEPSPEED_KEYS & content.keys()):
            raise ConfigError(
                f'{where}: a DeepSpeed configuration (it has {found[0]!r}) without a "dct" section'
            )
        return validated(cls, content, SECTION, rank=rank, where=where)

    def updated(self, changes: Mapping[str, Any]) -> DCTConfig:
        """Return a validated copy with nested ``changes``, e.g. ``{"data_parallel": {"sparsity": 0}}``."""
        # What is not written may depend on the number of ranks, or on the framework.
        return validated(type(self), _merged(self.model_dump(exclude_unset=True), changes), SECTION)

    def fingerprint(self) -> str:
        """Return a short hash of the section with all defaults (12 hexadecimal digits)."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


#: Bytes of a configuration; a longer file is another one, taken by mistake.
_LARGEST = 1_000_000


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in a file, see :func:`read_hjson`."""
    return read_hjson(path)[0]


def read_hjson(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bool]:
    """Return the object in a file as DeepSpeed reads it, and whether the file is strict JSON.

    Files with comments and trailing commas need the package hjson, which DeepSpeed installs.

    Args:
        path: The file, or the name of a ready configuration (``hybrid_dct``); ``-`` is the standard input.

    Raises:
        ConfigError: The file cannot be read, is larger than 1 MB, or holds no object.
    """
    where = os.fspath(path)
    text = _beginning(where)
    if where.endswith((".yaml", ".yml")) and not text.lstrip().startswith(b"{"):  # hjson reads it as texts
        raise ConfigError(f"{where}: is YAML, which DeepSpeed does not read either; write JSON")
    try:
        content, strict = _parsed(text.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: must hold a JSON object, holds {show(content)}")
    return content, strict


def _beginning(where: str) -> bytes:
    """Return the content of a configuration of at most 1 MB."""
    path, ready = Path(where), _READY / f"{where.removesuffix('.json')}.json"
    if path.name == where and ready.is_file() and not path.is_file():
        path = ready
    try:
        with nullcontext(sys.stdin.buffer) if where == "-" else path.open("rb") as file:
            content: bytes = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        names = [each.stem for each in _READY.glob("*.json")]
        close = difflib.get_close_matches(path.stem, names, n=1)
        meant = f"; did you mean the ready configuration {close[0]}?" if close else ""
        raise ConfigError(f"{where}: cannot be read: {getattr(error, 'strerror', error)}{meant}") from error
    if len(content) > _LARGEST:
        raise ConfigError(f"{where}: a configuration has {_LARGEST / 1e6:g} MB at most")
    return content


def _parsed(text: str) -> tuple[Any, bool]:
    plain = text.removeprefix("\ufeff")
    try:
        return json.loads(plain, object_pairs_hook=no_duplicates), plain == text
    except json.JSONDecodeError as error:
        if importlib.util.find_spec("hjson") is None or not plain.strip():
            raise
        import hjson

        try:
            return hjson.loads(plain, object_pairs_hook=no_duplicates), False
        except hjson.HjsonDecodeError:
            raise error from None


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested ``changes`` into ``base``; an object of another ``kind`` or ``method`` replaces the old
    one.
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same = all(value.get(name, old.get(name)) == old.get(name) for name in ("kind", "method"))
            merged[key] = _merged(old, value) if same else value
        else:
            merged[key] = value
    return merged


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, for ``object_pairs_hook``; ``ValueError`` if a key is given twice."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key {key!r} is given twice")
        seen[key] = value
    return seen
