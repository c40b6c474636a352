"""What becomes of what was not sent: the residual of one tensor stream.

Error feedback adds the residual to the next gradient (DCT, Gupta et al., KDD 2021, section 3: ``E = G - G *
keep``). The residual also keeps the rounding error of the value type, so that nothing is lost, only delayed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Residual:
    """Residual of one stream, with a transaction for host frameworks that may discard a step.

    A mixed-precision optimizer finds out that a step overflowed after all its gradients were reduced. Inside
    a transaction the updated residual is written to a second buffer (the selection pass writes it anyway, so
    this costs memory, not time); :meth:`commit` makes it the residual, :meth:`rollback` forgets it bitwise.

    Args:
        numel: Entries of the stream.
        device: Where the stream lives.
        transactional: Keep a second buffer; without it :meth:`rollback` is refused.
    """

    def __init__(self, numel: int, device: torch.device, *, transactional: bool = False) -> None:
        self._committed = torch.zeros(numel, dtype=torch.float32, device=device)
        self._pending = torch.zeros_like(self._committed) if transactional else None
        self._dirty = False

    @property
    def current(self) -> Tensor:
        """The residual as the next step will see it (fp32, ``[numel]``)."""
        return self._pending if self._dirty and self._pending is not None else self._committed

    def begin(self) -> tuple[Tensor, Tensor]:
        """Buffers of the coming pass over the whole stream: ``(read from, write to)``, possibly the same."""
        if self._pending is None:
            return self._committed, self._committed
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

    def state_dict(self) -> dict[str, Any]:
        """The residual, fp32 on the CPU."""
        return {"residual": self.current.detach().to("cpu", copy=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; raises ``ValueError`` when the length differs."""
        residual = state["residual"]
        if residual.shape != self._committed.shape:
            raise ValueError(
                f"residual has shape {tuple(residual.shape)}, expected {tuple(self._committed.shape)}"
            )
        self._dirty = False
        self._committed.copy_(residual)
