"""The weights and the optimizers of a rank that trains alone, and the common weights, which others see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ...policy.optimizers import OptimizerFamily, family_of
from ..passes import ModuleHook, calls_of
from ..step_units import stepping, unwrapped

#: Makes the value in a ``state_dict`` from a name and common weights, 1-D.
Saved = Callable[[str, Tensor], Tensor]


class TrainedWeights:
    """A rank's own weights, and the common ones, which are shown in their place.

    Args:
        held: Trainable parameters, or a framework's slices of them, by name: ``data`` is the memory of the
            weights, and can be replaced.
        option: The option that asks for common weights.
        rounded: The model's parameters by the same names, if ``held`` are masters of another type; parameters
            hold the masters' values, rounded.

    Attributes:
        held, option: See above.
        common: The common weights by name, 1-D; empty before the first local step. Each has a storage of its
            own: safetensors takes tensors of one storage for copies, and saves the first alone.
        flat: All of them in one tensor, 1-D, whose memory they share.

    Raises:
        ConfigError: Weights are of another type than fp32, or not contiguous.
    """

    def __init__(
        self, held: Mapping[str, Any], option: str, rounded: Mapping[str, Any] | None = None
    ) -> None:
        for name, each in held.items():
            if each.data.dtype != torch.float32 or not each.data.is_contiguous():
                found = f"{each.data.dtype}, contiguous: {each.data.is_contiguous()}"
                rule = (
                    f"must be contiguous and of torch.float32 (is {found}); train in fp32 with torch.autocast"
                )
                raise ConfigError(f"dct.data_parallel.{option}: {name} {rule}")
        self.held, self.option, self.flat = held, option, torch.empty(0)
        self._rounded = rounded or {}
        self.common: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        """The data that parameters held before they showed the common weights."""

    def adopt(self) -> None:
        """Take this rank's weights for the common ones."""
        own = self.own()
        self.flat = torch.cat(own)
        parts = map(torch.from_dlpack, self.flat.split([each.numel() for each in own]))
        self.common = dict(zip(self.held, parts, strict=True))

    def own(self) -> list[Tensor]:
        """Return this rank's weights in the order of the names, 1-D."""
        replaced = {} if self._rounded else self._own
        return [replaced.get(name, each.data).detach().view(-1) for name, each in self.held.items()]

    def update_parameters(self) -> None:
        """Let the parameters hold this rank's weights, if they are others."""
        for name, parameter in self._rounded.items():
            shown_later = self._own.get(name, parameter.data)
            shown_later.copy_(self.held[name].data.view(parameter.shape))

    def weight(self, name: str) -> Tensor:
        """Return the weights of a name that all ranks hold; before the first local step its own."""
        return self.common[name] if self.common else self.held[name].data.detach().view(-1)

    def show(self) -> None:
        """Let the parameters hold the common weights."""
        for name, common in self.common.items() if not self._own else ():
            parameter = self._parameter(name)
            own = self._own[name] = parameter.data
            parameter.data = common.view(own.shape).to(own.dtype)

    def hide(self) -> None:
        """Undo :meth:`show`."""
        for name, own in self._own.items():
            self._parameter(name).data = own
        self._own.clear()

    def _parameter(self, name: str) -> Any:
        return (self._rounded or self.held)[name]

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Show the common weights within the block."""
        nested = bool(self._own)
        self.show()
        try:
            yield
        finally:
            if not nested:
                self.hide()

    def follow(
        self, module: torch.nn.Module, names: Mapping[int, str], saved: Saved, loaded: Callable[[], None]
    ) -> Iterator[Any]:
        """Show common weights in evaluation passes and in ``state_dict``; yield the handles of the hooks.

        Args:
            module: Called for forward passes.
            names: The names of its parameters, by identity.
            saved: Makes the values in a ``state_dict``.
            loaded: Called after the module has loaded one.
        """
        shown: list[bool] = []

        def before(trains: bool) -> None:  # common weights are shown where there are no gradients
            shown.append(not trains and not self._own)
            if shown[-1]:
                self.show()

        def after(_: Any) -> None:
            if shown and shown.pop():
                self.hide()

        yield calls_of(module).follow(before, after)
        for part in module.modules():
            own = [(key, names[id(p)]) for key, p in part.named_parameters(recurse=False) if id(p) in names]

            def replace(_: Any, state: dict[str, Any], prefix: str, *__: Any, own: Any = own) -> None:
                state.update((f"{prefix}{key}", saved(name, self.weight(name))) for key, name in own)

            yield part.register_state_dict_post_hook(ModuleHook(replace, part))
            yield part.register_load_state_dict_post_hook(ModuleHook(lambda *_: loaded(), part))


class Optimizers:
    """The optimizers that train the weights.

    Args:
        optimizers: Those of torch.
        trained: By the name of weights, the tensor in an optimizer that has them, and the part that they are.
        option: The option that needs the optimizers.

    Attributes:
        groups: The optimizer and the parameter group that train the weights of a name.

    Raises:
        ConfigError: There is no optimizer, or it trains a share of the weights on each rank.
    """

    def __init__(
        self, optimizers: Sequence[Any], trained: Mapping[str, tuple[Any, Any]], option: str
    ) -> None:
        if not optimizers:
            raise ConfigError(
                f"dct.data_parallel.{option} needs an optimizer: dct_plugin.attach(model, optimizer, section)"
            )
        if sharded := [each for each in optimizers if stepping(each) is not unwrapped(each)]:
            raise ConfigError(
                f"dct.data_parallel.{option}: {type(sharded[0]).__name__} sends every rank's weights "
                "to the others in each step; use the optimizer that it is made of"
            )
        self.all = optimizers
        self._parts: dict[int, dict[str, Any]] = {}
        """The parts that weights have of a tensor, by its identity and their name."""
        for name, (tensor, part) in trained.items():
            self._parts.setdefault(id(tensor), {})[name] = part
        self.groups: dict[str, tuple[Any, Any]] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                names = (name for p in group["params"] for name in self._parts.get(id(p), ()))
                self.groups |= dict.fromkeys(names, (optimizer, group))

    def used(self, optimizer: Any) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        """Yield the parameter groups that an optimizer is to change, and their gradients by name."""
        for group in optimizer.param_groups:
            have = [p for p in group["params"] if p.grad is not None and id(p) in self._parts]
            parts = ((_local(p.grad), name, part) for p in have for name, part in self._parts[id(p)].items())
            yield group, {name: gradient[part] for gradient, name, part in parts}

    def states(self) -> dict[str, Tensor]:
        """Return the states that differ from rank to rank, numbered."""
        values = [v for each in self.all for state in each.state.values() for v in state.values()]
        states = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
        return {str(number): _local(each) for number, each in enumerate(states)}


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def is_muon(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer orthogonalises the steps of a parameter group."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return family_of(names) is OptimizerFamily.MUON and group.get("use_muon", True)


def decay_of(optimizer: Any, group: Mapping[str, Any]) -> float:
    """Return the share by which a step shrinks the weights of a group, apart from their gradients."""
    names = " ".join(cls.__name__.lower() for cls in type(optimizer).__mro__)
    decoupled = group.get("decoupled_weight_decay") or "adamw" in names or "muon" in names
    decoupled = decoupled or bool(getattr(optimizer, "adam_w_mode", getattr(optimizer, "adamw_mode", False)))
    return float(group["lr"]) * float(group.get("weight_decay", 0.0)) if decoupled else 0.0


def memory_of(optimizer: Any, group: Mapping[str, Any]) -> float:
    """Return the share of an optimizer's statistic that outlasts a step."""
    if is_muon(optimizer, group):
        return float(group.get("momentum", 0.95))
    return float(group.get("betas", (0.9, 0.999))[1])
