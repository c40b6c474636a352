"""Parameters that hold displaced weights during passes with gradients: when they do, who writes to them, and
whether all gradients were taken there.

A parameter's data are displaced weights, which differ from rank to rank, from the first forward pass with
gradients to the end of the next backward pass, and in every later backward pass of the step. Everything else
finds the weights themselves. ``state_dict()`` and ``AveragedModel.update_parameters`` read the weights at all
times. What reads or writes parameters by itself between a forward pass and the end of its backward pass does
so within ``with dct_plugin.data_parallel.weights(model):``. A write outside of it that is still there when
the weights come back is undone, and refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...console import listed, logger
from ...errors import DCTError
from ...metrics import Record
from ...metrics.summary import DISPLACED
from ..passes import ModuleHook, around_backward_passes, calls_of, is_transforming
from ..stream_group import StreamGroup

#: Entries of each tensor that are compared to find writes which version counters miss (``.data``).
SAMPLES = 64
#: A write that was taken back (``p += e; p -= e``) leaves so many roundings of the largest entry at most.
ROUNDINGS = 16
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class State(Enum):
    """The contents of the parameters."""

    REAL = auto()
    """The weights. The next forward pass computes displaced ones."""
    READY = auto()
    """The weights. Displaced ones are those of the next forward pass, too: a graph of them is open."""
    DISPLACED = auto()
    """The displaced weights."""
    HIDDEN = auto()
    """The weights, within a block after which the parameters hold what they held before."""


class Event(Enum):
    """Events of the attached module."""

    FORWARD = auto()
    """A forward pass with gradients begins."""
    BACKWARD = auto()
    """A backward pass begins."""
    BACKWARD_ENDS = auto()
    """It ends."""
    PAUSE = auto()
    """It ends, or the host asks for the weights; coming passes belong to graphs that are open."""
    HIDE = auto()
    """A block begins that reads or writes the weights: a pass without gradients, a save."""
    STEP = auto()
    """The weights change: an optimizer's step, a load."""


_SAME = dict(zip(State, State, strict=True))
#: The state after an event, by event and the state before it.
TRANSITIONS: dict[Event, dict[State, State]] = {
    Event.FORWARD: _SAME | {State.REAL: State.DISPLACED, State.READY: State.DISPLACED},
    Event.BACKWARD: _SAME | {State.REAL: State.DISPLACED, State.READY: State.DISPLACED},
    Event.BACKWARD_ENDS: _SAME | {State.DISPLACED: State.REAL},
    Event.PAUSE: _SAME | {State.DISPLACED: State.READY},
    Event.HIDE: dict.fromkeys(State, State.HIDDEN),
    Event.STEP: dict.fromkeys(State, State.REAL),
}


class Computed(NamedTuple):
    """A parameter, its displaced weights, and the version counter of the parameter that they belong to.

    Writes to the parameter change the counter, but for those to its ``.data``.
    """

    parameter: torch.nn.Parameter
    displaced: Tensor
    version: int


class DisplacedWeights:
    """Shows displaced weights in parameters, from buffers of their own, and puts the weights back.

    Nothing is added to the weights and nothing is subtracted from them, so ranks stay bitwise equal.

    Args:
        compute: Yields names, parameters and their displaced weights, all of which are computed.
    """

    def __init__(self, compute: Callable[[], Iterable[tuple[str, torch.nn.Parameter, Tensor]]]) -> None:
        self.state = State.REAL
        self.buffers: dict[str, Tensor] = {}
        """Memory of the displaced weights by name, for whoever computes them."""
        self._compute = compute
        self._computed: dict[str, Computed] = {}
        self._weights: dict[str, Tensor] = {}
        """Weights of the parameters that hold displaced ones."""
        self._samples: list[Tensor] = []
        """Views of the bits of some entries of all displaced weights."""
        self._sampled = torch.empty(0)
        """Their values after they were computed."""
        self._views: dict[str, tuple[Tensor, Tensor]] = {}
        """Displaced weights and the view of their samples, by name."""
        self._unchecked = False

    @property
    def names(self) -> Iterable[str]:
        """The names of the parameters that are displaced in this step."""
        return self._computed.keys()

    def on(self, event: Event, *, anew: bool = False, thorough: bool = False, checks: bool = True) -> None:
        """Follow an event.

        Args:
            event: The event.
            anew: Compute displaced weights for a forward pass even if a graph of the last ones is open.
            thorough: Look for writes through ``.data``, too, which waits for the device.
            checks: False where an error is on its way already.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        before, after = self.state, TRANSITIONS[event][self.state]
        if after is State.DISPLACED and before is not after:
            if event is Event.FORWARD and (before is State.REAL or anew or self._is_outdated()):
                self._begin()
            self.state = after
            self._show()
            return
        self.state = after
        written = self._restore() if before is State.DISPLACED and after is not before else []
        if checks and (written or (thorough and self._unchecked)):
            self._refuse(written, thorough)

    def drop(self) -> None:
        """Forget the displaced weights: no backward pass needs them any more."""
        self._computed.clear()
        self._samples, self._unchecked = [], False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let the parameters hold their weights within the block."""
        found = self.hide()
        try:
            yield
        finally:
            self.unhide(found)

    def hide(self) -> State:
        """Let the parameters hold their weights until :meth:`unhide`, which is to get the returned value."""
        found = self.state
        self.on(Event.HIDE)
        return found

    def unhide(self, found: State) -> None:
        """Let the parameters hold what they held before :meth:`hide`. If weights were written meanwhile, that
        is the weights, up to the next pass.
        """
        if self.state is not State.HIDDEN:
            return  # the weights have changed since
        self.state = State.READY if found is State.DISPLACED and self._is_outdated() else found
        if self.state is State.DISPLACED:
            self._show()

    def weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's weight, also while the parameter holds a displaced one."""
        shown = (w for name, w in self._weights.items() if self._computed[name].parameter is parameter)
        return next(shown, parameter.data)

    def _is_outdated(self) -> bool:
        return any(each.parameter._version != each.version for each in self._computed.values())

    def _begin(self) -> None:
        self.drop()
        for name, parameter, displaced in self._compute():
            self._computed[name] = Computed(parameter, displaced, parameter._version)
        self._samples = [self._sample(name, each.displaced) for name, each in self._computed.items()]
        if self._samples:
            self._sampled = torch.cat(self._samples)

    def _sample(self, name: str, displaced: Tensor) -> Tensor:
        of, view = self._views.get(name, (None, displaced))
        if of is not displaced:
            flat = displaced.as_strided((displaced.numel(),), (1,))  # in the order of memory
            view = flat[:: max(1, displaced.numel() // SAMPLES)]
            view = view.view(_BITS[view.element_size()])
            self._views[name] = displaced, view
        return view

    def _show(self) -> None:
        """Show the displaced weights, but for those of parameters that were written since: another optimizer
        may have stepped them.
        """
        for name, (parameter, displaced, version) in self._computed.items():
            if parameter._version == version:
                self._weights[name], parameter.data = parameter.data, displaced
        self._unchecked = bool(self._computed)
        torch.clear_autocast_cache()  # copies of the weights that parameters held until now

    def _restore(self) -> list[str]:
        """Put the weights back, and return the names of the parameters that were written meanwhile."""
        written = []
        for name, weight in self._weights.items():
            parameter, displaced, version = self._computed[name]
            now = parameter.data
            moved = now.data_ptr() != displaced.data_ptr()
            parameter.data = weight
            if not moved and parameter._version == version:
                continue
            if not _is_close(now, displaced) if moved else self._is_written(name):
                written.append(name)
            else:  # a backup was put back, or an RNN has laid out its weights anew
                self.buffers[name] = now if moved and now.stride() == displaced.stride() else displaced
                self._computed[name] = Computed(parameter, self.buffers[name], parameter._version)
        self._weights.clear()
        torch.clear_autocast_cache()  # copies of the weights that parameters held until now
        return written

    def _is_written(self, name: str) -> bool:
        """Return whether samples of a parameter's displaced weights have changed; waits for the device."""
        number = list(self._computed).index(name)
        now, dtype = self._samples[number], self._computed[name].displaced.dtype
        before = self._sampled.split([each.numel() for each in self._samples])[number].to(now.dtype)
        return not _is_close(now.view(dtype), before.view(dtype))

    def _refuse(self, written: list[str], thorough: bool) -> None:
        if thorough:
            self._unchecked = False
            # The host waits once, whatever the number of parameters.
            if not torch.equal(torch.cat(self._samples), self._sampled):
                written += [n for n in self._computed if n not in written and self._is_written(n)]
        if written:
            self.state = State.REAL
            self.drop()
            raise DCTError(
                f"the weights of {', '.join(written[:3])}{', ...' if len(written) > 3 else ''} were written "
                "or replaced between a forward pass with gradients and the end of its backward pass, or "
                "after a forward pass that had none. With dct.data_parallel.feedback = 'step_ahead' "
                "parameters hold displaced weights there, which differ from rank to rank; the write was "
                "undone. Read and write weights within `with dct_plugin.data_parallel.weights(model):`, or "
                "set feedback to 'local'"
            )


def _is_close(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors are equal to a few roundings; NaN is equal to NaN."""
    if now.dtype != before.dtype or now.shape != before.shape:
        return False
    most = float(before.abs().nan_to_num(0.0, 0.0, 0.0).max()) if before.numel() else 0.0
    rounding = ROUNDINGS * torch.finfo(before.dtype).eps * most
    return torch.allclose(now, before, rtol=0.0, atol=rounding, equal_nan=True)


#: Returns from a forward pass that runs whether it has gradients.
_HAS_GRADIENTS = operator.itemgetter(1)


class TrainingPasses:
    """Tells displaced weights which passes run, and when the weights change.

    A backward pass uses the weights that its forward pass used. Which forward pass it belongs to is not
    known: as long as more forward passes with gradients than backward passes were seen in a step, or a graph
    was kept, the same displaced weights are shown.

    Args:
        weights: The displaced weights.

    Attributes:
        reduced: Whether gradients were reduced since displaced weights were computed. Then residuals, and
            with them new displaced weights, are others.
        transformed: Whether a pass of this step ran within a transform of ``torch.func``.
    """

    def __init__(self, weights: DisplacedWeights) -> None:
        self._weights = weights
        self.reduced = self.transformed = False
        self._entered: list[tuple[State, bool]] = []
        """The state before each forward pass that runs, and True if that pass has gradients."""
        self._backward = 0
        """Depth of backward passes that run."""
        self._passes = 0
        """Forward passes with gradients less backward passes in this step."""
        self._kept = False
        """True if a backward pass of this step has kept its graph."""
        self._idle = True
        """True if no pass was seen since the last step."""
        self._saving: list[State] = []

    def register(self, module: torch.nn.Module) -> list[Any]:
        """Follow the passes of ``module``; show the weights where it or a part of it is saved or loaded.

        Returns:
            Handles that remove the hooks.
        """
        handles: list[Any] = [
            calls_of(module).follow(self.before_forward, self.after_forward),
            around_backward_passes(self._around_backward),
        ]
        for part in module.modules():
            load = ModuleHook(self.step, part)
            handles += [
                part.register_state_dict_pre_hook(ModuleHook(self._before_saving, part)),
                part.register_state_dict_post_hook(ModuleHook(self._after_saving, part)),
                part._register_load_state_dict_pre_hook(load, with_module=True),
            ]
        return handles

    @property
    def runs(self) -> bool:
        """True while a forward pass with gradients runs, and no backward pass within it."""
        return self._is_inside and not self._backward

    @property
    def _is_inside(self) -> bool:
        return any(map(_HAS_GRADIENTS, self._entered))

    def before_forward(self, gradients: bool) -> None:
        """Show the weights of a forward pass."""
        found, trains = self._weights.state, gradients and not torch.jit.is_tracing()
        if is_transforming():
            self.transformed, trains = True, False
        elif trains:
            self._weights.on(Event.FORWARD, anew=not self.reduced)
            self._passes, self._idle = self._passes + 1, False
        else:
            self._weights.hide()
        self._entered.append((found, trains))

    def after_forward(self, failed: bool) -> None:
        """Leave the weights as they were before a pass without gradients, or before one that failed."""
        found, trained = self._entered.pop() if self._entered else (self._weights.state, False)
        if trained and failed:
            self._passes -= 1
            if found is not State.DISPLACED:
                self._weights.on(Event.PAUSE, checks=False)
        elif not trained and not is_transforming():
            self._weights.unhide(found)

    @contextmanager
    def _around_backward(self, keeps: bool) -> Iterator[None]:
        if is_transforming() or self._backward or self._is_inside:
            # Within another pass: of a transform, a recomputation, a force, Lightning's manual optimization.
            self._backward += 1
            try:
                yield
            finally:
                self._backward -= 1
            return
        self._weights.on(Event.BACKWARD)
        self._backward, failed = 1, True
        try:
            yield
            failed = False
        finally:
            self._backward = 0
            self._passes, self._idle = self._passes - 1, False
            self._kept |= keeps
            ends = Event.PAUSE if self._kept or self._passes > 0 else Event.BACKWARD_ENDS
            # Where gradients were reduced the host has waited for the device.
            self._weights.on(ends, thorough=self.reduced, checks=not failed)

    def step(self, *_: Any) -> None:
        """Follow a change of the weights.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        self._saving.clear()
        try:
            self._weights.on(Event.STEP, thorough=True)
        finally:
            if not (self._kept or self._passes > 0 or self._idle):
                self._weights.drop()
            self._passes, self._kept, self._idle, self.transformed = 0, False, True, False

    def _before_saving(self, *_: Any) -> None:
        # Hooks call this for a module and for all its parts.
        self._saving.append(self._weights.hide())

    def _after_saving(self, *_: Any) -> None:
        if self._saving:
            self._weights.unhide(self._saving.pop())


class Coverage:
    """Counts the tensors whose gradients were reduced in steps in which their weights were displaced.

    Args:
        is_displaceable: Returns whether a pass with gradients would have displaced a parameter, by name.
    """

    def __init__(self, is_displaceable: Callable[[str], bool]) -> None:
        self._is_displaceable = is_displaceable
        self._shown: set[str] = set()
        self._reduced: set[str] = set()
        self._missed: set[str] = set()
        """Names of gradients of this step whose weights should have been displaced, and were not."""
        self._steps_missed = 0

    def show(self, names: Iterable[str]) -> None:
        """Note the parameters that are displaced in this step."""
        self._shown.update(names)

    def reduce(self, names: Iterable[str]) -> None:
        """Note the gradients that are reduced in this step."""
        # A residual that the first reduction of this step has made is none that its passes could know.
        new = set(names) - self._reduced
        self._missed.update(filter(self._is_displaceable, new - self._shown))
        self._reduced |= new

    def end_step(self, *, shown: Iterable[str]) -> tuple[int, list[str]]:
        """Close an optimizer step.

        Args:
            shown: Names of parameters that are displaced in a pass that runs now.

        Returns:
            The number of gradients that were taken at displaced weights, and the names of the others.
        """
        found = len(self._reduced & self._shown), sorted(self._missed - self._shown)
        self._shown, self._reduced, self._missed = set(shown), set(), set()
        return found

    def report(
        self, group: StreamGroup, displaced: int, missed: Sequence[str], why: Callable[[str], str]
    ) -> None:
        """Record how many tensors were displaced in a step, and say once that some were not, and why."""
        tensors = displaced + len(missed)
        if group.metrics is not None and tensors:
            group.metrics.record(Record(DISPLACED, numel=tensors, nnz=displaced, target_density=1 - 1e-9))
        self._steps_missed += bool(missed)
        # A residual may begin between two passes of one step.
        if missed and self._steps_missed == 2 and not group.group_rank:
            logger.warning(
                f"dct: step-ahead: step {group.step}: {len(missed)} of {tensors} tensors were trained at "
                f"weights that were not displaced ({listed(missed)}): {why(missed[0])}. Adam and momentum "
                "lose quality without it; 'feedback': 'local' in dct.data_parallel is the same without this "
                "line"
            )
