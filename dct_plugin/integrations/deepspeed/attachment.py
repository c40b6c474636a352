"""The plugin's additions to one engine, from its parts."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

import torch.distributed as dist

from dct_plugin.config import DCTConfig
from dct_plugin.data_parallel.step_ahead.add_on import StepAhead
from dct_plugin.host_traffic import count_group
from dct_plugin.metrics import Event, Metrics, Sink

from ..host import attached, lost_peers
from ..host.patches import Function, Patches
from ..host.replicas import Replicas
from ..host.reporting import Reporting
from ..host.steps import StepHooks
from .checkpointing import CheckpointFiles, RankState
from .displacement import DisplacedPasses
from .node_copies import DisplacedCopies, NodeCopies
from .nonfinite import SkippedSteps
from .part import EngineContext, EnginePart
from .path import GradientPath
from .paths import activation_paths_of
from .support import is_pipeline, tied_weights
from .weight_updates import ThresholdedGather, WeightUpdates


class Attachment:
    """The plugin's additions to an engine; ``engine.dct`` for scripts.

    Args:
        engine: DeepSpeed's engine.
        config: The section as it is applied to the engine.
        path: The class of path for its gradients.

    Attributes:
        config: The section.
        reducer: Sums the gradients; holds residuals and thresholds.
        experts: The same for experts, by the name of their group; empty unless they are thresholded.
        metrics: Bytes, densities and times so far.
        steps: Optimizer steps so far.
        ahead: Displaces the weights in training passes; None without ``"feedback": "step_ahead"``.
        activations: Paths of activations, by section of ``dct.model_parallel``: ``pipeline``, ``experts``.
        description: The paths that were chosen, in words.
        coverage: How many of the trainable parameters have their gradients compressed, in words.
    """

    def __init__(self, engine: Any, config: DCTConfig, path: type[GradientPath]) -> None:
        self.config = config
        self.metrics = Metrics(config.metrics, rank=engine.global_rank, world_size=dist.get_world_size())
        self.steps = StepHooks([], self.metrics, rank=engine.global_rank)
        context = EngineContext(engine, config, self.metrics, self.steps)
        self._engine, self._patches = engine, Patches()
        self._path = path(context)
        self.reducer, self.experts = self._path.reducer, self._path.experts
        self.activations = {each.name: each(context) for each in activation_paths_of(engine, config)}
        self.description, self.coverage = self._describe(), self._path.coverage()
        streams = [activation.streams for activation in self.activations.values()]
        self.steps.members = [*self._path.reducers, *streams]
        self._gather: WeightUpdates | None = None
        self.ahead: StepAhead | None = None
        self._parts: list[EnginePart] = []
        settings = config.data_parallel
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
            displaced: DisplacedCopies | DisplacedPasses
            if isinstance(self._gather, NodeCopies):
                displaced = DisplacedCopies(self._path, self._gather)
            else:
                updates = None if self._gather is None else self._gather.updates
                displaced = DisplacedPasses(self._path, updates)
            self.ahead = displaced.ahead
            self._parts.append(displaced)
        self._leaves = False
        state = RankState(context, self._path, self._gather, self.activations)
        self._files = CheckpointFiles(state)
        self._parts.append(self._files)

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
        return isinstance(self._gather, ThresholdedGather)

    def gather_parameters(self) -> None:
        """Bring the weights of all ranks to the optimizer's masters, in full; a collective, between two
        steps.

        Checkpoints do it by themselves; for evaluation or an export of the weights call it before.
        """
        if self._gather is not None:
            self._gather.gather()

    def detach(self) -> None:
        """Leave everything to DeepSpeed after the next step, which brings what was not sent so far; on every
        rank, between two steps.
        """
        self._leaves = True
        for reducer in self._path.reducers:
            reducer.flush()

    def close(self) -> None:
        """Take everything off the engine, and print the summary."""
        with contextlib.ExitStack() as ends:  # last comes first, also after an error
            ends.callback(attached.forget, self)
            ends.callback(self._patches.undo)
            for end in self._at_end:
                ends.callback(end)
            ends.callback(self._reporting.finish)
            for part in self._parts:
                ends.callback(part.close)

    def install(self) -> None:
        """Patch the engine and its optimizer (these instances, not their classes)."""
        engine = self._engine
        attached.note(engine.module, self)
        if not self.config.data_parallel.enabled:
            self.steps.begin()  # no gradients will come, and nothing is to be said about that
        for part in self._parts:
            part.install(self._patches)
        replicas = Replicas(self.config.data_parallel, self._path.replicated, self.reducer.group)
        self.steps.replicas = [replicas]
        # The monitor, but not the engine: one that is dropped must not live until the process ends.
        self._reporting = Reporting(self.metrics, _sink(engine.monitor) if engine.monitor.enabled else None)
        count = functools.partial(self.metrics.uncompressed, "gradient", "shared_weights")
        self._at_end = [lost_peers.watch(self, lambda attachment: attachment.steps.step)]
        if self.config.data_parallel.enabled:
            self._at_end += [count_group(group, count) for _, group in tied_weights(engine)]
        self._patches.intercept(engine, "_take_model_step", self._step)
        self._patches.intercept(engine, "destroy", self._destroy)

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
        if self._leaves and self.reducer.flushed:
            self.close()
        return result

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
