"""What becomes of what was not sent: the residual of one tensor stream.

Error feedback adds the residual to the next gradient (DCT, Gupta et al., KDD 2021, section 3: ``E = G - G *
keep``). The residual also keeps the rounding error of the value type, so that nothing is lost, only delayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codecs.payload import OVERFLOW_MAGNITUDE


class Residual:
    """Residual of one stream, with a transaction for host frameworks that may discard a step.

    A mixed-precision optimizer finds out that a step overflowed after all its gradients were reduced. Inside
    a transaction the updated residual is written to a second buffer (the selection pass writes it anyway, so
    this costs memory, not time); :meth:`commit` makes it the residual, :meth:`rollback` forgets it bitwise.

    Args:
        numel: Entries of the stream.
        device: Where the stream lives.
        transactional: Keep a second buffer; without it :meth:`rollback` is refused.
        memory: fp32 ``[numel]``, of a host that keeps the residual itself; what it holds is the residual.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        *,
        transactional: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        self._committed = torch.zeros(numel, dtype=torch.float32, device=device) if memory is None else memory
        self._pending = torch.zeros_like(self._committed) if transactional else None
        self._dirty = False
        # A GPU's kernel that writes beside what it reads need not look at the gradient before it adds, a
        # quarter of the traffic. It takes the memory of one tensor, which the caching allocator passes on.
        self._beside = device.type == "cuda" and memory is None

    @property
    def current(self) -> Tensor:
        """The residual as the next step will see it (fp32, ``[numel]``)."""
        return self._pending if self._dirty and self._pending is not None else self._committed

    def begin(self) -> tuple[Tensor, Tensor]:
        """Buffers of the coming pass over the whole stream: ``(read from, write to)``, possibly the same."""
        if self._pending is None:
            source = self._committed
            if self._beside:
                self._committed = torch.empty_like(source)
            return source, self._committed
        source = self._pending if self._dirty else self._committed
        self._dirty = True
        return source, self._pending

    def commit(self) -> None:
        """Keep what was written since the last commit."""
        if self._dirty and self._pending is not None:
            self._committed, self._pending = self._pending, self._committed
        self._dirty = False

    def rollback(self) -> None:
        """Forget what was written since the last commit."""
        if self._pending is None:
            raise RuntimeError("rollback() needs a transactional residual")
        self._dirty = False

    def rescale(self, factor: float) -> None:
        """Follow a change of the gradient's unit (loss scale); exact for powers of two."""
        self.current.mul_(factor)

    def saved(self) -> Tensor:
        """A copy for a checkpoint (fp32, CPU)."""
        return self.current.detach().to("cpu", copy=True)

    def restore(self, residual: Tensor) -> None:
        """Take over what :meth:`saved` gave; raises ``ValueError`` when the length differs."""
        if residual.shape != self._committed.shape:
            raise ValueError(
                f"residual has shape {tuple(residual.shape)}, expected {tuple(self._committed.shape)}"
            )
        self._dirty = False
        self._committed.copy_(residual)


class Velocity:
    """Momentum of one stream, kept at the worker: Deep Gradient Compression (Lin et al., ICLR 2018).

    Momentum correction (section 3.2): what is thresholded is the velocity ``u = momentum * u + gradient``, so
    that an entry sent late carries the momentum it would have gathered; the optimizer itself must not apply
    momentum again. Momentum factor masking (section 3.3): the velocity of entries that were sent starts over,
    so that what is stale does not push on.

    Args:
        numel: Entries of the stream.
        device: Where the stream lives.
        momentum: In (0, 1).
        transactional: Support :meth:`Residual.rollback`.
    """

    def __init__(
        self, numel: int, device: torch.device, momentum: float, *, transactional: bool = False
    ) -> None:
        self.momentum = momentum
        self.buffer = Residual(numel, device, transactional=transactional)

    def accumulate(self, grad: Tensor) -> Tensor:
        """Add a gradient (1-D, any floating-point type); returns the velocity, fp32, with memory of its own.

        One that the kernels will refuse (see :meth:`~dct_plugin.kernels.Backend.compress`) is returned and
        not kept. No value crosses to the host.
        """
        source, target = self.buffer.begin()
        velocity = source.mul(self.momentum).add_(grad)
        if velocity.numel():
            low, high = torch.aminmax(velocity)  # NaN propagates
            finite = (high < OVERFLOW_MAGNITUDE) & (low > -OVERFLOW_MAGNITUDE)
            torch.where(finite, velocity, source, out=target)
        return velocity

    def restart(self, start: int, mask: Tensor) -> None:
        """The entries from ``start`` on where ``mask`` (bool) is set were sent."""
        self.buffer.current[start : start + mask.numel()].masked_fill_(mask, 0.0)
