"""The contents of parameters as a table: the state after each event in each state."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from dct_plugin.data_parallel.step_ahead.displaced_weights import (
    TRANSITIONS,
    DisplacedWeights,
    Event,
    State,
)

REAL, READY, DISPLACED, HIDDEN = State.REAL, State.READY, State.DISPLACED, State.HIDDEN
TABLE = {
    # event: after REAL, READY, DISPLACED, HIDDEN
    Event.FORWARD: (DISPLACED, DISPLACED, DISPLACED, HIDDEN),
    Event.BACKWARD: (DISPLACED, DISPLACED, DISPLACED, HIDDEN),
    Event.BACKWARD_ENDS: (REAL, READY, REAL, HIDDEN),
    Event.PAUSE: (REAL, READY, READY, HIDDEN),
    Event.HIDE: (HIDDEN, HIDDEN, HIDDEN, HIDDEN),
    Event.STEP: (REAL, REAL, REAL, REAL),
}


class Weights(DisplacedWeights):
    """One weight, whose displaced ones are 1 less, and how often they were computed."""

    def __init__(self) -> None:
        self.parameter, self.computed = nn.Parameter(torch.zeros(3)), 0
        super().__init__(self._displace)

    def _displace(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        self.computed += 1
        return [("w", self.parameter, self.parameter.data - 1.0)]

    def reach(self, state: State) -> None:
        if state is not REAL:
            self.on(Event.FORWARD)
        if state is READY:
            self.on(Event.PAUSE)
        elif state is HIDDEN:
            self.hide()
        assert self.state is state


@pytest.mark.parametrize(("before", "event"), product(State, Event))
def test_table(before: State, event: Event) -> None:
    """The data are displaced in one state alone, and computed by a forward pass alone, where none are."""
    after = TABLE[event][list(State).index(before)]
    assert TRANSITIONS[event][before] is after
    weights = Weights()
    weights.reach(before)
    computed = weights.computed
    weights.hide() if event is Event.HIDE else weights.on(event)
    assert weights.state is after
    anew = event is Event.FORWARD and before is REAL
    assert weights.computed - computed == anew
    shown = after is DISPLACED and (before is not REAL or anew)
    assert torch.equal(weights.parameter.data, torch.full((3,), -1.0 if shown else 0.0))


def test_every_event_of_every_state_is_in_the_table() -> None:
    assert TRANSITIONS.keys() == set(Event)
    assert all(states.keys() == set(State) for states in TRANSITIONS.values())


@pytest.mark.parametrize("before", State)
def test_a_block_leaves_what_it_found(before: State) -> None:
    weights = Weights()
    weights.reach(before)
    held = weights.parameter.data_ptr()
    with contextlib.suppress(ZeroDivisionError), weights.hidden(), weights.hidden():
        assert torch.equal(weights.parameter.data, torch.zeros(3))
        raise ZeroDivisionError
    assert weights.state is before
    assert weights.parameter.data_ptr() == held


def test_weights_that_change_in_a_block_do_not_come_back() -> None:
    weights = Weights()
    weights.reach(DISPLACED)
    with weights.hidden():
        weights.on(Event.STEP)
    assert weights.state is REAL
    weights.on(Event.FORWARD)
    with weights.hidden(), torch.no_grad():
        weights.parameter.fill_(5.0)
    assert weights.state is READY
    weights.on(Event.FORWARD)
    assert torch.equal(weights.parameter.data, torch.full((3,), 4.0))


@pytest.mark.parametrize("moved", [False, True])
def test_what_is_put_back_is_no_write(moved: bool) -> None:
    """As SAM and FGM do, also if nothing is left but roundings; and as an RNN lays out its weights anew."""
    weights = Weights()
    weights.reach(DISPLACED)
    if moved:
        weights.parameter.data = weights.parameter.data.clone()
    else:
        with torch.no_grad():
            weights.parameter.add_(0.1).sub_(0.1)
    kept = weights.parameter.data_ptr()
    weights.on(Event.PAUSE, thorough=True)
    assert torch.equal(weights.parameter.data, torch.zeros(3))
    weights.on(Event.BACKWARD)
    assert weights.parameter.data_ptr() == kept  # taken over
    weights.on(Event.STEP, thorough=True)
