"""The common part of attachments to models whose scripts make the optimizers and the steps: DDP and FSDP2."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.config import DataParallelConfig, DCTConfig
from dct_plugin.console import listed, logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.passes import Handle, ModuleHook, calls_of, remove
from dct_plugin.data_parallel.step_units import ParameterGroups
from dct_plugin.errors import ConfigError
from dct_plugin.transport.nodes import Nodes

from .attachment import HostAttachment
from .gradient_use import parameters_of
from .replica_checksums import ReplicaChecksums, checksum
from .settings import optimizers_of
from .steps import OptimizerSteps, PoisonedSteps, StepHooks


class OptimizerAttachment(HostAttachment, ABC):
    """An attachment that follows the optimizers of a script.

    Args:
        section: The section.
        optimizer: The optimizers, as the script passed them.
        scaler: The gradient scaler of fp16.
        gradients: Gives the gradients of this rank that were reduced, by name.

    Attributes:
        call: The function that makes the attachment, for messages.
        remedy: What to do about an optimizer of another model.
        sharded: Whether ranks hold different gradients.

    Raises:
        ConfigError: An optimizer is none, or the section is wrong.
    """

    call: ClassVar[str]
    remedy: ClassVar[str]
    sharded: ClassVar[bool]

    def __init__(
        self,
        section: DCTConfig | Mapping[str, Any] | None,
        optimizer: Any,
        scaler: torch.amp.GradScaler | None,
        gradients: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> None:
        super().__init__(section)
        self._optimizers = optimizers_of(optimizer, self.call)
        self._module: Callable[[], nn.Module | None] = lambda: None
        self._reducers: dict[tuple[int, ...], GradientReducer] = {}
        """The key of a reducer is the ranks whose gradients it sums."""
        self.steps = StepHooks(self._reducers.values())
        poisoned = PoisonedSteps(self.config.data_parallel, gradients, agree=self.sharded)
        self._optimizer_steps = OptimizerSteps(
            self.steps, self._reducers.values(), scaler, poisoned, sharded=self.sharded
        )
        self.ends.callback(self._optimizer_steps.close)

    @property
    def _is_first(self) -> bool:
        """True on the first rank of the group, which may be one without a default group beside it."""
        return not dist.is_initialized() or dist.get_rank(self.process_group) == 0

    @property
    def reducers(self) -> Iterable[GradientReducer]:
        return self._reducers.values()

    def detach(self) -> None:
        self._optimizer_steps.end_or_reject()
        super().detach()
        if (module := self._module()) is not None:  # weights are displaced by then
            close = calls_of(module).follow(lambda _: self.close_if_done(), inside=True)
            self.ends.callback(close.remove)

    # -- saved states ---

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, thresholds and counters of this rank, between two steps."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""

    @abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state of all ranks; a collective."""

    @abstractmethod
    def load(self, folder: str | os.PathLike[str]) -> bool:
        """Restore :meth:`save`; a collective. Return False, with residuals of zero, if there is none."""

    # -- for the frameworks ---

    def _require_optimizer(self, option: str, *, unless: object) -> None:
        """Refuse an option of ``dct.data_parallel`` that needs an optimizer.

        Raises:
            ConfigError: Names the option.
        """
        if not (self._optimizers or unless):
            raise ConfigError(f"dct.data_parallel.{option} needs {self.call}(..., optimizer=optimizer)")

    def _facts(self) -> dict[str, Any]:
        """Return what all ranks must share, beside configuration, versions and kernels."""
        return {"optimizer steps so far": self.steps.step, "optimizer given": bool(self._optimizers)}

    def _before_forward(self, model: nn.Module, function: Callable[[], None]) -> None:
        """Call a function before a model's forward passes, and before functions that were given earlier."""
        self.ends.callback(calls_of(model).follow(lambda _: function()).remove)

    def _watch_loading(self, model: nn.Module, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Drop what this rank has not sent of tensors whose weights ``load_state_dict`` has changed; to be
        called before weights are displaced.

        It belongs to a run that the script has abandoned. Weights that are loaded before the first step are
        the start of the run. Weights that are only replaced for an evaluation (averaged ones) are the same
        again at the next training pass, and keep their residuals.

        Args:
            model: The model.
            weights: Returns the weights of this rank by name.
        """
        steps, before, passes = self._optimizer_steps, dict[str, Tensor](), list[Handle]()
        reference = weakref.ref(model)  # its hooks must not keep it alive

        def before_loading(*_: Any) -> None:
            if steps.has_stepped and not before and (loading := reference()) is not None:
                before.update((name, checksum(weight)) for name, weight in weights())
                passes.append(calls_of(loading).follow(before_forward))

        def before_forward(gradients: bool) -> None:
            if not gradients:
                return
            remove(passes)
            changed = [n for n, w in weights() if n in before and not torch.equal(checksum(w), before[n])]
            before.clear()
            for reducer in self._reducers.values() if changed and steps.has_stepped else ():
                reducer.undo(changed, lost=True)
                if reducer.group.group_rank == 0:
                    logger.warning(
                        f"dct: step {reducer.group.step}: load_state_dict has changed the weights of "
                        f"{len(changed)} tensors: what the steps before had left unsent of them is dropped"
                    )

        for part in model.modules():
            hook = ModuleHook(before_loading, part)
            self.ends.callback(part._register_load_state_dict_pre_hook(hook, with_module=True).remove)
        self.ends.callback(remove, passes)

    def _check_optimizers(self, model: nn.Module, compressed: Mapping[str, Tensor]) -> None:
        """Check that each optimizer is one of the model's, and warn about parameters that none has.

        Args:
            model: The model.
            compressed: The parameters by name whose gradients are thresholded.

        Raises:
            ConfigError: An optimizer has no parameter of the model.
        """
        self._module = weakref.ref(model)
        self._refuse_line_search(self.config.data_parallel)
        optimizers, own = self._optimizers, {id(parameter) for parameter in model.parameters()}
        told: set[int] = set()
        for number, optimizer in enumerate(optimizers, 1):
            parameters = set(map(id, parameters_of(optimizer)))
            if not parameters & own:
                which = f"{type(optimizer).__name__}, {number} of {len(optimizers)}"
                raise ConfigError(
                    f"{self.call}: the optimizer ({which}) has no parameter of the model; {self.remedy}"
                )
            told |= parameters
        without_optimizer = [n for n, p in compressed.items() if p.requires_grad and id(p) not in told]
        if optimizers and without_optimizer and self._is_first:
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
        is_exact = settings.quality == "dense" or (settings.sparsity == 0 and settings.value_dtype == "fp32")
        if is_exact or settings.trains_alone:
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
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        others: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> GradientReducer:
        """Return a new reducer of the gradients of a group's ranks, whose weights are to stay equal, and
        ``others``, which are not trained.
        """
        settings = self.config.data_parallel
        reducer = GradientReducer(
            settings,
            nodes or group,
            metrics=self.metrics,
            device=device,
            kernels=self.config.kernels,
            transactional=self._optimizer_steps.transactions.armed,
            optimizer=ParameterGroups(self._optimizers),
        )
        self._reducers[tuple(dist.get_process_group_ranks(group or dist.group.WORLD))] = reducer
        self.steps.metrics = self.metrics
        self.steps.replicas.append(ReplicaChecksums(settings, weights, group, others, reducer.group.agree))
        return reducer
