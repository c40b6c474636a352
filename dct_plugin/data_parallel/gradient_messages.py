"""The messages that every topology begins with: this rank's gradients, thresholded, for their owners."""

from __future__ import annotations

from collections.abc import Sequence

from ..codecs.message import MessageWriter
from ..compression.stream import Encoded, as_flat, encode_all
from ..host_traffic import bytes_sent
from .plan import PlannedTensor, ReductionPlan
from .stream_group import WrittenTensor
from .topology import Phase


class GradientMessages(Phase):
    """Every rank sends its thresholded gradients, and leaves zeros in their place."""

    def dense_bytes(self, nbytes: float) -> float:
        """Return the bytes that the host would send for ``nbytes`` of gradients, where these messages go."""
        group = self.group
        return bytes_sent("all_reduce", nbytes, group.world_size, gloo=group.device.type == "cpu")

    def write(self, plan: ReductionPlan, writers: Sequence[MessageWriter]) -> list[WrittenTensor]:
        with self.group.backend.batched():
            return [self._write(tensor, writers) for tensor in plan.tensors]

    def _write(self, tensor: PlannedTensor, writers: Sequence[MessageWriter]) -> WrittenTensor:
        group, stream = self.group, None
        grad, sparsity = as_flat(tensor.tensor), group.sparsity(tensor.name)
        parts = [(shard.start, shard.stop, writers[shard.owner]) for shard in tensor.shards]
        if tensor.small:
            stats = [
                encode_all(group.backend, grad[start:stop], writer, clear=True).stats[0]
                for start, stop, writer in parts
            ]
            encoded = Encoded(stats, grad.numel())
        else:
            stream = group.stream(tensor.name)
            encoded = stream.encode(grad, parts, sparsity.density, clear=True)
        if grad.data_ptr() != tensor.tensor.data_ptr():
            tensor.tensor.zero_()
        others = group.world_size - 1
        return WrittenTensor(
            tensor.name,
            "gradient_small" if tensor.small else "gradient",
            encoded,
            stream,
            self.dense_bytes(tensor.tensor.nbytes),
            [others if self.to_all else int(shard.owner != group.rank) for shard in tensor.shards],
            "" if tensor.small else sparsity.label,
        )
