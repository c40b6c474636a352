"""DCT-DP: gradients between data-parallel ranks, thresholded, with error feedback.

Source: Gupta et al., KDD 2021, section 3. The paper's parameter server is sharded over the ranks: every rank
owns a part of each large gradient, sums what the ranks send it, thresholds the sum with a residual of its
own and sends the result to all (``two_phase``). With few ranks it is cheaper that everybody sends everybody
(``direct``). Under ZeRO-1/2 the owner is the rank that holds the optimizer partition, and only the first half
is needed (``reduce_scatter``).

All ranks decode the same bytes in the same order, their own included, so results are bitwise identical
everywhere.
"""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import checkpoint
from .codecs.message import MessageWriter
from .codecs.payload import Payload, payload_bound
from .codecs.values import ValueDtype
from .collectives import Exchange
from .compressor import Compressor
from .config import DataParallelConfig, DCTConfig, KernelConfig
from .errors import PayloadError
from .kernels import Backend, Stats, get_backend
from .metrics import Metrics, Record
from .schedules import SparsitySchedule

#: A tensor is split over owners only into shards of at least this many entries: below, headers outweigh the
#: balance.
MIN_SHARD = 16_384


class Shard(NamedTuple):
    """Entries ``[start, stop)`` of a tensor, summed up at rank ``owner`` of the group."""

    owner: int
    start: int
    stop: int


class GradientReducer:
    """Sums gradients over a data-parallel group through compressed messages.

    Every method that takes entries is a collective: all ranks of the group call it in the same order with
    tensors of the same names and sizes; a rank that is out of step or fails makes the others raise
    :class:`~dct_plugin.errors.DesyncError`.

    Args:
        config: The ``data_parallel`` settings, or the whole configuration.
        group: Process group (gloo or nccl), None for the default one.
        metrics: Where bytes, density and times are recorded.
        device: Device of the gradients.
        kernels: Kernel settings.
        transactional: Take skipped steps back, for host frameworks under fp16 loss scaling.
        step: Optimizer steps so far, for a reducer that is made while the training runs.
        loss_scale: What the host multiplies into the gradients.
    """

    def __init__(
        self,
        config: DataParallelConfig | DCTConfig,
        group: dist.ProcessGroup | None = None,
        *,
        metrics: Metrics | None = None,
        device: torch.device | str = "cpu",
        kernels: KernelConfig | None = None,
        transactional: bool = False,
        step: int = 0,
        loss_scale: float = 1.0,
    ) -> None:
        if isinstance(config, DCTConfig):
            kernels = kernels or config.kernels
            config = config.data_parallel
        kernels = kernels or KernelConfig()
        self.config = config
        self.device = torch.device(device)
        self.exchange = Exchange(group, self.device)
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.metrics = metrics
        self.schedule = SparsitySchedule(config.sparsity, config.warmup_steps, config.sparsity_warmup_steps)
        self.step = step
        """Optimizer steps so far."""
        self.loss_scale = loss_scale
        self.streams: dict[str, Compressor] = {}
        """One stream per parameter (what this rank sends) and, in two phases, per owned shard (what it sends
        back).
        """
        self._backend: Backend = get_backend(self.device, kernels.backend, threads=kernels.threads)
        self._transactional = transactional
        self._writers = [MessageWriter(self.device) for _ in range(self.world_size)]
        self._scratch = torch.empty(0, dtype=torch.float32, device=self.device)
        self._loaded: dict[str, dict[str, Any]] = {}

    # -- collectives ---

    def all_reduce(self, entries: Sequence[tuple[str, Tensor]], *, scale: float = 1.0) -> None:
        """Replace every tensor by ``scale`` times its thresholded sum over the ranks, bitwise the same on
        all.

        Args:
            entries: ``(name, tensor)``; 1-D contiguous tensors of a floating-point type, changed in place. An
                entry that is not finite anywhere comes back as NaN on every rank.
            scale: For an average, one over the world size.

        Raises:
            DesyncError: A rank failed or reduces other tensors.
            PayloadError: A message arrived damaged.
        """
        if self._reduced_dense([tensor for _, tensor in entries], scale):
            return
        with _Tally(self.metrics, self.exchange) as tally:
            if self._direct():
                plan = self._plan("direct", [(n, t, [Shard(0, 0, t.numel())]) for n, t in entries])
                self._all_reduce_direct(plan, scale, tally)
            else:
                plan = self._plan("two_phase", [(n, t, self._shards(n, t)) for n, t in entries])
                self._all_reduce_two_phase(plan, scale, tally)

    def reduce_scatter(
        self, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]], *, scale: float = 1.0
    ) -> None:
        """Give every owner ``scale`` times the thresholded sum of its shards (ZeRO-1/2).

        Args:
            entries: ``(name, tensor, shards)``; the shards cover the 1-D contiguous tensor once. The owner's
                shards are changed in place; the rest of the tensor is left unspecified.
            scale: For an average, one over the world size.

        Raises:
            DesyncError: A rank failed or reduces other tensors.
            PayloadError: A message arrived damaged.
            ValueError: The shards of a tensor do not cover it.
        """
        if self._reduced_dense([tensor for _, tensor, _ in entries], scale):
            return
        with _Tally(self.metrics, self.exchange) as tally:
            plan = self._plan("reduce_scatter", entries)
            self._encode(plan, tally, copies=1)
            received = self._send_to_owners(plan, tally)
            for position, (item, shard) in enumerate(plan.owned_by(self.rank)):
                self._sum_into(item.view(shard), [payloads[position] for payloads in received], scale, tally)

    def _all_reduce_direct(self, plan: _Plan, scale: float, tally: _Tally) -> None:
        """Everybody sends everybody the same message; everybody adds up all of them in rank order."""
        self._encode(plan, tally, copies=self.world_size - 1)
        with tally.timed("exchange"):
            messages = self.exchange.all_gather(self._writers[0].message, plan.fingerprint)
        split = [self._split(message, len(plan.items), sender) for sender, message in enumerate(messages)]
        for position, item in enumerate(plan.items):
            self._sum_into(item.tensor, [payloads[position] for payloads in split], scale, tally)

    def _all_reduce_two_phase(self, plan: _Plan, scale: float, tally: _Tally) -> None:
        """Sparse to the owners, who sum and threshold again, and from them to all."""
        self._encode(plan, tally, copies=1)
        received = self._send_to_owners(plan, tally)
        answer = MessageWriter(self.device)
        with self._others_told_of_failure():
            for position, (item, shard) in enumerate(plan.owned_by(self.rank)):
                total = self._zeros(shard.stop - shard.start)
                self._add_up(total, [payloads[position] for payloads in received], tally)
                self._encode_answer(item, shard, total, answer, tally)
        with tally.timed("exchange"):
            answers = self.exchange.all_gather(answer.message, plan.fingerprint)
        for owner, message in enumerate(answers):
            owned = plan.owned_by(owner)
            for (item, shard), payload in zip(owned, self._split(message, len(owned), owner), strict=True):
                self._sum_into(item.view(shard), [payload], scale, tally)

    # -- steps ---

    def end_step(
        self, *, skipped: bool = False, loss_scale: float | None = None, reduced_at: float | None = None
    ) -> None:
        """An optimizer step is over; warm-up counts it, also a skipped one.

        Args:
            skipped: The optimizer did not use the gradients reduced since the last step: residuals and
                thresholds are bitwise what they were then. Without ``transactional`` they stay as they
                are: what was sent in the step is lost with it.
            loss_scale: The coming gradients are multiplied by it; residuals and thresholds follow (exact for
                powers of 2). None: as before.
            reduced_at: Loss scale of the gradients reduced in this step, for hosts that learn it only now.
        """
        if reduced_at is not None:
            self.loss_scale = reduced_at
        for stream in self.streams.values():
            if skipped and self._transactional:
                stream.rollback()
            else:
                stream.commit()
        self._rescale(loss_scale)
        self.step += 1

    def _rescale(self, loss_scale: float | None) -> None:
        if loss_scale is not None and loss_scale != self.loss_scale:
            for stream in self.streams.values():
                stream.rescale(loss_scale / self.loss_scale)
            self.loss_scale = loss_scale

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank (each rank has its own)."""
        streams = {**self._loaded, **{name: stream.state_dict() for name, stream in self.streams.items()}}
        return {"step": self.step, "loss_scale": self.loss_scale, "streams": streams}

    def load_state_dict(self, state: dict[str, Any], *, loss_scale: float | None = None) -> None:
        """Restore :meth:`state_dict`; streams get their state when they are next used, unknown ones start
        afresh.

        Args:
            state: Of this rank.
            loss_scale: That of the coming gradients; None: the saved one.
        """
        scale = state["loss_scale"] if loss_scale is None else loss_scale
        self.step, self.loss_scale = state["step"], scale
        self.streams.clear()
        self._loaded = dict(checkpoint.in_unit(state, scale / state["loss_scale"])["streams"])

    # -- sending ---

    def _direct(self) -> bool:
        if self.config.exchange == "auto":
            # A rank sends P-1 messages directly, 2(P-1)/P in two phases: the same bytes for two ranks, one
            # round fewer.
            return self.world_size <= 2
        return self.config.exchange == "direct"

    def _density(self) -> float:
        return self.schedule.density(self.step)

    def _reduced_dense(self, tensors: Sequence[Tensor], scale: float) -> bool:
        """Warm-up steps and single ranks: sum as the host framework would. Returns whether that was done."""
        if self.world_size > 1 and self.step >= self.config.warmup_steps:
            return False
        with _Tally(self.metrics, self.exchange) as tally:
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                same = [tensor for tensor in tensors if tensor.dtype == dtype]
                if self.world_size > 1:
                    flat = torch.cat(same)
                    with tally.timed("exchange"):
                        dist.all_reduce(flat, group=self.exchange.group)
                    # A ring all-reduce's bytes: the transport does not tell.
                    size = 2 * (self.world_size - 1) / self.world_size * flat.numel() * flat.element_size()
                    self.exchange.sent_bytes += round(size)
                    tally.add("gradient_warmup", [], numel=flat.numel(), dense=size, sent=size, density=1.0)
                    for tensor, reduced in zip(same, flat.split([t.numel() for t in same]), strict=True):
                        tensor.copy_(reduced)
                if scale != 1.0:
                    for tensor in same:
                        tensor.mul_(scale)
        return True

    def _shards(self, name: str, tensor: Tensor) -> list[Shard]:
        """Owners of a tensor: by name and size only, so that residuals do not depend on the host's bucket
        layout.
        """
        numel = tensor.numel()
        small = numel < self.config.min_numel
        count = 1 if small else max(1, min(self.world_size, numel // MIN_SHARD))
        first = zlib.crc32(name.encode())
        bounds = [numel * i // count for i in range(count + 1)]
        return [Shard((first + i) % self.world_size, bounds[i], bounds[i + 1]) for i in range(count)]

    def _plan(self, kind: str, entries: Sequence[tuple[str, Tensor, Sequence[Shard]]]) -> _Plan:
        with self._others_told_of_failure():
            items = [_Item(n, t, list(shards), t.numel() < self.config.min_numel) for n, t, shards in entries]
            return _Plan(kind, items)

    def _encode(self, plan: _Plan, tally: _Tally, *, copies: int) -> None:
        """Fill the writers, one per receiver. A failure is passed on to the ranks waiting in the exchange."""
        for writer in self._writers:
            writer.clear()
        factor = (self.world_size - 1) / self.world_size * (2 if plan.kind == "direct" else 1)
        with self._others_told_of_failure():
            for item in plan.items:
                parts = [(shard.start, shard.stop, self._writers[shard.owner]) for shard in item.shards]
                if item.small:
                    stats = [self._encode_dense(item.tensor[a:b], writer) for a, b, writer in parts]
                    tau, refreshes = 0.0, 0
                else:
                    stream = self._stream(item.name, self.config)
                    refreshes = stream.threshold.refreshes
                    stats = stream.compress_parts(_as_gradient(item.tensor), parts, self._density())
                    tau, refreshes = stream.threshold.tau, stream.threshold.refreshes - refreshes
                leaving = [
                    part.nbytes
                    for part, shard in zip(stats, item.shards, strict=True)
                    if plan.kind == "direct" or shard.owner != self.rank
                ]
                tally.add(
                    "gradient_small" if item.small else "gradient",
                    stats,
                    numel=item.tensor.numel(),
                    dense=factor * item.tensor.numel() * item.tensor.element_size(),
                    sent=copies * sum(leaving),
                    density=1.0 if item.small else self._density(),
                    tau=tau,
                    refreshes=refreshes,
                )

    def _encode_dense(
        self, tensor: Tensor, writer: MessageWriter, value_dtype: ValueDtype | None = None
    ) -> Stats:
        """A payload that holds every entry as it is."""
        grad = _as_gradient(tensor)
        code = value_dtype if value_dtype is not None else _LOSSLESS[grad.dtype]
        room = writer.reserve(payload_bound(grad.numel(), grad.numel(), code))
        stats = self._backend.compress(grad, None, 0.0, room, capacity=grad.numel(), value_dtype=code)
        writer.advance(stats.nbytes)
        return stats

    def _encode_answer(
        self, item: _Item, shard: Shard, total: Tensor, answer: MessageWriter, tally: _Tally
    ) -> None:
        """What an owner sends back: the sum, thresholded once more with the owner's own residual."""
        numel = total.numel()
        density, tau, refreshes = self._density(), 0.0, 0
        if item.small:
            density = 1.0
            stats = self._encode_dense(total, answer, ValueDtype.FP32)
        elif density < 1.0 and not self.config.server_error_feedback:
            # Without a residual nothing may be dropped: everything that arrived goes back.
            tau = _TINY
            code = ValueDtype.parse(self.config.value_dtype)
            room = answer.reserve(payload_bound(numel, numel, code))
            stats = self._backend.compress(total, None, tau, room, capacity=numel, value_dtype=code)
            answer.advance(stats.nbytes)
        else:
            stream = self._stream(f"{item.name}[{shard.start}:{shard.stop}]", self.config)
            refreshes = stream.threshold.refreshes
            (stats,) = stream.compress_parts(total, [(0, numel, answer)], density)
            tau, refreshes = stream.threshold.tau, stream.threshold.refreshes - refreshes
        tally.add(
            "gradient_small" if item.small else "gradient_answer",
            [stats],
            numel=numel,
            dense=(self.world_size - 1) * numel * item.tensor.element_size(),
            sent=(self.world_size - 1) * stats.nbytes,
            density=density,
            tau=tau,
            refreshes=refreshes,
        )

    def _stream(self, name: str, config: DataParallelConfig) -> Compressor:
        stream = self.streams.get(name)
        if stream is None:
            stream = Compressor(
                config, name=name, rank=self.rank, kernels=self._backend, transactional=self._transactional
            )
            if name in self._loaded:
                stream.load_state_dict(self._loaded.pop(name))
            self.streams[name] = stream
        return stream

    # -- receiving ---

    def _send_to_owners(self, plan: _Plan, tally: _Tally) -> list[list[Payload]]:
        """Exchange; returns, for every sender, the payloads of the shards owned here in the plan's order."""
        with tally.timed("exchange"):
            messages = self.exchange.all_to_all(
                [writer.message for writer in self._writers], plan.fingerprint
            )
        count = len(plan.owned_by(self.rank))
        with self._others_told_of_failure():
            return [self._split(message, count, sender) for sender, message in enumerate(messages)]

    def _split(self, message: Tensor, count: int, sender: int) -> list[Payload]:
        try:
            payloads = Payload.split(message, verify=False)  # decoding verifies
        except PayloadError as error:
            raise PayloadError(
                f"rank {self.rank}: message from rank {sender} of the group: {error}"
            ) from error
        if len(payloads) != count:
            raise PayloadError(
                f"rank {self.rank}: message from rank {sender} of the group holds {len(payloads)} payloads, "
                f"expected {count}"
            )
        return payloads

    def _sum_into(self, tensor: Tensor, payloads: Sequence[Payload], scale: float, tally: _Tally) -> None:
        """``tensor = scale * sum of the payloads``, added up in fp32 in rank order."""
        with tally.timed("decode"):
            in_place = tensor.dtype == torch.float32
            total = tensor.zero_() if in_place else self._zeros(tensor.numel())
            for payload in payloads:
                self._backend.decode_add(payload.data, total)
            if scale != 1.0:
                total.mul_(scale)
            if not in_place:
                tensor.copy_(total)

    def _add_up(self, total: Tensor, payloads: Sequence[Payload], tally: _Tally) -> None:
        with tally.timed("decode"):
            for payload in payloads:
                self._backend.decode_add(payload.data, total)

    def _zeros(self, numel: int) -> Tensor:
        if self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, dtype=torch.float32, device=self.device)
        return self._scratch[:numel].zero_()

    @contextmanager
    def _others_told_of_failure(self) -> Iterator[None]:
        """Around work between two exchanges: the other ranks are already waiting in the next one."""
        try:
            yield
        except BaseException:
            self.exchange.abort()
            raise


_LOSSLESS = {torch.float32: ValueDtype.FP32, torch.bfloat16: ValueDtype.BF16, torch.float16: ValueDtype.FP16}
_TINY = float(torch.finfo(torch.float32).tiny)


def _as_gradient(tensor: Tensor) -> Tensor:
    """``tensor`` in a type that the kernels read (fp64 is rounded to fp32)."""
    return tensor if tensor.dtype in _LOSSLESS else tensor.to(torch.float32)


@dataclass
class _Item:
    """One tensor of a reduction and where its parts go."""

    name: str
    tensor: Tensor
    shards: list[Shard]
    small: bool

    def __post_init__(self) -> None:
        covered = 0
        for shard in sorted(self.shards, key=lambda s: s.start):
            if shard.start != covered or shard.stop < shard.start:
                break
            covered = shard.stop
        if covered != self.tensor.numel():
            raise ValueError(
                f"{self.name}: shards {self.shards} do not cover its {self.tensor.numel()} entries once"
            )

    def view(self, shard: Shard) -> Tensor:
        return self.tensor[shard.start : shard.stop]


@dataclass
class _Plan:
    """What one reduction moves where; the same on every rank."""

    kind: str
    items: list[_Item]
    fingerprint: int = field(init=False)

    def __post_init__(self) -> None:
        text = [self.kind, *(f"{item.name}:{item.tensor.numel()}:{item.shards}" for item in self.items)]
        low = zlib.crc32("\n".join(text).encode())
        high = zlib.adler32("\n".join(text).encode())
        self.fingerprint = (high << 31 ^ low) & (2**63 - 1)

    def owned_by(self, rank: int) -> list[tuple[_Item, Shard]]:
        """Shards of ``rank`` in the order in which their payloads stand in a message."""
        return [(item, shard) for item in self.items for shard in item.shards if shard.owner == rank]


class _Tally:
    """Passes bytes, entries and milliseconds of one reduction on to the metrics."""

    def __init__(self, metrics: Metrics | None, exchange: Exchange) -> None:
        self._metrics = metrics
        self._exchange = exchange
        self._before = exchange.sent_bytes
        self._sent = 0
        self._milliseconds = {"exchange": 0.0, "decode": 0.0}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._milliseconds[what] += 1e3 * (time.perf_counter() - start)

    def add(
        self,
        cls: str,
        stats: Sequence[Stats],
        *,
        numel: int,
        dense: float,
        sent: float,
        density: float,
        tau: float = 0.0,
        refreshes: int = 0,
    ) -> None:
        self._sent += round(sent)
        if self._metrics is not None:
            self._metrics.record(
                Record(
                    cls,
                    dense_bytes=round(dense),
                    sent_bytes=round(sent),
                    numel=numel,
                    nnz=sum(part.nnz for part in stats),
                    target_density=density,
                    tau=tau,
                    refreshes=refreshes,
                    select_ms=sum(part.select_ns for part in stats) / 1e6,
                    encode_ms=sum(part.encode_ns for part in stats) / 1e6,
                )
            )

    def __enter__(self) -> _Tally:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Record what belongs to the reduction as a whole: size messages, and the time of exchange and
        decoding.
        """
        if self._metrics is not None and kind is None:
            self._metrics.record(
                Record(
                    "gradient",
                    dense_bytes=0,
                    sent_bytes=self._exchange.sent_bytes - self._before - self._sent,
                    numel=0,
                    nnz=0,
                    target_density=1.0,
                    tau=0.0,
                    exchange_ms=self._milliseconds["exchange"],
                    decode_ms=self._milliseconds["decode"],
                    tensors=0,
                )
            )


def __getattr__(name: str) -> Any:
    # torch DDP's hook is an integration: by name, since the library imports none.
    if name in ("DCTState", "dct_hook"):
        return getattr(importlib.import_module("dct_plugin.integrations.ddp"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
