"""The exchange of progress. Its messages may travel while the ranks make their next steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...codecs.copies import SideStream
from ..pending_exchanges import exchanges_of
from .add_on import LocalSteps

if TYPE_CHECKING:
    from ..plan import Entries
    from ..reducer import GradientReducer, Reduction


class ProgressExchange:
    """Sends progress when it is due, and takes over its mean; every method is a collective.

    Where ranks do not wait for the mean, progress leaves in the pass that follows the step: every rank makes
    that pass, but a script may leave out the step on one rank. They take over the mean of one exchange before
    they send the next one. What else uses the reducer's exchange calls :meth:`finish` before.

    Args:
        reducer: Its ranks exchange progress.
        local: The add-on that has the progress.

    Attributes:
        under_way: What was sent, and whose mean was not taken over yet.
    """

    def __init__(self, reducer: GradientReducer, local: LocalSteps) -> None:
        self._reducer, self._local, self._group = reducer, local, reducer.group
        self._exchanges = exchanges_of(self._group, "gradient", reducer.add_ons.show_sums)
        self._side = SideStream()
        self.under_way: Reduction | None = None
        self._steps = 0
        """Steps since it was sent."""

    def before_gradients(self) -> None:
        """Send the progress that is due, if ranks do not wait for its mean."""
        if self._delay and not self._local.sends:
            self.finish()
            self._send(self._local.entries())

    def after_step(self) -> None:
        """Take over the mean whose delay is over; or exchange the progress that is due, and wait."""
        if self.under_way is not None:
            self._steps += 1
            if self._steps >= self._delay:
                self.finish()
            elif 2 * self._steps >= self._delay:
                with self._side.queue(device=self._group.device):
                    self.under_way.answer()
        if not self._delay and self._local.due:
            self._send(self._local.entries())
            self.finish()

    def finish(self) -> None:
        """Wait for the mean of what was sent, and take it over."""
        if self.under_way is None:
            return
        with self._side.queue(device=self._group.device):
            self.under_way.finish()
            self._exchanges.finish()
        self._side.join()
        self.under_way = None
        self._local.step()

    def flush(self) -> None:
        """Send all progress that is still unsent."""
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
        self.under_way, self._steps, self._local.sends = reduction, 0, False
