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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...config.data_parallel import LocalStepsConfig
from ...console import logger
from ...errors import ConfigError
from ..add_on import AddOn, ReducerContext
from ..module_hooks import ModuleHook, register, remove, unregister
from ..passes import around_passes
from ..plan import Entries, Sparsity
from ..step_units import stepping, unwrapped
from .buffers import AveragedBuffers, average
from .updates import SKETCH_EVERY, UnsentUpdates, decay_of

#: Makes the value in a ``state_dict`` from a name and common weights, 1-D.
_Saved = Callable[[str, Tensor], Tensor]


class LocalSteps(AddOn):
    """Steps without an exchange of gradients, and an exchange of progress after so many of them.

    Args:
        context: The reducer.
        rule: Its settings.
    """

    key = "local"

    def __init__(self, context: ReducerContext, rule: LocalStepsConfig) -> None:
        self._group, self._rule, self._context = context.group, rule, context
        self._start = context.config.dense_steps
        self._option = "exchange_of" if context.config.exchange_of == "updates" else "local_steps"
        self._updates: UnsentUpdates | None = None
        """The unsent progress in an exchange of updates; else None."""
        self._names: dict[int, str] = {}
        """The names of the parameters, by identity."""
        self._groups: dict[str, tuple[Any, Any]] = {}
        """The optimizer and the parameter group that train the weights of a name."""
        self._decays: dict[str, float] = {}
        """Shares by which weights have decayed since the last exchange."""
        self._shortened: dict[str, float] = {}
        """The factor of gradients that no optimizer has used, by name."""
        self._averages_states = False
        """True if the optimizer's states are to be averaged before the next step."""
        self._exchanged: int | None = None
        """The step of the last exchange."""
        self._held: dict[str, Any] = {}
        self._buffers = AveragedBuffers(context.group)
        self._optimizers: Sequence[Any] = ()
        self._weights: dict[str, Tensor] = {}
        """The common weights by name, 1-D; empty before the first local step."""
        self._momentum: dict[str, Tensor] = {}
        """The same of the outer momentum; empty without one."""
        self._exchanges = False
        """True while progress is exchanged."""
        self._loaded: Mapping[str, Any] | None = None
        self._own: dict[str, Tensor] = {}
        """Own weights of those parameters that show the common ones now."""
        self._handles: list[Any] = []

    @classmethod
    def configured(cls, context: ReducerContext) -> LocalSteps | None:
        rule = context.config.local_steps
        return None if rule is None or context.group.world_size == 1 else cls(context, rule)

    # -- the model ---

    def attach(
        self,
        module: torch.nn.Module,
        weights: Mapping[str, Any],
        optimizers: Sequence[Any],
        parameters: Mapping[str, Tensor] | None = None,
        saved: _Saved | None = None,
    ) -> None:
        """Train the weights of ``module``; evaluation passes and ``state_dict`` see the common ones.

        To be called before the first reduction.

        Args:
            module: Called for forward passes. Its floating buffers that change are averaged at every
                exchange.
            weights: Trainable parameters, or a host's slices of them, by name: ``data`` (fp32, contiguous) is
                the memory of the weights, and can be replaced.
            optimizers: Those of torch, whose states are a rank's own until :meth:`flush`.
            parameters: The module's parameters by the same names, if ``weights`` are others.
            saved: Makes the values in a ``state_dict``; None: they have the shape of the parameter.

        Raises:
            ConfigError: There is no optimizer, or it trains a share of the weights on each rank; weights are
                of another type than fp32, or not contiguous.
        """
        if not optimizers:
            raise ConfigError(
                f"dct.data_parallel.{self._option} needs the optimizer: call "
                "dct_plugin.attach(model, optimizer, section)"
            )
        if sharded := [each for each in optimizers if stepping(each) is not unwrapped(each)]:
            raise ConfigError(
                f"dct.data_parallel.{self._option}: {type(sharded[0]).__name__} sends every rank's weights "
                "to the others in each step; use the optimizer that it is made of"
            )
        for name, held in weights.items():
            if held.data.dtype != torch.float32 or not held.data.is_contiguous():
                found = f"{held.data.dtype}, contiguous: {held.data.is_contiguous()}"
                raise ConfigError(
                    f"dct.data_parallel.{self._option}: {name} must be contiguous and of torch.float32 "
                    f"(is {found}); train in fp32 with torch.autocast"
                )
        self._held, self._optimizers = dict(weights), optimizers
        self._buffers.follow(module)
        self._names = {id(parameter): name for name, parameter in (parameters or weights).items()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                mine = (self._names[id(p)] for p in group["params"] if id(p) in self._names)
                self._groups |= dict.fromkeys(mine, (optimizer, group))
            if self._option == "exchange_of" and isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_pre_hook(self._see_gradients))
                self._handles.append(optimizer.register_step_post_hook(self._note_decay))
        self._register(module, parameters or weights, saved or (lambda name, w: w.view(weights[name].shape)))

    def _register(self, module: torch.nn.Module, parameters: Mapping[str, Any], saved: _Saved) -> None:
        register(module, self)
        shown: list[bool] = []

        def before(trains: bool) -> None:  # common weights are shown where there are no gradients
            shown.append(not trains and not self._own)
            if shown[-1]:
                self._show()

        def after(_: Any) -> None:
            if shown and shown.pop():
                self._hide()

        self._handles.append(around_passes(module, before, after))

        def loads(*_: Any) -> None:
            self._weights, self._updates, self._loaded = {}, None, None

        names = {id(parameter): name for name, parameter in parameters.items()}
        for part in module.modules():
            own = [(key, names[id(p)]) for key, p in part.named_parameters(recurse=False) if id(p) in names]

            def replace(_: Any, state: dict[str, Any], prefix: str, *__: Any, own: Any = own) -> None:
                state.update((f"{prefix}{key}", saved(name, self.weight(name))) for key, name in own)

            self._handles += [
                part.register_state_dict_post_hook(ModuleHook(replace, part)),
                part.register_load_state_dict_post_hook(ModuleHook(loads, part)),
            ]

    @torch.no_grad()
    def _see_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """See gradients as the optimizer does: clipped, and without a loss scale."""
        if self._updates is None:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]
        gradients = [(self._names[id(p)], p.grad) for p in trained if p.grad is not None]
        local = [(name, _local(gradient)) for name, gradient in gradients]
        for name, gradient in local:
            if (ratio := self._shortened.pop(name, 1.0)) != 1.0:
                gradient.div_(ratio)
        if self._updates.factors.is_due(self._exchanged or 0):
            self._updates.factors.see(local, self._exchanged or 0, steps=False)

    def shorten(self, names: Sequence[str]) -> float:
        """Return the factor of a rank's gradients until its optimizer uses them. It gives them about the norm
        of the mean gradient, by which scripts clip; the gradients of several passes of a step have none.
        """
        if self._updates is None or not self._updates.clips:
            return 1.0
        if not self._shortened.keys().isdisjoint(names):
            self._updates.clips = False
            return 1.0
        ratio = self._updates.factors.ratio
        self._shortened |= dict.fromkeys(names, ratio)
        return ratio

    def end_step(self, *, skipped: bool) -> None:
        self._shortened = {n: r for n, r in self._shortened.items() if n in self._group.waiting}

    def _note_decay(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if bool(getattr(optimizer, "found_inf", None)):  # a fused optimizer, which skips the step
            return
        for group in optimizer.param_groups:
            decayed = (p for p in group["params"] if p.grad is not None and id(p) in self._names)
            self._decays |= dict.fromkeys((self._names[id(p)] for p in decayed), decay_of(optimizer, group))

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        remove(self._handles)
        unregister(self)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Show the common weights within the block."""
        nested = bool(self._own)
        self._show()
        try:
            yield
        finally:
            if not nested:
                self._hide()

    def weight(self, name: str) -> Tensor:
        """Return the weights of a name that all ranks hold; before the first local step its own."""
        return self._weights[name] if self._weights else self._flat(name)

    def _show(self) -> None:
        for name, common in self._weights.items() if not self._own else ():
            held = self._held[name]
            self._own[name], held.data = held.data, common.view(held.data.shape)

    def _hide(self) -> None:
        for name, own in self._own.items():
            self._held[name].data = own
        self._own.clear()

    def _flat(self, name: str) -> Tensor:
        return self._own.get(name, self._held[name].data).detach().view(-1)

    # -- steps ---

    @property
    def alone(self) -> bool:
        """True if gradients of this step stay on their rank."""
        return self._steps >= 0 and not self._exchanges

    @property
    def counted(self) -> float:
        """Share of the weights whose exchange of progress counts for this step in the metrics."""
        if self._updates is not None:
            return self._context.config.density
        return float((self._steps + 1) % self._rule.every == 0)

    @property
    def due(self) -> bool:
        """True if progress is to be exchanged now. Optimizers that have not made the step yet are waited for,
        by one exchange at most.
        """
        steps, every = self._steps, self._rule.every
        is_due = bool(self._weights) and steps > 0 and steps % every == 0 and self._exchanged != steps
        waits = not self._groups.keys().isdisjoint(self._group.waiting)
        return is_due and not (waits and steps - (self._exchanged or 0) == every)

    def sparsity(self, name: str, otherwise: Sparsity) -> Sparsity:
        return Sparsity(1.0) if self._updates is not None else otherwise

    def before_compression(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        if not self._held:
            raise ConfigError(
                f"dct.data_parallel.{self._option}: this host does not say which weights are trained; DDP, "
                "FSDP2 (dct_plugin.attach with the optimizer) and DeepSpeed's ZeRO stage 0 do. Leave it out"
            )
        if self._averages_states:  # they are not needed if no step follows
            average(self._group, list(self._of_rank()["optimizer"].values()))
            self._averages_states = False
        if self.alone and not self._weights:
            self._adopt()

    @property
    def has_unsent(self) -> bool:
        """True if there is progress that did not cross at the last exchange."""
        return self._updates is not None

    def progress(self, *, last: bool = False) -> Entries:
        """Return own minus common weights by name, in the memory of the own ones, and the buffers that
        change; their mean over the ranks is to be there when :meth:`step` is called.

        Args:
            last: Return all of the unsent progress, at the end of an exchange of updates.
        """
        self._hide()
        self._exchanges = True
        if self._updates is not None:
            step, decays = self._steps - 1, [self._decays.pop(name, 0.0) for name in self._held]
            self._updates.take_step([self._flat(name) for name in self._held], decays, step)
            buffers = self._buffers.entries() if last or not step % SKETCH_EVERY else ()
            return [*self._updates.entries(None if last else step), *buffers]
        own = [(name, self._flat(name).sub_(self.weight(name))) for name in self._held]
        return [*own, *self._buffers.entries()]

    @torch.no_grad()
    def step(self) -> None:
        """Move the common weights by the mean progress, and continue from them; a collective."""
        self._exchanged = self._steps
        if self._updates is not None:
            self._updates.take_over()
            self._updates.show([self._flat(name) for name in self._held])
            self._buffers.take_over()
            self._exchanges = False
            return
        rule, common, momentum = self._rule, list(self._weights.values()), list(self._momentum.values())
        mean = [self._flat(name) for name in self._held]
        if momentum:
            torch._foreach_mul_(momentum, rule.outer_momentum)
            torch._foreach_add_(momentum, mean)
            torch._foreach_add_(mean, momentum, alpha=rule.outer_momentum)
        torch._foreach_add_(common, mean, alpha=rule.outer_lr)
        torch._foreach_copy_(mean, common)
        self._buffers.take_over()
        self._exchanges = False

    def flush(self) -> None:
        if self._weights:
            self._hide()
            if self._updates is not None:  # nothing is unsent
                torch._foreach_copy_([self._flat(name) for name in self._held], list(self._weights.values()))
                self._averages_states = True
                self._group.streams.clear()
            else:
                own = [tensor for tensors in self._of_rank().values() for tensor in tensors.values()]
                average(self._group, [*own, *self._buffers.all().values()])
            self._weights, self._updates, self._start = {}, None, sys.maxsize

    @property
    def _steps(self) -> int:
        """Optimizer steps since the dense ones."""
        return self._group.step - self._start

    def _adopt(self) -> None:
        """Take the ranks' weights for the common ones, or those of a loaded state.

        Raises:
            ConfigError: The optimizer has not the states that are in it.
        """
        flat = torch.cat([self._flat(name) for name in self._held])
        parts = flat.split([self._flat(name).numel() for name in self._held])
        self._weights = dict(zip(self._held, parts, strict=True))
        if self._option == "exchange_of":
            self._updates = UnsentUpdates(self._context, self._weights, flat, self._groups)
        self._exchanged = self._steps // self._rule.every * self._rule.every
        self._buffers.note()
        self._momentum = {
            n: torch.zeros_like(w) for n, w in self._weights.items() if self._rule.outer_momentum
        }
        loaded, self._loaded, targets = self._loaded or {}, None, self._all()
        for kind, tensors in loaded.items():
            if tensors.keys() != targets[kind].keys():
                raise ConfigError(
                    f"dct.data_parallel.{self._option}: a saved state has other tensors than this training "
                    f"({kind}); load the model and its optimizer before it"
                )
            for name, tensor in tensors.items():
                targets[kind][name].copy_(tensor)
        if self._updates is not None:
            self._updates.restore()
            self._updates.show([self._flat(name) for name in self._held])

    def _of_rank(self) -> dict[str, dict[str, Tensor]]:
        """Return what differs from rank to rank: weights, and states of the optimizers."""
        values = [v for each in self._optimizers for state in each.state.values() for v in state.values()]
        states = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
        own = {name: self._flat(name) for name in self._held}
        return {"own": own, "optimizer": {str(number): _local(each) for number, each in enumerate(states)}}

    def _all(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors of a saved state."""
        factors = {} if self._updates is None else {"factors": self._updates.factors.saved}
        return {**self._of_rank(), "common": self._weights, "momentum": self._momentum, **factors}

    # -- state ---

    def state_dict(self) -> Any:
        if not self._weights:
            return self._loaded
        return {kind: {n: t.cpu().clone() for n, t in each.items()} for kind, each in self._all().items()}

    def load_state_dict(self, state: Any, *, step: int) -> None:
        if state is None and step > self._start and not self._group.group_rank:
            lost = "what ranks had trained since the last exchange, and the outer momentum, are lost"
            if self._option == "exchange_of":
                lost = "with the mean of what was not sent, and new states of the optimizer where it has none"
            logger.warning(f"dct: every rank starts at the common weights; {lost}")
        self._weights, self._updates, self._loaded = {}, None, state
        if state is not None and self._held:
            self._adopt()


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
