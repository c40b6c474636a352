"""Functions for users: install the hooks in megatron-core, take them out, save and load their state.

:func:`install` replaces a few functions and methods of megatron-core and nothing in a Megatron-LM checkout.
Each hook has a module of its own: :mod:`.pipeline`, :mod:`.tensor` and :mod:`.data`; :mod:`.checkpoint` keeps
their state in Megatron-LM's checkpoints. Users import these functions from the package,
``dct_plugin.integrations.megatron``.
"""

from __future__ import annotations

import os
from typing import Any

from dct_plugin.config import DCTConfig
from dct_plugin.errors import DCTError

from ..host import lost_peers
from ..host.patching import Function
from . import checkpoint
from .options import hook_states
from .session import Session
from .versions import TARGETS

_session: Session | None = None


def current() -> Session | None:
    """Return the installed session."""
    return _session


def install(config: DCTConfig, *, pass_through: bool = True) -> dict[str, str]:
    """Put the hooks that ``config`` asks for into megatron-core; a repeated call changes nothing.

    Args:
        config: The whole configuration.
        pass_through: Leave what has sparsity 0 to Megatron; False sends it through the codec (for tests).

    Returns:
        The settings of the active hooks by their names, in words.

    Raises:
        DCTError: Hooks with another configuration are already installed.
        ConfigError: The configuration asks for something these hooks cannot do.
    """
    global _session
    if _session is not None:
        if _session.written != config:
            raise DCTError("Megatron hooks are already installed with another configuration")
        return dict(_session.active)
    if not config.enabled:
        return {}
    session = Session(config, pass_through=pass_through)
    try:
        _add_hooks(session)
    except BaseException:
        session.close()
        raise
    _session = session
    session.ends.callback(_forget)
    session.ends.callback(lost_peers.watch(session, lambda session: session.step))
    return dict(session.active)


def uninstall() -> None:
    """Put megatron-core back as it was and forget all state."""
    if _session is not None:
        _session.close()


def detach() -> None:
    """Put megatron-core back as it was after the next training iteration, which brings what was not sent so
    far; on every rank, between two iterations.
    """
    if _session is not None:
        _session.detach()


def _forget() -> None:
    global _session
    _session = None


def gather_parameters() -> None:
    """Bring all weights to the optimizers' masters, in full, with ``data_parallel.parameters``.

    For trainings with megatron.core alone, before they save or export weights; ``megatron.training`` does it
    by itself when it saves. A collective over all ranks, between iterations. Does nothing without hooks.
    """
    if _session is not None:
        _session.before_save()


def save_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Write residuals, thresholds and counters of every rank into a checkpoint's folder.

    For trainings with megatron.core alone, beside ``dist_checkpointing.save`` and after it;
    ``megatron.training`` does it by itself. A collective over all ranks, between iterations. Does nothing
    without hooks.

    Raises:
        DCTError: A rank cannot write; every rank raises and names it.
    """
    if _session is not None and _session.hooks:
        checkpoint.save(_session, folder)


def load_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Restore what :func:`save_checkpoint` wrote; a collective over all ranks, after the model was built.

    Returns:
        Whether there was something to restore; otherwise residuals are zero from here on, and the log says
        why. The number of data-parallel ranks may differ, other parallelism may not.

    Raises:
        DCTError: A file is damaged or belongs to another rank; every rank raises and names it.
    """
    return checkpoint.load(_session, folder) if _session is not None and _session.hooks else False


def state_dict() -> dict[str, Any]:
    """Return this rank's residuals, thresholds and counters; empty without hooks."""
    return _session.state_dict() if _session is not None and _session.hooks else {}


def load_state_dict(state: dict[str, Any]) -> None:
    """Restore :func:`state_dict` of the same rank in the same layout; an empty one starts afresh."""
    if _session is not None:
        _session.load_state_dict(state or None)


def _add_hooks(session: Session) -> None:
    """Patch what the configuration asks for; nothing that it does not use is imported."""
    config = session.config
    off = hook_states(config, pass_through=session.pass_through)
    pipeline, tensor = config.model_parallel.pipeline, config.model_parallel.tensor
    data = config.data_parallel
    if not off["pipeline"]:
        from .pipeline import PipelineHook

        each = "".join(f", boundary {i}: {s:g}" for i, s in enumerate(pipeline.boundary_sparsity))
        session.hooks.append(PipelineHook(session))
        session.active["pipeline"] = f"{pipeline.summary}{each}"
    if not off["tensor"]:
        from .tensor import TensorHook

        session.hooks.append(TensorHook(session))
        session.active["tensor"] = f"{tensor.summary}, {'with' if tensor.gather else 'without'} gathers"
    if not off["data_parallel"]:
        from .data import DataParallelHook

        hook = DataParallelHook(session)
        session.hooks.append(hook)
        session.active["data_parallel"] = f"sparsity {data.sparsity:g}"
        updates = data.parameters
        if updates is not None or "parameters" not in data.model_fields_set:
            from .parameters import ParameterHook

            session.hooks.append(ParameterHook(session, hook.resolve))
        if updates is not None:
            session.active["parameters"] = (
                updates if isinstance(updates, str) else f"sparsity {updates.sparsity:g}"
            )
    if session.hooks:
        _watch_iterations(session)
        session.hooks.append(checkpoint.CheckpointHook(session))


def _watch_iterations(session: Session) -> None:
    from megatron.core.pipeline_parallel import schedules

    def iteration(original: Function, *arguments: Any, **keywords: Any) -> Any:
        try:
            session.begin(training=not keywords.get("forward_only", False))
            return original(*arguments, **keywords)
        finally:
            session.end_iteration()

    for target in TARGETS:
        if target.name.startswith("forward_backward_"):
            session.patches.intercept(schedules, target.name, iteration)
