"""The state that the hooks in megatron-core share: configuration, metrics, and the course of iterations.

An iteration is one call of Megatron's forward-backward function. Thresholds and residuals move on at the
start of the next training iteration, when it is known whether the optimizer took the step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dct_plugin.config import ActivationConfig, DCTConfig
from dct_plugin.console import logger
from dct_plugin.data_parallel import GradientReducer, Shard
from dct_plugin.metrics import Event, Metrics
from dct_plugin.metrics.sinks import write_scalars

from ..host.activation_streams import ActivationStreams
from ..host.attachment import HostAttachment
from ..host.patching import Patches


class RankCoordinates(NamedTuple):
    """The part of the model that a rank holds: sizes of what cuts the parameters, and its rank in each.

    ``data`` and ``replicas`` are rank and size among those that hold the same parameters.
    """

    layout: dict[str, int]
    tensor: int
    pipeline: int
    expert: int
    data: int
    replicas: int

    @classmethod
    def of_this_rank(cls) -> RankCoordinates:
        """Return those of this process; a plain process group counts as data-parallel ranks."""
        from megatron.core import parallel_state as ps

        if not ps.model_parallel_is_initialized():
            return cls({}, 0, 0, 0, dist.get_rank(), dist.get_world_size())
        layout = {
            "tensor": ps.get_tensor_model_parallel_world_size(),
            "pipeline": ps.get_pipeline_model_parallel_world_size(),
            "virtual pipeline": ps.get_virtual_pipeline_model_parallel_world_size() or 1,
            "expert": ps.get_expert_model_parallel_world_size(),
            "expert tensor": ps.get_expert_tensor_parallel_world_size(),
        }
        return cls(
            layout,
            ps.get_tensor_model_parallel_rank(),
            ps.get_pipeline_model_parallel_rank(),
            ps.get_expert_model_parallel_rank(),
            ps.get_data_parallel_rank(with_context_parallel=True),
            ps.get_data_parallel_world_size(with_context_parallel=True),
        )


class Hook:
    """The interface between the session and a hook; its methods do nothing by default."""

    def begin(self, training: bool) -> None:
        """Prepare for an iteration (``training``: with a backward pass)."""

    def end_step(self) -> None:
        """Close the last training iteration, whose optimizer step was taken or skipped."""

    def before_save(self) -> None:
        """Prepare for a checkpoint of model and optimizer; a collective, between two iterations."""

    def state_dict(self) -> dict[str, Any]:
        """Return a part of :meth:`Session.state_dict`, by its keys."""
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore :meth:`Session.state_dict`; None starts afresh."""

    def sites(self) -> str:
        """Return where the hook is active, of how many places, in words; empty if there is nothing to say."""
        return ""


class Session(HostAttachment):
    """State that the hooks share, from their installation until they are taken out.

    Attributes:
        pass_through: Whether what has sparsity 0 is left to Megatron.
        training: Whether the current iteration has a backward pass.
        is_open: True from the start of a training iteration until it is closed.
        step: Completed training iterations.
        patches: What was replaced in megatron-core.
        active: The settings of the hooks by their names, in words.
        streams: The streams of activations.
        reductions: The :class:`.reductions.Reductions` of the gradients; None where Megatron sums them.
        pending_of: Gives what this rank has not sent of the updates of a parameter, see
            :meth:`~dct_plugin.data_parallel.parameters.ParameterUpdates.pending_of`.
    """

    framework = "Megatron"

    def __init__(self, config: DCTConfig, *, pass_through: bool = True) -> None:
        super().__init__(config)
        self.pass_through = pass_through
        self.training = True
        self.step = 0
        self.patches = Patches()
        self.ends.callback(self.patches.undo)
        self.hooks: list[Hook] = []
        self.active: dict[str, str] = {}
        self.streams = ActivationStreams(self.config.kernels)
        self.reductions: Any = ()
        self.pending_of: Callable[[str], tuple[Shard, Tensor] | None] = lambda name: None
        self.is_open = self._sites_told = False
        self._monitors: set[str] = set()

    @functools.cached_property
    def metrics(self) -> Metrics:
        """The metrics, made at first use, when the process group exists."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        config = self.config.metrics
        interval = getattr(self.megatron_args, "log_interval", None)
        if interval and "every" not in config.model_fields_set:  # one beside each of Megatron's
            config = config.model_copy(update={"every": int(interval)})
        metrics = self.report(rank, size, before_finish=self.end_step, config=config)
        if rank == size - 1:  # the rank that writes Megatron's own log lines
            metrics.add_sink(_print_line)
        return metrics

    @property
    def reducers(self) -> list[GradientReducer]:
        return [each.reducer for each in self.reductions]

    def weights(self) -> list[Tensor]:
        if not self.reductions:
            return []
        return [weight for group in self.reductions.models.groups() for weight in group.params]

    def steps_so_far(self) -> int:
        return self.step

    def begin(self, training: bool) -> None:
        """Begin an iteration."""
        if training:
            self.end_step()
            self.is_open = True
        self.training = training
        self._find_monitor()
        self.streams.begin(training)
        for hook in self.hooks:
            hook.begin(training)

    def end_iteration(self) -> None:
        """Clean up behind the forward-backward function of an iteration, which returned or raised."""
        for each in self.reductions:
            if each.ahead is not None:
                each.ahead.restore()

    def detach(self) -> None:
        self.end_step()
        super().detach()

    def before_save(self) -> None:
        """Tell the hooks that model and optimizer are about to be saved."""
        for hook in self.hooks:
            hook.before_save()

    def end_step(self) -> None:
        """Close the last training iteration, if that has not been done yet."""
        if not self.is_open:
            return
        self.is_open = False
        self.step += 1
        self.streams.end_step()
        for hook in self.hooks:
            hook.end_step()
        if not self._sites_told:
            self._sites_told = True
            self.metrics.warns = is_first_of_stage()
            sites = [each for hook in self.hooks if (each := hook.sites())]
            if sites and self.metrics.warns:
                logger.warning("dct: active: %s", ", ".join(sites))
        self.metrics.step(self.step)  # once for all hooks, and all reducers of one
        self.close_if_done()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, thresholds and counters; call it between iterations.

        Keys: ``step``, ``streams`` (activations' thresholds by layer or boundary), ``reducers``
        (gradients' residuals by kind, see :meth:`~dct_plugin.data_parallel.GradientReducer.state_dict`) and
        ``parameters`` (thresholds of updated weights by optimizer).
        """
        self.end_step()
        state: dict[str, Any] = {"step": self.step, "streams": self.streams.state_dict()}
        state |= {"reducers": {}, "parameters": {}}
        for hook in self.hooks:
            for key, part in hook.state_dict().items():
                state[key].update(part)
        return state

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore :meth:`state_dict` of the same rank; None forgets everything, as at the start."""
        self.is_open = False
        self.step = 0 if state is None else int(state["step"])
        self.streams.load_state_dict({} if state is None else state["streams"], step=self.step)
        for hook in self.hooks:
            hook.load_state_dict(state)

    def is_active(self, section: ActivationConfig) -> bool:
        """Return whether a section compresses activations in the current pass."""
        if not self.training and not section.evaluation:
            return False
        return not self.pass_through or (section.compresses and self.step >= section.warmup_steps)

    @property
    def megatron_args(self) -> Any:
        """Megatron-LM's arguments; None without Megatron-LM."""
        return _megatron_global("_GLOBAL_ARGS")

    def _find_monitor(self) -> None:
        """Add Megatron-LM's writers to the sinks, once there are any (on its last rank)."""
        for name, write in _MONITORS.items():
            writer = _megatron_global(name)
            if writer is not None and name not in self._monitors:
                self._monitors.add(name)
                self.metrics.add_sink(functools.partial(write, writer))


def is_first_of_stage() -> bool:
    """Return whether this rank speaks for its pipeline stage."""
    own = RankCoordinates.of_this_rank() if dist.is_initialized() else None
    return own is None or own.data == own.tensor == 0


def _print_line(events: list[Event]) -> None:
    """Print one line beside Megatron-LM's own for every report."""
    values = {name.removeprefix("dct/"): value for name, value, _ in events}
    classes = dict.fromkeys(name.rpartition("/")[0] for name in values)
    parts = [
        f"{cls}: {values[f'{cls}/sent_bytes'] / 1e6:.3f} MB/step"
        + (f" ({values[f'{cls}/ratio']:.1f}x)" if f"{cls}/ratio" in values else "")
        + f" density {values.get(f'{cls}/density', 1.0):.3f}"
        for cls in classes
        if values.get(f"{cls}/dense_bytes")
    ]
    if parts and "megatron.training" in sys.modules:
        print(f" dct iteration {events[0][2]:8d} | " + " | ".join(parts), flush=True)


def _write_wandb(wandb: Any, events: list[Event]) -> None:
    if wandb.run is not None:  # Megatron ends it before the last report
        wandb.log({name: value for name, value, _ in events}, step=events[0][2])


#: Megatron-LM's global variables that hold a writer, and how it is written to.
_MONITORS = {"_GLOBAL_TENSORBOARD_WRITER": write_scalars, "_GLOBAL_WANDB_WRITER": _write_wandb}


def _megatron_global(name: str) -> Any:
    """Return a global variable of Megatron-LM; None without Megatron-LM, or before it has set it."""
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)
