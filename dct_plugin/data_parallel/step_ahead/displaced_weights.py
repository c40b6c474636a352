"""Parameters that hold displaced weights during training passes, and how writes to them are noticed.

Between a training forward pass and the end of its backward pass, and up to the optimizer's step if it has
none or keeps its graph, a parameter's data are displaced weights, which differ from rank to rank
(:mod:`.training_passes`). ``state_dict()`` saves the weights all the same. What reads or writes parameters by
itself (``copy.deepcopy``, ``torch.save(list)``, ``AveragedModel.update_parameters``, an exchange with
averaged weights) does so within ``with dct_plugin.data_parallel.weights(model):``. A write outside of it is
undone, and refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import DCTError

#: Entries of each tensor that are compared to find writes which version counters miss (``.data``).
SAMPLES = 64
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Computed(NamedTuple):
    """A buffer, and the parameter that it was computed from."""

    parameter: torch.nn.Parameter
    buffer: Tensor
    version: int
    """Version counter of the parameter. Writes to the parameter change it, but for those to its ``.data``."""


class DisplacedWeights:
    """Shows displaced weights in parameters, from buffers of their own, and puts the weights back.

    Nothing is added to the weights and nothing is subtracted from them, so ranks stay bitwise equal.
    """

    def __init__(self) -> None:
        self._computed: dict[str, _Computed] = {}
        self._sample = torch.empty(0)
        """Samples of all buffers, taken when these were complete."""
        self._weights: dict[str, Tensor] = {}
        """Weights of the parameters that hold displaced ones."""
        self.fresh = False
        """True if the displaced weights are those of the coming passes."""
        self.version = 0
        """Number of times that the displaced weights were computed."""
        self._saving = 0
        """Depth of calls of ``state_dict`` that began while displaced weights were shown."""

    @property
    def shown(self) -> bool:
        """True while parameters hold displaced weights now."""
        return bool(self._weights)

    @property
    def outdated(self) -> bool:
        """True if a weight was written since its displaced one was computed."""
        return any(each.parameter._version != each.version for each in self._computed.values())

    def begin(self) -> None:
        """Forget all buffers, to :meth:`add` those of the coming passes."""
        self._computed.clear()
        self.fresh = True
        self.version += 1

    def add(self, computed: Sequence[tuple[str, torch.nn.Parameter, Tensor]]) -> None:
        """Note displaced weights for :meth:`show`: names, parameters, and buffers, which are complete."""
        for name, parameter, buffer in computed:
            self._computed[name] = _Computed(parameter, buffer, parameter._version)
        self._sample = torch.cat(self._samples()) if computed else self._sample

    def show(self) -> None:
        """Let the parameters hold the displaced weights, but for those that were written meanwhile: another
        optimizer may have stepped them.
        """
        self._saving = 0
        for name, (parameter, buffer, version) in self._computed.items():
            if parameter._version == version and name not in self._weights:
                self._weights[name], parameter.data = parameter.data, buffer

    def restore(self, *, thorough: bool = True) -> None:
        """Let the parameters hold their weights again.

        Args:
            thorough: Look for writes through ``.data``, too, which waits for the device.

        Raises:
            DCTError: A parameter was written meanwhile; the write is undone.
        """
        written = self._written(self._weights, thorough)
        weights, self._weights = self._weights, {}
        for name, weight in weights.items():
            self._computed[name].parameter.data = weight
        if written:
            self.fresh = False
            raise DCTError(
                f"the weights of {', '.join(written[:3])}{', ...' if len(written) > 3 else ''} were written "
                "or replaced between a training forward pass and the end of its backward pass, or after a "
                "forward pass that had none. With dct.data_parallel.feedback = 'step_ahead' parameters "
                "hold displaced weights there, which differ from rank to rank; the write was undone. Read "
                "and write weights within `with dct_plugin.data_parallel.weights(model):`, or set "
                "feedback to 'local'"
            )

    def before_saving(self) -> None:
        """Let the parameters hold their weights until :meth:`after_saving` was called as often.

        Hooks call both for a module and for all its parts: the first call may find displaced weights.
        """
        if self.shown or self._saving:
            self._saving += 1
            self.restore()

    def after_saving(self) -> None:
        """Show displaced weights again, if the first :meth:`before_saving` found them."""
        if self._saving:
            self._saving -= 1
            if not self._saving:
                self.show()

    def check(self) -> None:
        """:meth:`restore`, if a parameter was written."""
        if self._written(self._weights, True):
            self.restore()

    def weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's weight, also while the parameter holds a displaced one."""
        shown = (w for name, w in self._weights.items() if self._computed[name].parameter is parameter)
        return next(shown, parameter.data)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let the parameters hold their weights within the block."""
        shown = self.shown
        self.restore()
        yield
        if shown:
            self.show()

    def _written(self, names: Collection[str], thorough: bool) -> list[str]:
        """Return which of these parameters, which hold displaced weights, were written."""
        written = set()
        for name in names:
            parameter, buffer, version = self._computed[name]
            if parameter._version != version or parameter.data_ptr() != buffer.data_ptr():
                written.add(name)
        if names and thorough:  # the host waits once, whatever the number of parameters
            samples = self._samples()
            if not torch.equal(torch.cat(samples), self._sample):
                before = self._sample.split([each.numel() for each in samples])
                pairs = zip(self._computed, samples, before, strict=True)
                written |= {name for name, now, then in pairs if not torch.equal(now.to(then.dtype), then)}
        return [name for name in names if name in written]

    def _samples(self) -> list[Tensor]:
        """Return the bits of some entries of each buffer, spread over all of them."""
        flat = [each.buffer.view(-1) for each in self._computed.values()]
        return [x[:: max(1, x.numel() // SAMPLES)].view(_BITS[x.element_size()]) for x in flat]
