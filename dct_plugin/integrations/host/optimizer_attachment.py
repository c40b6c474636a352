"""The common part of attachments to models whose scripts make the optimizers and the steps: DDP and FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.config import DataParallelConfig, DCTConfig
from dct_plugin.console import listed, logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.module_hooks import ModuleHook
from dct_plugin.data_parallel.step_units import ParameterGroups
from dct_plugin.errors import ConfigError
from dct_plugin.metrics import Metrics
from dct_plugin.transport.nodes import Nodes

from .replica_checksums import ReplicaChecksums
from .restored_weights import RestoredWeights
from .settings import optimizers_of
from .steps import OptimizerSteps, PoisonedSteps, StepHooks


class OptimizerAttachment:
    """An attachment that follows the optimizers of a script.

    Args:
        config: The section.
        optimizer: The optimizers, as the script passed them.
        scaler: The gradient scaler of fp16.
        gradients: Gives the gradients of this rank that were reduced, by name.
        call: The call that they were passed to, for messages.
        sharded: Whether ranks hold different gradients.

    Attributes:
        config: The section as it is applied.
        steps: Optimizer steps so far.
        ends: Takes off all that was put on the model, its optimizer and the process.

    Raises:
        ConfigError: An optimizer is none.
    """

    def __init__(
        self,
        config: DCTConfig,
        optimizer: Any,
        scaler: torch.amp.GradScaler | None,
        gradients: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        call: str,
        sharded: bool,
    ) -> None:
        self.config = config
        self._optimizers = optimizers_of(optimizer, call)
        self._reducers: dict[tuple[int, ...], GradientReducer] = {}
        """The key of a reducer is the ranks whose gradients it sums."""
        self.steps = StepHooks(self._reducers.values())
        poisoned = PoisonedSteps(config.data_parallel, gradients, agree=sharded)
        self._optimizer_steps = OptimizerSteps(
            self.steps, self._reducers.values(), scaler, poisoned, sharded=sharded
        )
        self._leaves = False
        self.ends = contextlib.ExitStack()
        self.ends.callback(self._optimizer_steps.close)

    def detach(self) -> None:
        """Let the host exchange gradients after the next step, which sends all residuals.

        Call it on every rank, between two steps. The next forward pass or :meth:`close` removes all hooks.
        """
        self._optimizer_steps.end_or_reject()
        self._leaves = True
        for reducer in self._reducers.values():
            reducer.flush()

    def close(self) -> None:
        """Remove all hooks from the model and its optimizer, and print the summary. Unsent entries are lost;
        see :meth:`detach`.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        self.ends.close()

    def close_if_done(self) -> None:
        """Close a detached attachment whose last step was made."""
        if self._leaves and all(reducer.flushed for reducer in self._reducers.values()):
            self.close()

    def _before_forward(self, model: nn.Module, function: Callable[[], None]) -> None:
        """Call a function before the forward passes of a model, and before its earlier hooks."""
        hook = ModuleHook(lambda *_: function(), model)
        self.ends.callback(model.register_forward_pre_hook(hook, prepend=True).remove)

    def _watch_loading(self, model: nn.Module, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Drop residuals when the script restores weights; before weights are displaced."""
        restored = RestoredWeights(self._optimizer_steps, self._reducers.values(), weights)
        for handle in restored.watch(model):
            self.ends.callback(handle.remove)

    def _check_optimizers(
        self, model: nn.Module, compressed: Mapping[str, Tensor], *, call: str, remedy: str, warns: bool
    ) -> None:
        """Check that each optimizer is one of the model's, and warn about parameters that none has.

        Args:
            compressed: The parameters by name whose gradients are thresholded.
            call, remedy: The call that the optimizers were passed to, and what to do about a wrong one.
            warns: Whether this rank warns.

        Raises:
            ConfigError: An optimizer has no parameter of the model.
        """
        optimizers, own = self._optimizers, {id(parameter) for parameter in model.parameters()}
        told: set[int] = set()
        for number, optimizer in enumerate(optimizers, 1):
            parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not parameters & own:
                which = f"{type(optimizer).__name__}, {number} of {len(optimizers)}"
                raise ConfigError(f"{call}: the optimizer ({which}) has no parameter of the model; {remedy}")
            told |= parameters
        without_optimizer = [n for n, p in compressed.items() if p.requires_grad and id(p) not in told]
        if optimizers and without_optimizer and warns:
            logger.warning(
                f"dct: {len(without_optimizer)} parameters are in none of the optimizers that were passed, "
                f"and get local error feedback at sparsity {self.config.data_parallel.sparsity:g}: "
                f"{listed(without_optimizer)}; pass all optimizers in a list"
            )

    def _refuse_line_search(self, settings: DataParallelConfig) -> None:
        """Refuse an optimizer that compares the gradients of several passes, unless they are exact.

        Raises:
            ConfigError: Names it.
        """
        is_exact = settings.value_dtype == "fp32" and (settings.sparsity == 0 or settings.quality == "exact")
        if is_exact or settings.local_steps is not None:
            return
        for each in self._optimizers:
            if isinstance(each, torch.optim.LBFGS):
                raise ConfigError(
                    f"{type(each).__name__}: it compares gradients of several passes of one step, which lack "
                    'what was not sent; set dct.data_parallel.sparsity to 0 and value_dtype to "fp32", or '
                    "train without dct"
                )

    def _make_reducer(
        self,
        group: dist.ProcessGroup | None,
        nodes: Nodes | None,
        device: torch.device,
        metrics: Metrics,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> GradientReducer:
        """Return a new reducer of the gradients of a group's ranks, whose weights are to stay equal."""
        settings = self.config.data_parallel
        self._refuse_line_search(settings)
        reducer = GradientReducer(
            settings,
            nodes or group,
            metrics=metrics,
            device=device,
            kernels=self.config.kernels,
            transactional=self._optimizer_steps.transactional,
            optimizer=ParameterGroups(self._optimizers),
        )
        self._reducers[tuple(dist.get_process_group_ranks(group or dist.group.WORLD))] = reducer
        self.steps.metrics = metrics
        self.steps.replicas.append(ReplicaChecksums(settings, weights, group))
        return reducer
