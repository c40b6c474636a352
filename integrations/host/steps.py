"""The step protocol: gradients come, the optimizer steps or skips, everything that counts steps moves on."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

from dct_plugin.metrics import Metrics

from .replicas import Replicas

__all__ = ["HasSteps", "StepHooks"]

logger = logging.getLogger("dct_plugin")


class HasSteps(Protocol):
    """A :class:`~dct_plugin.data_parallel.GradientReducer`, or whatever else lives by optimizer steps."""

    def end_step(
        self, *, skipped: bool = False, loss_scale: float | None = None, reduced_at: float | None = None
    ) -> None:
        """An optimizer step is over."""


class StepHooks:
    """Ties what a host's ranks exchange to the steps of its optimizer.

    A host that learns at once what became of a step calls :meth:`end` then; one that learns it later, calls
    it before the next step's gradients if a step is :attr:`open`.

    Args:
        members: What moves on with each step; may grow.
        metrics: Whose step is closed, once for all members.
        step: Optimizer steps so far.
        rank: Of this process; rank 0 warns.

    Attributes:
        step: Optimizer steps so far, skipped ones included; a host sets it when it restores a checkpoint.
        open: Whether gradients were reduced since the last step.
        replicas: Compares the ranks' parameters after a step, if the host says which they are.
    """

    def __init__(
        self, members: Collection[HasSteps], metrics: Metrics | None = None, *, step: int = 0, rank: int = 0
    ) -> None:
        self.members = members
        self.metrics = metrics
        self.step = step
        self.open = False
        self.replicas: Replicas | None = None
        self._warns = rank == 0

    def begin(self) -> None:
        """Gradients of the current step are reduced now; any number of times in a step."""
        self.open = True
        self._warns = False

    def end(
        self, *, skipped: bool = False, loss_scale: float | None = None, reduced_at: float | None = None
    ) -> None:
        """The optimizer stepped, or skipped the step.

        Args:
            skipped, loss_scale, reduced_at: As in :meth:`~dct_plugin.data_parallel.GradientReducer.end_step`.
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
            member.end_step(skipped=skipped, loss_scale=loss_scale, reduced_at=reduced_at)
        if self.metrics is not None:
            self.metrics.step(self.step)
        if self.replicas is not None:
            self.replicas.check(self.step)
