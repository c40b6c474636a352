"""From the ``dct`` section to a hooked engine: check, agree with the other ranks, then patch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.accordion import Accordion
from dct_plugin.data_parallel.local import LocalUpdates
from dct_plugin.data_parallel.parameters import ParameterUpdates, refuse
from dct_plugin.data_parallel.step_ahead import StepAhead
from dct_plugin.metrics import Metrics

from ..host import lost_peers, startup
from ..host.nonfinite import PoisonedSteps
from ..host.patches import Patches
from ..host.replicas import Replicas
from ..host.reporting import Reporting
from ..host.steps import StepHooks
from . import checkpointing, step_ahead
from .moe import ExpertHooks
from .onebit import MomentumHooks, MomentumReducer
from .parameters import GatherHooks
from .pipeline import PipelineHooks
from .section import TOPIC, gradient_path_of_optimizer, unread_keys
from .stage0 import BoundaryHooks, is_expert
from .support import (
    check_engine,
    check_experts,
    check_local,
    check_momentum,
    check_parameters,
    check_version,
    inner_of,
    is_pipeline,
    known_fault,
)
from .zero import PartitionHooks
from .zero3 import ScatterHooks, settings_for_zero3

logger = logging.getLogger("dct_plugin")

#: The attachment of an engine, for scripts that want its reducer or metrics: ``engine.dct.reducer``.
ATTRIBUTE = "dct"


class Attachment:
    """What the plugin added to an engine.

    Attributes:
        config: The validated section.
        reducer: Sums the gradients; holds residuals and thresholds.
        experts: The same for experts, by the name of their group; none unless they are thresholded.
        metrics: Bytes, densities and times so far.
        steps: Optimizer steps so far.
        ahead: Displaces the weights in training passes; None without ``"feedback": "step_ahead"``.
        gathers: Sends updated weights; None without ``parameters``.
        local: Local weights and their anchor; None without ``"feedback": "local_updates"``.
        activations: What compresses activations, by section of ``dct.model_parallel``: ``pipeline``,
            ``experts``.
        description: The hooks that were chosen, in words.
    """

    def __init__(self, engine: Any, config: DCTConfig, kind: str) -> None:
        # Under dynamic loss scaling (fp16) an optimizer learns only in step(), after all gradients were
        # reduced, that they overflowed: such a step is taken back. In fp32 and bf16 only non-finite gradients
        # skip a step, which never enter a residual; what the finite tensors had sent in that step is lost
        # with its batch, unless nonfinite_action asks for more.
        # Momentum is in the weights' units, and is not exchanged in a step that is skipped.
        gradients = kind != "momentum"
        self._scaled = bool(engine.fp16_enabled()) and gradients
        self._transactional = self._scaled or (gradients and config.data_parallel.nonfinite_action == "skip")
        self.config = config
        self.metrics = Metrics(
            config.metrics, rank=engine.global_rank, world_size=torch.distributed.get_world_size()
        )
        self.reducer = self._reducer(
            engine, engine.seq_data_parallel_group, MomentumReducer if kind == "momentum" else GradientReducer
        )
        self.experts = (
            {
                name: self._reducer(engine, group)
                for name, group in engine.expert_data_parallel_group.items()
                if torch.distributed.get_world_size(group) > 1
            }
            if config.model_parallel.expert_gradients and engine.has_moe_layers
            else {}
        )
        if (accordion := self.reducer.find(Accordion)) is not None:
            accordion.follow(engine.optimizer)
        self.steps = StepHooks([self.reducer], self.metrics, rank=engine.global_rank)
        self._patches = Patches()
        self._load: Callable[..., bool] = lambda folder: False
        self.ahead: StepAhead | None = None
        self._hooks: BoundaryHooks | PartitionHooks | ScatterHooks
        if kind == "zero3":
            self._hooks = ScatterHooks(engine.optimizer, self.reducer, self.steps)
        elif kind == "zero":
            tied = engine.module.get_tied_weights_and_groups() if is_pipeline(engine) else ()
            whole = [weight for weight, _ in tied]
            self._hooks = PartitionHooks(
                engine.optimizer, self.reducer, self.steps, whole=whole, experts=self.experts
            )
        elif kind == "momentum":
            self._hooks = MomentumHooks(engine, self.reducer, self.steps, self.experts)
        else:
            self._hooks = BoundaryHooks(engine, self.reducer, self.steps, self.experts)
        self.gathers: GatherHooks | None = None
        self.local: LocalUpdates | None = None
        self.activations = {
            name: hooks(engine, config, self.metrics) for name, hooks in activations_of(engine, config)
        }
        streams = [hooks.streams for hooks in self.activations.values()]
        self.steps.members = [self.reducer, *self.experts.values(), *streams]
        self.description = _describe(engine, kind, config, self.activations)
        if not config.data_parallel.enabled:
            return
        if config.data_parallel.parameters is not None:
            self.gathers = self._gathers(engine, kind)
        if config.data_parallel.feedback.looks_ahead:
            unit = 1.0 / (self._hooks.scale * self.reducer.world_size)
            updates = None if self.gathers is None else self.gathers.updates
            self.ahead = step_ahead.prepared(engine, self.reducer, self._hooks.name_of, unit, updates)
        if config.data_parallel.feedback.steps_locally:
            assert isinstance(self._hooks, BoundaryHooks)
            self.local = self._hooks.update_locally()

    def _reducer(
        self, engine: Any, group: Any, kind: type[GradientReducer] = GradientReducer
    ) -> GradientReducer:
        return kind(
            self.config.data_parallel,
            group,
            metrics=self.metrics,
            device=engine.device,
            kernels=self.config.kernels,
            transactional=self._transactional,
            loss_scale=float(engine.optimizer.loss_scale) if self._scaled else 1.0,
        )

    def _gathers(self, engine: Any, kind: str) -> GatherHooks:
        if kind in ("stage0", "momentum"):
            raise refuse("ZeRO stage 0")
        check_parameters(engine)
        updates = ParameterUpdates(
            self.config.data_parallel,
            engine.seq_data_parallel_group,
            metrics=self.metrics,
            device=engine.device,
            kernels=self.config.kernels,
        )
        self.steps.members = [*self.steps.members, updates]
        return GatherHooks(kind, engine.optimizer, updates, self._hooks.name_of)

    def load_residuals(self, folder: str | os.PathLike[str]) -> bool:
        """Take over the residuals in the folder of a checkpoint's tag; a collective, between two steps.

        For checkpoints that ``load_checkpoint`` is to load without the optimizer's states, because another
        ZeRO stage wrote them: their residuals would start at zero.

        Returns:
            Whether the folder had any; otherwise residuals are zero, and the log says why.

        Raises:
            DCTError: On every rank, if a rank's file is damaged or does not fit; names ranks and files.
        """
        return self._load(folder)

    def gather_parameters(self) -> None:
        """Bring the weights of all ranks to the optimizer's masters, in full; a collective, between two
        steps. Checkpoints do it by themselves; for evaluation or an export of the weights call it before.
        """
        if self.gathers is not None:
            self.gathers.gather()

    def _poison_finder(self, engine: Any) -> Callable[[], None]:
        """To be called before an optimizer step: with ``nonfinite_action: "skip"`` it makes DeepSpeed skip
        the step, and count it, if the gradient is not finite; optimizers of DeepSpeed's that look for
        themselves are told to.
        """
        optimizer, module = engine.optimizer, engine.module
        if hasattr(optimizer, "check_grad_overflow") and self._transactional:
            self._patches.replace(optimizer, "check_grad_overflow", True)
        poisoned = PoisonedSteps(
            self.config.data_parallel,
            lambda: ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None),
            agree=True,  # experts' gradients are not everybody's
        )
        if not poisoned.skips or hasattr(optimizer, "overflow"):
            return lambda: None

        def look() -> None:
            optimizer.overflow = poisoned.found(self.steps.step)

        def make_step(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **keywords: None if optimizer.overflow else original(*args, **keywords)

        self._patches.replace(optimizer, "overflow", False)
        self._patches.wrap(optimizer, "step", make_step)
        return look

    def install(self, engine: Any) -> None:
        """Patch the engine and its optimizer (these instances, not their classes)."""
        optimizer, patches = engine.optimizer, self._patches
        if self.config.data_parallel.enabled:
            self._hooks.install(patches)
        else:
            self.steps.begin()  # no gradients will come, and nothing is to be said about that
        if self.gathers is not None:
            self.gathers.install(patches)
        for hooks in self.activations.values():
            hooks.install(patches)
        prescaled = isinstance(self._hooks, PartitionHooks) and self._hooks.prescaled
        unit = 1.0 / self.reducer.world_size if prescaled else 1.0
        ahead, local, look = self.ahead, self.local, self._poison_finder(engine)
        if ahead is not None and is_pipeline(engine):
            step_ahead.displace_in_batches(engine, ahead, patches)
        else:
            for shows in (ahead, local):
                if shows is not None:
                    shows.attach(engine.module)
        named = step_ahead.named_parameters(engine, self._hooks.name_of)
        replicated = [pair for group in named for pair in group if not is_expert(pair[1])]
        self.steps.replicas = Replicas(
            self.config.data_parallel,
            lambda: [(name, parameter.data) for name, parameter in replicated],
            self.reducer.exchange.group,
        )
        self._load = checkpointing.install(
            engine,
            self.reducer,
            self.gathers,
            self.steps,
            patches,
            unit=unit,
            # Under ZeRO-3 a parameter of which this rank has a part has no entries of its own.
            sizes=self._hooks.sizes
            if isinstance(self._hooks, MomentumHooks)
            else {name: getattr(p, "ds_numel", p.numel()) for group in named for name, p in group},
            configuration=self.config.fingerprint(),
            local=local,
            activations=self.activations,
            experts=self.experts,
        )
        # The monitor, but not the engine: one that is dropped must not live until the process ends.
        reporting = Reporting(self.metrics, engine.monitor.write_events if engine.monitor.enabled else None)

        def make_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def _take_model_step(*args: Any, **keywords: Any) -> Any:
                if ahead is not None:
                    ahead.restore()
                if local is not None:
                    local.show_local()
                look()
                result = original(*args, **keywords)
                if local is not None:
                    local.end_step()
                self.steps.end(
                    skipped=self._transactional and bool(getattr(optimizer, "overflow", False)),
                    loss_scale=float(optimizer.loss_scale) if self._scaled else None,
                )
                return result

            return _take_model_step

        gradients = self._hooks

        def make_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
            def destroy(*args: Any, **keywords: Any) -> Any:
                for shows in (ahead, local):
                    if shows is not None:
                        shows.detach()
                reporting.finish()
                if isinstance(gradients, PartitionHooks):
                    gradients.close()
                patches.undo()
                return original(*args, **keywords)

            return destroy

        patches.wrap(engine, "_take_model_step", make_step)
        patches.wrap(engine, "destroy", make_destroy)


def attach(engine: Any, section: Any) -> Attachment | None:
    """Attach to a finished engine; called for every engine whose JSON has a ``dct`` section.

    Args:
        engine: A ``DeepSpeedEngine`` after its ``__init__``.
        section: The ``dct`` section as read from the JSON.

    Returns:
        What was attached (also ``engine.dct``), None when the section is disabled.

    Raises:
        ConfigError: The section is wrong, or the engine's combination of features is not supported.
        VersionError: This DeepSpeed is not supported.
        DesyncError: Other ranks failed, do not take part, or run another configuration or version.
    """
    if ATTRIBUTE in engine.__dict__:
        return engine.__dict__[ATTRIBUTE]
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    agreement = startup.join(TOPIC)
    with startup.reported(agreement):
        config = DCTConfig.parse(section, rank=rank)
        if not config.enabled and gradient_path_of_optimizer(engine) is None:
            agreement.abstain()
            return None
        check_version(deepspeed.__version__)
        kind = check_engine(engine, deepspeed.__version__)
        reduces = config.data_parallel.enabled
        if kind == "momentum":
            check_momentum(config, rank)
        elif reduces and kind == "zero3":
            config = settings_for_zero3(engine, config)
        if reduces and kind not in ("momentum", "none") and config.data_parallel.feedback.steps_locally:
            check_local(engine, kind)
        check_experts(engine, config, deepspeed.__version__)
        wanted = kind != "none" and (reduces or activations_of(engine, config))
        attachment = Attachment(engine, config, kind) if wanted else None
    path = attachment.description if attachment else "none"
    agreement.confirm(
        startup.facts_of(config, {"version of deepspeed": deepspeed.__version__, "gradient path": path})
    )
    if attachment is None:
        if rank == 0:
            why = "the engine has no optimizer" if kind == "none" else "dct.data_parallel.enabled is false"
            logger.warning("dct: nothing to do: %s", why)
        return None
    attachment.install(engine)
    lost_peers.watch(attachment, lambda attachment: attachment.steps.step)
    engine.__dict__[ATTRIBUTE] = attachment
    if rank == 0:
        settings = config.data_parallel
        gradients = f"sparsity {settings.sparsity:g}, {settings.value_dtype} values"
        logger.warning(
            "dct: active on %s, %d ranks, %s, config %s",
            attachment.description,
            world_size,
            gradients if reduces else "dense gradients",
            config.fingerprint(),
        )
        if unknown := unread_keys(engine):
            logger.warning("dct: keys of the configuration that nothing reads: %s", ", ".join(unknown))
        if advice := known_fault(engine, deepspeed.__version__):
            logger.warning("dct: %s", advice)
    return attachment


def activations_of(engine: Any, config: DCTConfig) -> list[tuple[str, type[PipelineHooks | ExpertHooks]]]:
    """Which activations of the engine are to be compressed, by section, and by what."""
    kinds: tuple[tuple[str, type[PipelineHooks | ExpertHooks]], ...] = (
        ("pipeline", PipelineHooks),
        ("experts", ExpertHooks),
    )
    return [(name, hooks) for name, hooks in kinds if hooks.wanted(engine, config)]


def _describe(
    engine: Any, kind: str, config: DCTConfig, activations: Mapping[str, PipelineHooks | ExpertHooks]
) -> str:
    stages = f", {engine.num_stages} pipeline stages" if is_pipeline(engine) else ""
    crossing = [f"; {name}: {hooks.summary}" for name, hooks in activations.items()]
    return "".join([_gradient_path(engine, kind, config), stages, *crossing])


def _gradient_path(engine: Any, kind: str, config: DCTConfig) -> str:
    precision = "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
    stage = int(engine.zero_optimization_stage())
    if kind == "momentum":
        return f"the momentum of {type(inner_of(engine)).__name__}, {precision}"
    if kind == "zero":
        optimizer = engine.optimizer
        form = "reduce-scatter" if optimizer.reduce_scatter else "all-reduce"
        layout = "contiguous" if optimizer.contiguous_gradients else "separate"
        return f"ZeRO stage {stage}, {precision}, {form}, {layout} gradients"
    if kind == "zero3":
        kept_in = config.data_parallel.residual_dtype
        return f"ZeRO stage {stage}, {precision}, reduce-scatter, residuals in {kept_in}"
    if kind == "bf16":
        return f"ZeRO stage {stage}, {precision} with fp32 accumulation, all-reduce"
    return f"stage {stage}, {precision}, all-reduce"
