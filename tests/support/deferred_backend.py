"""A kernel backend that leaves all figures on its device, and counts how often the host reads any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dct_plugin.codecs.message import MessageWriter
from dct_plugin.codecs.payload import split_message
from dct_plugin.codecs.slots import PREFIX, WORDS
from dct_plugin.codecs.stats import Figures, Stats
from dct_plugin.compression.stream import add_payload
from dct_plugin.errors import PayloadError
from dct_plugin.kernels import Job
from dct_plugin.kernels.job import Spans, applied_tau
from dct_plugin.kernels.reference import ReferenceBackend

_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy),
    *(Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__),
}


class OnDevice(Tensor):
    """Tensor whose values count as being on a device: what is computed from it is there, too."""

    reads: ClassVar[int] = 0
    """Copies to the host so far, of any such tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in _READS or (func is Tensor.to and "cpu" in map(str, args)):
            OnDevice.reads += 1
            return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
        return result


def on_device(value: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype).as_subclass(OnDevice)


class DeferredBackend(ReferenceBackend):
    """The reference's results, with the interface of a backend that never waits for its kernels."""

    name = "deferred"
    lengths_on_host = False

    def compress(self, job: Job) -> Stats:
        applied = applied_tau(job.tau)
        # What the kernel itself reads, on the device.
        inside = applied.as_subclass(Tensor) if isinstance(applied, Tensor) else applied
        stats = super().compress(replace(job, tau=inside))
        return Stats.on_device(Figures(on_device(stats.counts, torch.int64)), tau=applied)

    def sample_threshold(  # type: ignore[override]
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> Tensor:
        tau = super().sample_threshold(grad, residual, keep_fraction, num_samples, seed)
        return on_device(tau, torch.float32)

    def write_slots(
        self,
        writer: MessageWriter,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        fingerprint: int,
        nothing: Tensor | None = None,
    ) -> None:
        empty = 0 if nothing is None else int(nothing.as_subclass(Tensor))
        for receiver, (begin, end) in enumerate(bounds):
            out = buffer[begin:end]
            parts = [
                each.buffer[each.address - each.buffer.data_ptr() :][: int(_plain(each.stats)[0])]
                for each in writer.placed
                if each.receivers == (receiver,)
            ]
            message = torch.cat([out[:0], *parts])
            out.view(torch.int64)[:WORDS] = torch.tensor([message.numel(), fingerprint, empty, 0])
            room = out[PREFIX:]
            room[: message.numel()] = message[: room.numel()]

    def prepare_sum(
        self,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        outs: Sequence[Tensor],
        scale: float,
        spans: Spans | None = None,
        *,
        spare: bool = False,
        bits: int = 2,
    ) -> Callable[[], Tensor]:
        def add_up() -> Tensor:
            if spans is None:
                return self._sum_slots(buffer, bounds, outs, scale, spare)
            parts = [[outs[w][start:stop] for w, start, stop in each] for each in spans.of]
            pairs = zip(bounds, parts, strict=True)
            return torch.cat([self._sum_slots(buffer, [place], own, scale, spare) for place, own in pairs])

        return add_up

    def _sum_slots(
        self,
        buffer: Tensor,
        bounds: Sequence[tuple[int, int]],
        outs: Sequence[Tensor],
        scale: float,
        spare: bool,
    ) -> Tensor:
        slots = [buffer[slice(*each)] for each in bounds]
        heads = [slot.view(torch.int64)[:WORDS].tolist() for slot in slots]
        missing = [
            not 0 <= size <= slot.numel() - PREFIX or empty
            for slot, (size, _, empty, _) in zip(slots, heads, strict=True)
        ]
        if any(missing):
            for out in outs if not spare else ():
                out.fill_(torch.nan)
        elif outs:
            messages = [slot[PREFIX : PREFIX + head[0]] for slot, head in zip(slots, heads, strict=True)]
            try:
                if spare and outs[0].dtype != torch.int16:
                    for out, payload in zip(outs, split_message(messages, 0, outs), strict=True):
                        add_payload(self, payload, out)
                else:
                    self.sum_messages(messages, outs, scale)
            except PayloadError as error:
                heads[error.message][-1] = 7
        return on_device(heads, torch.int64)

    def exact_threshold(  # type: ignore[override]
        self, grad: Tensor, residual: Tensor | None, k: int
    ) -> Tensor:
        return on_device(super().exact_threshold(grad, residual, k), torch.float32)


def _plain(stats: Stats) -> Tensor:
    """Return the figures of a payload; nobody counts this look at them."""
    return stats.device_counts.as_subclass(Tensor)
