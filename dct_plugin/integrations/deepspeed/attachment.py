"""The way from the ``dct`` section to a hooked engine: check, agree with the other ranks, then patch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import deepspeed
import torch.distributed as dist
from torch import Tensor

from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.parameters import ParameterUpdates
from dct_plugin.data_parallel.step_units import units_of
from dct_plugin.errors import ConfigError
from dct_plugin.host_traffic import count_group
from dct_plugin.metrics import Event, Metrics, Sink
from dct_plugin.transport.agreement import HINT, Agreement
from dct_plugin.transport.nodes import layout_of

from ..host import startup
from ..host.attachment import HostAttachment, PlainTraining, start_reporting, switched_off
from ..host.measured_job import FACTS
from ..host.patching import Function, Patches, given
from ..host.replica_checksums import ReplicaChecksums, not_trained
from ..host.settings import steps_of
from ..host.startup import nodes_of
from ..host.steps import FrozenParameters, PoisonedSteps, StepHooks
from .checkpointing import CheckpointFiles, warn_of_dropped_residuals
from .engine import EngineContext, EnginePart, has_optimizer, is_pipeline, job_of, supported, tied_weights
from .hpz_copies import HpzCopies, layout_of_copies
from .moe import ExpertPath
from .path import ActivationPath, GradientPath
from .pipeline import PipelinePath
from .rules import require, training_facts
from .section import SECTION, TOPIC, gradient_path_of_optimizer, inner_optimizer
from .stage0 import Bf16Path, Stage0Path
from .weight_updates import UpdatedWeights, WeightUpdates
from .zero import ZeroPath
from .zero3 import Zero3Path

if TYPE_CHECKING:
    from dct_plugin.data_parallel.step_ahead.add_on import StepAhead


class DisplacedPasses(EnginePart):
    """The displacement of an engine's weights in its training passes.

    Args:
        path: The path of the engine's gradients.
        updates: Exchanges updates of the engine's weights; None if they are not thresholded.

    Attributes:
        ahead: Displaces and restores the weights.

    Raises:
        ConfigError: The step of the engine's optimizer is not known.
    """

    def __init__(self, path: GradientPath, updates: ParameterUpdates | None) -> None:
        self._engine, self._optimizer = path.engine, path.optimizer
        self._groups = len(path.optimizer.param_groups)
        groups = path.named_parameters()
        unit_of = units_of(path.optimizer, groups=[[parameter for _, parameter in group] for group in groups])
        unit = 1.0 / (path.scale * path.reducer.group.group_size)
        pairs = [pair for group in groups for pair in group]
        pending: dict[str, Any] = {} if updates is None else {"pending_of": updates.pending_of}
        self.ahead = path.reducer.add_ons.step_ahead.prepare(pairs, unit_of, unit=unit, **pending)

    def install(self, patches: Patches) -> None:
        if is_pipeline(self._engine):
            # The passes of several micro-batches overlap: the weights are displaced from the start of
            # train_batch to the optimizer's step in it.
            patches.intercept(self._engine, "train_batch", self._train_batch)
        else:
            self.ahead.attach(self._engine.module)

    def before_step(self) -> None:
        self.ahead.restore()
        groups = len(self._optimizer.param_groups)
        if groups != self._groups and self._engine.global_rank == 0:
            logger.warning(
                "dct: parameters of groups that were added to the optimizer after deepspeed.initialize get "
                "local error feedback; initialize again for step-ahead"
            )
        self._groups = groups

    def close(self) -> None:
        self.ahead.detach()

    def _train_batch(self, original: Function, *args: Any, **keywords: Any) -> Any:
        self.ahead.forget()
        self.ahead.displace()
        try:
            return original(*args, **keywords)
        finally:
            self.ahead.restore()


class SkippedSteps(EnginePart):
    """The search for non-finite gradients before an optimizer step.

    Args:
        context: The engine.
        transactional: Whether a skipped step is rolled back.
    """

    def __init__(self, context: EngineContext, *, transactional: bool) -> None:
        self._optimizer, self._steps = context.engine.optimizer, context.steps
        self._transactional = transactional
        module = context.engine.module
        self._poisoned = PoisonedSteps(
            context.config.data_parallel,
            lambda: ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None),
            agree=True,  # experts' gradients are not everybody's
        )
        self._searches = False

    def install(self, patches: Patches) -> None:
        """Patch the optimizer; one of DeepSpeed's that can search by itself is told to."""
        if hasattr(self._optimizer, "check_grad_overflow") and self._transactional:
            patches.replace(self._optimizer, "check_grad_overflow", True)
        self._searches = self._poisoned.skips and not hasattr(self._optimizer, "overflow")
        if self._searches:
            patches.replace(self._optimizer, "overflow", False)
            patches.intercept(self._optimizer, "step", self._step)

    def before_step(self) -> None:
        if self._searches:
            self._optimizer.overflow = self._poisoned.found(self._steps.step)

    def _step(self, original: Function, *args: Any, **keywords: Any) -> Any:
        return None if self._optimizer.overflow else original(*args, **keywords)


#: The first that applies to an engine is its gradients' path.
GRADIENT_PATHS: tuple[type[GradientPath], ...] = (Zero3Path, ZeroPath, Bf16Path, Stage0Path)
ACTIVATION_PATHS: tuple[type[ActivationPath], ...] = (PipelinePath, ExpertPath)


def gradient_path_of(engine: Any) -> type[GradientPath] | None:
    """Return the class of path for the engine's gradients; None if there is none, or nothing to train."""
    if not has_optimizer(engine):
        return None
    applying = (path for path in GRADIENT_PATHS if path.applies(engine))
    return gradient_path_of_optimizer(engine) or next(applying, None)


class EngineAttachment(HostAttachment):
    """The plugin's additions to an engine; ``engine.dct`` for scripts.

    Args:
        engine: DeepSpeed's engine.
        section: The ``dct`` section as read from the JSON.

    Attributes:
        reducer: Sums the gradients; holds residuals and thresholds.
        experts: The same for experts, by the name of their group; empty unless they are thresholded.
        steps: Optimizer steps so far.
        ahead: Displaces the weights in training passes; None without ``"feedback": "step_ahead"``.
        activations: Paths of activations, by section of ``dct.model_parallel``: ``pipeline``, ``experts``.
        description: The paths that were chosen, in words; empty if there is nothing to do.
        coverage: How many of the trainable parameters have their gradients compressed, in words.
    """

    framework = "DeepSpeed"

    def __init__(self, engine: Any, section: Any) -> None:
        super().__init__(section)
        self._engine, self.description, self.coverage = engine, "", ""
        self._gather: WeightUpdates | None = None
        self.ahead: StepAhead | None = None
        self._parts: list[EnginePart] = []

    def prepare(self) -> bool:
        """Decide the settings and choose the paths; nothing is patched yet. Return False if there is nothing
        to do.

        Raises:
            ConfigError: The engine's combination of features is not supported.
            VersionError: This DeepSpeed is not supported.
        """
        engine = self._engine
        with supported(engine):
            path = gradient_path_of(engine)
            self._decide(path)
            sections = self.config.model_parallel
            asked = [each for each in ACTIVATION_PATHS if getattr(sections, each.name).compresses]
            crossing = [each for each in asked if each.applies(engine, self.config)]
            if path is None or not (self.config.data_parallel.enabled or crossing):
                return False
            self.metrics = Metrics(
                self.config.metrics, rank=engine.global_rank, world_size=dist.get_world_size()
            )
            self.steps = StepHooks([], self.metrics, rank=engine.global_rank)
            context = EngineContext(engine, self.config, self.metrics, self.steps)
            self._make_paths(context, path(context), crossing)
        return True

    def weights(self) -> Iterable[Tensor]:
        if self._engine.zero_optimization_stage() == 3:  # parameters hold nothing between passes
            return ()
        return (parameter for parameter in self._engine.module.parameters() if parameter.requires_grad)

    def _decide(self, path: type[GradientPath] | None) -> None:
        """Decide the settings, and refuse what the engine cannot do."""
        engine, written = self._engine, self.written
        job = job_of(engine, path)
        if path is not None and not job.exchanges_momentum:
            group = engine.seq_data_parallel_group
            nodes = nodes_of(written.data_parallel, group, unsupported=path.without_nodes)
            ranks, size = dist.get_world_size(group), job.ranks_per_copy
            has_copies = size > 1 and layout_of(nodes) == layout_of_copies(ranks, size)
            training = replace(
                training_facts(job, written, node_copies=has_copies),
                ranks=ranks,
                steps=steps_of(engine.lr_scheduler),
            )
            FACTS.update(stage=job.stage, step_ahead_unavailable=training.step_ahead_unavailable)
            self.resolve(engine.optimizer, training, nodes)
        require(job, self.config, rank=engine.global_rank)

    def _make_paths(
        self, context: EngineContext, path: GradientPath, crossing: Iterable[type[ActivationPath]]
    ) -> None:
        settings, self._path = self.config.data_parallel, path
        self.reducer, self.experts = path.reducer, path.experts
        self.activations = {each.name: each(context) for each in crossing}
        self.description, self.coverage = self._describe(), self._path.coverage()
        streams = [activation.streams for activation in self.activations.values()]
        self.steps.members = [*self._path.reducers, *streams]
        if settings.enabled:
            self._parts.append(self._path)
            if settings.parameters is not None:
                self._gather = self._path.weight_updates(context)
            if self._gather is not None:
                self._parts.append(self._gather)
                self.steps.members = [*self.steps.members, self._gather.updates]
        self._parts += self.activations.values()
        self._parts.append(SkippedSteps(context, transactional=self._path.transactional))
        if settings.enabled and settings.feedback.looks_ahead:
            self._look_ahead()
        self._files = CheckpointFiles(context, self._path, self._gather, self.activations)
        self._parts.append(self._files)

    def _look_ahead(self) -> None:
        if isinstance(self._gather, HpzCopies):
            self.ahead = self._gather.look_ahead(self._path)
            return
        updates = self._gather.updates if self._gather is not None and self.weights_lag else None
        displaced = DisplacedPasses(self._path, updates)
        self.ahead = displaced.ahead
        self._parts.append(displaced)

    @property
    def reducers(self) -> list[GradientReducer]:
        return self._path.reducers

    def start(self, agreement: Agreement, active: str, facts: Mapping[str, Any]) -> None:
        """Make the process groups of nodes besides: a backward pass finds them made."""
        super().start(agreement, active, facts)
        streams = [reducer.group for reducer in self.reducers]
        for group in streams if self._gather is None else [*streams, self._gather.updates.group]:
            group.make_process_groups()

    def load_residuals(self, folder: str | os.PathLike[str]) -> bool:
        """Take over the residuals in the folder of a checkpoint's tag; a collective, between two steps.

        This is for checkpoints that ``load_checkpoint`` is to load without the optimizer's states, because
        another ZeRO stage wrote them: their residuals would start at zero.

        Returns:
            Whether the folder had any; otherwise residuals are zero, and the log says why.

        Raises:
            DCTError: On every rank, if a rank's file is damaged or does not fit; names ranks and files.
        """
        return self._files.load(folder)

    @property
    def weights_lag(self) -> bool:
        """True if the weights between steps are not the rounded masters; see :meth:`gather_parameters`."""
        return isinstance(self._gather, UpdatedWeights) and not self._gather.updates.exact

    def gather_parameters(self) -> None:
        """Bring the weights of all ranks to the optimizer's masters, in full; a collective, between two
        steps.

        Checkpoints do it by themselves; for evaluation or an export of the weights call it before.
        """
        if self._gather is not None:
            self._gather.gather()

    def install(self) -> None:
        """Patch the engine and its optimizer (these instances, not their classes)."""
        engine, patches, ends = self._engine, Patches(), self.ends
        self.note(engine.module)
        ends.callback(patches.undo)
        if not self.config.data_parallel.enabled:
            self.steps.begin()  # no gradients will come, and nothing is to be said about that
        for part in self._parts:
            part.install(patches)
        if (local := self.reducer.add_ons.local_steps) is not None:
            named = {name: p for group in self._path.named_parameters() for name, p in group}
            masters = self._path.masters()
            optimizer = inner_optimizer(engine) if masters else self._path.optimizer
            local.attach(engine.module, named, [optimizer], masters=masters)
            ends.callback(local.detach)
        self.steps.replicas = self._replicas()
        if engine.global_rank == 0 and not self._path.trains_unfrozen:
            self.steps.frozen = FrozenParameters(
                engine.module.named_parameters(),
                "DeepSpeed's optimizer has left them out, and does not train them; call "
                "deepspeed.initialize anew with the model and a new optimizer",
            )
        # The monitor, but not the engine: one that is dropped must not live until the process ends.
        finish = start_reporting(self.metrics, _sink(engine.monitor) if engine.monitor.enabled else None)
        count = functools.partial(self.metrics.uncompressed, "gradient", "shared_weights")
        for _, group in tied_weights(engine) if self.config.data_parallel.enabled else ():
            ends.callback(count_group(group, count))
        ends.callback(finish)
        for part in self._parts:
            ends.callback(part.close)
        patches.intercept(engine, "_take_model_step", self._step)
        patches.intercept(engine, "compile", self._compile)
        patches.intercept(engine, "destroy", self._destroy)

    def _replicas(self) -> list[ReplicaChecksums]:
        """Return the comparison of what all ranks hold; none, unless it is written, where an optimizer that
        exchanges by itself keeps ranks equal up to rounding, or where each rank has a share of its own.
        """
        settings, engine, path = self.config.data_parallel, self._engine, self._path
        own_exchange = gradient_path_of_optimizer(engine) is not None
        if not settings.asks_to_verify and (own_exchange or isinstance(path, Zero3Path)):
            return []
        names = [name for name, _ in path.replicated()]
        others = functools.partial(not_trained, engine.module, names)
        group = self.reducer.group
        return [ReplicaChecksums(settings, path.replicated, group.process_group, others, group.agree)]

    def _step(self, original: Function, *args: Any, **keywords: Any) -> Any:
        path = self._path
        for part in self._parts:
            part.before_step()
        result = original(*args, **keywords)
        for part in self._parts:
            part.after_step()
        self.steps.end(
            skipped=path.transactional and bool(getattr(path.optimizer, "overflow", False)),
            loss_scale=float(path.optimizer.loss_scale) if path.scaled else None,
        )
        self.close_if_done()
        return result

    def _compile(self, original: Function, *args: Any, **keywords: Any) -> Any:
        if given(original, "compiled_autograd_enabled", args, keywords):
            raise ConfigError(
                f"rank {dist.get_rank()}: dct does not work with compiled autograd (engine.compile("
                "compiled_autograd_enabled=True)): hooks of the backward pass are no part of a graph; "
                "leave it out"
            )
        return original(*args, **keywords)

    def _destroy(self, original: Function, *args: Any, **keywords: Any) -> Any:
        self.close()
        return original(*args, **keywords)

    def _describe(self) -> str:
        stages = f", {self._engine.num_stages} pipeline stages" if is_pipeline(self._engine) else ""
        crossing = [f"; {name}: {each.describe()}" for name, each in self.activations.items()]
        return "".join([self._path.describe(), stages, *crossing])


def _sink(monitor: Any) -> Sink:
    """Return what writes the metrics to DeepSpeed's monitors."""
    wandb = getattr(monitor, "wandb_monitor", None)
    if wandb is None:
        return monitor.write_events
    names = ("tb_monitor", "csv_monitor", "comet_monitor")
    others = [each for name in names if (each := getattr(monitor, name)) is not None]

    def write(events: list[Event]) -> None:
        for each in others:
            each.write_events(events)
        if sys.modules["wandb"].run is not None:  # the script may have ended it
            # W&B drops what is behind its last step, and DeepSpeed's steps there are samples.
            wandb.log({name: value for name, value, _ in events}, commit=False)

    return write


#: The attribute of an engine that holds its attachment, for scripts: ``engine.dct.reducer``.
ATTRIBUTE = "dct"


def attach(engine: Any, section: Any) -> EngineAttachment | None:
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
    agreement = startup.join(TOPIC, hint=f"its configuration has no {SECTION!r} section, or {HINT}")
    with agreement:
        attachment = EngineAttachment(engine, section)
        config = attachment.written
        abstains = not config.enabled and gradient_path_of_optimizer(engine) is None
        if abstains:
            agreement.abstain()
        prepared = not abstains and attachment.prepare()
    facts = {
        "version of deepspeed": deepspeed.__version__,
        "gradient path": attachment.description or "none",
    }
    if not prepared:
        if not abstains:
            agreement.confirm(startup.facts_of(attachment.config, facts))
        PlainTraining(config, switched_off(config) or "the engine has no optimizer")
        warn_of_dropped_residuals(engine)
        return None
    what = f"{attachment.description}, {attachment.coverage}, {dist.get_world_size()} ranks"
    attachment.start(agreement, what, facts)
    attachment.install()
    engine.__dict__[ATTRIBUTE] = attachment
    if attachment.weights_lag and dist.get_rank() == 0:
        logger.warning(
            "dct: the weights lack updates that dct.data_parallel.parameters has not sent yet: before an "
            "evaluation or export call engine.dct.gather_parameters() on all ranks; save_checkpoint does it"
        )
    return attachment
