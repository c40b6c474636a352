"""Sums of ZeRO-1 and ZeRO-2 that are filed before the host knows whether all messages were there.

DeepSpeed copies what a bucket's reduction gives into the gradients of its partition, for the bucket's buffer
is filled again, and works with these at the end of the backward pass. So the host waits for a device there,
once for all buckets: a message that had not fitted its frame is sent again, and its sums go to where
DeepSpeed has put the others. Elsewhere (gradients that go to the host, are added up as they are filed, or
have another type than their messages) a bucket is waited for before it is filed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer

from ..host.patches import Patches


class Filing:
    """Reductions that are waited for at the end of the backward pass.

    Args:
        optimizer: A ``DeepSpeedZeroOptimizer``.
        reducer: Of its gradients.
    """

    def __init__(self, optimizer: Any, reducer: GradientReducer) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        self._unfiled: dict[int, tuple[str, int]] = {}
        """By the id of a parameter: its name in the reducer, and its entries."""
        self._nothing = torch.empty(1, device=reducer.device)
        reducer.deferred = True

    @classmethod
    def of(cls, optimizer: Any, reducer: GradientReducer) -> Filing | None:
        """None where sums do not stay where they are filed, or nobody waits for a device."""
        compact = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda _: False)
        stays = optimizer.contiguous_gradients and optimizer.reduce_scatter and not optimizer.cpu_offload
        stays = stays and not any(compact(group) for group in range(len(optimizer.bit16_groups)))
        if not reducer.fixed_size or not stays or getattr(optimizer, "zenflow", False):
            return None
        return cls(optimizer, reducer)

    def begin(
        self, tensor: Tensor, dtype: torch.dtype, parameters: Iterable[tuple[str, torch.nn.Parameter]]
    ) -> None:
        """A bucket's reduction is queued, of these parameters, with their names in the reducer."""
        if tensor.dtype == dtype == self._optimizer.dtype:
            self._unfiled |= {id(parameter): (name, parameter.numel()) for name, parameter in parameters}
        else:
            self._reducer.finish()

    def install(self, patches: Patches) -> None:
        """Patch the optimizer instance."""
        optimizer = self._optimizer

        def make_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
            def reduce_ipg_grads(comm_dtype: Any = None) -> None:
                original(comm_dtype)
                for name, numel in self._unfiled.values():  # other ranks': their memory may be given back
                    self._reducer.replace_result(name, self._nothing.expand(numel))
                self._unfiled.clear()
                if comm_dtype is None:  # the end of the backward pass
                    stream = optimizer.reduction_stream if optimizer.overlap_comm else None
                    on_cuda = stream is not None and self._reducer.device.type == "cuda"
                    with torch.cuda.stream(stream) if on_cuda else contextlib.nullcontext():
                        self._reducer.finish()

            return reduce_ipg_grads

        def make_copy(original: Callable[..., Any]) -> Callable[..., Any]:
            def copy_grads_in_partition(parameter: Any, *arguments: Any) -> None:
                original(parameter, *arguments)
                if (unfiled := self._unfiled.pop(id(parameter), None)) is not None:
                    filed = optimizer.get_gradient_for_reduction(parameter)
                    self._reducer.replace_result(unfiled[0], filed.detach().view(-1))

            return copy_grads_in_partition

        patches.wrap(optimizer, "reduce_ipg_grads", make_reduce)
        patches.wrap(optimizer, "copy_grads_in_partition", make_copy)
