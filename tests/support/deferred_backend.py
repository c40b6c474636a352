"""A kernel backend that leaves all figures on its device, and counts how often the host reads any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dct_plugin.codecs import Payload
from dct_plugin.kernels import Job, Stats
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

    def compress(self, job: Job) -> Stats:
        applied = job.applied_tau()
        # What the kernel itself reads, on the device.
        inside = applied.as_subclass(Tensor) if isinstance(applied, Tensor) else applied
        stats = super().compress(replace(job, tau=inside))
        return Stats.on_device(on_device(stats.counts, torch.int64), tau=applied)

    def encode_shared(
        self, source: Tensor, index_payload: Payload | Tensor, value_dtype: int, out: Tensor
    ) -> Stats:
        stats = super().encode_shared(source, index_payload, value_dtype, out)
        return Stats.on_device(on_device(stats.counts, torch.int64))

    def sample_threshold(  # type: ignore[override]
        self, grad: Tensor, residual: Tensor | None, keep_fraction: float, num_samples: int, seed: int
    ) -> Tensor:
        tau = super().sample_threshold(grad, residual, keep_fraction, num_samples, seed)
        return on_device(tau, torch.float32)

    def exact_threshold(  # type: ignore[override]
        self, grad: Tensor, residual: Tensor | None, k: int
    ) -> Tensor:
        return on_device(super().exact_threshold(grad, residual, k), torch.float32)
