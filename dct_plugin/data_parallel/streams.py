"""The compressed streams of one rank: one for each tensor that it sends by itself, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from .. import checkpoint
from ..codecs.values import ValueDtype
from ..compression.feedback import ScratchBuffers
from ..compression.stream import Compressor
from ..config import DataParallelConfig, KernelConfig
from ..kernels.checks import PACK_BLOCK


class Streams(dict[str, Compressor]):
    """The streams that were used so far.

    Args:
        settings: Settings of the streams.
        rank: Position of this rank among those that exchange messages.
        kernels: Which kernels run; the defaults when None.
        transactional: Keep a second residual, with which skipped steps are taken back.

    Attributes:
        kernels: Those that run; the defaults when None.
        loaded: Loaded states of streams that were not used since.
        scratch: Scratch memory of all streams.
    """

    def __init__(
        self, settings: DataParallelConfig, rank: int, kernels: KernelConfig | None, *, transactional: bool
    ) -> None:
        super().__init__()
        self._settings, self._rank, self.kernels = settings, rank, kernels
        self._value_dtype = ValueDtype.parse(settings.value_dtype)
        self.transactional = transactional
        self.scratch = ScratchBuffers()
        self.loaded: dict[str, dict[str, Any]] = {}

    def named(self, name: str) -> Compressor:
        """Return the stream of a tensor, made when it is first asked for."""
        stream = self.get(name)
        if stream is None:
            settings, scratch, transactional = self._settings, self.scratch, self.transactional
            stream = self[name] = Compressor(
                settings, name=name, rank=self._rank, kernels=self.kernels,
                transactional=transactional, scratch=scratch,
            )  # fmt: skip
            stream.set_value_dtype(self._value_dtype)
            if name in self.loaded:
                stream.load_state_dict(self.loaded.pop(name))
        return stream

    def of(self, names: Collection[str]) -> list[Compressor]:
        """Return the streams of tensors, also those of the parts of their sums that this rank owns."""
        wanted = set(names)
        return [each for key, each in self.items() if wanted & {key, key.rpartition("[")[0]}]

    def arm(self) -> None:
        """Keep a second residual from the next step on, so that steps can be taken back."""
        if not self.transactional:
            self.transactional = True
            for stream in self.values():
                stream.arm()

    def set_value_dtype(self, value_dtype: ValueDtype) -> None:
        """Send the kept values in another type from now on."""
        self._value_dtype = value_dtype
        for stream in self.values():
            stream.set_value_dtype(value_dtype)

    def add_to_residual(self, name: str, flat: Tensor) -> None:
        """Add to the residual of a tensor what an exchange left in it, where no rank used that."""
        stream = self.get(name)
        if stream is not None and stream.residual is not None:
            stream.residual.add(flat)

    def end_step(self, waiting: Collection[str], *, skipped: bool) -> None:
        """Close an optimizer step of all streams but those of the tensors that are ``waiting``. Streams that
        cannot be undone have nothing to keep or to restore.
        """
        open_still = set(self.of(waiting)) if waiting and self.transactional else ()
        for stream in self.values() if self.transactional else ():
            if stream not in open_still:
                stream.end_step(skipped=skipped)

    def rescale(self, ratio: float) -> None:
        """Follow a change of the gradients' unit (exact for powers of 2)."""
        self.loaded = dict(checkpoint.in_unit({"streams": self.loaded}, ratio)["streams"])
        for stream in self.values():
            stream.rescale(ratio)

    def residual_bytes(self, numel: int) -> float:
        """Return the memory of one residual of so many entries."""
        if not self._settings.feedback.keeps_residual:
            return 0.0
        return {"bf16": 2.0, "int8": 1.0 + 1.0 / PACK_BLOCK}.get(self._settings.residual_dtype, 4.0) * numel

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all streams, also of those that were loaded and not used since."""
        return {**self.loaded, **{name: stream.state_dict() for name, stream in self.items()}}

    def load(self, states: Mapping[str, Any]) -> None:
        """Forget all streams; those of ``states`` get theirs when they are next used."""
        self.clear()
        self.loaded = dict(states)
