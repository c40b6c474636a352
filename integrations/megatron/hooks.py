"""The hooks in megatron-core: what is active, and what they share from one iteration to the next.

``install(config)`` replaces a few functions and methods of megatron-core and nothing in a Megatron-LM
checkout. Each hook has a module of its own: :mod:`.hooks_pipeline`, :mod:`.hooks_tensor` and
:mod:`.hooks_data`; :mod:`.hooks_checkpoint` keeps their state in checkpoints. An iteration is one call of
Megatron's forward-backward function; thresholds and residuals move on at the start of the next training
iteration, when it is known whether the optimizer took the step.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from dct_plugin.config import DCTConfig
from dct_plugin.errors import ConfigError, DCTError
from dct_plugin.metrics import Event, Metrics

__all__ = [
    "Active",
    "Session",
    "current",
    "install",
    "load_checkpoint",
    "load_state_dict",
    "save_checkpoint",
    "state_dict",
    "uninstall",
]

logger = logging.getLogger("dct_plugin")

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class Active(NamedTuple):
    """A hook that :func:`install` put in place."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})"


class Hook:
    """What the session asks of a hook; nothing by default."""

    def begin(self, training: bool) -> None:
        """An iteration starts (``training``: with a backward pass)."""

    def settle(self) -> None:
        """The last training iteration is over, its optimizer step taken or skipped."""

    def state_dict(self) -> dict[str, Any]:
        """Part of :meth:`Session.state_dict`, by its keys."""
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore :meth:`Session.state_dict`; None starts afresh."""

    def close(self) -> None:
        """The hooks are taken out."""


class Patches:
    """Attributes that were replaced, to be put back."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` and remember what it was."""
        self._originals.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function by ``make(original)``; name, docstring and attributes stay."""
        original = getattr(owner, name)
        self.replace(owner, name, functools.wraps(original)(make(original)))

    def rebind(self, package: str, name: str, old: Any, new: Any) -> None:
        """Replace ``old`` where modules of ``package`` (and the script) have imported it by name."""
        for key, module in list(sys.modules.items()):
            inside = key in ("__main__", package) or key.startswith(f"{package}.")
            if inside and getattr(module, "__dict__", {}).get(name) is old:
                self.replace(module, name, new)

    def undo(self) -> None:
        """Put everything back."""
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)
        self._originals.clear()


class Session:
    """State that the hooks share: configuration, metrics, and the rhythm of iterations.

    Attributes:
        config: The whole configuration.
        training: Whether the current iteration has a backward pass.
        step: Completed training iterations.
        pass_through: Whether what has sparsity 0 is left to Megatron.
    """

    def __init__(self, config: DCTConfig, *, pass_through: bool = True) -> None:
        self.config = config
        self.pass_through = pass_through
        self.training = True
        self.step = 0
        self.patches = Patches()
        self.hooks: list[Hook] = []
        self.active: list[Active] = []
        self.closed = False
        self._open = False
        self._metrics: Metrics | None = None
        self._monitor: Any = None

    @property
    def metrics(self) -> Metrics:
        """Made at first use, when the process group exists."""
        if self._metrics is None:
            rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            config = self.config.metrics
            interval = getattr(self.megatron_args, "log_interval", None)
            if interval and "every" not in config.model_fields_set:  # one beside each of Megatron's
                config = config.model_copy(update={"every": int(interval)})
            self._metrics = Metrics(config, rank=rank, world_size=size)
            if rank == size - 1:  # the rank that writes Megatron's own log lines
                self._metrics.add_sink(self._log_line)
        return self._metrics

    def begin(self, training: bool) -> None:
        """An iteration starts."""
        if training:
            self.settle()
            self._open = True
        self.training = training
        self._look_for_monitor()
        for hook in self.hooks:
            hook.begin(training)

    def settle(self) -> None:
        """Close the last training iteration, if that has not been done yet."""
        if not self._open:
            return
        self._open = False
        self.step += 1
        for hook in self.hooks:
            hook.settle()
        self.metrics.step(self.step)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, thresholds and counters; call it between iterations.

        Keys: ``step``, ``streams`` (activations' thresholds by place) and ``reducers`` (gradients'
        residuals by kind, see :meth:`~dct_plugin.data_parallel.GradientReducer.state_dict`).
        """
        self.settle()
        state: dict[str, Any] = {"step": self.step, "streams": {}, "reducers": {}}
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

    @property
    def megatron_args(self) -> Any:
        """Megatron-LM's arguments; None without Megatron-LM."""
        return _megatron_global("_GLOBAL_ARGS")

    def finish(self) -> None:
        """The program ends: report what is left and, on rank 0, the run in one line."""
        if self._metrics is None:
            return
        self.settle()
        metrics, self._metrics = self._metrics, None
        if metrics.rank == 0 and self.step:
            print(metrics.summary_line(), flush=True)
        metrics.close()

    def close(self) -> None:
        """Put megatron-core back as it was."""
        self.closed = True
        self.patches.undo()
        for hook in self.hooks:
            hook.close()

    def _look_for_monitor(self) -> None:
        """Megatron-LM's TensorBoard writer as one more sink, once there is one (on its last rank)."""
        writer = _megatron_global("_GLOBAL_TENSORBOARD_WRITER") if self._monitor is None else None
        if writer is not None:
            self._monitor = writer
            self.metrics.add_sink(functools.partial(_write_scalars, writer))

    def _log_line(self, events: list[Event]) -> None:
        """One line beside Megatron's own for every report."""
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


_session: Session | None = None


def current() -> Session | None:
    """The installed session."""
    return _session


def install(config: DCTConfig, *, pass_through: bool = True) -> list[Active]:
    """Put the hooks that ``config`` asks for into megatron-core; a repeated call changes nothing.

    Args:
        config: The whole configuration.
        pass_through: Leave what has sparsity 0 to Megatron; False sends it through the codec (for tests).

    Returns:
        The hooks that are active, with their settings.

    Raises:
        DCTError: Hooks with another configuration are already installed.
        ConfigError: The configuration asks for something these hooks cannot do.
    """
    global _session
    if _session is not None:
        if _session.config != config:
            raise DCTError("Megatron hooks are already installed with another configuration")
        return list(_session.active)
    session = Session(config, pass_through=pass_through)
    if not config.enabled:
        return []
    pipeline, tensor = config.model_parallel.pipeline, config.model_parallel.tensor
    data = config.data_parallel
    try:
        if pipeline.enabled and (pipeline.sparsity or any(pipeline.boundary_sparsity) or not pass_through):
            from .hooks_pipeline import PipelineHook

            session.hooks.append(PipelineHook(session))
            each = "".join(f", boundary {i}: {s:g}" for i, s in enumerate(pipeline.boundary_sparsity))
            session.active.append(Active("pipeline", f"sparsity {pipeline.sparsity:g}{each}"))
        if tensor.enabled and (tensor.sparsity or not pass_through):
            from .hooks_tensor import TensorHook

            session.hooks.append(TensorHook(session))
            detail = f"sparsity {tensor.sparsity:g}, {'with' if tensor.gather else 'without'} gathers"
            session.active.append(Active("tensor", detail))
        if data.enabled and (data.sparsity or not pass_through):
            from .hooks_data import DataParallelHook

            _refuse_momentum(config)
            session.hooks.append(DataParallelHook(session))
            session.active.append(Active("data_parallel", f"sparsity {data.sparsity:g}"))
        if session.hooks:
            from .hooks_checkpoint import CheckpointHook

            _watch_iterations(session)
            session.hooks.append(CheckpointHook(session))
    except BaseException:
        session.close()
        raise
    _session = session
    atexit.register(session.finish)
    return list(session.active)


def uninstall() -> None:
    """Put megatron-core back as it was and forget all state."""
    global _session
    if _session is not None:
        session, _session = _session, None
        session.finish()
        atexit.unregister(session.finish)
        session.close()


def save_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Write residuals, thresholds and counters of every rank into a checkpoint's folder.

    For trainings with megatron.core alone, beside ``dist_checkpointing.save`` and after it;
    ``megatron.training`` does it by itself. A collective over all ranks, between iterations. Does nothing
    without hooks.

    Raises:
        DCTError: A rank cannot write; every rank raises and names it.
    """
    from .hooks_checkpoint import save

    if _session is not None and _session.hooks:
        save(_session, folder)


def load_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Restore what :func:`save_checkpoint` wrote; a collective over all ranks, after the model was built.

    Returns:
        Whether there was something to restore; otherwise residuals are zero from here on, and the log says
        why. The number of data-parallel ranks may differ, other parallelism may not.

    Raises:
        DCTError: A file is damaged or belongs to another rank; every rank raises and names it.
    """
    from .hooks_checkpoint import load

    return load(_session, folder) if _session is not None and _session.hooks else False


def state_dict() -> dict[str, Any]:
    """This rank's residuals, thresholds and counters, for checkpoints of one's own; empty without hooks."""
    return _session.state_dict() if _session is not None and _session.hooks else {}


def load_state_dict(state: dict[str, Any]) -> None:
    """Restore :func:`state_dict` of the same rank in the same layout; an empty one starts afresh."""
    if _session is not None:
        _session.load_state_dict(state or None)


def _watch_iterations(session: Session) -> None:
    from megatron.core.pipeline_parallel import schedules

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def iteration(*arguments: Any, **keywords: Any) -> Any:
            session.begin(training=not keywords.get("forward_only", False))
            return original(*arguments, **keywords)

        return iteration

    for name in _SCHEDULES:
        session.patches.wrap(schedules, name, make)


def _refuse_momentum(config: DCTConfig) -> None:
    data = config.data_parallel
    if data.momentum_correction:
        raise ConfigError(
            f"dct.data_parallel.momentum_correction = {data.momentum_correction:g}: must be 0 with Megatron, "
            "whose optimizers keep a momentum of their own"
        )


def _megatron_global(name: str) -> Any:
    """One of Megatron-LM's global variables; None without Megatron-LM, or before it has set it."""
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)


def _write_scalars(writer: Any, events: list[Event]) -> None:
    for name, value, step in events:
        writer.add_scalar(name, value, step)
