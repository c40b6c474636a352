"""The compressed streams of one rank in one process group, and the metrics of what they send.

Reductions of gradients and updates of weights have them in common.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checkpoint
from ..codecs.copies import Stopwatch
from ..codecs.values import ValueDtype
from ..compression.feedback import ScratchBuffers
from ..compression.stream import Compressor
from ..config import DataParallelConfig, KernelConfig
from ..console import logger
from ..errors import ConfigError
from ..kernels import get_backend
from ..metrics import Metrics, Record
from ..transport import Exchange
from ..transport.agreement import ranks_in_words
from ..transport.nodes import Nodes, layout_of
from ..transport.transports import GroupPeers, Peers
from .plan import fingerprint_of

if TYPE_CHECKING:
    from .nodes.ranks import NodeRanks


class Streams(dict[str, Compressor]):
    """The streams that were used so far.

    Args:
        settings: Settings of the streams.
        rank: Position of this rank among those that exchange messages.
        kernels: Which kernels run; the defaults when None.
        transactional: Keep a second residual, with which skipped steps are taken back.

    Attributes:
        kernels: Those that run; the defaults when None.
        loaded: Loaded states of streams that were not used since.
        scratch: Scratch memory of all streams.
    """

    def __init__(
        self, settings: DataParallelConfig, rank: int, kernels: KernelConfig | None, *, transactional: bool
    ) -> None:
        super().__init__()
        self._settings, self._rank, self.kernels = settings, rank, kernels
        self.transactional = transactional
        self.scratch = ScratchBuffers()
        self.loaded: dict[str, dict[str, Any]] = {}

    def named(self, name: str) -> Compressor:
        """Return the stream of a tensor, made when it is first asked for."""
        stream = self.get(name)
        if stream is None:
            stream = self[name] = Compressor(
                self._settings, name=name, rank=self._rank, kernels=self.kernels,
                transactional=self.transactional, scratch=self.scratch,
            )  # fmt: skip
            if name in self.loaded:
                stream.load_state_dict(self.loaded.pop(name))
        return stream

    def of(self, names: Collection[str]) -> list[Compressor]:
        """Return the streams of tensors, also those of the parts of their sums that this rank owns."""
        wanted = set(names)
        return [each for key, each in self.items() if wanted & {key, key.rpartition("[")[0]}]

    def residual_of(self, name: str, use: str, device: torch.device, *, committed: bool) -> Tensor | None:
        """Return the residual of a tensor, also a loaded one that was not used since; None if there is none.

        It may share memory with the next one of the same ``use``. See :meth:`.feedback.Residual.show`.
        """
        stream = self.get(name)
        if stream is not None:
            kept = stream.residual
            return None if kept is None else kept.show(self.scratch, use, committed=committed)
        saved = self.loaded[name]["residual"] if name in self.loaded else None
        return None if saved is None else checkpoint.unpacked(saved).to(device)

    def arm(self) -> None:
        """Keep a second residual from the next step on, so that steps can be taken back."""
        if not self.transactional:
            self.transactional = True
            for stream in self.values():
                stream.arm()

    def set_value_dtype(self, settings: DataParallelConfig) -> None:
        """Send the kept values in the type of these settings from now on."""
        self._settings = settings
        for stream in self.values():
            stream.set_value_dtype(settings.value_dtype)

    def end_step(self, waiting: Collection[str], *, skipped: bool) -> None:
        """Close an optimizer step of all streams but those of the tensors that are ``waiting``. Streams that
        cannot be undone have nothing to keep or to restore.
        """
        open_still = set(self.of(waiting)) if waiting and self.transactional else ()
        for stream in self.values() if self.transactional else ():
            if stream not in open_still:
                stream.end_step(skipped=skipped)

    def rescale(self, ratio: float) -> None:
        """Follow a change of the gradients' unit (exact for powers of 2)."""
        self.loaded = dict(checkpoint.in_unit({"streams": self.loaded}, ratio)["streams"])
        for stream in self.values():
            stream.rescale(ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all streams, also of those that were loaded and not used since."""
        return {**self.loaded, **{name: stream.state_dict() for name, stream in self.items()}}

    def load(self, states: Mapping[str, Any]) -> None:
        """Forget all streams; those of ``states`` get theirs when they are next used."""
        self.clear()
        self.loaded = dict(states)

    def give_up_sums(self, names: Collection[str]) -> None:
        """Make loaded residuals of sums of these tensors, which are exchanged without a second phase now, a
        part of this rank's own residuals.
        """
        wanted = set(names)
        found = {key: each for key, each in self.loaded.items() if wanted & {key, key.rpartition("[")[0]}}
        if any(map(checkpoint.is_answer, found)):
            state = {**checkpoint.FRESH, "streams": found}
            rest = {key: each for key, each in self.loaded.items() if key not in found}
            self.loaded = rest | checkpoint.reshard([{"state": state, "unit": 1.0}])["streams"]


#: The ranks that exchange messages, as a host names them.
Ranks: TypeAlias = dist.ProcessGroup | Peers | Nodes | None


class GroupOptions(TypedDict, total=False):
    """Arguments of :class:`StreamGroup` by keyword."""

    metrics: Metrics | None
    device: torch.device | str
    kernels: KernelConfig | None
    step: int


class StreamGroup:
    """The streams of this rank, and the process group that exchanges them.

    Args:
        settings: Settings of the streams.
        ranks: Process group (gloo or nccl), None for the default one; or other kinds of peers; or nodes: only
            ranks with the same position in their nodes exchange messages.
        metrics: Records bytes, density and times.
        device: Device of the tensors.
        kernels: Which kernels run; the defaults when None.
        transactional: Take skipped steps back.
        step: Optimizer steps so far.

    Attributes:
        group, group_rank, group_size: The host's process group, this rank's position in it, and its ranks.
        nodes: Its nodes; None where every rank exchanges messages.
        layout: Positions in the host's process group of each node's ranks; empty without nodes.
        rank, world_size: Position and number of the ranks that exchange messages: those of the group, or one
            of each node.
    """

    def __init__(
        self,
        settings: DataParallelConfig,
        ranks: Ranks,
        *,
        metrics: Metrics | None = None,
        device: torch.device | str = "cpu",
        kernels: KernelConfig | None = None,
        transactional: bool = False,
        step: int = 0,
    ) -> None:
        self.device = torch.device(device)
        self.nodes = ranks if isinstance(ranks, Nodes) else None
        group = ranks.group if isinstance(ranks, Nodes) else ranks
        peers = group if isinstance(group, Peers) else GroupPeers(group)
        self.process_group = None if isinstance(group, Peers) else group
        self.layout = layout_of(self.nodes)
        self.node: NodeRanks | None = None
        """The ranks of this rank's node, if gradients are summed there first."""
        self.group_rank, self.group_size = peers.rank, len(peers.ranks)
        self.exchange = Exchange(group, self.device, None if self.nodes is None else self.nodes.across)
        self.exchanges = [self.exchange]
        """All exchanges: also that inside the node, if there is one."""
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.metrics = metrics
        self.settings = settings
        self.schedule = settings.schedule
        self.step = step
        """Optimizer steps so far."""
        self.loss_scale = 1.0
        """Factor that the host multiplies into the gradients."""
        self.streams = Streams(settings, self.rank, kernels, transactional=transactional)
        self.host_collective = "reduce_scatter"
        """Collective by which the framework would give owners their sums; for the metrics."""
        self.backend = get_backend(self.device, (kernels or KernelConfig()).backend)
        self.value_dtype = ValueDtype.parse(settings.value_dtype)
        """The type of the selected values."""
        if self.value_dtype not in self.backend.value_dtypes:
            raise ConfigError(
                f"dct.data_parallel.value_dtype = '{settings.value_dtype}': the kernels for "
                f"{self.device.type} tensors ({self.backend.name}) do not write it"
            )
        self.waiting: Collection[str] = ()
        """Names of tensors whose gradients wait for their optimizer: the end of a step leaves them open."""
        self.dense_names: set[str] = set()
        """Names of tensors that are sent dense, whatever their size."""
        self.nonfinite_reported = False
        self.dense_sums_watch: Stopwatch | None = None
        """Times the dense sums, where the automatic mode wants to know."""
        self.stays_dense = False
        """True if the framework may sum the coming gradients by itself, which is faster than thresholds; the
        same on all ranks. No residual is kept then.
        """
        self.sends_all = False
        """True if every entry of the coming gradients is sent, so that step-ahead has nothing to foresee."""

    def make_process_groups(self) -> None:
        """Make the process groups of this rank's node, and of the ranks with its position in theirs, which
        their first use makes otherwise; a collective of the host's process group.
        """
        for exchange in self.exchanges:
            _ = exchange.peers.group

    def send_all(self, *, wanted: bool, dense: bool) -> None:
        """Note whether all entries of the coming gradients are sent, and whether densely. Then the residuals,
        which were sent, are freed.
        """
        self.sends_all, self.stays_dense = wanted, dense
        if dense:
            self.streams.clear()

    def set_value_dtype(self, value_dtype: str) -> None:
        """Send the kept values of all streams in another type from now on."""
        self.settings = self.settings.model_copy(update={"value_dtype": value_dtype})
        self.value_dtype = ValueDtype.parse(value_dtype)
        self.streams.set_value_dtype(self.settings)

    def is_small(self, name: str, numel: int) -> bool:
        """Return whether a tensor is sent dense, of which so many entries take part in the exchange."""
        if self.node is not None:  # one rank has a tensor that is not divided: the others cannot observe it
            return name in self.dense_names or not self.node.is_divided(self.node.sizes.get(name, numel))
        return name in self.dense_names or numel < self.settings.min_numel

    def operation(self, name: str) -> str:
        """Return the name of an operation for fingerprints. Ranks whose kernels leave lengths on a device
        exchange other messages than ranks whose kernels do not.
        """
        return name if self.backend.lengths_on_host else f"{name}, lengths on the device"

    def agree(self, what: str) -> None:
        """Make sure that all ranks do the same now, before a collective that would wait for a rank that does
        not.

        Raises:
            DesyncError: A rank is at another operation or step, or failed.
        """
        with self.recorded("plugin"):
            self.exchange.agree(fingerprint_of(what, ()) + self.step)

    def report_nonfinite(self, name: str) -> None:
        """Say, on the rank where it arose, which gradient poisons the step."""
        self.nonfinite_reported = True
        who = f"rank {self.rank}" if self.nodes is None else f"node of {ranks_in_words(self.nodes.inside)}"
        remedy = (
            " and reaches all ranks as NaN; said once. To skip such steps on all ranks: "
            "dct.data_parallel.nonfinite_action = 'skip'"
        )
        skips = self.settings.nonfinite_action == "skip"
        text = f"dct: {who}: the gradient of {name} is not finite in step {self.step}"
        logger.warning(text if skips else text + remedy)

    # -- metrics ---

    def recorded(self, cls: str) -> AbstractContextManager[Record]:
        """Record an exchange as a whole: announcements of sizes, the time of exchange and decoding, and as
        time of selection whatever no other figure holds. The block gets the record.
        """
        return _Recording(self, Record(cls), whole=True)

    def recording(self, exchange_record: Record) -> AbstractContextManager[Record]:
        """Add the bytes and the time of the block to the record of an exchange."""
        return _Recording(self, exchange_record)


class _Recording:
    """See :meth:`StreamGroup.recording`, and (``whole``) :meth:`StreamGroup.recorded`; a class, since a
    generator takes three times as long.
    """

    __slots__ = ("_before", "_elsewhere", "_group", "_record", "_whole")

    def __init__(self, group: StreamGroup, record: Record, *, whole: bool = False) -> None:
        self._group, self._record, self._whole = group, record, whole

    def __enter__(self) -> Record:
        self._group.exchange.step = self._group.step
        self._elsewhere = self._record.exchange_ms + self._record.decode_ms
        self._before = *self._group.exchange.counters(), time.perf_counter()
        return self._record

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        group, record, (sent, waited, began) = self._group, self._record, self._before
        if error is not None:  # now: the end of the process group may wait for what this rank has queued
            group.exchange.peers.state_failure(error)
        sent_now, waited_now = group.exchange.counters()
        record.sent_bytes += sent_now - sent
        record.waited_ms += waited_now - waited
        seconds = time.perf_counter() - began
        record.exchange_ms = max(record.exchange_ms, record.waited_ms)  # the wait is a part of it
        elsewhere = self._elsewhere - record.exchange_ms - record.decode_ms
        record.select_ms += 1e3 * seconds + elsewhere
        if self._whole and error is None and group.metrics is not None:
            group.metrics.record(record)
