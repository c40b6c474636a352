"""DeepSpeed's slot for compressed momentum: ``"comm_backend_name": "dct"``.

1-bit Adam, 1-bit LAMB and 0/1 Adam (Tang et al., ICML 2021; Li et al., 2021; Lu et al., 2022) exchange their
momentum through a backend that they choose by name, and keep two errors for it: the worker's, and that of the
part that a rank sums up for all. Here what is exchanged is thresholded instead of reduced to signs, through
the plugin's codecs and exchange; the residuals of its streams lie in the optimizer's two buffers. DeepSpeed
has these optimizers up to 0.19.6.

Deleting this file and its use in :mod:`.engine_hook` removes the feature.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.plan import Shard, shards_in
from dct_plugin.data_parallel.topologies import TwoPhase
from dct_plugin.errors import ConfigError, VersionError

from ..host.patching import Function, Patches, when_imported
from .engine import EngineContext, precision_of
from .rules import without_slot
from .section import PATH_ATTRIBUTE, SECTION, inner_optimizer
from .stage0 import Stage0Path

#: The value of ``comm_backend_name`` that chooses the plugin.
BACKEND_NAME = SECTION
#: DeepSpeed's modules with a slot for compressed momentum, and the optimizer in each; up to 0.19.6.
OPTIMIZERS = {
    "deepspeed.runtime.fp16.onebit.adam": "OnebitAdam",
    "deepspeed.runtime.fp16.onebit.lamb": "OnebitLamb",
    "deepspeed.runtime.fp16.onebit.zoadam": "ZeroOneAdam",
}
#: Module, class and name of the backend in whose place ours is made.
_STAND_IN = "deepspeed.runtime.comm.compressed", "CompressedBackend", "compressed"
#: The stream of 1-bit LAMB, which has all momenta in one tensor.
_ALL = "momentum"


@contextmanager
def prepared() -> Iterator[None]:
    """Make the optimizers in :data:`OPTIMIZERS` accept the name, inside the block.

    Raises:
        VersionError: In place of an error in the block, if this DeepSpeed has none of them.
    """
    with Patches() as patches, ExitStack() as waiting:

        def prepare(module: ModuleType) -> None:
            patches.intercept(getattr(module, OPTIMIZERS[module.__name__]), "__init__", _init)

        for name in OPTIMIZERS:  # DeepSpeed imports the one that it needs
            waiting.callback(when_imported(name, prepare))
        try:
            yield
        except Exception as error:
            if _has_slot():
                raise
            version = getattr(sys.modules.get("deepspeed"), "__version__", "")
            raise VersionError(without_slot(version)) from error


def _init(original: Function, *args: Any, **keywords: Any) -> None:
    given = inspect.signature(original).bind(*args, **keywords)
    if given.arguments.get("comm_backend_name") != BACKEND_NAME:
        original(*args, **keywords)
        return
    module, attribute, given.arguments["comm_backend_name"] = _STAND_IN
    own, there = ModuleType(module), sys.modules.get(module)
    setattr(own, attribute, Backend)
    sys.modules[module] = own  # DeepSpeed's own cannot be imported without the device that it is written for
    try:
        original(*given.args, **given.kwargs)
    finally:
        del sys.modules[module]
        if there is not None:
            sys.modules[module] = there
    made = given.arguments["self"]
    made.comm_backend_name = BACKEND_NAME
    setattr(made, PATH_ATTRIBUTE, MomentumPath)
    # DeepSpeed gives the first step of a process to trying its backend out: no weight moves. After a
    # checkpoint was loaded, the step after it is then taken with each rank's own gradient.
    made.initialize = True


def _has_slot() -> bool:
    """Return whether this DeepSpeed has one of the optimizers."""
    try:
        return any(importlib.util.find_spec(name) is not None for name in OPTIMIZERS)
    except ImportError:
        return False


class Backend:
    """The backend that the optimizers call; the gradient path of their engine connects it.

    Args:
        mpu: DeepSpeed's model-parallel unit, None for data parallelism over all ranks.
    """

    def __init__(self, mpu: Any = None) -> None:
        group = None if mpu is None else mpu.get_data_parallel_group()
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.path: MomentumPath | None = None

    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int
    ) -> Tensor:
        """Replace ``buffer_m`` by the mean of what the ranks send of it, bitwise the same on all.

        Args:
            buffer_m: A momentum of any shape; changed in place and returned.
            worker_error: fp32, at least as many entries: the residual of this rank.
            server_error: fp32, one over the number of ranks of these: the residual of the part that this rank
                sums up for all.
            local_rank: Not used.

        Raises:
            ConfigError: The engine's configuration switches the plugin off.
            DesyncError, PayloadError: See :meth:`~dct_plugin.data_parallel.GradientReducer.all_reduce`.
        """
        if self.path is None:
            raise ConfigError(
                f"optimizer.params.comm_backend_name = '{BACKEND_NAME}': the engine that this optimizer "
                "belongs to is not attached to dct"
            )
        if buffer_m.numel():
            self.path.average(buffer_m, worker_error, server_error)
        return buffer_m


class _BuffersOfOptimizer(TwoPhase):
    """A two-phase exchange whose owners own what the optimizer has buffers for; small tensors need none."""

    part = 0
    """Entries that each rank owns."""

    def shards(self, name: str, numel: int, *, small: bool) -> Sequence[Shard]:
        return super().shards(name, numel, small=small) if small else shards_in(0, numel, self.part)


class MomentumReducer(GradientReducer):
    """A reducer that averages one momentum after the other; its residuals are the optimizer's."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._layout = _BuffersOfOptimizer(self.group)
        if isinstance(self.topologies.all_reduce, TwoPhase):
            self.topologies.all_reduce = self._layout

    def average(self, name: str, momentum: Tensor, worker_error: Tensor, server_error: Tensor) -> None:
        """Replace ``momentum`` (1-D) by the mean of what the ranks send of ``momentum + worker_error``.

        Args:
            name: The name of the stream.
            momentum, worker_error, server_error: See :meth:`Backend.compressed_allreduce`.
        """
        numel, self._layout.part = momentum.numel(), server_error.numel()
        group = self.group
        if not group.is_small(name, numel):
            group.streams.named(name).use_residual_memory(worker_error[:numel])
            for shard, key in self.topologies.all_reduce.owner_residuals(name, numel):
                if shard.owner == group.rank:
                    error = server_error[: shard.stop - shard.start]
                    group.streams.named(key).use_residual_memory(error)
        self.all_reduce([(name, momentum)], scale=1.0 / group.world_size)


class MomentumPath(Stage0Path):
    """The exchange of an optimizer's momentum; gradients of its dense steps are left to DeepSpeed."""

    reducer_class = MomentumReducer
    without_nodes = "1-bit optimizers"
    loss_scaled = False  # momentum is in the weights' units, and is not exchanged in a step that is skipped
    reducer: MomentumReducer

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._inner = inner_optimizer(self.engine)
        # Tensors of the optimizer are parameters, or flat copies of groups of them.
        tensors = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        self._stream_names = {id(t): self._names.get(id(t), f"group {i}") for i, t in enumerate(tensors)}
        self._sizes = {self._stream_names[id(t)]: t.numel() for t in tensors}
        if hasattr(self._inner, "exp_avg_flat"):
            # 1-bit LAMB has all momenta in one tensor, with zeros at its end.
            unit = self._inner.size * self._inner.divider
            self._sizes = {_ALL: -(-sum(self._sizes.values()) // unit) * unit}
            self._stream_names = {}
        self._owners: dict[int, Any] = {}

    def describe(self) -> str:
        return f"the momentum of {type(self._inner).__name__}, {precision_of(self.engine)}"

    def install(self, patches: Patches) -> None:
        patches.replace(self._inner.comm_backend_handle, "path", self)
        self.steps.begin()  # in the optimizer's dense steps nothing comes here, and nothing is wrong

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def average(self, momentum: Tensor, worker_error: Tensor, server_error: Tensor) -> None:
        """See :meth:`Backend.compressed_allreduce`."""
        self.steps.begin()
        flat = momentum.detach().reshape(-1)
        self.reducer.average(self._stream_name(worker_error), flat, worker_error, server_error)
        if flat.data_ptr() != momentum.data_ptr():
            momentum.copy_(flat.view(momentum.shape))

    def _stream_name(self, worker_error: Tensor) -> str:
        """Return the stream whose residual is ``worker_error``; a loaded checkpoint changes the tensors."""
        state = self._inner.state
        owner = self._owners.get(id(worker_error))
        if owner is None or state[owner].get("worker_error") is not worker_error:
            self._owners = {id(s["worker_error"]): p for p, s in state.items() if "worker_error" in s}
            owner = self._owners.get(id(worker_error))
        return _ALL if owner is None else self._stream_names[id(owner)]
