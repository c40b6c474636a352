"""The common part of attachments to FSDP2 models: settings, passes, steps and saved states."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from dct_plugin.config import DCTConfig
from dct_plugin.console import log_once
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.metrics import Metrics
from dct_plugin.policy import Training
from dct_plugin.transport import lost_ranks

from ..host.attachment import PlainTraining, switched_off, take_off
from ..host.optimizer_attachment import OptimizerAttachment
from . import saved_residuals
from .parameter_groups import (
    ShardedParameter,
    check_torch,
    follow_methods,
    refuse_compiled_autograd,
)

#: FSDP's parameter groups, and their parameters.
Groups = Sequence[tuple[Any, list[ShardedParameter]]]


class FSDPAttachment(OptimizerAttachment):
    """Exchange of the gradients of an FSDP2 model, in place of one of FSDP's collectives.

    It is a ``Stateful`` of ``torch.distributed.checkpoint``. Make it on every rank, after the last
    ``fully_shard`` and before the first step.

    Args:
        model: The model, modules of which were passed to ``fully_shard``.
        config: The configuration, or a mapping with the keys of the ``dct`` section.
        optimizer: The model's optimizer or a list of them, made after ``fully_shard``. Its steps are counted;
            without it a step ends with every backward pass that reduces gradients. With
            ``nonfinite_action: "skip"`` gradients that are cleared without ``optimizer.step()`` leave
            residuals as they were.
        scaler: The gradient scaler of fp16.
        total_steps: Optimizer steps of the run, if known: the dense start becomes a share of it.
        metrics: The metrics to record in; None makes them from the configuration, and rank 0 prints their
            summary when the process ends.
        time_limit: Seconds in which the other ranks must reach their first reduction; None: as long as the
            process group waits.

    Attributes:
        groups: The exchanged parameter groups.

    Raises:
        ConfigError: The model is not one of FSDP2's, or a setting does not work with it.
        VersionError: The installed torch is not supported.
    """

    remedy = "make it after fully_shard, which replaces the parameters"
    sharded = True
    find_groups: Callable[[nn.Module], Groups]
    """Returns the parameter groups of a model whose gradients are exchanged."""
    groups: Sequence[Any] = ()

    def __init__(
        self,
        model: nn.Module,
        config: DCTConfig | Mapping[str, Any] | None = None,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        total_steps: int | None = None,
        metrics: Metrics | None = None,
        time_limit: float | None = None,
    ) -> None:
        check_torch()
        super().__init__(config, optimizer, scaler, self._gradients)
        self._model, self.time_limit = model, time_limit
        self._agreed: set[GradientReducer] = set()
        self._reduced: set[Any] = set()
        """Reducers, and groups, that have reduced gradients of this step."""
        self._pass = -1
        """The backward pass of the last exchange."""
        try:
            groups = self.find_groups(self._model)
            self.note(self._model)
            hint = f"{self.call}(..., optimizer=optimizer) takes what suits it"
            self._decide(groups, Training(steps=total_steps, optimizer_unknown_hint=hint))
            settings = self.config.data_parallel
            self._require_optimizer("feedback = 'step_ahead'", unless=not settings.feedback.looks_ahead)
            passes = settings.nonfinite_action == "pass"
            self._require_optimizer("nonfinite_action = 'skip'", unless=passes)
            compressed = {each.name: each.sharded for _, parameters in groups for each in parameters}
            self._check_optimizers(self._model, compressed)
            self.metrics = metrics or self.report(dist.get_rank(), self.applied.compressors)
            self._connect_all(groups)
            self._before_forward(self._model, lambda: refuse_compiled_autograd(self.call))
            self._change_passes()
            self._optimizer_steps.follow(self._optimizers)
            # Whether a scaler skipped the last step is known at the next pass, without waiting for a device;
            # and to be known before weights are displaced.
            self._before_forward(self._model, self._optimizer_steps.end_due)
            self.ends.callback(follow_methods(self._model))
        except BaseException:
            self.close()
            raise

    @classmethod
    def made(
        cls, model: nn.Module, config: DCTConfig | Mapping[str, Any] | None = None, **options: Any
    ) -> Self | PlainTraining:
        """Return an attachment with these arguments; if the section is switched off, the model stays as it
        is.
        """
        written = DCTConfig.given(config, rank=dist.get_rank())
        if reason := switched_off(written):
            take_off(model)
            return PlainTraining(written, reason)
        return cls(model, written, **options)

    @abstractmethod
    def _decide(self, groups: Groups, training: Training) -> None:
        """Decide the settings, and check that they fit the model."""

    @abstractmethod
    def _connect_all(self, groups: Groups) -> None:
        """Let FSDP call the exchange; sets :attr:`groups`."""

    def _saved_parts(self) -> Sequence[Any]:
        """Return what is saved beside the reducers, for a run that goes on with the same mesh."""
        return ()

    def _change_passes(self) -> None:
        """Follow the passes of the model beside what every attachment follows."""

    @property
    def parameters(self) -> Iterator[ShardedParameter]:
        """The parameters whose gradients are compressed."""
        return (parameter for group in self.groups for parameter in group.parameters)

    def weights(self) -> Iterable[Tensor]:
        return (parameter.local() for parameter in self.parameters)

    # -- a backward pass ---

    def _begin_exchange(self, group: Any, expected: Iterable[ShardedParameter]) -> None:
        """Note an exchange of a group's gradients in a backward pass, at whose end it is finished."""
        refuse_compiled_autograd(self.call)
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            self._optimizer_steps.end_or_reject()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        if not self.steps.open:
            self._reduced.clear()
        if group.reducer not in self._agreed:
            self._agree(group)
            self._agreed.add(group.reducer)
        self._before_reduction(group)
        if group in self._reduced and dist.get_rank() == 0:
            log_once(
                "dct: gradients are exchanged in every micro-batch of a step; call "
                "model.set_requires_gradient_sync(False) before all but the last backward pass of a step "
                "(set_requires_all_reduce with replicas), and they cross between nodes once"
            )
        self._reduced |= {group.reducer, group}
        self._optimizer_steps.begin((each.name, each.sharded) for each in expected)

    def _before_reduction(self, group: Any) -> None:
        """Prepare a reduction of a group."""

    def _end_pass(self) -> None:
        """Complete the sums, with one wait for the device, behind all of FSDP's reductions."""
        for reducer in self._reducers.values():
            reducer.finish()
        self._optimizer_steps.end_pass()

    def _agree(self, group: Any) -> None:
        def prepare() -> str:
            active = self._active(group)
            return "" if dist.get_rank() or self._agreed else active

        self.agree(prepare, topic="fsdp", group=group.replicas, facts=self._facts)

    @abstractmethod
    def _active(self, group: Any) -> str:
        """Return what is active, in words.

        Raises:
            ConfigError: A module came later.
        """

    # -- a step ---

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for each in self.parameters:
            if each.sharded.grad is not None and each.shape.numel():
                yield each.name, each.sharded.grad.to_local()

    # -- saved states ---

    def state_dict(self) -> dict[str, Any]:
        """Return residuals as DTensors, and this rank's thresholds and counters, between two steps; a
        collective, which ``torch.distributed.checkpoint.save`` calls.
        """
        self._optimizer_steps.end_or_reject()
        return saved_residuals.state_of(self.groups, self.steps.step, self._saved_parts())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; ``torch.distributed.checkpoint.load`` calls it."""
        saved_residuals.restore(self.groups, state, self._saved_parts())
        self._restored()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write residuals to a separate checkpoint, for :meth:`load`; a collective of all ranks."""
        import torch.distributed.checkpoint as dcp

        with lost_ranks.reported("save of residuals", step=self.steps.step):
            dcp.save({"dct": self}, checkpoint_id=folder)

    def load(self, folder: str | os.PathLike[str], key: str = "dct") -> bool:
        """Restore residuals from a checkpoint of ``torch.distributed.checkpoint``, also of another mesh.

        On the same mesh training continues bitwise. On another one every replica gets the mean of the
        residuals, and thresholds are measured anew. A collective of all ranks.

        Args:
            folder: The ``checkpoint_id`` of the save.
            key: Key of this object in the state that was saved.

        Returns:
            False, with residuals of zero, if the checkpoint has none; the log says so.
        """
        found = saved_residuals.load(folder, key, self.groups, self._saved_parts())
        self._restored()
        return found

    def _restored(self) -> None:
        self._optimizer_steps.forget()
        self.steps.step = self.groups[0].reducer.group.step
