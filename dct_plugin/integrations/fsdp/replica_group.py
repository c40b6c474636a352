"""The process group that FSDP calls for its all-reduce over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.errors import ConfigError, DesyncError

from ..host.patching import Patches
from .parameter_groups import ShardedParameter


class ReplicaGroup(dist.ProcessGroup):
    """The replicas of one of FSDP's parameter groups: its all-reduce exchanges compressed messages.

    FSDP all-reduces one flat tensor per parameter group: the shards of the parameters that have a gradient in
    this pass, one behind the other, each padded to the same size on all ranks.

    Args:
        replicas: torch's own process group of the replicas.
        parameters: All parameters of FSDP's group.
        reducer: Sums over ``replicas``.
        before: Called with this group before every exchange. Returns whether the reducer is finished at the
            end of the backward pass.

    Attributes:
        expected: Parameters of the reduction that runs now.
        divided_by: What FSDP divides the result of the all-reduce by.
        averages: Whether FSDP asks for the average of the replicas, as it then does of the shards.
    """

    def __init__(
        self,
        replicas: dist.ProcessGroup,
        parameters: Sequence[ShardedParameter],
        reducer: GradientReducer,
        before: Callable[[ReplicaGroup], bool],
    ) -> None:
        super().__init__(replicas.rank(), replicas.size())  # type: ignore[call-arg]
        self.replicas, self.parameters, self.reducer = replicas, list(parameters), reducer
        self._before = before
        self._by_id = {id(each.fsdp): each for each in parameters}
        self._failure: Exception | None = None
        self.expected: list[ShardedParameter] = []
        self.divided_by, self.averages = 1.0, True

    @contextmanager
    def expecting(self, fsdp_parameters: Iterable[Any]) -> Iterator[None]:
        """Surround FSDP's reduction of these parameters.

        Raises:
            ConfigError: FSDP asks for another operation than a sum or an average.
            DesyncError: The tensor is not of these parameters; or see
                :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        self.expected = [self._by_id[id(each)] for each in fsdp_parameters]
        yield
        self.expected = []
        if self._failure is not None:
            raise self._failure

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Done:  # type: ignore[override]
        """Replace the tensor by the thresholded sum, or average, over the replicas.

        :meth:`expecting` raises the errors: torch's function for an all-reduce would raise another one, since
        it does not know this group.
        """
        try:
            self._reduce(tensors[0], options)
        except Exception as error:
            self._failure = error
        return _Done()

    def _reduce(self, flat: Tensor, options: Any) -> None:
        self.averages = options.reduceOp == dist.ReduceOp.AVG
        if not self.averages and options.reduceOp != dist.ReduceOp.SUM:
            raise ConfigError(
                f"rank {dist.get_rank()}: compress_replicas: FSDP asks for {options.reduceOp} over the "
                "replicas; sum and average are supported"
            )
        entries, offset = [], 0
        for each in self.expected:
            if each.shape.numel():
                entries.append((each.name, flat[offset : offset + each.shape.numel()]))
            offset += each.padded_numel
        if offset != flat.numel():
            raise DesyncError(
                f"rank {dist.get_rank()}: FSDP all-reduces {flat.numel()} entries, and the parameters with "
                f"gradients have {offset}"
            )
        finishes_later = self._before(self)
        if entries:
            self.reducer.begin(entries, scale=1.0 / self.size() if self.averages else 1.0).finish()
            if not finishes_later:
                self.reducer.finish()

    @property
    def unit(self) -> float:
        """Unit of the tensors, where that of the optimizer's gradients is 1."""
        return self.divided_by / (1 if self.averages else self.size())


class _Done:
    """The handle of an exchange that has ended."""

    def wait(self, *arguments: Any) -> bool:
        return True


class ReductionSeam:
    """Tells process groups which parameters FSDP is about to all-reduce, and by what it divides the sum.

    One for the process. While a model is compressed, it wraps two functions of torch's, which pass through
    for all other groups.
    """

    def __init__(self) -> None:
        self._patches, self._models = Patches(), 0

    def leave(self) -> None:
        """Note that a model is compressed no longer."""
        self._models -= 1
        if not self._models:
            self._patches.undo()

    def enter(self) -> None:
        """Note that one more model is compressed."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

        self._models += 1
        if self._models > 1:
            return
        self._patches.intercept(_fsdp_param_group, "foreach_reduce", self._reduce)
        self._patches.intercept(_fsdp_collectives, "_get_gradient_divide_factors", self._factors)

    def _reduce(self, original: Any, fsdp_params: Any, *arguments: Any, **keywords: Any) -> Any:
        group = self._ours(arguments, keywords)
        if group is None:
            return original(fsdp_params, *arguments, **keywords)
        with group.expecting(fsdp_params):
            return original(fsdp_params, *arguments, **keywords)

    def _factors(self, original: Any, *arguments: Any, **keywords: Any) -> Any:
        factors = original(*arguments, **keywords)
        group = self._ours(arguments, keywords)
        if group is not None:
            group.divided_by = float(factors[1] or 1.0)
        return factors

    def _ours(self, arguments: Any, keywords: Any) -> Any:
        found = (each for each in (*arguments, *keywords.values()) if isinstance(each, ReplicaGroup))
        return next(found, None)


#: The seam of this process.
SEAM = ReductionSeam()
