"""Training passes of a module, forward and backward, which run at displaced weights.

A backward pass uses the weights that its forward pass used. So the parameters hold displaced weights from a
training forward pass to the end of its backward pass. A backward pass that keeps its graph (``retain_graph``,
``create_graph``) may be followed by another one. Then they hold them to the optimizer's step.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..module_hooks import ModuleHook, around_passes
from .displaced_weights import DisplacedWeights


class _Pass:
    """A training forward pass. The graph of its outputs keeps the object alive."""

    def __init__(self, version: int) -> None:
        self.version = version
        """Version of the displaced weights that it used."""


class TrainingPasses:
    """Lets parameters hold displaced weights in the training passes of a module.

    Other passes find the weights themselves, and leave what they found.

    Args:
        weights: The displaced weights.
        displace: Computes the displaced weights if they are not those of the coming passes, and shows them.
    """

    def __init__(self, weights: DisplacedWeights, displace: Callable[[], None]) -> None:
        self._weights, self._displace = weights, displace
        self._entered: list[tuple[bool, bool, BaseException | None]] = []
        """For each forward pass that runs: does it train, were displaced weights shown before it, and the
        exception that was handled when it began.
        """
        self._open: WeakSet[_Pass] = WeakSet()
        """Forward passes whose backward pass may come."""
        self._kept: set[_Pass] = set()
        """Those of them whose graph was kept, or that have no known output: they are open to the step."""

    def register(self, module: torch.nn.Module, *, before_loading: Callable[[], None]) -> list[Any]:
        """Follow the forward passes of ``module``, and show the weights where it or a part of it is saved.

        Args:
            module: Called for forward passes; passes of its parts alone are not seen.
            before_loading: Called before ``load_state_dict`` of the module or of a part of it.

        Returns:
            Handles that remove the hooks.
        """

        handles = around_passes(module, self.before_forward, self.after_forward, first=True)
        for part in module.modules():
            save, saved, load = (
                ModuleHook(lambda *_, function=function: function(), part)
                for function in (self._weights.before_saving, self._weights.after_saving, before_loading)
            )
            handles += [
                part.register_state_dict_pre_hook(save),
                part.register_state_dict_post_hook(saved),
                part._register_load_state_dict_pre_hook(load, with_module=True),
            ]
        return handles

    def end(self) -> None:
        """Forget all passes; no backward pass of them comes any more."""
        self._open.clear()
        self._kept.clear()

    def before_forward(self, trains: bool) -> None:
        """Show the weights of a forward pass."""
        shown = self._weights.shown
        if trains:
            self._displace()
        else:
            self._weights.restore()
        self._entered.append((trains, shown, sys.exc_info()[1]))

    def after_forward(self, output: Any) -> None:
        """Follow the output of a forward pass, or leave the weights as they were before it."""
        if not self._entered:
            return
        trains, shown, handled = self._entered.pop()
        if sys.exc_info()[1] is not handled:  # the pass has failed
            trains = False
        if not trains:
            self._weights.show() if shown else self._weights.restore()
        elif self._weights.shown:
            this = _Pass(self._weights.version)
            self._open.add(this)
            if not _call_in_backward(output, partial(self._begin_backward, this)):
                self._kept.add(this)

    def _begin_backward(self, this: _Pass) -> None:
        if this.version == self._weights.version:
            self._weights.show()
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, this, kept))

    def _end_backward(self, this: _Pass, kept: bool) -> None:
        if kept:
            self._kept.add(this)
        else:
            self._open.discard(this)
            self._kept.discard(this)
        if not self._open and not self._kept:
            # Without waiting for a device in every step.
            self._weights.restore(thorough=False)


def _call_in_backward(output: Any, function: Callable[[], None]) -> bool:
    """Call ``function`` when a backward pass reaches an output of a forward pass, any number of times; return
    whether there is an output that it can reach.
    """
    # Hooks of the output, not of the parameters: re-entrant activation checkpointing runs backward passes
    # inside the backward pass, which must not end it.
    found = [tensor for tensor in _tensors_of(output) if tensor.requires_grad]
    for tensor in found:
        tensor.register_hook(lambda _: function())
    return bool(found)


def _tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a forward pass returned: nested containers, and attributes of objects."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not callable(leaf):
            slots = copyreg._slotnames(type(leaf))  # type: ignore[attr-defined]
            values = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, n, None) for n in slots)]
            yield from (tensor for tensor in tree_leaves(values) if isinstance(tensor, Tensor))
