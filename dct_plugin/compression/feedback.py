"""The residual of one tensor stream: what was not sent, for the next step.

Error feedback adds the residual to the next gradient (DCT, Gupta et al., KDD 2021, section 3: ``E = G - G *
keep``). The residual also keeps the rounding error of the value type, so that nothing is lost, only delayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..kernels import Backend, Residuals
from ..kernels.backend import PACK_BLOCK, PACK_EXPONENTS
from ..kernels.reference import ReferenceBackend

Saved: TypeAlias = Tensor | dict[str, Tensor]
"""A residual in a checkpoint: fp32 or bf16 [numel], or ``values`` and ``exponents`` in int8."""


class ScratchBuffers:
    """Scratch memory (fp32), one buffer for each use: fresh memory in large blocks is slow to touch."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, use: str, like: Tensor) -> Tensor:
        """Return fp32 [numel] of ``like`` on its device, to overwrite; the same memory for one use."""
        return self._buffer(use, like.numel(), like.device, torch.empty)

    def zeros(self, use: str, numel: int, device: torch.device) -> Tensor:
        """Return fp32 [numel] of zeros; whoever takes a buffer in this way leaves zeros in it."""
        return self._buffer(use, numel, device, torch.zeros)

    def _buffer(self, use: str, numel: int, device: torch.device, make: Callable[..., Tensor]) -> Tensor:
        buffer = self._buffers.get((use, device))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[use, device] = make(numel, dtype=torch.float32, device=device)
        return buffer[:numel]


class Fp32Tensor:
    """Numbers in fp32, with the methods of :class:`PackedTensor`.

    Args:
        values: The memory, [numel].
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def write(self, values: Tensor, seed: int) -> None:
        """Take over values, which may be those that :meth:`read` gave."""
        if values is not self.values:
            self.values.copy_(values)

    def read(self, scratch: ScratchBuffers, use: str) -> Tensor:
        """Return the values in the memory that has them."""
        return self.values

    def saved(self) -> Saved:
        """A copy for a checkpoint."""
        return self.values.detach().to("cpu", copy=True)

    def restore(self, saved: Saved, seed: int) -> None:
        """Take over what :meth:`saved` gave."""
        self.values.copy_(unpacked(saved))


class PackedTensor:
    """Numbers in 2 bytes each (bf16) or in 1 and a 64th (int8), as :meth:`.kernels.Backend.pack` rounds them.

    Args:
        numel: Number of entries; zeros at first.
        dtype: bf16 or int8.
        kernels: Kernels of the device.
        device: Device of the numbers.
    """

    def __init__(self, numel: int, dtype: torch.dtype, kernels: Residuals, device: torch.device) -> None:
        blocks = -(-numel // PACK_BLOCK)
        self.values = torch.zeros(numel, dtype=dtype, device=device)
        self.exponents = torch.zeros(blocks, dtype=torch.int8, device=device) if dtype == torch.int8 else None
        self._kernels = kernels

    def write(self, values: Tensor, seed: int) -> None:
        """Take over fp32 values, rounded."""
        self._kernels.pack(values, self.values, self.exponents, seed)

    def read(self, scratch: ScratchBuffers, use: str) -> Tensor:
        """Return the values in fp32, in scratch memory."""
        out = scratch.take(use, self.values)
        self._kernels.unpack(self.values, self.exponents, out)
        return out

    def saved(self) -> Saved:
        """A copy for a checkpoint."""
        values = self.values.to("cpu", copy=True)
        if self.exponents is None:
            return values
        return {"values": values, "exponents": self.exponents.to("cpu", copy=True)}

    def restore(self, saved: Saved, seed: int) -> None:
        """Take over what :meth:`saved` gave, as it is; other types are rounded."""
        if isinstance(saved, dict) and self.exponents is not None:
            self.values.copy_(saved["values"])
            self.exponents.copy_(saved["exponents"])
        else:
            self.write(unpacked(saved).to(self.values.device), seed)


def unpacked(saved: Saved) -> Tensor:
    """A residual of a checkpoint, whatever its type, in fp32 (CPU)."""
    if isinstance(saved, dict):
        out = torch.empty(saved["values"].shape, dtype=torch.float32, device="cpu")
        ReferenceBackend().unpack(saved["values"], saved["exponents"], out)
        return out
    return saved.to(torch.float32)


def entries_of(saved: Saved) -> tuple[int, ...]:
    """Shape of a residual of a checkpoint.

    Raises:
        ValueError: It is none; says what is wrong with it.
    """
    if isinstance(saved, Tensor):
        return tuple(saved.shape)
    if not isinstance(saved, dict) or saved.keys() != {"values", "exponents"}:
        raise ValueError("is not a tensor, nor values and exponents")
    values, exponents = saved["values"], saved["exponents"]
    if values.dtype != torch.int8 or exponents.dtype != torch.int8 or values.dim() != 1:
        raise ValueError("is not in int8")
    if exponents.shape != (-(-values.numel() // PACK_BLOCK),):
        raise ValueError(f"has {exponents.numel()} exponents for {values.numel()} entries")
    low, high = PACK_EXPONENTS
    if bool(((exponents < low) | (exponents > high)).any()):
        raise ValueError("has exponents out of range")
    return tuple(values.shape)


class Residual:
    """Residual of one stream, with a transaction for host frameworks that may discard a step.

    A mixed-precision optimizer finds out that a step overflowed after all its gradients were reduced. Inside
    a transaction the updated residual is written to a second buffer (the selection pass writes it anyway, so
    this costs memory, not time); :meth:`commit` makes it the residual, :meth:`rollback` forgets it bitwise.

    Args:
        numel: Entries of the stream.
        device: Device of the stream.
        transactional: Keep a second buffer; without it :meth:`rollback` sets the residual to zero.
        memory: fp32 ``[numel]``, of a host that keeps the residual itself; what it holds is the residual.
    """

    _scratch, _seed = ScratchBuffers(), 0

    def __init__(
        self, numel: int, device: torch.device, *, transactional: bool = False, memory: Tensor | None = None
    ) -> None:
        self.numel, self._device, self._is_of_host = numel, device, memory is not None
        # A GPU's kernel that writes beside what it reads need not look at the gradient before it adds, a
        # quarter of the traffic. It takes the memory of one tensor, which the caching allocator passes on.
        self._beside = device.type == "cuda" and memory is None
        self._committed = self._zeros() if memory is None else Fp32Tensor(memory)
        self._pending = self._zeros() if transactional else None
        self._dirty = False

    def _zeros(self) -> Fp32Tensor | PackedTensor:
        return Fp32Tensor(torch.zeros(self.numel, dtype=torch.float32, device=self._device))

    def arm(self) -> None:
        """Keep a second buffer from now on, unless a host keeps the residual."""
        if self._pending is None and not self._is_of_host:
            self._pending = self._zeros()

    @property
    def _newest(self) -> Fp32Tensor | PackedTensor:
        return self._pending if self._dirty and self._pending is not None else self._committed

    def commit(self) -> None:
        """Keep what was written since the last commit."""
        if self._dirty and self._pending is not None:
            self._committed, self._pending = self._pending, self._committed
        self._dirty = False

    def rollback(self) -> None:
        """Forget what was written since the last commit. Without a second buffer that is everything."""
        if self._pending is None:
            self.clear()
        self._dirty = False

    @property
    def current(self) -> Tensor:
        """The residual as the next step will see it (fp32, ``[numel]``)."""
        return self.show(ScratchBuffers(), "current")

    def show(self, scratch: ScratchBuffers, use: str, *, committed: bool = False) -> Tensor:
        """:attr:`current`, to be read before the room's next use; or what a rollback would leave."""
        return (self._committed if committed else self._newest).read(scratch, use)

    def begin(self) -> tuple[Tensor, Tensor]:
        """Return the buffers of the coming pass over the whole stream: ``(read from, write to)``. They may be
        the same.

        The residual stays as it is until :meth:`end`, also if the pass fails before.
        """
        if self._pending is not None:
            return self._newest.values, self._pending.values
        committed = self._committed.values
        return committed, torch.empty_like(committed) if self._beside else committed

    def end(self, written: Tensor, step: int) -> None:
        """Take over what the pass has ``written``; ``step`` passes of the stream came before it."""
        if self._pending is None:
            self._committed.values = written
        else:
            self._dirty = True

    def clear(self) -> None:
        """Set the residual to zero."""
        self._newest.write(self.show(self._scratch, "pass").zero_(), self._seed)

    def add(self, values: Tensor) -> None:
        """Add ``values`` (``[numel]``); packed sums are rounded."""
        self._newest.write(self.show(self._scratch, "pass").add_(values), self._seed)

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradient's unit (loss scale); exact for powers of two."""
        for held in dict.fromkeys((self._committed, self._newest)):
            held.write(held.read(self._scratch, "pass").mul_(factor), self._seed)

    def saved(self) -> Saved:
        """A copy for a checkpoint (CPU), in its own type."""
        return self._newest.saved()

    def restore(self, saved: Saved) -> None:
        """Take over what :meth:`saved` gave; another type is rounded.

        Raises:
            ValueError: The length differs.
        """
        if (shape := entries_of(saved)) != (self.numel,):
            raise ValueError(f"residual has shape {shape}, expected {(self.numel,)}")
        self._dirty = False
        self._committed.restore(saved, self._seed)


class PackedResidual(Residual):
    """A :class:`Residual` that is kept in bf16 or int8 (``residual_dtype``).

    Passes run on fp32 scratch memory.

    The residual of a pass is rounded stochastically, with random numbers that follow from the stream's seed
    and step: runs repeat bitwise, and in expectation nothing is lost. Entries that a pass left alone stay
    bitwise what they were.

    Args:
        numel, device, transactional: See :class:`Residual`.
        dtype: bf16 or int8.
        kernels: Kernels of the device.
        scratch: Scratch memory, of the size of the largest stream that shares it; not for passes where many
            streams' are one batch (``batched`` of :class:`.kernels.Backend`).
        seed: Seed of the stream.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        *,
        transactional: bool,
        dtype: torch.dtype,
        kernels: Backend,
        scratch: ScratchBuffers,
        seed: int,
    ) -> None:
        self._dtype, self._kernels, self._scratch, self._seed = dtype, kernels, scratch, seed
        super().__init__(numel, device, transactional=transactional)

    def _zeros(self) -> PackedTensor:
        return PackedTensor(self.numel, self._dtype, self._kernels, self._device)

    def begin(self) -> tuple[Tensor, Tensor]:
        """See :meth:`Residual.begin`."""
        source = self.show(ScratchBuffers() if self._kernels.batches else self._scratch, "pass")
        return source, torch.empty_like(source) if self._kernels.batches else source

    def end(self, written: Tensor, step: int) -> None:
        """See :meth:`Residual.end`."""
        target = self._committed if self._pending is None else self._pending
        target.write(written, self._seed + 0x9E3779B9 * (step + 1))
        self._dirty = self._pending is not None
