"""Residuals beside DeepSpeed's checkpoints: one ``dct_rank_XXXXX.pt`` per rank in the tag's folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin import checkpoint
from dct_plugin.data_parallel import GradientReducer

#: The state of a reducer that has not reduced anything.
_NOTHING: dict[str, Any] = {"step": 0, "loss_scale": 1.0, "streams": {}}

logger = logging.getLogger("dct_plugin")


class CheckpointHooks:
    """Wraps ``save_checkpoint`` and ``load_checkpoint`` of an engine.

    Args:
        engine: DeepSpeed's engine.
        reducer: Whose state is saved.
        unit: Factor on the gradients that reach the reducer, see :func:`dct_plugin.checkpoint.save`.
    """

    def __init__(self, engine: Any, reducer: GradientReducer, unit: Callable[[], float]) -> None:
        self.engine = engine
        self.reducer = reducer
        self.unit = unit

    def install(self) -> None:
        """Patch the engine instance."""
        engine = self.engine
        save, load = engine.save_checkpoint, engine.load_checkpoint

        def save_checkpoint(_: Any, save_dir: Any, tag: Any = None, *args: Any, **keywords: Any) -> Any:
            # Before DeepSpeed's own files: once it has written "latest", the checkpoint is complete.
            if save_dir:
                self.save(
                    os.path.join(save_dir, f"global_step{engine.global_steps}" if tag is None else str(tag))
                )
            return save(save_dir, tag, *args, **keywords)

        def load_checkpoint(
            _: Any,
            load_dir: Any,
            tag: Any = None,
            load_module_strict: bool = True,
            load_optimizer_states: bool = True,
            load_lr_scheduler_states: bool = True,
            load_module_only: bool = False,
            **keywords: Any,
        ) -> Any:
            found = load(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                **keywords,
            )
            if found[0] is not None:
                training = load_optimizer_states and not load_module_only
                self.load(self._folder(load_dir, tag) if training else None)
            return found

        engine.save_checkpoint = MethodType(save_checkpoint, engine)
        engine.load_checkpoint = MethodType(load_checkpoint, engine)

    def _folder(self, load_dir: Any, tag: Any) -> str:
        """Where DeepSpeed has just loaded from."""
        if tag is None:
            latest = "latest_universal" if self.engine.load_universal_checkpoint() else "latest"
            with open(os.path.join(load_dir, latest), encoding="utf-8") as file:
                tag = file.read().strip()
        return os.path.join(load_dir, str(tag))

    def save(self, folder: str) -> None:
        """Write this rank's state."""
        reducer = self.reducer
        checkpoint.save(
            folder, reducer.state_dict(), rank=reducer.rank, world_size=reducer.world_size, unit=self.unit()
        )

    def load(self, folder: str | None) -> None:
        """Restore this rank's state (a collective); None or missing files start from zero residuals."""
        reducer = self.reducer
        state = None
        if folder is not None:
            state = checkpoint.load(
                folder, rank=reducer.rank, world_size=reducer.world_size, unit=self.unit()
            )
        # A rank without its file would count warm-up steps of its own: all have a state, or none has.
        there = torch.tensor([state is not None, state is None], dtype=torch.int32, device=self.engine.device)
        dist.all_reduce(there, group=reducer.exchange.group)
        having, missing = there.tolist()
        if state is None or missing:
            if folder is not None and reducer.rank == 0:
                logger.warning(
                    "dct: %s: %s; training goes on with residuals of zero and new thresholds",
                    folder,
                    "the checkpoint holds no dct_rank_*.pt files"
                    if not having
                    else f"{missing} of {missing + having} ranks cannot read their dct_rank_*.pt files",
                )
            state = _NOTHING
        scaled = bool(self.engine.fp16_enabled())
        reducer.load_state_dict(state, loss_scale=float(self.engine.optimizer.loss_scale) if scaled else None)
