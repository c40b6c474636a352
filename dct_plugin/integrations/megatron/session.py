"""The state that the hooks in megatron-core share: configuration, metrics, and the course of iterations.

An iteration is one call of Megatron's forward-backward function. Thresholds and residuals move on at the
start of the next training iteration, when it is known whether the optimizer took the step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dct_plugin.config import ActivationConfig, DCTConfig
from dct_plugin.console import logger
from dct_plugin.data_parallel import Shard
from dct_plugin.metrics import Event, Metrics
from dct_plugin.model_parallel import ActivationStream

from ..host.activation_streams import ActivationStreams
from ..host.patching import Patches, when_imported
from ..host.reporting import Reporting


class Hook:
    """The interface between the session and a hook; its methods do nothing by default."""

    def begin(self, training: bool) -> None:
        """Prepare for an iteration (``training``: with a backward pass)."""

    def flush(self) -> None:
        """Send all that was not sent in the next step, after which the hooks are taken out."""

    @property
    def flushed(self) -> bool:
        """True if a step after :meth:`flush` was made."""
        return True

    def end_iteration(self) -> None:
        """Clean up behind Megatron's forward-backward function, before the optimizer's step."""

    def end_step(self) -> None:
        """Close the last training iteration, whose optimizer step was taken or skipped."""

    def before_save(self) -> None:
        """Prepare for a checkpoint of model and optimizer; a collective, between two iterations."""

    def state_dict(self) -> dict[str, Any]:
        """Return a part of :meth:`Session.state_dict`, by its keys."""
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore :meth:`Session.state_dict`; None starts afresh."""

    def pending_of(self, name: str) -> tuple[Shard, Tensor] | None:
        """See :meth:`~dct_plugin.data_parallel.parameters.ParameterUpdates.pending_of`."""
        return None

    def sizes(self) -> dict[str, int]:
        """Return the numbers of entries of the parameters whose residuals the hook keeps, by name."""
        return {}

    def sites(self) -> str:
        """Return where the hook is active, of how many places, in words; empty if there is nothing to say."""
        return ""

    def close(self) -> None:
        """Release threads and state, when the hooks are taken out."""


class Session:
    """State that the hooks share, from their installation until they are taken out.

    Attributes:
        config: The whole configuration, once the optimizers are known with the feedback that suits them.
        written: The configuration as it was written.
        pass_through: Whether what has sparsity 0 is left to Megatron.
        training: Whether the current iteration has a backward pass.
        step: Completed training iterations.
        patches: What was replaced in megatron-core.
        active: The settings of the hooks by their names, in words.
    """

    def __init__(self, config: DCTConfig, *, pass_through: bool = True) -> None:
        self.config = self.written = config
        self.pass_through = pass_through
        self.training = True
        self.step = 0
        self.ends = contextlib.ExitStack()
        """Takes off what the hooks have put on megatron-core and the process."""
        self.patches = Patches()
        self.ends.callback(self.patches.undo)
        self.hooks: list[Hook] = []
        self.active: dict[str, str] = {}
        self._open = self._leaves = self._sites_told = False
        self._monitors: set[str] = set()

    @functools.cached_property
    def metrics(self) -> Metrics:
        """The metrics, made at first use, when the process group exists."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        config = self.config.metrics
        interval = getattr(self.megatron_args, "log_interval", None)
        if interval and "every" not in config.model_fields_set:  # one beside each of Megatron's
            config = config.model_copy(update={"every": int(interval)})
        metrics = Metrics(config, rank=rank, world_size=size)
        if rank == size - 1:  # the rank that writes Megatron's own log lines
            metrics.add_sink(_print_line)
        self.ends.callback(Reporting(metrics, before_finish=self.end_step).finish)
        return metrics

    def when_imported(self, module: str, function: Callable[[ModuleType], None]) -> None:
        """Call ``function(module)`` as soon as that module has run, if it does before the hooks are taken
        out.
        """
        self.ends.callback(when_imported(module, function))

    def begin(self, training: bool) -> None:
        """Begin an iteration."""
        if training:
            self.end_step()
            self._open = True
        self.training = training
        self._find_monitor()
        for hook in self.hooks:
            hook.begin(training)

    def end_iteration(self) -> None:
        """Tell the hooks that the forward-backward function of an iteration returned or raised."""
        for hook in self.hooks:
            hook.end_iteration()

    def detach(self) -> None:
        """Take the hooks out after the next training iteration, which brings what was not sent so far."""
        self.end_step()
        self._leaves = True
        for hook in self.hooks:
            hook.flush()

    def before_save(self) -> None:
        """Tell the hooks that model and optimizer are about to be saved."""
        for hook in self.hooks:
            hook.before_save()

    def end_step(self) -> None:
        """Close the last training iteration, if that has not been done yet."""
        if not self._open:
            return
        self._open = False
        self.step += 1
        for hook in self.hooks:
            hook.end_step()
        if not self._sites_told:
            self._sites_told = True
            self.metrics.warns = is_first_of_stage()
            sites = [each for hook in self.hooks if (each := hook.sites())]
            if sites and self.metrics.warns:
                logger.warning("dct: active: %s", ", ".join(sites))
        self.metrics.step(self.step)  # once for all hooks, and all reducers of one
        if self._leaves and all(hook.flushed for hook in self.hooks):
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, thresholds and counters; call it between iterations.

        Keys: ``step``, ``streams`` (activations' thresholds by layer or boundary), ``reducers``
        (gradients' residuals by kind, see :meth:`~dct_plugin.data_parallel.GradientReducer.state_dict`) and
        ``parameters`` (thresholds of updated weights by optimizer).
        """
        self.end_step()
        state: dict[str, Any] = {"step": self.step, "streams": {}, "reducers": {}, "parameters": {}}
        for hook in self.hooks:
            for key, part in hook.state_dict().items():
                state[key].update(part)
        return state

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore :meth:`state_dict` of the same rank; None forgets everything, as at the start."""
        self._open = False
        self.step = 0 if state is None else int(state["step"])
        for hook in self.hooks:
            hook.load_state_dict(state)

    def pending_of(self, name: str) -> tuple[Shard, Tensor] | None:
        """Return what this rank has not sent yet of the updates of a parameter, and of which part."""
        return next((found for hook in self.hooks if (found := hook.pending_of(name)) is not None), None)

    def sizes(self) -> dict[str, int]:
        """Return the numbers of entries of the parameters by name, as far as the models are made."""
        return {name: numel for hook in self.hooks for name, numel in hook.sizes().items()}

    @property
    def megatron_args(self) -> Any:
        """Megatron-LM's arguments; None without Megatron-LM."""
        return _megatron_global("_GLOBAL_ARGS")

    def close(self) -> None:
        """Report what is left, and put megatron-core back as it was."""
        self.ends.close()
        for hook in self.hooks:
            hook.close()

    def _find_monitor(self) -> None:
        """Add Megatron-LM's writers to the sinks, once there are any (on its last rank)."""
        for name, write in _MONITORS.items():
            writer = _megatron_global(name)
            if writer is not None and name not in self._monitors:
                self._monitors.add(name)
                self.metrics.add_sink(functools.partial(write, writer))


def is_first_of_stage() -> bool:
    """Return whether this rank speaks for its pipeline stage."""
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        return not dist.is_initialized() or dist.get_rank() == 0
    data = ps.get_data_parallel_rank(with_context_parallel=True)
    return bool(data == 0 and ps.get_tensor_model_parallel_rank() == 0)


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


def _write_scalars(writer: Any, events: list[Event]) -> None:
    for name, value, step in events:
        writer.add_scalar(name, value, step)


def _write_wandb(wandb: Any, events: list[Event]) -> None:
    if wandb.run is not None:  # Megatron ends it before the last report
        wandb.log({name: value for name, value, _ in events}, step=events[0][2])


#: Megatron-LM's global variables that hold a writer, and how it is written to.
_MONITORS = {"_GLOBAL_TENSORBOARD_WRITER": _write_scalars, "_GLOBAL_WANDB_WRITER": _write_wandb}


def _megatron_global(name: str) -> Any:
    """Return a global variable of Megatron-LM; None without Megatron-LM, or before it has set it."""
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)


class ActivationHook(Hook):
    """A hook whose state is streams by name.

    Args:
        session: What the hooks share.
        config: Of this hook.
        prefix: Of its streams' names: the states of all hooks lie in one dictionary.
    """

    def __init__(self, session: Session, config: ActivationConfig, prefix: str) -> None:
        self.session = session
        self._settings = config
        self._streams = ActivationStreams(prefix, session.config.kernels, self.seed)

    def stream(self, name: str, config: ActivationConfig | None = None) -> ActivationStream:
        """Return the stream of a name with the prefix; ``config`` is for its first use (None: the hook's)."""
        return self._streams.stream(name, self._settings if config is None else config)

    def seed(self) -> int:
        """Return what seeds the streams beside their names."""
        return dist.get_rank()

    def begin(self, training: bool) -> None:
        self._streams.begin(training)

    def end_step(self) -> None:
        self._streams.end_step()

    def state_dict(self) -> dict[str, Any]:
        return {"streams": self._streams.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._streams.load_state_dict({} if state is None else state["streams"], step=self.session.step)
