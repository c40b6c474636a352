"""Assertions that hold in every loop of a script under step-ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.metrics.summary import DISPLACED

#: Step-ahead after two dense steps.
AHEAD = {
    "sparsity": 0.95,
    "min_numel": 16,
    "warmup_steps": 2,
    "sparsity_warmup_steps": 0,
    "feedback": "step_ahead",
}
#: The same with the check that no gradient is lost.
SECTION = {"data_parallel": {**AHEAD, "verify": {"every": 3, "action": "stop", "conservation": True}}}


class Watched:
    """Watches the passes of a model whose weights are displaced.

    Args:
        module: The attached module.
        ahead: Returns what displaces its weights; None before the first reduction.
        metrics: Those of the attachment.

    Attributes:
        passes: Forward passes with gradients in which weights were displaced.
        wrong: Parameters whose gradient came at other weights than those of the last forward pass.
    """

    def __init__(self, module: nn.Module, ahead: Callable[[], Any], metrics: Any) -> None:
        self._named, self._ahead, self._metrics = dict(module.named_parameters()), ahead, metrics
        self.passes, self.wrong = 0, set[str]()
        self._seen: dict[str, Tensor] = {}
        module.register_forward_pre_hook(self._note)
        for name, parameter in self._named.items():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self._compare, name))

    def __deepcopy__(self, _: Any) -> Watched:  # with the module whose hooks refer to it
        return self

    def displaced(self) -> list[str]:
        """Return the names of the parameters that hold displaced weights now."""
        ahead = self._ahead()
        named = {} if ahead is None else self._named
        return [n for n, p in named.items() if ahead.weight(p).data_ptr() != p.data_ptr()]

    @torch.compiler.disable
    def _note(self, *_: Any) -> None:
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            self._seen = {name: p.data.clone() for name, p in self._named.items()}
            self.passes += bool(self.displaced())

    @torch.compiler.disable
    def _compare(self, name: str, _: Tensor) -> None:
        if self._seen and not torch.equal(self._seen[name], self._named[name].data):
            self.wrong.add(name)

    def faults(self, *, covered: float | None = 1.0) -> list[str]:
        """Return what went wrong; ``covered`` is the least share of tensors that were displaced."""
        found = [f"gradients at other weights: {sorted(self.wrong)}"] if self.wrong else []
        share = self._metrics.summary().classes.get(DISPLACED)
        if covered is not None and (share is None or share.density is None or share.density < covered):
            found.append(f"displaced: {None if share is None else share.density}")
        if covered and not self.passes:
            found.append("no pass was displaced")
        if left := self.displaced():
            found.append(f"displaced at the end: {left}")
        return found


def equal_on_ranks(tensors: Sequence[Tensor]) -> bool:
    """Return whether all ranks have the same tensors, bitwise."""
    mine = [each.detach().cpu() for each in tensors]
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, mine)
    return all(len(o) == len(mine) and all(map(torch.equal, o, mine)) for o in others)
