"""The compressed streams of one process group, and the metrics of what they send.

Reductions of gradients and updates of weights have them in common.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.message import Key, MessageWriter
from ..codecs.values import ValueDtype
from ..compression.feedback import ScratchBuffers
from ..compression.stream import Compressor, Encoded, as_flat, backend_of, parts_of
from ..config import DataParallelConfig, KernelConfig
from ..console import logger
from ..errors import ConfigError, PayloadError
from ..metrics import TENSOR, Metrics, Record
from ..transport import Exchange
from ..transport.agreement import ranks_in_words
from ..transport.nodes import Nodes, layout_of
from ..transport.transports import GroupPeers, Peers
from .plan import Entries, Sparsity, fingerprint_of

if TYPE_CHECKING:
    from .nodes.ranks import NodeRanks

#: The ranks that exchange messages, as a host names them.
Ranks: TypeAlias = dist.ProcessGroup | Peers | Nodes | None


class WrittenTensor(NamedTuple):
    """One tensor in a message, to be recorded when the message is complete."""

    name: str | None
    """Name of a gradient of this rank, to be named where it is not finite. None for weights and for answers
    of owners, which are not finite because of other ranks.
    """
    cls: str
    """Class in the metrics."""
    encoded: Encoded
    stream: Compressor | None
    dense_bytes: float
    """Bytes that the host would have sent."""
    copies: Sequence[int]
    """Number of ranks that each payload is sent to."""
    label: str = ""
    """Share of the class under which it is recorded besides."""


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
        self.group = None if isinstance(group, Peers) else group
        self.layout = layout_of(self.nodes)
        self.node: NodeRanks | None = None
        """The ranks of this rank's node, if gradients are summed there first."""
        self.group_rank, self.group_size = peers.rank, len(peers.ranks)
        self.exchange = Exchange(group, self.device, None if self.nodes is None else self.nodes.across)
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.metrics = metrics
        self.settings = settings
        self.schedule = settings.schedule
        self.step = step
        """Optimizer steps so far."""
        self.loss_scale = 1.0
        """Factor that the host multiplies into the gradients."""
        self.streams: dict[str, Compressor] = {}
        """By name: one for each tensor that this rank sends by itself."""
        self.host_collective = "reduce_scatter"
        """Collective by which the host would give owners their sums; for the metrics."""
        self.kernels = kernels
        self.backend = backend_of(kernels, self.device)
        self._value_dtype = value_dtype = ValueDtype.parse(settings.value_dtype)
        self.value_bits = value_dtype.bits
        """The fewest bits of a selected value."""
        if value_dtype not in self.backend.value_dtypes:
            raise ConfigError(
                f"dct.data_parallel.value_dtype = '{settings.value_dtype}': the kernels for "
                f"{self.device.type} tensors ({self.backend.name}) do not write it"
            )
        self.transactional = transactional
        """True if steps can be taken back, with a second residual."""
        self.waiting: Collection[str] = ()
        """Names of tensors whose gradients wait for their optimizer: the end of a step leaves them open."""
        self.scratch = ScratchBuffers()
        self._spare_writers: list[tuple[MessageWriter, MessageWriter]] = []
        self.loaded: dict[str, dict[str, Any]] = {}
        """Loaded states of streams that were not used since."""
        self.nonfinite_reported = False
        self.reduce_seconds = 0.0
        """Time so far in reductions, in the thread that runs them."""
        self.stays_dense = False
        """True if the framework may sum the coming gradients by itself, which is faster than thresholds; the
        same on all ranks. No residual is kept then.
        """
        self.sends_all = False
        """True if every entry of the coming gradients is sent, so that step-ahead has nothing to foresee."""

    def send_all(self, *, wanted: bool, dense: bool) -> None:
        """Note whether all entries of the coming gradients are sent, and whether densely. Then the residuals,
        which were sent, are freed.
        """
        self.sends_all, self.stays_dense = wanted, dense
        if dense:
            self.streams.clear()

    def streams_state(self) -> dict[str, Any]:
        """Return the states of all streams, also of those that were loaded and not used since."""
        return {**self.loaded, **{name: stream.state_dict() for name, stream in self.streams.items()}}

    def stream(self, name: str) -> Compressor:
        """Return the stream of a tensor, made when it is first asked for."""
        stream = self.streams.get(name)
        if stream is None:
            stream = Compressor(
                self.settings,
                name=name,
                rank=self.rank,
                kernels=self.kernels,
                transactional=self.transactional,
                scratch=self.scratch,
            )
            if name in self.loaded:
                stream.load_state_dict(self.loaded.pop(name))
            self.streams[name] = stream
        return stream

    def streams_of(self, names: Collection[str]) -> list[Compressor]:
        """Return the streams of tensors, also those of the parts of their sums that this rank owns."""
        wanted = set(names)
        return [each for key, each in self.streams.items() if wanted & {key, key.rpartition("[")[0]}]

    def arm(self) -> None:
        """Keep a second residual from the next step on, so that steps can be taken back."""
        if not self.transactional:
            self.transactional = True
            for stream in self.streams.values():
                stream.arm()

    @property
    def answer_dtype(self) -> ValueDtype:
        """The type of the sums that owners send back; signs lose too much of them."""
        return ValueDtype.INT2 if self._value_dtype is ValueDtype.SIGN else self._value_dtype

    def most_bytes(
        self, bounds: Key | None, numel: int, density: float, value_dtype: ValueDtype | None = None
    ) -> Sequence[int]:
        """Return the most bytes of the payloads that :meth:`.Compressor.encode` writes of parts."""
        return parts_of(
            bounds, numel, density, value_dtype or self._value_dtype, self.backend.most_kept
        ).nbytes

    def take_writers(self) -> tuple[MessageWriter, MessageWriter]:
        """Return empty message writers: of a message for each rank, and of one for all of them."""
        device = self.device
        spare = self._spare_writers or [(MessageWriter(device, self.world_size), MessageWriter(device))]
        for writer in (writers := spare.pop()):
            writer.clear()
        return writers

    def give_back(self, writers: tuple[MessageWriter, MessageWriter]) -> None:
        """Take back writers whose messages have left."""
        self._spare_writers.append(writers)

    def set_value_dtype(self, value_dtype: str) -> None:
        """Send the kept values of all streams in another type from now on."""
        self.settings = self.settings.model_copy(update={"value_dtype": value_dtype})
        self._value_dtype = ValueDtype.parse(value_dtype)
        self.value_bits = self._value_dtype.bits
        for stream in self.streams.values():
            stream.set_value_dtype(value_dtype)

    def return_to_residual(self, entries: Sequence[tuple[str, Tensor]]) -> None:
        """Add to the residuals what an exchange left in these tensors, where no rank used it."""
        for name, tensor in entries:
            stream, flat = self.streams.get(name), as_flat(tensor)
            if self.node is not None:
                flat = flat[slice(*self.node.part(name, flat.numel()))]
            if stream is not None and stream.residual is not None:
                stream.residual.add(flat)

    def node_mean_parts(self, entries: Entries) -> Entries:
        """Return what this rank brings into an exchange of gradients, which stay as they are: themselves, or
        its part of the mean of its node's; a collective.
        """
        return entries if self.node is None else self.node.means(entries)

    def is_small(self, name: str, numel: int) -> bool:
        """Return whether a tensor is sent dense, of which so many entries take part in the exchange."""
        numel = numel if self.node is None else self.node.sizes.get(name, numel)
        return numel < self.settings.min_numel

    @property
    def ranks_inside(self) -> int:
        """Number of ranks whose mean takes part in the exchange in place of one rank's gradient."""
        return 1 if self.node is None else self.node.size

    def sparsities(self, names: Sequence[str]) -> Sequence[Sparsity]:
        """Return the sparsities of tensors in this step."""
        return [Sparsity(self.schedule.density(self.step))] * len(names)

    def operation(self, name: str) -> str:
        """Return the name of an operation for fingerprints. Ranks whose kernels leave lengths on a device
        exchange other messages than ranks whose kernels do not.
        """
        return name if self.backend.lengths_on_host else f"{name}, lengths on the device"

    def at_step(self, fingerprint: int) -> int:
        """Return the fingerprint of an operation in this step: ranks that have made other numbers of steps
        find that out.
        """
        return fingerprint + self.step

    def agree(self, what: str) -> None:
        """Make sure that all ranks do the same now, before a collective that would wait for a rank that does
        not.

        Raises:
            DesyncError: A rank is at another operation or step, or failed.
        """
        with self.recorded("plugin"):
            self.exchange.agree(self.at_step(fingerprint_of(what, ())))

    def account(self, written: Sequence[WrittenTensor], exchange_record: Record) -> None:
        """Let thresholds follow what was written, and record it; the first figure read reads all of them."""
        for name, cls, encoded, stream, dense_bytes, copies, label in written:
            totals = encoded.totals()
            if totals.nonfinite and name is not None and not self.nonfinite_reported:
                self.report_nonfinite(name)
            if stream is not None:
                stream.observe(encoded, totals)
            if self.metrics is None:
                continue
            sizes = [nbytes for stats in encoded.stats for nbytes in stats.sizes]
            sent = sum([n * nbytes for n, nbytes in zip(copies, sizes, strict=True)])
            record = encoded.record(cls, dense_bytes=dense_bytes, sent_bytes=sent, totals=totals)
            self.record(record, exchange_record)
            if label:
                self.metrics.record(replace(record, cls=f"{cls}/{label}"))
            if self.metrics.config.tensors and name is not None and encoded.density < 1:
                self.metrics.record(replace(record, cls=f"{cls}{TENSOR}{name}"))

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

    @contextmanager
    def naming_sender(self, first: int = 0) -> Iterator[None]:
        """Name the sender of a message that is found damaged within the block: ``first``, or the rank so many
        messages behind it.
        """
        try:
            yield
        except PayloadError as error:
            sender = first + error.message
            raise PayloadError(
                f"rank {self.rank}: message from rank {sender} of the group: {error}"
            ) from error

    def preparing(self) -> AbstractContextManager[None]:
        """Surround work before an exchange, in which the other ranks may wait already: they are told of an
        error.
        """
        return self.exchange.preparing()

    # -- metrics ---

    def recorded(self, cls: str) -> AbstractContextManager[Record]:
        """Record an exchange as a whole: announcements of sizes, the time of exchange and decoding, and as
        time of selection whatever no other figure holds. The block gets the record.
        """
        return _Recording(self, Record(cls), whole=True)

    def recording(self, exchange_record: Record) -> AbstractContextManager[Record]:
        """Add the bytes and the time of the block to the record of an exchange."""
        return _Recording(self, exchange_record)

    def record(self, record: Record, exchange_record: Record) -> None:
        """Record the share of one tensor in the exchange."""
        exchange_record.sent_bytes -= record.sent_bytes
        exchange_record.select_ms -= record.select_ms + record.encode_ms
        if self.metrics is not None:
            self.metrics.record(record)


class _Recording:
    """See :meth:`StreamGroup.recording`, and (``whole``) :meth:`StreamGroup.recorded`; a class, since a
    generator takes three times as long.
    """

    __slots__ = ("_began", "_elsewhere", "_group", "_record", "_recorded", "_whole")

    def __init__(self, group: StreamGroup, record: Record, *, whole: bool = False) -> None:
        self._group, self._record, self._whole = group, record, whole
        self._recorded = group.exchange.recorded(record)

    def __enter__(self) -> Record:
        self._group.exchange.step = self._group.step
        self._elsewhere = self._record.exchange_ms + self._record.decode_ms
        self._began = time.perf_counter()
        self._recorded.__enter__()
        return self._record

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._recorded.__exit__(kind, error, trace)
        if error is not None:  # now: the end of the process group may wait for what this rank has queued
            self._group.exchange.peers.state_failure(error)
        record, seconds = self._record, time.perf_counter() - self._began
        self._group.reduce_seconds += seconds
        record.exchange_ms = max(record.exchange_ms, record.waited_ms)  # the wait is a part of it
        elsewhere = self._elsewhere - record.exchange_ms - record.decode_ms
        record.select_ms += 1e3 * seconds + elsewhere
        if self._whole and error is None and self._group.metrics is not None:
            self._group.metrics.record(record)
