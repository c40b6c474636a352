"""The add-on of local steps: gradients stay on their rank, and common weights are shown to the outside.

A rank trains its own weights, which are the model's parameters. After some steps the ranks exchange their
progress, which is own minus common weights. An outer optimizer, SGD with Nesterov momentum, moves the common
weights by its mean. Evaluation and ``state_dict`` of the model see the common weights, which all ranks hold.

In an exchange of updates (:mod:`.updates`) ranks do so in every step, and no outer optimizer moves them.

Source: Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language Models*, 2023. All
entries are sent: thresholded progress lost quality in every form that was tried (docs/local-steps.md).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...console import logger
from ...errors import ConfigError
from ..add_on import AddOn, ReducerContext
from ..passes import calls_of, register, remove, unregister
from ..plan import Entries, Sparsity
from .buffers import AveragedBuffers, average
from .outer_step import OuterStep
from .training import Optimizers, Saved, TrainedWeights
from .updates import UnsentUpdates

_Tensors: TypeAlias = Mapping[str, Mapping[str, Tensor]]


def copy_state(state: _Tensors, targets: _Tensors, option: str) -> None:
    """Copy the tensors of a saved state to this rank's.

    Args:
        state: The saved tensors by kind and name.
        targets: Those of this rank.
        option: The option that has the state.

    Raises:
        ConfigError: The optimizer has not the states that are in it.
    """
    for kind, tensors in state.items():
        if tensors.keys() != targets.get(kind, {}).keys():
            raise ConfigError(
                f"dct.data_parallel.{option}: a saved state has other tensors than this "
                f"training ({kind}); load the model and its optimizer before it"
            )
        for name, tensor in tensors.items():
            targets[kind][name].copy_(tensor)


class RestoredState:
    """The state that was loaded since the last step.

    The module may load the weights of the same checkpoint after it: torch.distributed.checkpoint hands them
    over last. They replace what the state had restored. Whether they are of the same checkpoint is known
    before the next pass, when all of them are there.

    Args:
        tensors: Returns the tensors of this rank that a state has, by kind and name.
        forget: Called if the module has loaded other weights.
    """

    def __init__(self, tensors: Callable[[], _Tensors], forget: Callable[[], None]) -> None:
        self._tensors, self._forget = tensors, forget
        self._state: _Tensors | None = None
        self._passes: list[Any] = []
        """Follows the passes up to the first one after the module has loaded weights."""

    def follow(self, module: torch.nn.Module, weights: TrainedWeights) -> None:
        """Know the module, and the weights that this rank trains."""
        self._module, self._weights = weakref.ref(module), weights

    def note(self, state: _Tensors | None) -> None:
        """Note that a state was loaded; None: weights that are loaded from now on are others."""
        if self._passes:
            remove(self._passes)
        self._state = state

    def module_loaded(self) -> None:
        """Follow the module, which has loaded weights."""
        module = self._module()
        if self._state is None or not self._weights.common or module is None:
            self._forget()
        elif not self._passes:
            self._passes.append(calls_of(module).follow(lambda _: self._decide()))

    @torch.no_grad()
    def _decide(self) -> None:
        """Let this rank go on from the state, if its checkpoint has the weights that were loaded."""
        state = self._state or {}
        loaded = dict(zip(self._weights.held, self._weights.own(), strict=True))
        for kind in ("common", "own"):  # torch.distributed.checkpoint may load into the weights themselves
            if all(torch.equal(loaded[name].cpu(), each) for name, each in state[kind].items()):
                self.note(None)
                targets = self._tensors()
                copy_state({key: state[key] for key in ("own", "optimizer")}, targets, self._weights.option)
                return self._weights.update_parameters()
        return self._forget()


class LocalSteps(AddOn):
    """Steps without an exchange of gradients, and an exchange of progress after so many of them.

    Args:
        context: The reducer.
        period: Steps from one exchange to the next.

    Attributes:
        weights: Those that this rank trains, and the common ones.
        progress: What is exchanged; None before the first local step, and after :meth:`flush`.
        gradients: Those of a pass whose step ends in an exchange, 1-D, the same ones on all ranks.
        sends: True while progress is encoded and sent: what is reduced then is no gradient.
        is_open: True from the sending of progress until this rank's weights have followed its mean.
    """

    key, option = "local", "local_steps"

    def __init__(self, context: ReducerContext) -> None:
        assert context.config.local_steps is not None
        self._context, self._group, self._period = context, context.group, context.config.local_steps.period
        self._start, self.gradients = context.config.dense_steps, list[Tensor]()
        self._kind = UnsentUpdates if context.config.exchange_of == "updates" else OuterStep
        self.weights = TrainedWeights({}, self._kind.option)
        self.progress: OuterStep | None = None
        self._averages_states = False
        """True if the optimizer's states are to be averaged before the next step."""
        self.sends = self.is_open = False
        self._loaded: Mapping[str, Any] | None = None
        self._restored = RestoredState(self._tensors, self._forget)
        self._handles: list[Any] = []

    @classmethod
    def configured(cls, context: ReducerContext) -> LocalSteps | None:
        return None if context.group.world_size == 1 else cls(context)

    # -- the model ---

    def attach(
        self,
        module: torch.nn.Module,
        weights: Mapping[str, Any],
        optimizers: Sequence[Any],
        parameters: Mapping[str, Tensor] | None = None,
        saved: Saved | None = None,
        masters: Mapping[str, tuple[Tensor, Any]] | None = None,
    ) -> None:
        """Train the weights of ``module``; evaluation passes and ``state_dict`` see the common ones.

        To be called before the first reduction.

        Args:
            module: Called for forward passes. Its floating buffers that change are averaged at every
                exchange.
            weights: Trainable parameters, or a framework's slices of them, by name: ``data`` (fp32,
                contiguous) is the memory of the weights, and can be replaced.
            optimizers: Those of torch, whose states are a rank's own until :meth:`flush`.
            parameters: The module's parameters by the same names, if ``weights`` are others.
            saved: Makes the values in a ``state_dict``; None: they have the shape and type of the parameter.
            masters: By the names of parameters in 16 bits, the fp32 tensor in an optimizer that has their
                weights, and the part of it that they are (an index). Parameters hold its values, rounded.

        Raises:
            ConfigError: There is no optimizer, or it trains a share of the weights on each rank; weights are
                of another type than fp32, or not contiguous, or fewer than fragments.
        """
        option, parameters = self._kind.option, parameters or weights
        names = {id(parameter): name for name, parameter in parameters.items()}
        trained = masters or {name: (parameter, ...) for name, parameter in parameters.items()}
        self._optimizers = Optimizers(optimizers, trained, option)
        if masters:
            held = {name: tensor.detach()[part] for name, (tensor, part) in masters.items()}
            self.weights = TrainedWeights(held, option, rounded=weights)
        else:
            self.weights = TrainedWeights(weights, option)
        rule = self._context.config.local_steps
        if rule is not None and rule.fragments > len(self.weights.held):
            raise ConfigError(
                f"dct.data_parallel.{option}.fragments = {rule.fragments}: at most {len(self.weights.held)}, "
                "the number of trained tensors, is allowed"
            )
        self._buffers = AveragedBuffers(self._group, module)
        register(module, self.weights)
        saved = saved or (lambda name, flat: flat.view(weights[name].shape).to(weights[name].dtype))
        self._handles += self.weights.follow(module, names, saved, self._restored.module_loaded)
        self._restored.follow(module, self.weights)

    @torch.no_grad()
    def detach(self) -> None:
        """Undo :meth:`attach`. Ranks keep the common weights, lest their own ones go on to differ."""
        remove(self._handles)
        if self.weights.common:
            self.weights.hide()
            torch._foreach_copy_(self.weights.own(), list(self.weights.common.values()))
            self.weights.update_parameters()
        unregister(self.weights)
        self._forget()

    # -- steps ---

    @property
    def _steps(self) -> int:
        """Optimizer steps since the dense ones."""
        return self._group.step - self._start

    @property
    def alone(self) -> bool:
        """True if gradients of this step stay on their rank."""
        return self._steps >= 0 and not self.sends

    @property
    def counted(self) -> float:
        """Share of the weights whose exchange of progress counts for this step in the metrics."""
        return 0.0 if (self._steps + 1) % self._period or not self.progress else self.progress.share

    @property
    def due(self) -> bool:
        """True if progress is to be exchanged now. Optimizers that have not made the step yet are waited for,
        by one exchange at most; with a delay all of them have, since it is sent in the next pass.
        """
        if self.progress is None or (since := self._steps - self.progress.last) < self._period:
            return False
        waits = not self.progress.delay and since < 2 * self._period
        return not waits or self._optimizers.groups.keys().isdisjoint(self._group.waiting)

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        return Sparsity(1.0)

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        if not self.weights.held:
            raise ConfigError(
                f"dct.data_parallel.{self._kind.option}: this framework does not say which weights are "
                "trained; DDP, FSDP2 (dct_plugin.attach with the optimizer) and DeepSpeed's ZeRO stage 0 do. "
                "Leave it out"
            )
        if self._averages_states:  # they are not needed if no step follows
            average(self._group, list(self._optimizers.states().values()))
            self._averages_states = False
        if self.alone and self.progress is None:
            self._adopt()

    def keep(self, entries: Entries) -> float:
        """Note gradients that stay on this rank; return their factor until its optimizer uses them."""
        if self.progress is None:
            return 1.0
        if self._steps + 1 - self.progress.last >= self._period and not self.progress.delay:
            self.gradients += [gradient for _, gradient in entries if gradient.numel()]
        return self.progress.shorten([name for name, _ in entries])

    def end_step(self, *, skipped: bool) -> None:
        self._restored.note(None)
        if self.progress is not None:
            self.progress.end_step()

    def entries(self, *, last: bool = False) -> Entries:
        """Return this rank's progress by name, and the buffers that change; their mean over the ranks is to
        be there when :meth:`step` is called, which may be some steps later.

        Args:
            last: Return all that would be left unsent at the end, which is nothing under local steps.
        """
        if self.progress is None or (last and not self.progress.keeps_unsent):
            return []
        self.weights.hide()
        self.sends = True
        self.progress.exchanges[1] = self._steps // self._period * self._period
        crossing = self.progress.entries(last=last)
        has_buffers = last or not self.progress.number % self.progress.buffers_every
        return [*crossing, *(self._buffers.entries() if has_buffers else ())]

    @torch.no_grad()
    def step(self, *, moves: bool, follows: bool) -> None:
        """Move the common weights by the mean progress, and continue from them.

        Args:
            moves: Whether the common weights move; they do so once for each exchange.
            follows: Whether this rank's own weights continue from them.
        """
        assert self.progress is not None
        if moves:
            self.progress.take_over()
            self.progress.exchanges[0] += 1
            self._buffers.take_over()
        if follows:
            self.progress.follow()
            self.weights.update_parameters()

    def flush(self) -> None:
        if self.progress is None:
            return
        self.weights.hide()
        own = self.weights.own()
        if self.progress.keeps_unsent:  # nothing is unsent any more
            torch._foreach_copy_(own, list(self.weights.common.values()))
            self._averages_states = True
            self._group.streams.clear()
        else:
            states = self._optimizers.states().values()
            average(self._group, [*own, *states, *self._buffers.all().values()])
        self.weights.update_parameters()
        self._forget()
        self._start = sys.maxsize

    # -- state ---

    def _adopt(self) -> None:
        """Take the ranks' weights for the common ones, or those of a loaded state.

        Raises:
            ConfigError: The optimizer has not the states that are in it.
        """
        self.weights.adopt()
        self.progress = self._kind(self._context, self.weights, self._optimizers)
        self.progress.exchanges[1] = self._steps // self._period * self._period
        self._buffers.note()
        loaded, self._loaded = self._loaded or {}, None
        copy_state(loaded, self._tensors(), self._kind.option)
        self.progress.restore()
        self.weights.update_parameters()

    def _tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a saved state."""
        assert self.progress is not None
        own = dict(zip(self.weights.held, self.weights.own(), strict=True))
        tensors: dict[str, Mapping[str, Tensor]] = {"own": own, "optimizer": self._optimizers.states()}
        count = {"count": self.progress.exchanges}
        return {**tensors, "common": self.weights.common, "exchanges": count, **self.progress.saved}

    def _forget(self) -> None:
        """Have no common weights until the next local step."""
        if self.progress is not None:
            self.progress.close()
        self.weights.common, self.progress, self._loaded = {}, None, None
        self._restored.note(None)

    def state_dict(self) -> Any:
        if self.progress is None:
            return self._loaded
        return {kind: {n: t.cpu().clone() for n, t in each.items()} for kind, each in self._tensors().items()}

    def load_state_dict(self, state: Any, *, step: int) -> None:
        if state is None and step > self._start and not self._group.group_rank:
            logger.warning(f"dct: every rank starts at the common weights; {self._kind.lost}")
        self._forget()
        self._restored.note(state)
        self._loaded = state
        if state is not None and self.weights.held:
            self._adopt()
