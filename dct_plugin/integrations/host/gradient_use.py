"""The use of reduced gradients by one optimizer, as a state machine, and gradients that no optimizer used:
their residuals return to what they were before.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.checkpoint import device_of
from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.host_traffic import own_traffic
from dct_plugin.metrics import format_bytes
from dct_plugin.policy.memory import residual_bytes
from dct_plugin.transport import lost_ranks


class Use(enum.Enum):
    """A state of the gradients of one optimizer."""

    IDLE = "no gradients were reduced since the last step"
    REDUCED = "gradients were reduced, and wait for the optimizer"
    USED = "the optimizer has made its step"
    SKIPPED = "the optimizer's step has left them out"
    CLEARED = "the script has cleared them without a step"


class Event(enum.Enum):
    """An event that changes the use of gradients, with the next states by the present one. A state that is
    not there stays as it is.
    """

    #: Gradients are reduced; after a step in a backward pass, for each gradient that is ready, or a closure.
    REDUCE = MappingProxyType({Use.IDLE: Use.REDUCED, Use.USED: Use.REDUCED, Use.CLEARED: Use.REDUCED})
    #: ``optimizer.step()`` has returned. One without gradients counts, and changes nothing.
    STEP = MappingProxyType({Use.REDUCED: Use.USED, Use.CLEARED: Use.SKIPPED})
    #: The scaler, or the check of gradients, leaves the step out. That may be known later than its call.
    LEAVE_OUT = MappingProxyType({Use.REDUCED: Use.SKIPPED, Use.USED: Use.SKIPPED})
    #: Gradients are found to be cleared.
    CLEAR = MappingProxyType({Use.REDUCED: Use.CLEARED})
    #: Residuals have followed, a loaded state takes their place, or no rank has used the parameters.
    CLOSE = MappingProxyType(dict.fromkeys(Use, Use.IDLE))


class OptimizerGradients:
    """The reduced gradients of one optimizer's parameters.

    Args:
        optimizer: The optimizer; None for parameters that no known optimizer has.

    Attributes:
        use: What became of the gradients.
        reduced: By name, the parameters whose gradients were reduced since the last step.
        covered: True if a second residual was there when they were reduced.
        accumulates: True if a further pass adds to them.
        asked: True if a gradient scaler has looked at them.
        overflow: Returns what the scaler found out for a step that it leaves to the optimizer (fused ones).
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.use = Use.IDLE
        self.reduced: dict[str, Tensor] = {}
        self.covered = self.accumulates = self.asked = False
        self.overflow: Callable[[], Tensor] | None = None

    def note(self, event: Event) -> None:
        """Follow an event."""
        self.use = event.value.get(self.use, self.use)
        if self.use is Use.IDLE:
            self.reduced, self.overflow = {}, None
            self.accumulates = self.asked = False

    def add(self, named: dict[str, Tensor], *, covered: bool) -> None:
        """Note that gradients of parameters, by name, were reduced, with a second residual (``covered``) or
        without.
        """
        self.covered = covered and (self.covered or not self.reduced)
        self.reduced |= named
        self.note(Event.REDUCE)

    def is_cleared(self, *, zeros: bool) -> bool:
        """Return whether no optimizer can use the gradients any more; ``zeros`` count as cleared ones."""
        for each in self.reduced.values():
            if each.grad is not None and (not zeros or bool(local_part(each.grad).any())):
                return False
        return True

    def accumulate(self) -> None:
        """Note that the coming pass adds to the gradients, if they wait for the optimizer."""
        self.accumulates = self.use is Use.REDUCED

    def leave(self, unused: Set[str]) -> None:
        """Note the names of parameters that no rank used in a pass. If it reduced no others, nothing waits
        for the optimizer: what gradients they have, it has used.
        """
        if self.use is Use.REDUCED and not self.accumulates and self.reduced.keys() <= unused:
            self.note(Event.CLOSE)

    def is_decided(self, updated: bool) -> bool:
        """Return whether the scaler, which was ``updated`` or not, has made or left out the step."""
        left_out = self.use is Use.REDUCED and self.asked and updated
        return left_out or self.use in (Use.USED, Use.SKIPPED)

    def is_left_out(self) -> bool:
        """Return whether the scaler has left out a step that is decided."""
        return self.use is Use.REDUCED or (self.overflow is not None and bool(self.overflow().any()))


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, and the values of a sparse one."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    own = tensor if local is None else local()
    return own._values() if own.is_sparse else own


def collective_device() -> torch.device:
    """Return a device whose tensors the ranks can reduce, the same kind with and without gradients: the CPU
    if it can be, else this rank's accelerator.
    """
    kind = device_of(str(dist.get_backend_config()))
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


class Transactions:
    """Takes back gradients that no optimizer used.

    The first time there may be no second residual. What was sent is then old residual and gradient in one,
    and cannot be told apart: residuals of these tensors are set to zero, a line says so, and from then on
    there is a second residual.

    Args:
        reducers: The reducers of the gradients; more may be added.
        armed: Whether there is a second residual from the start.
        sharded: Whether ranks hold different gradients.

    Attributes:
        armed: True if there is a second residual.
        groups: Process groups whose ranks decide alike about sharded gradients; None is the whole job.
    """

    def __init__(self, reducers: Collection[GradientReducer], *, armed: bool, sharded: bool) -> None:
        self._reducers, self._sharded, self.armed = reducers, sharded, armed
        self.groups: Sequence[dist.ProcessGroup | None] = (None,)
        self._has_rejected = False

    def arm(self) -> None:
        """Keep a second residual from the next gradients on."""
        self.armed = True
        for reducer in self._reducers:
            reducer.group.streams.arm()

    def cleared(self, waiting: Sequence[OptimizerGradients], *, zeros: bool) -> list[OptimizerGradients]:
        """Return those whose gradients no optimizer can use any more; ``zeros`` count as cleared ones. For
        sharded gradients it is a collective.
        """
        flags = [each.is_cleared(zeros=zeros) for each in waiting]
        if flags and zeros and self._sharded:
            what, step = "agreement on gradients that were cleared", next(iter(self._reducers)).group.step
            flags = least(
                torch.tensor(flags, dtype=torch.int32, device="cpu"), self.groups, what, step
            ).tolist()
        return [each for each, flag in zip(waiting, flags, strict=True) if flag]

    def reject(self, cleared: Sequence[OptimizerGradients], optimizers: Iterable[Any]) -> None:
        """Take back gradients that were cleared without a step; ``optimizers`` are all that are known."""
        for each in cleared:
            each.note(Event.CLEAR)
        if any(reducer.add_ons.alone for reducer in self._reducers):  # nothing was sent
            return
        self.take_back(cleared)
        if not self._has_rejected:
            self._report(cleared, optimizers)
        self._has_rejected = True
        self.arm()

    def take_back(self, gradients: Sequence[OptimizerGradients]) -> None:
        """Let residuals be as before these gradients."""
        for each in gradients:
            for reducer in self._reducers:
                reducer.undo(each.reduced.keys(), lost=not each.covered)

    def _report(self, cleared: Sequence[OptimizerGradients], optimizers: Iterable[Any]) -> None:
        """Say once what becomes of gradients that are cleared without a step."""
        reducer = next(iter(self._reducers))
        if dist.get_rank() if self._sharded else reducer.group.group_rank:
            return
        what = f"dct: step {reducer.group.step}: its gradients were cleared without optimizer.step()"
        if self.armed:
            logger.warning(f"{what}: residuals are as before it")
            return
        lost = "the step was dense, and nothing is lost"
        if any(reducer.group.streams for reducer in self._reducers):
            lost = "what earlier steps had left unsent of these tensors is set to zero, once"
        told = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        known = told or [parameter for each in cleared for parameter in each.reduced.values()]
        sizes = [local_part(each).numel() for each in known]
        kept = [(r, sum(n for n in sizes if not r.group.is_small("", n))) for r in self._reducers]
        memory = max(residual_bytes(r.group.settings) * numel for r, numel in kept)
        if memory:  # 0: there are no residuals, and such a batch takes nothing along
            logger.warning(
                f"{what}: {lost}. From now on a second residual, {format_bytes(memory)} on a rank, "
                "keeps residuals as they were before such a batch"
            )


@own_traffic(recorded=False)
def least(numbers: Tensor, groups: Iterable[dist.ProcessGroup | None], what: str, step: int) -> Tensor:
    """Return the least of each number on all ranks of the groups, on the host; a collective, ``what`` is its
    name.
    """
    numbers = numbers.to(collective_device())
    with lost_ranks.reported(what, step=step):
        for group in groups:
            dist.all_reduce(numbers, dist.ReduceOp.MIN, group)
        return lost_ranks.received(numbers, None)
