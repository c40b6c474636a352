"""Local updates: every rank's optimizer steps on its own gradient, and ranks exchange changes of weights.

A rank trains weights ``x`` of its own beside an anchor ``a`` that is bitwise the same on all ranks. At an
exchange

    d = x - a;   S = what of d reaches the threshold;   a <- a + mean S;   x <- a + (d - S)

so that ``x - a`` is always what the rank has not sent: the anchor takes the place of a residual in memory.
The gradient is taken at ``x``, where the anchor will be once that has arrived, which is step-ahead error
feedback (Xu, Huo, Huang, AAAI 2021) in the optimizer's own units, whatever the optimizer. With several steps
between exchanges it is local SGD (Stich, ICLR 2019) with thresholded differences (Qsparse-local-SGD, Basu et
al., NeurIPS 2019).

The anchor is the model: what is evaluated and saved, and what the parameters hold between optimizer steps.
Local weights are in the parameters from a training forward pass to the end of the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..config import LocalUpdatesFeedback
from ..errors import ConfigError
from .add_on import AddOn, ReducerContext
from .module_hooks import register_hooks
from .plan import PlannedTensor, Shard

#: Most entries of one exchange, which has room of so many fp32 numbers; a larger tensor is alone in its own.
ROOM = 1 << 24


class Weight(NamedTuple):
    """A parameter, and the memory that its optimizer steps."""

    name: str
    parameter: torch.nn.Parameter
    """A parameter of the model."""
    master: Tensor
    """The tensor that the optimizer holds: the parameter itself, or an fp32 copy of it."""


@dataclass
class _Pair:
    """Local weights of a parameter, and its anchor, in the same layout."""

    parameter: torch.nn.Parameter
    master: Tensor
    working: Tensor  # the parameter's data in training passes
    anchor: Tensor  # fp32
    shown: Tensor  # the anchor as the parameter's data


class LocalUpdates:
    """A model's local weights and its anchor.

    Args:
        weights: What the optimizer has now, in an order that is the same on all ranks. Parameters that need
            no gradient are left alone until they do.
        optimizer: Its state is kept with the local weights.
        average: :meth:`~.reducer.GradientReducer.average_tensors`.
        step: Optimizer steps so far.
        first: Step from which weights are local; before it the host averages gradients.
        every: Steps from one exchange to the next.
        alone: There is one rank: its weights are the anchor.

    Raises:
        ConfigError: A weight is of a type or layout that cannot be exchanged.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[Weight]],
        optimizer: torch.optim.Optimizer,
        average: Callable[[Sequence[PlannedTensor]], None],
        step: Callable[[], int],
        *,
        first: int,
        every: int,
        alone: bool,
    ) -> None:
        self._weights, self._optimizer, self._average, self._step = weights, optimizer, average, step
        self._first, self._every, self._alone = first, every, alone
        self._pairs: dict[str, _Pair] = {}
        self._shows_anchor = self._stale = False
        self._handles: list[Any] = []
        for weight in weights():
            _check(weight)

    @property
    def active(self) -> bool:
        """True if the coming step is local: the host leaves gradients as they are."""
        return not self._alone and self._step() >= self._first

    # -- what the parameters hold ---

    def attach(self, module: torch.nn.Module) -> None:
        """Train ``module`` at the local weights; saving, loading and evaluation see the anchor."""
        self._handles += register_hooks(
            module,
            before_pass=lambda trains: self.show_local() if trains else self.show_anchor(),
            before_saving=self.show_anchor,
            before_loading=self.forget,
        )

    def detach(self) -> None:
        """Undo :meth:`attach`; the parameters hold the anchor in memory of their own."""
        self.forget()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def show_local(self) -> None:
        """Let the parameters hold the local weights, as the optimizer's step must find them."""
        if not self.active:
            return
        for weight in self._weights():
            parameter = weight.parameter
            if weight.name not in self._pairs and parameter.requires_grad and parameter.numel():
                self._pairs[weight.name] = _paired(weight)
                self._stale = True
        if self._shows_anchor:
            self._shows_anchor = False
            for pair in self._pairs.values():
                pair.parameter.data = pair.working

    def show_anchor(self) -> None:
        """Let the parameters hold the anchor."""
        if self._shows_anchor:
            return
        self._shows_anchor = True
        for pair in self._pairs.values():
            if self._stale and pair.shown is not pair.anchor:
                pair.shown.copy_(pair.anchor)
            pair.parameter.data = pair.shown
        self._stale = False

    @torch.no_grad()
    def forget(self) -> None:
        """Let the anchor become the local weights; changes that were not sent are dropped."""
        for pair in self._pairs.values():
            pair.master.copy_(pair.anchor)
            if pair.working is not pair.master:
                pair.working.copy_(pair.anchor)
            pair.parameter.data = pair.working
        self._pairs.clear()
        self._shows_anchor = False

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """The optimizer's fp32 copies of the weights hold the anchor, for hosts that save them."""
        copies = [pair for pair in self._pairs.values() if pair.master is not pair.working]
        local = [pair.master.detach().clone() for pair in copies]
        with torch.no_grad():
            for pair in copies:
                pair.master.copy_(pair.anchor)
            yield
            for pair, weights in zip(copies, local, strict=True):
                pair.master.copy_(weights)

    # -- steps ---

    def end_step(self) -> None:
        """The optimizer has stepped, and the step is not counted yet; a collective."""
        if not self.active:
            return
        step = self._step() + 1
        if step % self._every == 0:
            self._exchange_all(min(self._every, step - self._first))
        self.show_anchor()

    @torch.no_grad()
    def _exchange_all(self, steps: int) -> None:
        """Exchange what ``steps`` steps have changed."""
        pairs = list(self._pairs.items())
        room: Tensor | None = None
        while pairs:
            count = _fitting([pair.anchor.numel() for _, pair in pairs])
            chosen, pairs = pairs[:count], pairs[count:]
            sizes = [pair.anchor.numel() for _, pair in chosen]
            if room is None or room.numel() < sum(sizes):
                room = chosen[0][1].anchor.new_empty(sum(sizes))
            changes = []
            for (name, pair), change in zip(chosen, room[: sum(sizes)].split(sizes), strict=True):
                local = _flat(pair.master)
                torch.sub(local, _flat(pair.anchor), out=change)
                left = local if local.dtype == torch.float32 else torch.empty_like(change)
                whole = [Shard(0, 0, change.numel())]
                sent = steps * pair.parameter.element_size()
                changes.append(PlannedTensor(name, change, whole, False, left, sent))
            self._average(changes)
            for (_, pair), change in zip(chosen, changes, strict=True):
                anchor = _flat(pair.anchor).add_(change.tensor)
                assert change.unsent is not None
                torch.add(change.unsent, anchor, out=change.unsent)
                if pair.master.dtype != torch.float32:
                    _flat(pair.master).copy_(change.unsent)
                if pair.working is not pair.master:
                    pair.working.copy_(pair.master)
        self._stale = True

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Local weights and the optimizer's state of this rank: copies on the CPU, in the memory's order."""
        pairs = self._pairs.items()
        return {
            "weights": {name: _saved(_flat(pair.master)) for name, pair in pairs},
            # The host saves anchors, rounded to the type of the parameters.
            "anchors": {
                name: _saved(_flat(pair.anchor)) for name, pair in pairs if pair.shown is not pair.anchor
            },
            "optimizer": tree_map(_saved, self._optimizer.state_dict()["state"]) if self._pairs else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore :meth:`state_dict`, when the host has loaded model and optimizer; None: local weights start
        at the anchor.

        Raises:
            ValueError: A weight has another number of entries.
        """
        self.forget()
        if state is None or not state["weights"]:
            return
        for weight in self._weights():
            if weight.name not in state["weights"]:
                continue
            saved = state["weights"][weight.name]
            if saved.numel() != weight.master.numel():
                raise ValueError(
                    f"{weight.name}: {saved.numel()} local weights were saved, the model has "
                    f"{weight.master.numel()}"
                )
            pair = self._pairs[weight.name] = _paired(weight)
            if weight.name in state["anchors"]:
                _flat(pair.anchor).copy_(state["anchors"][weight.name])
            _flat(pair.master).copy_(saved)
            if pair.working is not pair.master:
                pair.working.copy_(pair.master)
        self._stale = True
        self.show_anchor()
        content = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**content, "state": state["optimizer"]})


class LocalUpdatesAddOn(AddOn):
    """Connects a reducer with the local weights of its model."""

    missing = "local updates need dct.data_parallel.feedback = 'local_updates', it is '{feedback}'"
    key = "local"
    replaces_gradients = True

    def __init__(self, context: ReducerContext, every: int) -> None:
        self._context, self._every = context, every
        self._local: LocalUpdates | None = None
        self._loaded: Mapping[str, Any] | None = None

    @classmethod
    def configured(cls, context: ReducerContext) -> LocalUpdatesAddOn | None:
        feedback = context.config.feedback
        return cls(context, feedback.every) if isinstance(feedback, LocalUpdatesFeedback) else None

    def prepare(
        self, weights: Callable[[], Iterable[Weight]], optimizer: torch.optim.Optimizer
    ) -> LocalUpdates:
        """Take in what the feedback ``local_updates`` needs to know of the host, before the first reduction.

        Args:
            weights: Returns what the optimizer has now.
            optimizer: The one that steps, not a wrapper of it.

        Returns:
            To be attached to the model, and told of the optimizer's steps.

        Raises:
            ConfigError: The weights cannot be exchanged.
        """
        group, config = self._context.group, self._context.config
        self._local = LocalUpdates(
            weights,
            optimizer,
            self._context.average,
            lambda: group.step,
            first=config.dense_steps,
            every=self._every,
            alone=group.world_size == 1,
        )
        self._local.load_state_dict(self._loaded)
        return self._local

    def observe(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        if self._local is None:
            raise ConfigError(
                "dct.data_parallel.feedback = 'local_updates': this host has not said which weights and "
                "which optimizer are meant (LocalUpdatesAddOn.prepare); set it to 'local'"
            )

    def state_dict(self) -> Mapping[str, Any] | None:
        return self._loaded if self._local is None else self._local.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        self._loaded = state
        if self._local is not None:
            self._local.load_state_dict(state)


def _paired(weight: Weight) -> _Pair:
    """The parameter's weights as they are, also as the anchor."""
    _check(weight)
    parameter, working = weight.parameter, weight.parameter.data
    # An optimizer steps the parameter itself: its data now, whatever it is shown to be later.
    master = working if weight.master is parameter else weight.master.data
    anchor = master.detach().to(torch.float32, copy=True)
    shown = anchor if working.dtype == torch.float32 else working.clone()
    return _Pair(parameter, master, working, anchor, shown)


def _check(weight: Weight) -> None:
    kind = weight.master.dtype
    problem = ""
    if kind not in (torch.float32, torch.bfloat16):
        problem = f"its type is {str(kind).removeprefix('torch.')}, and weights are exchanged in fp32 or bf16"
    elif not _dense(weight.master):
        problem = "its memory has gaps or overlaps"
    if problem:
        raise ConfigError(
            f"dct.data_parallel.feedback = 'local_updates': parameter {weight.name}: {problem}; set it to "
            "'local'"
        )


def _dense(tensor: Tensor) -> bool:
    """Return whether the entries, in some order, fill their memory once."""
    expected = 1
    if not tensor.numel():
        return True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """All entries, 1-D, in the order of the memory, which is the same on all ranks."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _fitting(sizes: Sequence[int]) -> int:
    """Return how many of the first tensors go into one exchange."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > ROOM and count:
            return count
    return len(sizes)


def _saved(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
