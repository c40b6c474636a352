"""Thresholded updates of the weights: the other half of the traffic of a sharded optimizer.

Under ZeRO-1 and 2 and Megatron's distributed optimizer a rank owns a part of the master weights (fp32), and
every rank trains with working weights (fp32, bf16 or fp16). After the optimizer's step the owner sends the
entries of ``master - working`` that reach a threshold, and *every rank, the owner too, adds exactly what was
sent* to its working weights. What was not sent stays between master and working weight: error feedback that
needs no memory and cannot be lost.

16-bit working weights: the difference is to the master as it would be rounded, so that nothing is sent which
rounding would swallow, and an entry that is sent arrives exactly where the host's own gather puts it
(unless it moved by more than the value type can say).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.message import MessageWriter
from ..codecs.values import ValueDtype
from ..config import DataParallelConfig, KernelConfig, NoFeedback, ParametersConfig
from ..errors import ConfigError
from ..kernels import GRAD_DTYPES
from ..kernels.checks import split_message
from ..metrics import Metrics, Record
from ..stream import add_payload, encode_all
from .fixed_size import FramedUpdates
from .plan import Item, Plan, Shard
from .stream_group import Member, Written

logger = logging.getLogger("dct_plugin")

#: The option that switches it on, as errors name it.
KEY = "dct.data_parallel.parameters"


def refuse(
    host: str, why: str = "every rank has the whole optimizer, no weights are gathered after a step"
) -> ConfigError:
    """The error for a host whose weights are not gathered, or not where they could be thresholded."""
    return ConfigError(f"{KEY}: {host}: {why}; leave it out")


class ParameterUpdates(Member):
    """Brings working weights to their owners' master weights, all ranks to bitwise the same values.

    Args:
        config: The ``data_parallel`` settings.
        group: Process group over which the masters are sharded; None for the default one.
        metrics: Where bytes, density and times are recorded.
        device: Of the weights.
        kernels: Which kernels run; the defaults when None.
        step: Optimizer steps so far.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        group: dist.ProcessGroup | None = None,
        *,
        metrics: Metrics | None = None,
        device: torch.device | str = "cpu",
        kernels: KernelConfig | None = None,
        step: int = 0,
    ) -> None:
        self.config = config.parameters or ParametersConfig()
        settings = config.model_copy(
            update={
                "sparsity": self.config.sparsity,
                "value_dtype": self.config.value_dtype,
                "feedback": NoFeedback(),
            }
        )
        super().__init__(
            settings, group, metrics=metrics, device=device, kernels=kernels, transactional=False, step=step
        )
        if self.rank == 0 and self.config.sparsity and not config.feedback.looks_ahead:
            logger.warning(
                "dct: %s with feedback = '%s': passes run at weights that lag behind, which "
                "cost quality under Adam; 'step_ahead' makes up for it",
                KEY,
                config.feedback.label(),
            )
        self._value_dtype = ValueDtype.parse(self.config.value_dtype)
        self._writer = MessageWriter(self.device)
        self._scratch = torch.empty(0, dtype=torch.float32, device=self.device)
        self._framed = FramedUpdates(self, "parameter") if self.frames else None
        self._master_of: Callable[[str], Tensor] | None = None
        self._own: dict[str, tuple[Shard, Tensor, Tensor]] = {}
        """What was last thresholded here: this rank's shards, their working weights and masters."""

    def full(self, dtype: torch.dtype) -> bool:
        """Whether in this step the host is to gather weights of ``dtype`` by itself, in full.

        The same on all ranks. True in warm-up steps, every ``full_every`` steps, and where nothing would be
        saved or rounded.
        """
        every = self.config.full_every
        if self.world_size == 1 or (every is not None and (self.step + 1) % every == 0):
            return True
        if self.schedule.density(self.step) < 1.0:
            return False
        lossless = self._value_dtype in (ValueDtype.FP32, ValueDtype.lossless(dtype))
        return lossless or self.step < self.schedule.warmup_steps

    def record_full(self, numel: int, element_size: int) -> None:
        """The host has gathered ``numel`` weights in full: nothing is pending."""
        self._own.clear()
        # What a rank sends in a ring: the transport does not tell.
        size = (self.world_size - 1) / self.world_size * numel * element_size
        if self.metrics is not None and size:
            self.metrics.record(Record("parameter_full", size, size, numel))

    def update(
        self,
        entries: Sequence[tuple[str, Tensor, Sequence[Shard]]],
        master_of: Callable[[str], Tensor],
    ) -> None:
        """Move working weights towards the masters; a collective.

        Args:
            entries: ``(name, working, shards)``; 1-D contiguous working weights of any floating type, changed
                in place, the same on all ranks before and after; every rank owns at most one of the shards.
            master_of: The masters of this rank's shard of a name, 1-D, of the shard's length.

        Raises:
            DesyncError: A rank failed or updates other tensors.
            PayloadError: A message arrived damaged.
            ValueError: The shards of a tensor do not cover it.
        """
        self._master_of = master_of
        framed = self._framed
        if framed is not None and any(working.dtype not in GRAD_DTYPES for _, working, _ in entries):
            framed = None
        with self.recorded("parameter") as whole:
            with self.exchange.preparing(announced=framed is None):
                small = self._settings.min_numel
                items = [Item(n, t, list(s), t.numel() < small) for n, t, s in entries]
                plan = Plan("parameters", items, framed=framed is not None)
            if framed is not None and framed.knows(plan):
                framed.start(plan, 1.0, whole)
            else:
                self._update(plan, whole)
        if framed is not None:
            framed.finish()

    def _update(self, plan: Plan, whole: Record) -> None:
        """With messages that say how long they are."""
        self._writer.clear()
        with self.exchange.preparing():
            written = self.write(plan, [self._writer], copies=self.world_size - 1)
            (message,) = self.complete([self._writer], written, whole)
        with whole.timed("exchange"):
            bounds = [plan.bound(owner) for owner in range(self.world_size)]
            messages = self.exchange.all_gather(message, plan.fingerprint, bounds=bounds)
        if self._framed is not None:
            self._framed.learn(plan, 0, [message] * self.world_size, messages)
        with whole.timed("decode"):
            for owner, received in enumerate(messages):
                self.add_message(plan, owner, received)

    @torch.no_grad()
    def pending_of(self, name: str) -> tuple[Shard, Tensor] | None:
        """This rank's shard of a name, and what its working weights lack there: fp32, to be read before the
        next call or update. None if nothing is pending.
        """
        if name not in self._own:
            return None
        shard, working, master = self._own[name]
        return shard, self._difference(working, master)

    def end_step(
        self, *, skipped: bool = False, loss_scale: float | None = None, reduced_at: float | None = None
    ) -> None:
        """An optimizer step is over; one that was skipped has updated nothing."""
        self.step += 1

    # -- state ---

    def state_dict(self) -> dict[str, Any]:
        """Thresholds and counters of this rank; what is not sent yet follows from the weights."""
        return {"step": self.step, "streams": self._streams_state()}

    def load_state_dict(self, state: dict[str, Any] | None, *, step: int = 0) -> None:
        """Restore :meth:`state_dict`; None measures thresholds anew, ``step`` steps into the training."""
        self.streams.clear()
        self._own.clear()
        self.step = step if state is None else int(state["step"])
        self._loaded = {} if state is None else dict(state["streams"])

    # -- inside ---

    def write(self, plan: Plan, writers: Sequence[MessageWriter], *, copies: int) -> list[Written]:
        """This rank's shards into the message that all ranks get, the first one, which is empty."""
        assert self._master_of is not None, "update() says what the masters are"
        writer, density, written = writers[0], self.schedule.density(self.step), []
        owned = [
            (item, shard, item.view(shard), self._master_of(item.name))
            for item, shard in plan.owned_by(self.rank)
        ]
        rounded = iter(_rounded([(master, held.dtype) for item, _, held, master in owned if item.small]))
        with self.backend.batched():
            for item, shard, working, master in owned:
                stream = None
                if item.small:
                    encoded = encode_all(self.backend, next(rounded), writer)
                else:
                    stream = self.stream(item.name)
                    self._own[item.name] = shard, working, master
                    difference = self._difference(working, master)
                    encoded = stream.encode(difference, [(0, working.numel(), writer)], density)
                name = "parameter_small" if item.small else "parameter"
                dense = copies * encoded.numel * item.entry_bytes
                written.append(Written(None, name, encoded, stream, dense, [copies]))
        return written

    def _difference(self, working: Tensor, master: Tensor) -> Tensor:
        """What the working weights lack, fp32; in memory of its own where kernels may not have been launched
        by the next call, else in memory which that uses again.
        """
        numel = working.numel()
        if self.backend.batches:
            out = torch.empty(numel, dtype=torch.float32, device=self.device)
        else:
            if self._scratch.numel() < numel:
                self._scratch = torch.empty(numel, dtype=torch.float32, device=self.device)
            out = self._scratch[:numel]
        self.backend.difference(master, working, out)
        return out

    def add_frame(
        self, plan: Plan, owner: int, buffer: Tensor, bounds: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Bring working weights to what a frame holds, see :meth:`.kernels.Backend.add_slot`."""
        workings = self._cleared(plan, owner)
        return self.backend.add_slot(buffer, bounds, workings)

    def add_message(self, plan: Plan, owner: int, message: Tensor) -> None:
        """Bring working weights to what an owner's message holds.

        Raises:
            PayloadError: It is damaged.
        """
        workings = self._cleared(plan, owner)
        with self._naming_sender(owner):
            for working, payload in zip(workings, split_message([message], 0, workings), strict=True):
                add_payload(self.backend, payload, working)

    def _cleared(self, plan: Plan, owner: int) -> list[Tensor]:
        """An owner's working weights, zeros where they are sent whole."""
        owned = [(item, item.view(shard)) for item, shard in plan.owned_by(owner)]
        if whole := [working for item, working in owned if item.small]:
            torch._foreach_zero_(whole)
        return [working for _, working in owned]


def _rounded(masters: Sequence[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Masters in the types of their working weights, with few launches for many of them."""
    made = [torch.empty(master.numel(), dtype=dtype, device=master.device) for master, dtype in masters]
    if made:
        torch._foreach_copy_(made, [master for master, _ in masters])
    return made
