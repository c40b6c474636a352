"""The exchange of progress. Its messages may travel while the ranks make their next steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...codecs.copies import SideStream
from ..pending_exchanges import exchanges_of
from .add_on import LocalSteps
from .outer_step import OuterStep

if TYPE_CHECKING:
    from ..plan import Entries
    from ..reducer import GradientReducer, Reduction


class ProgressExchange:
    """Sends progress when it is due, and applies its mean.

    Without a delay ranks exchange progress after a step, and wait. With a delay all that waits for other
    ranks, or sends to them, happens in passes: every rank makes a pass, but a script may leave out the step
    that follows on one rank. Weights change after a step alone, since a backward pass may need them.

    Call :meth:`finish` before anything else uses the reducer's exchange.

    Args:
        reducer: Its ranks exchange progress.
        local: The add-on that has the progress.
    """

    def __init__(self, reducer: GradientReducer, local: LocalSteps) -> None:
        self._reducer, self._local, self._group = reducer, local, reducer.group
        self._exchanges = exchanges_of(self._group, "gradient", reducer.add_ons.show_sums)
        self._side = SideStream()
        self._under_way: Reduction | None = None
        self._sender: OuterStep | None = None
        """Has sent what is under way; another one does not apply its mean."""
        self._sent = 0
        """Optimizer steps before the pass that sent it."""

    def share_nonfinite(self) -> None:
        """Let a gradient that is not finite on one rank be so on all ranks, as under plain training; a
        collective before a step at whose end ranks wait for the mean progress.

        A script that leaves out such steps then leaves them out on all ranks. A rank alone would let the
        others wait. The first entry of the gradient becomes NaN.
        """
        gradients, self._local.gradients = self._local.gradients, []
        # On a CPU the largest magnitude takes twenty times as long as a sum.
        poison = 0.0 * torch.stack([gradient.sum(dtype=torch.float32) for gradient in gradients])
        with self._group.recorded("gradient_local"):
            self._group.exchange.all_reduce(poison)
        for gradient, value in zip(gradients, poison, strict=True):
            gradient[:1] += value

    def in_pass(self) -> None:
        """Send the progress that is due, and receive what is under way, as far as its delay is over; called
        before gradients of a pass are reduced. A collective.
        """
        if not self._delay or self._local.sends:
            return
        if self._local.due:
            self.finish()
            self._send(self._local.entries())
        if self._under_way is not None:
            steps = self._group.step - self._sent
            with self._side.queue(device=self._group.device):
                if steps >= self._delay - 1:
                    self._under_way.receive()
                elif 2 * steps >= self._delay:
                    self._under_way.answer()

    def after_step(self) -> None:
        """Apply the mean whose delay is over; without a delay exchange the progress that is due."""
        if self._under_way is None or self._group.step - self._sent >= self._delay:
            self.finish()
        if not self._delay and self._local.due:
            self._send(self._local.entries())
            self.finish()

    def finish(self, *, follows: bool = True) -> None:
        """Wait for the mean of what was sent, and apply it. All ranks have made the same passes.

        Args:
            follows: Whether this rank's own weights may change now; else they do after the next step.
        """
        if not self._local.is_open:
            return
        if arrives := self._under_way is not None:
            with self._side.queue(device=self._group.device):
                self._under_way.finish()
                self._exchanges.finish()
            self._side.join()
            self._under_way = None
        self._local.is_open = not follows
        if self._sender is self._local.progress:  # no other weights were loaded since
            self._local.step(moves=arrives, follows=follows)

    def flush(self) -> None:
        """Send all progress that is still unsent; a collective."""
        self.finish()
        if unsent := self._local.entries(last=True):
            self._group.set_value_dtype("int8")
            self._send(unsent)
            self.finish()

    @property
    def _delay(self) -> int:
        return 0 if self._local.progress is None else self._local.progress.delay

    def _send(self, entries: Entries) -> None:
        reduction = self._reducer.begin(entries, scale=1.0 / self._group.group_size)
        with self._side.queue(device=self._group.device):
            reduction.post(self._exchanges, in_background=self._delay > 0)
        self._under_way, self._sender, self._sent = reduction, self._local.progress, self._group.step
        self._local.is_open, self._local.sends = True, False
