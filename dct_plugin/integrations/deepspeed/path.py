"""The interfaces of the paths that gradients and activations of an engine take through the plugin."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.host_traffic import counted_by

from ..host import startup
from ..host.activation_streams import ActivationStreams
from ..host.startup import nodes_of
from ..host.versions import Target
from .engine import EngineContext, EnginePart, is_expert, precision_of, require_targets
from .weight_updates import UpdatedWeights, WeightLayout, WeightUpdates

#: The attributes in which DeepSpeed's wrappers keep the model's parameters, a list for each parameter group.
_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")


class ScaleFactors(NamedTuple):
    """The factors with which the host turns a sum over the ranks into what it calls the gradient.

    The multiplications of DeepSpeed (``prescale_gradients``, ``gradient_predivide_factor``,
    ``gradient_allreduce_op``) are kept in its order where the order shows in the result. Only a plain
    division before the sum is moved behind it: residuals then hold gradients in their own unit, whatever the
    number of ranks.

    Attributes:
        before: Factor on every rank's gradient before the sum; 1.0 for none.
        after: Factor on the sum.
    """

    before: float
    after: float


class CommunicationBuffer:
    """A gradient in the type it is communicated in, 1-D and contiguous.

    DeepSpeed rounds gradients to ``communication_data_type`` before it sends them, so the same is done here.

    Args:
        grad: A gradient of any shape and layout.
        dtype: The communication type.
        factor: Multiplied in before the sum, see :class:`ScaleFactors`.
    """

    def __init__(self, grad: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._grad = grad
        flat = grad.reshape(-1)
        self._aliased = flat.data_ptr() == grad.data_ptr() and flat.dtype == dtype
        self.flat = flat if flat.dtype == dtype else flat.to(dtype)
        if factor != 1.0:
            self.flat.mul_(factor)

    def write_back(self) -> None:
        """Copy the result into the gradient, if it is not there already."""
        if not self._aliased:
            self._grad.copy_(self.flat.view(self._grad.shape))


class GradientPath(EnginePart, ABC):
    """The way of the gradients of one kind of engine through a :class:`GradientReducer`.

    Attributes:
        targets: Functions of DeepSpeed that the path replaces or calls.
        wrapper: Name of DeepSpeed's class around the optimizers whose engines take the path; empty: the path
            is for all engines with ZeRO stage 0.
        weight_layout: Where DeepSpeed's optimizer keeps the weights that it gathers after a step; None where
            it gathers none.
        reducer_class: The class of reducer that the path needs.
        without_nodes: Where ``dct.data_parallel.nodes`` does not work, the name of the path, for errors.
        loss_scaled: Whether what the reducers exchange carries the loss scale of fp16.
        trains_unfrozen: Whether DeepSpeed trains parameters that are unfrozen during the training.
        unit: Factor that DeepSpeed has multiplied into gradients before the path reduces them.
        averages: Whether the gradient is the mean over the ranks, and not their sum.
        setting: ZeRO stage and precision, in words.
        reducer: Sums the gradients; holds residuals and thresholds.
        experts: The same for experts, by the name of their group; empty unless they are thresholded.

    Raises:
        VersionError: This DeepSpeed lacks what the path replaces or calls; names it.
    """

    targets: ClassVar[tuple[Target, ...]] = ()
    wrapper: ClassVar[str] = ""
    weight_layout: ClassVar[WeightLayout | None] = None
    reducer_class: ClassVar[type[GradientReducer]] = GradientReducer
    without_nodes: ClassVar[str] = ""
    loss_scaled: ClassVar[bool] = True
    trains_unfrozen: ClassVar[bool] = False
    unit = 1.0

    def __init__(self, context: EngineContext) -> None:
        require_targets(self.targets)
        engine, config = context.engine, context.config
        self.engine, self.optimizer, self.steps = engine, engine.optimizer, context.steps
        self.metrics, self.averages = context.metrics, bool(engine.gradient_average)
        self.setting = f"ZeRO stage {int(engine.zero_optimization_stage())}, {precision_of(engine)}"
        self.scaled = self.loss_scaled and bool(engine.fp16_enabled())
        # With dynamic loss scaling (fp16) the optimizer learns in step(), after all gradients were reduced,
        # that they overflowed: such a step is rolled back. In fp32 and bf16 only non-finite gradients skip a
        # step. They never enter a residual; what the finite tensors had sent in that step is lost with its
        # batch, unless nonfinite_action asks for more.
        skips = self.loss_scaled and config.data_parallel.nonfinite_action == "skip"
        self.transactional = self.scaled or skips
        self.reducer = self._make_reducer(context, engine.seq_data_parallel_group)
        self.experts: dict[str, GradientReducer] = {}
        self._has_experts = any(map(is_expert, engine.module.parameters()))
        if config.model_parallel.expert_gradients and engine.has_moe_layers:
            for name, group in engine.expert_data_parallel_group.items():
                if dist.get_world_size(group) > 1:
                    self.experts[name] = self._make_reducer(context, group)

    @property
    def reducers(self) -> list[GradientReducer]:
        """The reducers of all gradients."""
        return [self.reducer, *self.experts.values()]

    def reducer_of(self, parameter: Any) -> GradientReducer | None:
        """Return what reduces the gradient of a parameter; None for experts that are left to DeepSpeed."""
        if self._has_experts and is_expert(parameter):
            return self.experts.get(parameter.group_name)
        return self.reducer

    def _make_reducer(self, context: EngineContext, group: Any) -> GradientReducer:
        settings = context.config.data_parallel
        return self.reducer_class(
            settings,
            nodes_of(settings, group, unsupported=self.without_nodes) or group,
            metrics=context.metrics,
            device=self.engine.device,
            kernels=context.config.kernels,
            transactional=self.transactional,
            loss_scale=float(self.optimizer.loss_scale) if self.scaled else 1.0,
            optimizer=self.optimizer,
        )

    def uncompressed(self, reason: str) -> AbstractContextManager[None]:
        """Surround what DeepSpeed reduces by itself; ``reason`` as in :meth:`.Metrics.uncompressed`."""
        return counted_by(functools.partial(self.metrics.uncompressed, "gradient", reason))

    def coverage(self) -> str:
        """Return how many of the trainable parameters have their gradients compressed, in words."""
        parameters = (parameter for group in self.named_parameters() for _, parameter in group)
        return startup.coverage(self.engine.module, parameters, lambda p: self.reducer_of(p) is not None)

    @classmethod
    def applies(cls, engine: Any) -> bool:
        """Return whether this is the path for the engine's gradients."""
        if cls.wrapper:
            return type(engine.optimizer).__name__ == cls.wrapper
        return int(engine.zero_optimization_stage()) == 0

    @abstractmethod
    def describe(self) -> str:
        """Return the words for the path in the log line ``active on ...``."""

    @property
    def scale(self) -> float:
        """The factor that turns the sum over the ranks into the gradient."""
        return self.factors().after

    def factors(self) -> ScaleFactors:
        """Return the factors that DeepSpeed's settings ask for."""
        size, predivide = self.reducer.group.group_size, self.engine.gradient_predivide_factor()
        if not self.averages:
            return ScaleFactors(1.0, 1.0)
        if self.engine.postscale_gradients() and predivide != 1.0:
            return ScaleFactors(1.0 / predivide, predivide / size)
        return ScaleFactors(1.0, 1.0 / size)

    @abstractmethod
    def name_of(self, group: int, parameter: Any) -> str:
        """Return the name of a parameter's stream.

        Args:
            group: Index of the parameter's group in the optimizer.
            parameter: A parameter of the model.
        """

    def named_parameters(self) -> list[list[tuple[str, Any]]]:
        """Return ``(name of the stream, parameter)`` for each of the optimizer's groups."""
        groups = next((getattr(self.optimizer, n) for n in _GROUPS if hasattr(self.optimizer, n)), None)
        if groups is None:
            groups = [group["params"] for group in self.optimizer.param_groups]
        return [[(self.name_of(i, parameter), parameter) for parameter in g] for i, g in enumerate(groups)]

    def masters(self) -> dict[str, tuple[Tensor, Any]]:
        """Return, by the name of a parameter, the fp32 tensor that this rank's optimizer trains in its place,
        and the part of it (an index) that the parameter has; empty where parameters are trained, or where
        ranks have parts of the masters.
        """
        return {}

    def replicated(self) -> list[tuple[str, Tensor]]:
        """Return the weights that all ranks hold, experts left out: the optimizer's, trainable parameters
        that it does not have, and the fp32 tensors that are trained in their place.
        """
        named = {id(p): (name, p) for group in self.named_parameters() for name, p in group}
        for name, parameter in self.engine.module.named_parameters():
            if parameter.requires_grad:
                named.setdefault(id(parameter), (name, parameter))
        weights = {
            name: self.reducer.shared_weight(name, p.data) for name, p in named.values() if not is_expert(p)
        }
        masters = self.masters() if self.reducer.progress is None else {}  # else they are a rank's own
        copies = {f"{n} (fp32 copy)": of[part] for n, (of, part) in masters.items() if n in weights}
        return [*weights.items(), *copies.items()]

    def weight_updates(self, context: EngineContext) -> WeightUpdates | None:
        """Return what exchanges the updates of the weights; None where DeepSpeed gathers none."""
        if self.weight_layout is None:
            return None
        return UpdatedWeights(context, self.weight_layout, self.name_of)

    def sizes(self) -> dict[str, int]:
        """Return the number of entries of each stream, by its name."""
        # Under ZeRO-3 a parameter of which this rank has a part has no entries of its own.
        pairs = [pair for group in self.named_parameters() for pair in group]
        return {name: getattr(parameter, "ds_numel", parameter.numel()) for name, parameter in pairs}


class ActivationPath(EnginePart, ABC):
    """The compression of the activations that cross between ranks in one kind of layer.

    Attributes:
        name: The section of ``dct.model_parallel`` that configures it.
        targets: Functions of DeepSpeed that the path replaces or calls.
        streams: The streams of activations; saved with a checkpoint.

    Raises:
        VersionError: This DeepSpeed lacks what the path replaces or calls; names it.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[Target, ...]]
    streams: ActivationStreams

    def __init__(self, context: EngineContext) -> None:
        require_targets(self.targets)
        self.engine, self.metrics = context.engine, context.metrics

    @classmethod
    @abstractmethod
    def applies(cls, engine: Any, config: DCTConfig) -> bool:
        """Return whether this engine has such layers that its section compresses; it compresses something."""

    @abstractmethod
    def describe(self) -> str:
        """Return the words for the path in the log line ``active on ...``."""
