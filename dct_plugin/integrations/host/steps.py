"""Optimizer steps of a host: gradients are reduced, the optimizer steps or skips, step counters move on."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

from dct_plugin.metrics import Metrics

from .replicas import Replicas

logger = logging.getLogger("dct_plugin")


class HasSteps(Protocol):
    """A :class:`~dct_plugin.data_parallel.GradientReducer`, or another object that counts optimizer steps."""

    def end_step(self, *, skipped: bool = False, loss_scale: float | None = None) -> None:
        """End an optimizer step."""


class StepHooks:
    """Tells everything that counts steps when an optimizer step of the host begins and ends.

    A host that knows at once whether a step was skipped calls :meth:`end` then. A host that knows it later
    calls it before the gradients of the next step, if a step is :attr:`open`.

    Args:
        members: The objects that count steps; more may be added.
        metrics: The metrics that record the steps.
        rank: The rank of this process; rank 0 warns.

    Attributes:
        step: Optimizer steps so far, skipped ones included; a host sets it when it restores a checkpoint.
        open: Whether gradients were reduced since the last step.
        replicas: Compare the ranks' parameters after a step, where the host says which they are.
    """

    def __init__(
        self, members: Collection[HasSteps], metrics: Metrics | None = None, *, rank: int = 0
    ) -> None:
        self.members = members
        self.metrics = metrics
        self.step = 0
        self.open = False
        self.replicas: list[Replicas] = []
        self._warns = rank == 0
        self._unchecked: int | None = None
        """A step whose comparison of parameters waits for the other ranks."""

    def begin(self) -> None:
        """Note that gradients of the current step are reduced; any number of times in a step."""
        self.open = True
        self._warns = False

    def end(self, *, skipped: bool = False, loss_scale: float | None = None, alone: bool = False) -> None:
        """End a step that the optimizer made or skipped.

        Args:
            skipped, loss_scale: As in :meth:`~dct_plugin.data_parallel.GradientReducer.end_step`.
            alone: The other ranks end it later: :meth:`check` then compares the parameters with theirs.
        """
        if self._warns:
            self._warns = False
            logger.warning(
                "dct: an optimizer step was made without passing gradients to dct; is the all-reduce of "
                "gradients switched off, or done by the script itself?"
            )
        self.open = False
        self.step += 1
        for member in self.members:
            member.end_step(skipped=skipped, loss_scale=loss_scale)
        if self.metrics is not None:
            self.metrics.step(self.step)
        self._unchecked = self.step
        if not alone:
            self.check()

    def check(self) -> None:
        """Compare the ranks' parameters if they were not since the last step; a collective."""
        step, self._unchecked = self._unchecked, None
        if step is not None:
            for each in self.replicas:
                each.check(step)
