"""Optimizer steps of a host: what counts them, the loss scale, and steps that scripts make themselves.

Gradients are reduced, the optimizer steps or skips, step counters move on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dct_plugin.codecs.copies import Mirror, start_to_host, to_host
from dct_plugin.config import DataParallelConfig
from dct_plugin.console import listed, logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.passes import remove
from dct_plugin.errors import ConfigError
from dct_plugin.kernels.reference import overflow_flags
from dct_plugin.metrics import Metrics

from .gradient_use import Event, OptimizerGradients, Transactions, Use, least, parameters_of
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
        if not unfrozen:
            return
        for name in unfrozen:
            del self._frozen[name]
        found = sorted(name for name, parameter in unfrozen.items() if not self._is_reduced(parameter))
        if found:
            logger.warning(f"dct: unfrozen during the training: {listed(found)}; {self._consequence}")


class PoisonedSteps:
    """Check of the gradients of each step, as ``dct.data_parallel.nonfinite_action`` says.

    Residuals are rolled back by :meth:`~dct_plugin.data_parallel.GradientReducer.end_step`, which is to be
    told that the step was skipped.

    Args:
        config: The ``data_parallel`` settings.
        gradients: Gives the gradients that the optimizer is about to use on this rank, by name.
        agree: Whether other ranks may have other gradients: then all ranks of the ``groups`` ask at the same
            time.

    Attributes:
        groups: As of :class:`.Transactions`.
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
        self.groups: Sequence[dist.ProcessGroup | None] = (None,)

    def keep_from(self, optimizers: Iterable[torch.optim.Optimizer], step: int) -> bool:
        """Keep optimizers of torch from making step ``step`` if it is to be skipped; return whether it is.

        torch's optimizers leave parameters without gradients, and their states, alone.
        """
        skips = self.found(step)
        for parameter in (p for each in optimizers for p in parameters_of(each)) if skips else ():
            parameter.grad = None
        return skips

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
        flags = torch.zeros(0, dtype=torch.bool, device="cpu")
        if named:
            flags = overflow_flags([g._values() if g.is_sparse else g for _, g in named])
        speaker, what = torch.where(flags.any(), rank, nobody), "agreement on a step that is not finite"
        first = int(least(speaker, self.groups if self._agree else (), what, step))
        if first == nobody:
            return False
        found = to_host(flags).tolist()
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
            self._warn("")
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

    def reject(self, *, counts: bool) -> None:
        """End a step that no optimizer made, and that other ranks may have made if it ``counts``; its
        parameters are compared at the next :meth:`check`.
        """
        self.open = False
        if counts:
            self.step += 1
            self._unchecked = self.step

    def warn_of_own_reduction(self, optimizer: torch.optim.Optimizer) -> None:
        """Say once if an optimizer steps with gradients, and none were ever passed to dct."""
        if not self._warns or dist.get_rank() != 0:
            return
        # torch.distributed.checkpoint makes states by a step at learning rate 0, with gradients of its own.
        trained = (p for group in optimizer.param_groups if group.get("lr", 1.0) for p in group["params"])
        if any(parameter.grad is not None for parameter in trained):
            self._warn("nothing is compressed: ")

    def warn_of_another(self, optimizer: torch.optim.Optimizer, passed: torch.optim.Optimizer) -> None:
        """Say that an optimizer makes steps in place of the one that was passed."""
        if dist.get_rank() == 0:
            logger.warning(
                f"dct: {type(optimizer).__name__} makes step {self.step} in place of the "
                f"{type(passed).__name__} that was passed, whose settings and moments stay in use: call "
                "dct_plugin.attach(model, optimizer) again"
            )

    def _warn(self, consequence: str) -> None:
        logger.warning(
            f"dct: {consequence}an optimizer step was made without passing gradients to dct; is the "
            "all-reduce of gradients switched off, or done by the script itself?"
        )
        self._warns = False

    def check(self) -> None:
        """Compare the ranks' parameters if they were not since the last step; a collective."""
        step, self._unchecked = self._unchecked, None
        if step is not None:
            for each in self.replicas:
                each.check(step)


class OptimizerSteps:
    """Ends a step when an optimizer makes it, and takes back gradients that no optimizer used.

    Each optimizer has its own transaction, the gradients of its parameters (:mod:`.gradient_use`). A step is
    counted when the first optimizer that was waiting makes it. Gradients that are None or zero when the next
    backward pass begins are *rejected*: they are no step, and leave no trace in the residuals. The first
    rejection finds no second residual (:class:`.gradient_use.Transactions`).

    Without optimizers the first step decides: an optimizer of torch that uses the gradients is followed from
    then on. If the gradients are cleared without one, every backward pass is a step.

    Args:
        steps: Ended with each optimizer step.
        reducers: The reducers of the gradients; more may be added.
        scaler: The gradient scaler; one that was not passed is found when it looks at the gradients. A step
            ends when the next pass begins: until then it is not known whether it was skipped.
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
        self._unknown = OptimizerGradients(None)
        self.gradients = [self._unknown]
        """The gradients of each optimizer, and first those of an unknown one."""
        self._owners: dict[int, OptimizerGradients] = {}
        """The optimizer's gradients to which a parameter belongs, by identity."""
        self._reducers, self._poisoned, self._sharded = reducers, poisoned, sharded
        armed = scaler is not None or poisoned.skips
        self.transactions = Transactions(reducers, armed=armed, sharded=sharded)
        self.has_stepped = False
        """True if a step was made since the start, or since a state was loaded."""
        self._updated = False
        """True if the scaler was updated since the last step."""
        self._passes_are_steps = False
        self._stepping: weakref.ref[Any] | None = None
        """The optimizer whose step runs, or has ended with an error."""
        self._passed: set[int] = set()
        """Identities of the optimizers that the script has passed. They are forgotten when one was found
        replaced, so that one line says it.
        """
        self._stepped: set[int] = set()
        """Identities of the optimizers that began a step since gradients were last used."""
        self._handles: list[Any] = []
        self._finalizer = weakref.finalize(self, remove, self._handles)
        if not _FOLLOWERS:
            for name in ("unscale_", "step"):
                _SCALERS.intercept(torch.amp.GradScaler, name, _tell)
        _FOLLOWERS.add(self)

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End steps with those of ``optimizers`` (torch's), or of others of the same parameters."""
        own = [each for each in optimizers if isinstance(each, torch.optim.Optimizer)]
        self._passed |= {id(each) for each in own}
        self.gradients += [OptimizerGradients(each) for each in own]
        if not self._handles:
            before, after = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
            self._handles += [
                register_optimizer_step_pre_hook(lambda *step: _call(before, *step)),
                register_optimizer_step_post_hook(lambda *step: _call(after, *step)),
            ]

    def decide_in(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Have the ranks of these process groups decide about steps, not those of the whole job."""
        self._poisoned.groups = self.transactions.groups = groups

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that are known."""
        return [each.optimizer for each in self.gradients if each.optimizer is not None]

    @property
    def awaits_optimizer(self) -> bool:
        """True if gradients were reduced that no optimizer has used yet."""
        return Use.REDUCED in [each.use for each in self.gradients]

    def close(self) -> None:
        """Follow the optimizers and the scaler no longer."""
        self._finalizer()
        self._patches.undo()
        _FOLLOWERS.discard(self)
        if not _FOLLOWERS:
            _SCALERS.undo()

    def loss_scale(self) -> float | None:
        """Return the scale of the coming gradients; None without a scaler."""
        if self.scaler is None:
            return None
        scale = self.scaler._get_scale_async()
        return float(self.scaler.get_scale() if scale is None else self._mirror.of(scale))

    # -- called by the host ---

    def begin(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note that gradients of these parameters, by name, are reduced; any number of times in a step."""
        if not self.steps.open:
            if self.scaler is not None and not self._sharded:  # its state may have been loaded since
                for reducer in self._reducers:
                    reducer.rescale(self.loss_scale() or 1.0)
            self._owners = {
                id(parameter): each
                for each in reversed(self.gradients[1:])
                for parameter in parameters_of(each.optimizer)
            }
        reduced: dict[OptimizerGradients, dict[str, Tensor]] = {}
        for name, parameter in named:
            reduced.setdefault(self._owners.get(id(parameter), self._unknown), {})[name] = parameter
        for owner, parameters in reduced.items():
            owner.add(parameters, covered=self.transactions.armed)
        self.steps.begin()

    def end_pass(self) -> None:
        """Note the end of a backward pass that reduced gradients, and may have run optimizers' steps."""
        if self._passes_are_steps:
            self._unknown.note(Event.STEP)
        if self.scaler is None:
            self._end()

    @property
    def due(self) -> list[OptimizerGradients]:
        """The gradients of steps that the gradient scaler has made or skipped, and that have not ended."""
        return [each for each in self.gradients if self.scaler and each.is_decided(self._updated)]

    def end_due(self, *, alone: bool = False) -> None:
        """End the step that the gradient scaler has made or skipped, before the next gradients come.

        Args:
            alone: See :meth:`.StepHooks.end`.
        """
        if not alone:
            self.steps.check()
        if due := self.due:
            for each in due:
                if each.is_left_out():
                    each.note(Event.LEAVE_OUT)
            self._end(alone=alone)

    def end_or_reject(self) -> None:
        """End or reject the last step, before a backward pass adds to gradients or a state is saved. For
        sharded gradients it is a collective.
        """
        self.end_due()
        cleared = self.transactions.cleared(
            [each for each in self.gradients if each.use is Use.REDUCED], zeros=True
        )
        if cleared and not (self.scaler or self._passes_are_steps or self.optimizers):
            self._passes_are_steps = True
            self._unknown.note(Event.STEP)
            self._end()
        elif cleared:
            self.transactions.reject(cleared, self.optimizers)
            for each in cleared:
                each.note(Event.CLOSE)
            if self.steps.open and not self.awaits_optimizer:
                counted = [reducer.reject_step() for reducer in self._reducers]
                self.steps.reject(counts=any(counted))

    def forget(self) -> None:
        """Forget the gradients reduced since the last step."""
        self.steps.open = self._updated = self.has_stepped = False
        for each in self.gradients:
            each.note(Event.CLOSE)

    # -- called by optimizers and scalers ---

    def scaler_looks(self, scaler: Any, optimizer: Any) -> None:
        """Note that a scaler looks at the gradients of an optimizer, and follow it.

        Raises:
            ConfigError: Another scaler was followed.
        """
        asked = self._of(optimizer) if scaler.is_enabled() else []
        for each in asked:
            each.asked = True
        if not asked or scaler is self.scaler:
            return
        if self.scaler is not None and self.scaler.is_enabled():
            raise ConfigError(
                f"rank {dist.get_rank()}: two gradient scalers (torch.amp.GradScaler) scale gradients of one "
                "model, and its residuals have one unit: use one scaler for all of its optimizers"
            )
        self.scaler = scaler
        self._patches.intercept(scaler, "update", self._update_scaler)
        self.transactions.arm()
        for reducer in self._reducers:  # the gradients that were reduced so far are in its unit
            reducer.group.loss_scale *= scaler.get_scale()
        if dist.get_rank() == 0:
            logger.warning(
                f"dct: {type(scaler).__name__} was not passed, and is followed from step {self.steps.step} "
                "on; pass it as scaler= to dct_plugin.attach"
            )

    def _update_scaler(self, original: Function, *arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        if scale is not None:  # copied now: later a device would first run the next forward pass
            self._mirror.begin(scale)
        self._updated = True

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Decide what becomes of the step that an optimizer is about to make."""
        self._stepped.add(id(optimizer))
        if self._is_nested(optimizer):
            return
        self._stepping = weakref.ref(optimizer)
        own = [each for each in self._of(optimizer) if each.use is Use.REDUCED]
        if not own:
            return
        zeros = self._poisoned.skips and self.scaler is None
        if cleared := self.transactions.cleared(own, zeros=zeros):
            self.transactions.reject(cleared, self.optimizers)
        left = [each for each in own if each.use is Use.REDUCED]
        looks = zeros and left and self.steps.open
        if looks and self._poisoned.keep_from([optimizer, *self.optimizers], self.steps.step):
            for each in left:
                each.note(Event.LEAVE_OUT)
        found = getattr(optimizer, "found_inf", None)  # the scaler leaves the decision to the optimizer
        if isinstance(found, Tensor):
            for each in own:
                each.overflow = start_to_host(found)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._stepping is None or self._stepping() is not optimizer:
            return
        self._stepping = None
        own = self._of(optimizer)
        if not own:
            return
        for each in own:
            is_passed = each.use is Use.REDUCED and id(each.optimizer) in self._passed
            if is_passed and not _steps_in(each.optimizer, optimizer, self._passed, self._stepped):
                self._passed.clear()
                self.steps.warn_of_another(optimizer, each.optimizer)
            each.note(Event.STEP)
        self._stepped.clear()
        if {each.use for each in own} == {Use.IDLE}:
            self.steps.warn_of_own_reduction(optimizer)
        # A step within the backward pass is one of several: the end of the pass ends them.
        if self.scaler is None and torch._C._current_graph_task_id() < 0:
            self._end()

    # -- inside ---

    def _of(self, optimizer: torch.optim.Optimizer) -> list[OptimizerGradients]:
        """Return the gradients that an optimizer may use: its own, and those of optimizers that it is a part
        or a wrapper of.
        """
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        reduced = self._unknown.reduced
        known = self._passes_are_steps or not reduced
        if not known and (unknown := {n: p for n, p in reduced.items() if id(p) in parameters}):
            found = OptimizerGradients(optimizer)
            found.add(unknown, covered=self._unknown.covered)
            for name in unknown:
                del self._unknown.reduced[name]
            if not self._unknown.reduced:
                self._unknown.use = Use.IDLE
            self.gradients.append(found)
        return [
            each
            for each in self.gradients
            if each.optimizer is optimizer or not parameters.isdisjoint(map(id, each.reduced.values()))
        ]

    def _is_nested(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps within another one's step, which ends later (wrappers)."""
        outer = None if self._stepping is None else self._stepping()
        if outer is None or outer is optimizer:
            return False
        return not set(map(id, parameters_of(outer))).isdisjoint(map(id, parameters_of(optimizer)))

    def _end(self, *, alone: bool = False) -> None:
        """End the steps that were made or skipped; the first one since gradients were reduced counts."""
        ended = [each for each in self.gradients if each.use in (Use.USED, Use.SKIPPED)]
        if not ended:
            return
        skipped = [each for each in ended if each.use is Use.SKIPPED]
        if skipped:
            self.transactions.take_back(skipped)
        names = {name for each in ended for name in each.reduced}
        for each in ended:
            each.note(Event.CLOSE)
        waiting = {n for each in self.gradients if each.use is Use.REDUCED for n in each.reduced}
        self._updated, self.has_stepped = False, True
        counts, self.steps.open = self.steps.open, False
        for reducer in self._reducers:
            reducer.group.waiting = waiting
            if not counts:
                reducer.commit(names)
        if counts:
            scale = None if self._sharded or self.scaler is None else self.loss_scale()
            self.steps.end(skipped=len(skipped) == len(ended), loss_scale=scale, alone=alone)


@torch.compiler.disable  # the step may be compiled, the hook cannot be
def _call(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    if (function := method()) is not None:
        function(*arguments)


#: The objects that are told of the gradient scalers of this process, which a script may not have passed.
_FOLLOWERS: WeakSet[OptimizerSteps] = WeakSet()
_SCALERS = Patches()


def _tell(original: Function, scaler: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
    for follower in list(_FOLLOWERS):
        follower.scaler_looks(scaler, optimizer)
    return original(scaler, optimizer, *arguments, **keywords)


def _steps_in(
    passed: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, known: Collection[int], stepped: set[int]
) -> bool:
    """Return whether a passed optimizer takes part in the step of another one, by the identities of all that
    were ``known`` and that ``stepped``; also if that cannot be told.
    """
    if id(optimizer) in known or id(passed) in stepped:
        return True
    # torch sees no steps of an optimizer that it has not initialized.
    return passed.param_groups is optimizer.param_groups or not getattr(type(passed).step, "hooked", False)
