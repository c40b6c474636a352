"""Optimizer steps of a host: what counts them, the loss scale, and steps that scripts make themselves.

Gradients are reduced, the optimizer steps or skips, step counters move on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dct_plugin.codecs.copies import Mirror, to_host
from dct_plugin.config import DataParallelConfig
from dct_plugin.console import listed, logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.module_hooks import remove
from dct_plugin.host_traffic import own_traffic
from dct_plugin.kernels.reference import overflow_flags
from dct_plugin.metrics import Metrics
from dct_plugin.transport import lost_ranks

from .patching import Function, Patches
from .replica_checksums import ReplicaChecksums


class FrozenParameters:
    """The parameters that are frozen now; :meth:`check` warns when one of them becomes trainable.

    Args:
        named: The model's parameters by name.
        consequence: What the host does with gradients of unfrozen parameters, and what to do, in words.
        is_reduced: Tells whether the host reduces a parameter's gradients nevertheless.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        consequence: str,
        is_reduced: Callable[[Tensor], bool] = lambda parameter: False,
    ) -> None:
        frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
        self._frozen = weakref.WeakValueDictionary(frozen)
        self._consequence, self._is_reduced = consequence, is_reduced

    def check(self) -> None:
        """Warn about the parameters that became trainable since the last call; after a step."""
        unfrozen = {name: each for name, each in self._frozen.items() if each.requires_grad}
        for name in unfrozen:
            del self._frozen[name]
        found = sorted(name for name, parameter in unfrozen.items() if not self._is_reduced(parameter))
        if found:
            logger.warning(f"dct: unfrozen during the training: {listed(found)}; {self._consequence}")


def collective_device() -> torch.device:
    """Return a device whose tensors the ranks can reduce, the same kind with and without gradients: the CPU
    if it can be, else this rank's accelerator.
    """
    kinds = [backend.partition(":")[0] for backend in str(dist.get_backend_config()).split(",")]
    kind = "cpu" if "cpu" in kinds else kinds[0]
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


class PoisonedSteps:
    """Check of the gradients of each step, as ``dct.data_parallel.nonfinite_action`` says.

    Residuals are rolled back by :meth:`~dct_plugin.data_parallel.GradientReducer.end_step`, which is to be
    told that the step was skipped.

    Args:
        config: The ``data_parallel`` settings.
        gradients: Gives the gradients that the optimizer is about to use on this rank, by name.
        agree: Whether other ranks may have other gradients: then all ranks of the job ask at the same time.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        gradients: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        agree: bool,
    ) -> None:
        self.skips = config.nonfinite_action == "skip"
        self._gradients, self._agree = gradients, agree
        self._count = 0

    def keep_from(self, optimizers: Iterable[torch.optim.Optimizer], step: int) -> bool:
        """Keep optimizers of torch from making step ``step`` if it is to be skipped; return whether it is.

        torch's optimizers leave parameters without gradients, and their states, alone.
        """
        skips = self.found(step)
        for group in (group for each in optimizers for group in each.param_groups) if skips else ():
            for parameter in group["params"]:
                parameter.grad = None
        return skips

    @own_traffic(recorded=False)
    def found(self, step: int) -> bool:
        """Return whether to skip step ``step``, the same on all ranks; a warning says why, at the first,
        second, fourth, ... such step.
        """
        if not self.skips:
            return False
        named = list(self._gradients())
        if not named and not self._agree:
            return False
        rank, nobody = dist.get_rank(), dist.get_world_size()
        flags = torch.zeros(0, dtype=torch.bool)
        if named:
            flags = overflow_flags([g._values() if g.is_sparse else g for _, g in named])
        speaker = torch.where(flags.any(), rank, nobody).view(1)
        if self._agree:
            speaker = speaker.to(collective_device())
            flags = flags.to(speaker.device)
            with lost_ranks.reported("agreement on a step that is not finite", step=step):
                dist.all_reduce(speaker, dist.ReduceOp.MIN)
        first, *found = to_host(torch.cat([speaker, flags.to(speaker)])).tolist()
        if first == nobody:
            return False
        names = [name for (name, _), flag in zip(named, found, strict=True) if flag]
        self._count += 1
        if rank == (first if self._agree else 0) and not self._count & (self._count - 1):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning(
                f"dct: rank {rank}: step {step} is skipped on all ranks: the gradient of "
                f"{', '.join(names[:3])}{more} is not finite; skipped so far: {self._count}"
            )
        return True


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
        frozen: Warns about unfrozen parameters after a step; None where the host picks them up, and on
            ranks that do not warn.
    """

    def __init__(
        self, members: Collection[HasSteps], metrics: Metrics | None = None, *, rank: int = 0
    ) -> None:
        self.members = members
        self.metrics = metrics
        self.step = 0
        self.open = False
        self.replicas: list[ReplicaChecksums] = []
        self.frozen: FrozenParameters | None = None
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
        if self.frozen is not None:
            self.frozen.check()
        self._unchecked = self.step
        if not alone:
            self.check()

    def check(self) -> None:
        """Compare the ranks' parameters if they were not since the last step; a collective."""
        step, self._unchecked = self._unchecked, None
        if step is not None:
            for each in self.replicas:
                each.check(step)


class OptimizerSteps:
    """Ends a step when the optimizer makes it, and takes back gradients that no optimizer used.

    A step is *rejected* if its gradients are cleared without ``optimizer.step()``: they are None or zero when
    the next backward pass begins. It is not counted. Several backward passes may belong to a step.

    Without optimizers the first step decides: an optimizer of torch that uses the gradients is followed from
    then on. If the gradients are cleared without one, every backward pass is a step.

    Args:
        steps: Ended with each optimizer step.
        reducers: The reducers of the gradients; more may be added.
        scaler: The gradient scaler. A step ends when the next pass begins: until then it is not known
            whether it was skipped.
        poisoned: Decides which steps are skipped; a scaler does so itself.
        sharded: Whether ranks hold different gradients. Then the host itself tells the reducers in which unit
            the gradients are.
    """

    def __init__(
        self,
        steps: StepHooks,
        reducers: Collection[GradientReducer],
        scaler: torch.amp.GradScaler | None,
        poisoned: PoisonedSteps,
        *,
        sharded: bool,
    ) -> None:
        self.steps, self.scaler = steps, scaler
        self._mirror, self._patches = Mirror(), Patches()
        if scaler is not None:
            self._patches.intercept(scaler, "update", self._update_scaler)
        self.optimizers: list[Any] = []
        self._reducers, self._poisoned, self._sharded = reducers, poisoned, sharded
        self._transactional = scaler is not None or poisoned.skips
        self.reduced: dict[int, Tensor] = {}
        """Parameters whose gradients were reduced since the last step, by identity."""
        self._scale_before: float | None = None
        """Loss scale of these gradients."""
        self._updated = self._stepped = self._stepping = self._skips = False
        self._passes_are_steps = False
        self._rejected = 0
        self._handles: list[Any] = []
        self._finalizer = weakref.finalize(self, remove, self._handles)

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End steps with those of ``optimizers`` (torch's), or of others of the same parameters."""
        self.optimizers.extend(each for each in optimizers if isinstance(each, torch.optim.Optimizer))
        if not self._handles:
            before, after = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
            self._handles += [
                register_optimizer_step_pre_hook(lambda *step: _call(before, *step)),
                register_optimizer_step_post_hook(lambda *step: _call(after, *step)),
            ]

    @property
    def awaits_optimizer(self) -> bool:
        """True if gradients were reduced that the optimizer has not used yet."""
        return self.steps.open and (bool(self.optimizers) or self._is_undecided) and not self._stepping

    @property
    def _is_undecided(self) -> bool:
        """True until it is known whether an optimizer of torch makes the steps."""
        return not (self.optimizers or self.scaler or self._passes_are_steps)

    def close(self) -> None:
        """Follow the optimizers and the scaler no longer."""
        self._finalizer()
        self._patches.undo()

    def loss_scale(self) -> float | None:
        """Return the scale of the coming gradients; None without a scaler."""
        if self.scaler is None:
            return None
        scale = self.scaler._get_scale_async()
        return float(self.scaler.get_scale() if scale is None else self._mirror.of(scale))

    # -- called by the host ---

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Note that gradients of these parameters are reduced; any number of times in a step."""
        if not self.steps.open:
            self._scale_before = self.loss_scale()
        self.reduced.update((id(each), each) for each in parameters)
        self.steps.begin()

    def end_pass(self) -> None:
        """Note the end of a backward pass that reduced gradients."""
        if self._passes_are_steps:
            self.end()

    @property
    def is_due(self) -> bool:
        """True if the gradient scaler has made or skipped a step that has not ended."""
        return self.scaler is not None and (self._updated or self._stepped)

    def end_due(self, *, alone: bool = False) -> None:
        """End the step that the gradient scaler has made or skipped, before the next gradients come.

        Args:
            alone: See :meth:`.StepHooks.end`.
        """
        if not alone:
            self.steps.check()
        if not self.is_due:
            return
        was_left_out = bool(self.optimizers) and not self._stepped
        before, scale = self._scale_before, self.loss_scale()
        lowered = before is not None and scale is not None and scale < before  # by a step that is skipped
        self.end(skipped=was_left_out or lowered, alone=alone)

    def end_or_reject(self) -> None:
        """End or reject the last step, before a backward pass adds to gradients or a state is saved. For
        sharded gradients it is a collective.
        """
        self.end_due()
        if self.awaits_optimizer and self._cleared(zeros=True):
            self._passes_are_steps = self._is_undecided
            if self._passes_are_steps:
                self.end()
            else:
                self._report_rejected()
                self.forget()
                for reducer in self._reducers:
                    reducer.reject_step()

    def end(self, *, skipped: bool = False, alone: bool = False) -> None:
        """End a step, if gradients were reduced since the last one."""
        if self.steps.open:
            self.forget()
            scale = None if self._sharded else self.loss_scale()
            self.steps.end(skipped=skipped, loss_scale=scale, alone=alone)

    def forget(self) -> None:
        """Forget the gradients reduced since the last step."""
        self.steps.open = self._updated = self._stepped = self._skips = False
        self.reduced.clear()

    # -- called by the optimizer and the scaler ---

    def _is_followed(self, optimizer: torch.optim.Optimizer) -> bool:
        if any(each is optimizer for each in self.optimizers):
            return True
        return bool(self.reduced) and any(
            id(p) in self.reduced for group in optimizer.param_groups for p in group["params"]
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Decide what becomes of the step that an optimizer is about to make."""
        if not self._is_followed(optimizer):
            return
        if self._is_undecided:
            self.optimizers.append(optimizer)
        self._stepping = True  # closures clear gradients that the optimizer has used
        if not self.steps.open:
            return
        with_scaler = self.scaler is not None
        self._skips = self._cleared(zeros=self._poisoned.skips and not with_scaler)
        if self._skips:
            self._report_rejected()
        elif not with_scaler:
            self._skips = self._poisoned.keep_from([optimizer, *self.optimizers], self.steps.step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_followed(optimizer):
            return
        self._stepping = False
        if self.scaler is None:
            self.end(skipped=self._skips)
        else:
            self._stepped = self.steps.open and not self._skips

    def _update_scaler(self, original: Function, *arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        if scale is not None:  # copied now: later a device would first run the next forward pass
            self._mirror.begin(scale)
        self._updated = self.steps.open

    def _cleared(self, *, zeros: bool) -> bool:
        """Return whether no optimizer can use the gradients any more; ``zeros`` count as cleared ones."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        told = itertools.chain(*groups) if groups else self.reduced.values()
        gradients = [each.grad for each in told if id(each) in self.reduced]
        left = [_local(gradient) for gradient in gradients if gradient is not None]
        if not left or not zeros:
            return bool(gradients) and not left
        is_nonzero = any(bool(gradient.any()) for gradient in left)
        if self._sharded and (self._transactional or self._is_undecided):
            is_nonzero = _any_rank(is_nonzero, self.steps.step)
        return not is_nonzero

    def _report_rejected(self) -> None:
        self._rejected += 1
        rank = dist.get_rank() if self._sharded else next(iter(self._reducers)).group_rank
        if rank or self._rejected & (self._rejected - 1):
            return
        what = f"dct: step {self.steps.step}: its gradients were cleared without optimizer.step()"
        if self._transactional:
            logger.warning(f"{what}: residuals are as before it; so far: {self._rejected}")
        elif self._rejected == 1:
            logger.warning(
                f"{what}, and what was not sent of them stays in the residuals and is sent in later steps. "
                "Set dct.data_parallel.nonfinite_action = 'skip' to leave residuals as before such steps, "
                "which takes a second residual buffer"
            )


def _call(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    if (function := method()) is not None:
        function(*arguments)


def _local(gradient: Tensor) -> Tensor:
    local: Callable[[], Tensor] | None = getattr(gradient, "to_local", None)
    own = gradient if local is None else local()
    return own._values() if own.is_sparse else own


@own_traffic(recorded=False)
def _any_rank(flag: bool, step: int) -> bool:
    """Return whether a flag is set on any rank of the job; a collective."""
    flags = torch.tensor(int(flag), device=collective_device())
    with lost_ranks.reported("agreement on gradients that were cleared", step=step):
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)
