"""The attachment of the plugin to a training: from a section to settings that all ranks share, and off.

Every framework opens it the same way: the section is parsed, what the framework cannot do is refused, the
settings are resolved for the optimizer and the ranks, the ranks agree, and rank 0 logs what was chosen. A
framework adds which gradients are exchanged, when, and under which names.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dct_plugin.config import DCTConfig
from dct_plugin.config.dct import MetricsConfig
from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.stream_group import StreamGroup
from dct_plugin.errors import DCTError
from dct_plugin.host_traffic import HostTraffic
from dct_plugin.metrics import Metrics, Sink
from dct_plugin.policy import AppliedSettings, Training, resolve
from dct_plugin.policy.memory import kept_in_words
from dct_plugin.policy.optimizers import OptimizerFamily
from dct_plugin.transport.agreement import HINT, Agreement
from dct_plugin.transport.nodes import Nodes

from . import lost_peers, startup
from .measured_job import SECTION, VARIABLE
from .refusals import refuse
from .settings import training_of
from .steps import StepHooks


def start_reporting(
    metrics: Metrics,
    monitor: Sink | None = None,
    *,
    before_finish: Callable[[], None] | None = None,
    prints: bool = False,
) -> Callable[[], None]:
    """Count what the host sends by itself and feed a monitor, until the host is done or the process ends.

    Args:
        metrics: The metrics to report.
        monitor: Called with ``[(name, value, step), ...]`` on rank 0.
        before_finish: Called before the metrics are closed, to record what is still missing.
        prints: Whether this rank prints the summary, though it is not rank 0.

    Returns:
        A function that writes what is left and prints the summary; the second call does nothing.
    """

    process = os.getpid()

    def summarize() -> None:
        if os.getpid() != process:  # a forked child, whose exit runs the handlers of its parent
            return
        metrics.close()
        if (prints or metrics.rank == 0) and metrics.summary().steps:
            print(metrics.summary_line(), flush=True)

    ends = contextlib.ExitStack()
    ends.callback(summarize)
    ends.enter_context(HostTraffic(metrics))
    if before_finish is not None:
        ends.callback(before_finish)
    if monitor is not None and metrics.rank == 0:
        metrics.add_sink(monitor)
    ends.callback(atexit.unregister, ends.close)
    atexit.register(ends.close)
    return ends.close


class HostAttachment:
    """The plugin's additions to the training of one framework.

    Args:
        section: The section as a script passes it, or the configuration.

    Attributes:
        framework: Its name in the support table, in refusals and in the line "active on".
        hint: The likely reason why another rank does not reach the start-up agreement.
        written: The configuration as it was written.
        config: The configuration as it is applied: read by all layers, logged, agreed on by the ranks.
        applied: Its data-parallel settings, with the reasons.
        ends: Takes off all that was put on the model, its optimizer and the process.
        steps: The optimizer steps so far.
        leaves: True if it was detached: the next step is its last one.

    Raises:
        ConfigError: The section is wrong, or asks for something that the framework does not have.
    """

    framework: ClassVar[str]
    steps: StepHooks
    hint: ClassVar[str] = HINT
    process_group: dist.ProcessGroup | None = None
    """The group whose ranks exchange gradients; None: all ranks."""
    time_limit: float | None = None
    """Seconds to wait for the other ranks at the start; None: as long as the group waits."""

    def __init__(self, section: DCTConfig | Mapping[str, Any] | None) -> None:
        if VARIABLE in os.environ:  # the job is measured by `dct advise`
            section = SECTION
        rank = dist.get_rank() if dist.is_initialized() else None
        self.config = self.written = DCTConfig.given(section, rank=rank)
        refuse(self.framework, self.written.data_parallel, rank)
        self.applied = AppliedSettings(self.config.data_parallel, 1)
        self.ends = contextlib.ExitStack()
        self.leaves = False

    @property
    def reducers(self) -> Iterable[GradientReducer]:
        """The reducers of the gradients; none where nothing is reduced."""
        return ()

    @functools.cached_property
    def metrics(self) -> Metrics:
        """Bytes, densities and times so far; made at first use, when the process group exists. Rank 0 prints
        their summary when the process ends; metrics that were assigned before are not printed.
        """
        group, rank = self.process_group, dist.get_rank()  # groups of one job share the names of files
        return self.report(rank, dist.get_world_size(group), is_first=dist.get_rank(group) == 0)

    # -- opening ---

    def note(self, model: nn.Module) -> None:
        """Note that this is attached to a model, until it is closed; close an earlier attachment."""
        take_off(model, but=self)
        for module in model.modules():
            _ATTACHED[module] = weakref.ref(self)
        self.ends.callback(_forget, self)

    def resolve(self, optimizer: Any, training: Training, nodes: Nodes | None = None) -> None:
        """Decide the settings, once, for the optimizer and the ranks.

        Args:
            optimizer: The optimizer, a wrapper of it, or a list of all optimizers, of which the one that
                suffers most by delay counts; None if it was not told.
            training: The other facts of the training.
            nodes: Nodes whose ranks are summed first; None if every rank exchanges messages.
        """
        self.config, self.applied = self.written, AppliedSettings(self.written.data_parallel, 1)
        if not self.written.enabled or training.ranks == 1:
            return
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        trainings = [training_of(each, training) for each in optimizers or [None]]
        suffers_most = OptimizerFamily.OTHER, OptimizerFamily.MUON
        training = max(trainings, key=lambda each: (each.family in suffers_most, each.family.loses_by_delay))
        count = training.ranks if nodes is None else len(nodes.ranks)
        self.applied = resolve(self.written.data_parallel, training, count)
        self.config = self.written.model_copy(update={"data_parallel": self.applied.settings})

    def report(
        self,
        rank: int,
        world_size: int,
        *,
        before_finish: Callable[[], None] | None = None,
        config: MetricsConfig | None = None,
        is_first: bool = False,
    ) -> Metrics:
        """Return new metrics, which are reported until the attachment is closed (:func:`.start_reporting`).

        Args:
            rank: Of this process; rank 0 writes files.
            world_size: Of the ranks that exchange gradients.
            config: The settings of the metrics; None: those of this attachment.
            is_first: Whether this rank warns, and prints the summary, though it is not rank 0.
        """
        metrics = Metrics(config or self.config.metrics, rank=rank, world_size=world_size)
        metrics.warns |= is_first
        ends = start_reporting(metrics, before_finish=before_finish, prints=is_first)
        self.ends.callback(ends)
        return metrics

    def agree(
        self,
        prepare: Callable[[], str],
        *,
        topic: str,
        group: dist.ProcessGroup | None = None,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> str:
        """Let all ranks of a group start together, or stop with the ranks named; a collective.

        Args:
            prepare: Prepares this rank, and returns what is active, in words. Its errors stop all ranks.
            topic: Of the agreement, the same on all ranks.
            group: The group that exchanges gradients; None for all ranks.
            facts: Returns what all ranks must share, beside configuration, versions and kernels.

        Returns:
            The topic with the number of this agreement, which no other one has.

        Raises:
            DesyncError: Ranks failed, did not come, or differ.
        """
        agreement = startup.join(topic, group=group, limit=self.time_limit, hint=self.hint)
        with agreement:
            active = prepare()
        self.start(agreement, active, facts())
        return agreement.topic

    def start(self, agreement: Agreement, active: str, facts: Mapping[str, Any]) -> None:
        """Confirm what this rank runs, log it on the first rank, and watch for lost ranks.

        Args:
            agreement: This rank's part in the agreement.
            active: What is active, in words; empty: nothing is logged.
            facts: See :meth:`agree`.
        """
        agreement.confirm(startup.facts_of(self.config, facts))
        self.ends.callback(lost_peers.watch(self, lambda attachment: attachment.steps_so_far()))
        if active and agreement.rank == 0 and agreement.world_size > 1:
            self.log_active(active)

    def make_process_groups(
        self, prepare: Callable[[], StreamGroup], *, topic: str, group: dist.ProcessGroup | None
    ) -> None:
        """Make the process groups of nodes; a collective. No rank waits in torch before all have come, and
        have the same settings.

        Args:
            prepare: Returns the streams that exchange messages over them. Its errors stop all ranks.
            topic: That of the coming :meth:`agree`, where a rank without nodes is.
            group: See :meth:`agree`.

        Raises:
            DesyncError: Ranks failed, did not come, or differ; names them.
        """
        agreement = startup.join(topic, group=group, limit=self.time_limit, hint=self.hint)
        with agreement:
            streams = prepare()
        agreement.confirm(startup.facts_of(self.config, {}))
        streams.make_process_groups()

    def log_active(self, what: str) -> None:
        """Log what is active, and why; the metrics' file gets the settings, too."""
        settings = self.config.data_parallel
        summary = settings.summary if settings.enabled else "dense gradients"
        fingerprint = self.config.fingerprint()
        logger.warning("dct: active on %s, %s, config %s", what, summary, fingerprint)
        for line in self.lines:
            logger.warning("dct: %s", line)
        self.metrics.event("settings", config=fingerprint, data_parallel=settings.model_dump(mode="json"))

    @property
    def lines(self) -> list[str]:
        """The reasons of the settings, and what is rounded; what is kept on this rank, if that is much."""
        settings, wide = self.config.data_parallel, [w for w in self.weights() if w.dtype is torch.float64]
        is_rounded = settings.enabled and any(each.numel() >= settings.min_numel for each in wide)
        rounded = "gradients of float64 cross in fp32 or fewer bits" if is_rounded else ""
        return list(filter(None, (*self.applied.lines, rounded, self._memory())))

    def weights(self) -> Iterable[Tensor]:
        """Return the weights whose gradients are compressed, as this rank trains with them; empty if it does
        not know them.
        """
        return ()

    def _memory(self) -> str:
        """Return what the plugin keeps on this rank, in words; empty if that is little."""
        weights = list(self.weights())
        if not weights or not self.config.data_parallel.enabled:
            return ""
        device = weights[0].device
        if device.type == "cuda":
            free = float(torch.cuda.mem_get_info(device)[0])
        else:
            free = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        entries, size = sum(weight.numel() for weight in weights), weights[0].element_size()
        return kept_in_words(self.config.data_parallel, entries / self.applied.inside, size * entries, free)

    def steps_so_far(self) -> int:
        """Return the optimizer steps so far."""
        return self.steps.step

    # -- leaving ---

    def detach(self) -> None:
        """Let the framework exchange gradients again after the next step, which sends all residuals.

        Call it on every rank, between two steps. What was attached is removed after that step.
        """
        self.leaves = True
        for reducer in self.reducers:
            reducer.flush()

    def finish(self) -> None:
        """Close at the end of a training, on every rank. Ranks that trained alone get equal weights first."""
        if self.config.data_parallel.trains_alone:
            self.detach()
        self.close()

    def close_if_done(self) -> None:
        """Close a detached attachment whose last step was made."""
        if self.leaves and all(reducer.flushed for reducer in self.reducers):
            self.close()

    def close(self) -> None:
        """Remove everything, and print the summary; may be called again. Unsent entries are lost, see
        :meth:`detach`.

        Raises:
            DCTError: A parameter was written while it held displaced weights; the write is undone.
        """
        self.ends.close()


class PlainTraining(HostAttachment):
    """The attachment of a training that is left as it is: it has the same methods, and changes nothing.

    Args:
        section: The section as a script passes it, or the configuration.
        reason: Why nothing is attached; rank 0 logs it.
    """

    framework = "no framework"

    def __init__(self, section: DCTConfig | Mapping[str, Any] | None, reason: str) -> None:
        super().__init__(section)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.metrics = Metrics(MetricsConfig(), rank=rank, world_size=size)
        if rank == 0:
            logger.warning("dct: nothing to do: %s", reason)

    def steps_so_far(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def save(self, folder: str | os.PathLike[str]) -> None:
        pass

    def load(self, folder: str | os.PathLike[str]) -> bool:
        return False


def switched_off(config: DCTConfig) -> str:
    """Return why a framework that exchanges gradients alone has nothing to do; empty if it has."""
    if not config.enabled:
        return "dct.enabled is false"
    return "" if config.data_parallel.enabled else "dct.data_parallel.enabled is false"


#: By module its attachment. Scripts wrap a module again to train other parts of it, in every ``fit``, and
#: after a batch that was too large.
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[HostAttachment]] = weakref.WeakKeyDictionary()


def attached_to(model: nn.Module) -> HostAttachment | None:
    """Return what is attached to a model; None if nothing is."""
    reference = _ATTACHED.get(model)
    return None if reference is None else reference()


def take_off(model: nn.Module, but: HostAttachment | None = None) -> None:
    """Close what is attached to a model, to a part of it, or to a model that it is a part of, ``but`` one."""
    for module in model.modules():
        earlier = attached_to(module)
        if earlier is None or earlier is but:
            continue
        _forget(earlier)
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "dct: the model is wrapped or attached to again: the earlier hooks are taken off, and what "
                "they had not sent is lost"
            )
        try:
            earlier.close()
        except DCTError as error:  # wrappers write weights before they are attached to
            logger.warning("dct: %s", error)


def _forget(attached: HostAttachment) -> None:
    """Note that an attachment was closed."""
    for module, reference in list(_ATTACHED.items()):
        if reference() in (attached, None):
            del _ATTACHED[module]
