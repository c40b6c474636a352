"""Transformer Engine's parallel linears, Megatron's default on GPUs, under the tensor-parallel hook.

They communicate inside Transformer Engine, unless their ``parallel_mode`` is None. Megatron builds experts
like that, and exchanges their tokens itself. Here a linear gets None for a forward pass, which autograd keeps
for its backward pass, and its input or its partial sums are exchanged outside. A fused linear gathers between
its layer norm and its product: there the functions that its module imports are replaced, in that module only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.errors import DCTError, VersionError
from dct_plugin.model_parallel import ActivationStream, CompressedCollectives

from ..host import versions
from ..host.patching import Function, Patches, given
from ..host.versions import Target, VersionRange

SUPPORTED = VersionRange("2.5.0", "3.0.0")
_EXTENSION = "megatron.core.extensions.transformer_engine"
_FUSED = "transformer_engine.pytorch.module.layernorm_linear"
_OFF = "or switch dct.model_parallel.tensor off"
#: The same in 2.5.0 to 2.20.2; those of Megatron in 0.16.1 to 0.19.0.
TARGETS = (
    Target(_EXTENSION, "TELinear.forward", "self x"),
    Target(_EXTENSION, "TELayerNormColumnParallelLinear.forward", "self x"),
    Target("transformer_engine.pytorch.module.linear", "Linear.forward", "self inp is_first_microbatch"),
    Target(_FUSED, "LayerNormLinear.forward", "self inp is_first_microbatch"),
    Target(_FUSED, "_LayerNormLinear.forward", "ctx inp"),
    Target(_FUSED, "_LayerNormLinear.backward", "ctx grad_outputs"),
    Target(_FUSED, "gather_along_first_dim", "inp process_group async_op quantizer"),
    Target(_FUSED, "reduce_scatter_along_first_dim", "inp tp_group async_op"),
)
#: Megatron's MLP of Transformer Engine's operations, which run without the forward passes of its linears.
_FUSED_MLP = "TEFusedMLP"
#: What is read of a linear, and ``parallel_mode``, which is also written.
ATTRIBUTES = ("parallel_mode", "tp_size", "tp_group", "sequence_parallel", "gemm_bias_unfused_add")

Route = tuple[CompressedCollectives, ActivationStream]
FindRoute = Callable[[dist.ProcessGroup, torch.device], "Route | None"]


def is_engine_linear(module: torch.nn.Module) -> bool:
    """Return whether a module is one of Transformer Engine's that may communicate between tensor ranks."""
    name, bases = type(module).__name__, type(module).__mro__
    is_engine = any(base.__module__.partition(".")[0] == "transformer_engine" for base in bases)
    return name == _FUSED_MLP or (is_engine and ("Linear" in name or "MLP" in name))


def exchanged(
    route: Route, linear: Any, x: Tensor, run: Function, alone: Mapping[str, Any], *, is_row: bool
) -> tuple[Tensor, Any]:
    """Exchange the input of a column-parallel linear, or the partial sums of a row-parallel one, outside of
    it; return its output and bias.

    Args:
        route: Exchanges them.
        linear: The linear.
        x: Its input.
        run: Runs it on an input.
        alone: Values of its attributes with which it exchanges nothing.
        is_row: Whether it is a row-parallel one.
    """
    collectives, stream = route
    if not is_row:
        x = collectives.all_gather(x, stream)
    with Patches() as patches:
        for name, value in alone.items():
            patches.replace(linear, name, value)
        output, bias = run(x)
    if is_row:
        total = collectives.reduce_scatter if linear.sequence_parallel else collectives.all_reduce
        output = total(output, stream)
    return output, bias


class EngineLinears:
    """Reroutes what Megatron's subclasses of Transformer Engine's linears communicate.

    Args:
        patches: Where replaced functions are put back.
        enter: ``enter(original, linear, x)`` runs a linear as the current one.
        route: The way of the current linear, by its group and device; None leaves it to Transformer Engine.
        gather: Whether inputs of column-parallel linears are compressed.

    Raises:
        VersionError: Says what was found, what is supported, and what to do.
    """

    def __init__(self, patches: Patches, enter: Function, route: FindRoute, *, gather: bool) -> None:
        if _version() not in SUPPORTED:
            raise _unsupported()
        if faults := versions.faults(TARGETS):
            raise _unsupported(faults)
        from megatron.core.extensions import transformer_engine as extension
        from transformer_engine.pytorch.module import layernorm_linear as fused

        self._enter, self._route, self._gathers = enter, route, gather
        self._state = extension.FP8GlobalStateManager
        self._fused = extension.TELayerNormColumnParallelLinear
        self.linears = (extension.TERowParallelLinear, extension.TEColumnParallelLinear, self._fused)
        self._gather: _Gather | None = None
        """The gather of the fused linear that runs, forward or backward."""
        for linear in self.linears:
            patches.intercept(linear, "forward", self._forward)
        if gather:
            patches.intercept(fused, "gather_along_first_dim", self._gathered)
            patches.intercept(fused, "reduce_scatter_along_first_dim", self._scattered)
            patches.replace(fused, "_LayerNormLinear", self._subclass(fused._LayerNormLinear))

    def mode(self, module: torch.nn.Module, where: str) -> str | None:
        """Return ``"row"`` or ``"column"``; None if nothing crosses, or the bias is added behind the sum.

        Raises:
            DCTError: It communicates out of reach.
            VersionError: It lacks an attribute.
        """
        name = type(module).__name__
        if not isinstance(module, self.linears):
            parallel = getattr(module, "parallel_mode", None) or getattr(module, "set_parallel_mode", False)
            if name == _FUSED_MLP or (parallel and getattr(module, "tp_size", 1) > 1):
                known = ", ".join(each.__name__ for each in self.linears)
                raise DCTError(
                    f"{where} is Transformer Engine's {name}, which communicates inside Transformer Engine; "
                    f"use Megatron's {known} without fused operations (use_te_op_fuser), {_OFF}"
                )
            return None
        if missing := [each for each in ATTRIBUTES if not hasattr(module, each)]:
            raise _unsupported(f"{name} has no {', '.join(missing)}")
        return None if module.tp_size == 1 or module.gemm_bias_unfused_add else module.parallel_mode

    def _forward(self, original: Function, linear: Any, x: Tensor) -> Any:
        return self._enter(functools.partial(self._rerouted, original), linear, x)

    def _rerouted(self, original: Function, linear: Any, x: Tensor) -> Any:
        is_row = linear.parallel_mode == "row"
        route = self._route(linear.tp_group, x.device)
        if route is None or not (is_row or (self._gathers and linear.sequence_parallel)):
            return original(linear, x)
        if self._state.is_fp8_enabled():
            raise _quantized("fp8 or fp4")
        if isinstance(linear, self._fused):
            return self._during(_Gather(*route), original, linear, x)
        run = functools.partial(original, linear)
        return exchanged(route, linear, x, run, {"parallel_mode": None}, is_row=is_row)

    # -- the gather inside a fused linear -------------------------------------------------------------------

    def _during(self, gather: _Gather | None, function: Function, *arguments: Any) -> Any:
        with Patches() as patches:
            patches.replace(self, "_gather", gather)
            return function(*arguments)

    def _gathered(self, original: Function, inp: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if self._gather is None:
            return original(inp, *arguments, **keywords)
        quantizer = given(original, "quantizer", (inp, *arguments), keywords)
        if quantizer is not None:
            raise _quantized(type(quantizer).__name__)
        self._gather.trip = self._gather.collectives.gather_trip(inp, self._gather.stream)
        return self._gather.trip.forward(inp), None

    def _scattered(self, original: Function, inp: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if self._gather is None:
            return original(inp, *arguments, **keywords)
        return self._gather.trip.backward(inp), None

    def _subclass(self, original: Any) -> Any:
        engine = self

        class Gathered(original):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                if ctx is not None:  # None without gradients
                    ctx.dct_gather = engine._gather
                return original.forward(ctx, *arguments)

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return engine._during(ctx.dct_gather, original.backward, ctx, *gradients)

        return Gathered


@dataclass
class _Gather:
    """One gather, which backward repeats for the weight's gradient; ``trip`` is its last one, both ways."""

    collectives: CompressedCollectives
    stream: ActivationStream
    trip: Any = None


def _quantized(what: str) -> DCTError:
    return DCTError(
        f"dct.model_parallel.tensor does not work with Transformer Engine's {what}: leave out fp8_autocast, "
        f"--fp8-format, --fp4-format and --te-precision-config-file, {_OFF}"
    )


def _unsupported(faults: str = "") -> VersionError:
    remedy = f"install a supported transformer_engine, use --transformer-impl local, {_OFF}"
    return versions.unsupported(f"Transformer Engine {_version()}", SUPPORTED, remedy, faults=faults)


def _version() -> str:
    from megatron.core.utils import get_te_version

    return str(get_te_version())
