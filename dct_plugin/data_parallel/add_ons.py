"""The table of add-ons, in the order in which they see a reduction."""

from __future__ import annotations

from .accordion import Accordion
from .add_on import AddOn, ReducerContext
from .autotune.add_on import AutomaticSparsity
from .step_ahead.add_on import StepAheadAddOn

ADD_ONS: tuple[type[AddOn], ...] = (Accordion, StepAheadAddOn, AutomaticSparsity)


def add_ons_of(context: ReducerContext) -> list[AddOn]:
    """Return the add-ons that a configuration asks for."""
    return [add_on for kind in ADD_ONS if (add_on := kind.configured(context)) is not None]
