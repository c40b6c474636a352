"""Residuals beside DeepSpeed's checkpoints: one ``dct_rank_XXXXX.pt`` per rank in the tag's folder."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from dct_plugin.data_parallel import GradientReducer

from ..host import reducer_files
from ..host.patches import Patches
from ..host.steps import StepHooks


def install(engine: Any, reducer: GradientReducer, steps: StepHooks, unit: float, patches: Patches) -> None:
    """Wrap ``save_checkpoint`` and ``load_checkpoint`` of an engine.

    Args:
        engine: DeepSpeed's engine; this instance is patched.
        reducer: Whose state is saved.
        steps: Of the engine's optimizer.
        unit: Factor on the gradients that reach the reducer, see :func:`dct_plugin.checkpoint.save`.
        patches: Keeps what was replaced.
    """
    group = reducer.exchange.group
    # Of the class: a subclass may pass its arguments on unseen.
    signature = inspect.signature(DeepSpeedEngine.load_checkpoint)

    def make_save(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **keywords: Any) -> Any:
            # Before DeepSpeed's own files: once it has written "latest", the checkpoint is complete.
            if save_dir:
                folder = os.path.join(
                    save_dir, f"global_step{engine.global_steps}" if tag is None else str(tag)
                )
                reducer_files.save(folder, reducer.state_dict, group=group, unit=unit)
            return original(save_dir, tag, *args, **keywords)

        return save_checkpoint

    def make_load(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **keywords: Any) -> Any:
            found = original(*args, **keywords)
            if found[0] is None:
                return found
            given = signature.bind(engine, *args, **keywords)
            given.apply_defaults()
            asked = given.arguments
            state = None
            if asked["load_optimizer_states"] and not asked["load_module_only"]:
                folder = _folder(engine, asked["load_dir"], asked["tag"])
                state = reducer_files.load(folder, group=group, unit=unit)
            scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None
            reducer.load_state_dict(state or reducer_files.FRESH, loss_scale=scale)
            steps.step = reducer.step
            return found

        return load_checkpoint

    patches.wrap(engine, "save_checkpoint", make_save)
    patches.wrap(engine, "load_checkpoint", make_load)


def _folder(engine: Any, load_dir: Any, tag: Any) -> str:
    """Where DeepSpeed has just loaded from."""
    if tag is None:
        latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        with open(os.path.join(load_dir, latest), encoding="utf-8") as file:
            tag = file.read().strip()
    return os.path.join(load_dir, str(tag))
