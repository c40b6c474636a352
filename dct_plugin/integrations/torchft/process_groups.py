"""The process groups for ``torchft.Manager(pg=...)``.

torchft makes a new group for every quorum. It calls :meth:`errored` once in a step, before it decides whether
to commit the step. Failures are reported there: with torchft 0.2 an error that an all-reduce raises would end
the backward pass.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torchft
from torch import Tensor
from torchft.process_group import ProcessGroupWrapper

from dct_plugin._version import __version__
from dct_plugin.config import DCTConfig, option_values
from dct_plugin.console import logger
from dct_plugin.errors import ConfigError
from dct_plugin.host_traffic import counted_by
from dct_plugin.metrics import Metrics
from dct_plugin.policy import Training

from ..host.attachment import HostAttachment, switched_off
from ..host.settings import optimizers_of
from .quorum import QuorumPeers, Statement
from .residuals import NO_AVERAGE, AveragedWeights, Counts, ReplicaResiduals

_STATE = "dct_residuals"
#: Keys under which DiLoCo registers the states of its fragments with the manager.
_FRAGMENT = "StreamingDiLoCoFragment_"


class ReplicaAttachment(HostAttachment):
    """The settings of a replica, whose quorums torchft makes anew: there is no agreement at start."""

    framework = "torchft"
    optimizers: Sequence[torch.optim.Optimizer] = ()

    def weights(self) -> list[Tensor]:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [getattr(weight, "_local_tensor", weight) for group in groups for weight in group["params"]]


class _ThresholdedGroup(ProcessGroupWrapper):
    """The common part of both process groups; it comes before torchft's class in their order of bases.

    Args:
        section: The configuration, or a mapping with the keys of the ``dct`` section.
        timeout: Time to wait for another replica, in quorums and in exchanges.
        averages: What ``Manager.allreduce`` averages: gradients, also DiLoCo's; or weights, as LocalSGD
            does. Of weights the differences from their last average are sent.
        optimizer: The optimizer that uses the averages. It decides on the feedback if the section names none.
        metrics: The metrics to record in; None makes them from the configuration.

    Raises:
        ConfigError: A setting does not work with torchft, or this torch has no NCCL for that group.
    """

    def __init__(
        self,
        section: DCTConfig | Mapping[str, Any] | None = None,
        *,
        timeout: timedelta = timedelta(seconds=60),
        averages: Literal["gradients", "weights"] = "gradients",
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        if averages not in ("gradients", "weights"):
            raise ConfigError(f"averages = {averages!r}: must be one of 'gradients', 'weights'")
        if isinstance(self, torchft.ProcessGroupNCCL) and not dist.is_nccl_available():
            raise ConfigError("ProcessGroupNCCL: this torch has no NCCL; take ProcessGroupGloo")
        training = Training(
            ranks=2,
            step_ahead_unavailable="torchft hands over tensors without their parameters",
            optimizer_unknown_hint=f"{type(self).__name__}(section, optimizer=optimizer) takes what suits it",
            is_timed=False,
        )
        attachment = ReplicaAttachment(section)
        attachment.resolve(optimizer, training)
        attachment.optimizers = optimizers_of(optimizer, type(self).__name__)
        self._attachment, self.config = attachment, attachment.config
        self._off = switched_off(self.config)
        for line in (f"nothing to do: {self._off}",) if self._off else attachment.lines:
            logger.warning("dct: %s", line)
        super().__init__(timeout)
        self._limit = timeout
        self._process = uuid.uuid4().hex
        self._manager: Any = None
        self._peers: QuorumPeers | None = None
        self._residuals = ReplicaResiduals(self.config, metrics, attachment.report)
        self._weights = AveragedWeights(self._residuals) if averages == "weights" else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dct_torchft")
        self._failure: Exception | None = None
        self._decided = False
        """True if the manager has asked for errors since the last all-reduce: the round is over."""

    @property
    def metrics(self) -> Metrics | None:
        """The metrics; None before the first quorum."""
        return self._residuals.metrics

    @property
    def counts(self) -> Counts:
        """Counts of the events of this replica."""
        return self._residuals.counts

    def follow(self, manager: torchft.Manager) -> None:
        """Follow the steps of the manager that this group was made for; to be called before its first step.

        Residuals are then kept and taken back as the manager commits, and thresholds are part of the state
        that a replica gets when it heals. Wrappers between the two, such as torchft's
        ``ErrorSwallowingProcessGroupWrapper``, then pass errors on to the manager.

        Raises:
            ConfigError: The manager has another process group.
        """
        if self._off:
            return
        for wrapper in self._wrappers_in(manager):
            # torchft's wrappers pass on everything but this, which also tells that a round is over.
            wrapper.errored = partial(_first_error, self.errored, wrapper.errored)
        self._manager = manager
        manager.register_state_dict_fn(_STATE, self._residuals.load_state_dict, self._residuals.state_dict)

    # -- called by torchft ---

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """Replace floating-point tensors by their thresholded sum over the replicas of the quorum.

        Everything else is torchft's own all-reduce, on the worker thread as well: all replicas make their
        all-reduces in one order.
        """
        operation = getattr(opts, "reduceOp", opts)
        averages = operation == dist.ReduceOp.AVG
        floating = all(each.is_floating_point() and each.layout is torch.strided for each in tensors)
        is_summed = (averages or operation == dist.ReduceOp.SUM) and floating
        if self._manager is None and not self._off:
            raise self._no_manager()
        if self._peers is None and self._failure is None:
            return super().allreduce(tensors, opts)  # switched off; or it raises: there was no quorum
        device = tensors[0].device
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if self._failure is not None:
            future.set_result(tensors)
            return _Pending(future)
        try:
            if is_summed:
                calls = [self._call(tensor, averages=averages) for tensor in tensors]
            else:
                calls = [partial(self._other, tensors, opts)]
        except ConfigError as error:
            self._fail(error)
            calls = []
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._worker.submit(self._run, calls, ready, partial(future.set_result, tensors))
        return _Pending(future)

    def errored(self) -> Exception | None:
        """Return the error of this step; torchft asks before it decides whether to commit.

        Raises:
            ConfigError: This replica cannot go on: a setting is wrong, or the others run something else.
        """
        self._drain()
        self._decided = True
        if isinstance(self._failure, ConfigError):
            raise self._failure
        return self._failure or super().errored()

    def shutdown(self) -> None:
        """Close all connections, and the metrics, with the last step; may be called again."""
        self._leave_quorum()
        if self._manager is not None:
            self._settle()
        self._attachment.close()
        super().shutdown()

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup | None:
        """Make the group of a new quorum; torchft's two versions both call this. Errors are kept for
        :meth:`errored`.

        Raises:
            ConfigError: No manager is followed, so that none would ask for the error.
        """
        if self._off:
            return super()._create_pg(store, rank, world_size)
        self._leave_quorum()
        self._failure = None
        if self._manager is None:
            self._failure = self._no_manager()
            raise self._failure
        try:
            self._settle()
            self._residuals.leave()
            dense: dist.ProcessGroup = super()._create_pg(store, rank, world_size)
            peers = QuorumPeers(store, rank, world_size, self._statement(), dense=dense, limit=self._limit)
            self._peers = peers
            self._residuals.enter(peers)
            if self._weights is not None:
                self._weights.enter(peers.statements)
            return dense
        except Exception as error:
            logger.warning("dct: %s", error)
            self._failure = error
            return None

    # -- inside ---

    def _no_manager(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} does not know its manager: call pg.follow(manager) before the first "
            "step; without a torchft.Manager use torchft's own group"
        )

    def _wrappers_in(self, manager: torchft.Manager) -> list[Any]:
        """Return the process groups through which a manager reaches this one, the outermost first."""
        wrappers, group = [], manager._pg
        while group is not self:
            wrappers.append(group)
            group = getattr(group, "_pg", None)
            if not isinstance(group, dist.ProcessGroup):
                raise ConfigError(
                    f"{type(self).__name__}.follow: the manager's process group is "
                    f"{type(wrappers[0]).__name__}, which is no torchft ProcessGroupWrapper around this one; "
                    "make the manager with pg=pg"
                )
        return wrappers

    def _call(self, tensor: Tensor, *, averages: bool) -> partial[None]:
        """Return the reduction of a tensor as a call without arguments."""
        if self._decided:
            self._settle()
        manager, residuals = self._manager, self._residuals
        assert self._peers is not None
        fragments = sum(key.startswith(_FRAGMENT) for key in manager._load_state_dict_fns)
        step, participates = manager.current_step(), manager.is_participating()
        name = residuals.name_of(tensor, step=step, fragments=fragments)
        common = {"step": step, "participates": participates}
        if self._weights is None:
            scale = 1.0 / len(self._peers.ranks) if averages else 1.0
            reduce = partial(residuals.reduce, name, scale=scale, **common)
        else:
            count = 1 if averages else manager.num_participants()
            reduce = partial(self._weights.reduce, name, peers=self._peers, count=count, **common)
        return partial(_in_place, tensor, reduce)

    def _other(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """Make an all-reduce of torchft's own."""
        assert self.metrics is not None
        with counted_by(partial(self.metrics.uncompressed, "gradient", "other_types")):
            super().allreduce(tensors, opts).wait()

    def _run(self, calls: Sequence[partial[None]], ready: Any, done: partial[None]) -> None:
        """Make reductions on the worker thread."""
        try:
            with torch.no_grad(), _after(ready):
                for call in calls:
                    if self._failure is None:
                        call()
                done()
        except Exception as error:
            self._fail(error)
            done()

    def _fail(self, error: Exception) -> None:
        """Note an error, and close the connections, so that the other replicas fail at once, too."""
        logger.warning("dct: %s", error)
        self._failure = error
        if self._peers is not None:
            self._peers.close()
        with contextlib.suppress(Exception):
            self.abort()

    def _drain(self) -> None:
        self._worker.submit(int).result()

    def _leave_quorum(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self._drain()
        self._peers = None

    def _settle(self) -> None:
        """Keep what the last round changed if the manager has committed its step; else take it back."""
        self._decided = False
        step = self._manager.current_step()
        committed = self._residuals.settle(step)
        if self._weights is not None:
            self._weights.settle(step, committed=committed)

    def _statement(self) -> Statement:
        facts = {
            **option_values(self.config),
            "averages": "gradients" if self._weights is None else "weights",
            "version of dct-plugin": __version__,
        }
        return Statement(
            process=self._process,
            name=str(getattr(self, "_replica_id", "")),
            step=self._manager.current_step(),
            reference=NO_AVERAGE if self._weights is None else self._weights.version,
            debt=self._residuals.debt()[1],
            facts=facts,
        )


class ProcessGroupGloo(_ThresholdedGroup, torchft.ProcessGroupGloo):
    """Process group of torchft over gloo that thresholds all-reduces of floating-point tensors.

    Args:
        section: The keys of the ``dct`` section.

    Example:
        >>> pg = ProcessGroupGloo({"data_parallel": {"sparsity": 0.99}}, optimizer=optimizer)
        >>> manager = torchft.Manager(pg=pg, min_replica_size=2, load_state_dict=load, state_dict=state)
        >>> pg.follow(manager)
    """


class ProcessGroupNCCL(_ThresholdedGroup, torchft.ProcessGroupNCCL):
    """Process group of torchft over NCCL for dense sums. Thresholded messages go through the host by TCP, so
    a replica that dies is detected at once.

    Args:
        section: The keys of the ``dct`` section.
    """


class _Pending(dist._Work):
    """The handle of all-reduces that run on the worker thread. It raises nothing, see :meth:`errored`."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def synchronize(self) -> None:
        self._future.wait()

    block_current_stream = synchronize

    def get_future(self) -> Any:
        return self._future


def _first_error(*sources: Callable[[], Exception | None]) -> Exception | None:
    return next((error for source in sources if (error := source()) is not None), None)


def _in_place(tensor: Tensor, reduce: partial[None]) -> None:
    """Reduce a tensor of any strides."""
    flat = tensor.detach().reshape(-1)
    reduce(flat)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


@cache
def _stream_of(device: torch.device, thread: int) -> Any:
    """Return the stream of a group's thread: each stream keeps the memory of what ran on it."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _after(ready: Any) -> Iterator[None]:
    """Run the block on a CUDA stream of its own, after the event ``ready``, and wait for it at the end."""
    if ready is None:
        yield
        return
    # A new thread has device 0, whatever the device of the tensors is.
    with torch.cuda.device(ready.device), torch.cuda.stream(_stream_of(ready.device, threading.get_ident())):
        stream = torch.cuda.current_stream()
        stream.wait_event(ready)
        yield
        stream.synchronize()
