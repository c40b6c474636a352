"""Residuals beside DeepSpeed's checkpoints: one ``dct_rank_XXXXX.pt`` per rank in the tag's folder.

DeepSpeed's own state names the save that the files belong to, as an entry of the client state: files that
were left by another run, or by a save that was interrupted, are found.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from dct_plugin import checkpoint
from dct_plugin.checkpoint import FRESH, StateFiles
from dct_plugin.console import logger
from dct_plugin.errors import DCTError
from dct_plugin.transport import lost_ranks

from ..host.patching import Function, Patches
from .engine import EngineContext, EnginePart, is_pipeline
from .path import ActivationPath, GradientPath
from .weight_updates import WeightUpdates

#: The key of the client state that holds the identity of the save.
CLIENT_KEY = "dct_plugin"


class CheckpointFiles(EnginePart):
    """The files beside an engine's checkpoints, through its ``save_checkpoint`` and ``load_checkpoint``.

    They hold the residuals, thresholds and counters of a rank. The stages of a pipeline hold other
    parameters: each has a folder for its data-parallel ranks.

    Args:
        context: The engine.
        path: The path of its gradients.
        gather: The updates of its weights, if they are thresholded.
        activations: The paths of its activations, by their names.
    """

    def __init__(
        self,
        context: EngineContext,
        path: GradientPath,
        gather: WeightUpdates | None,
        activations: Mapping[str, ActivationPath],
    ) -> None:
        self._engine, self._steps = context.engine, context.steps
        self._path, self._gather, self._activations = path, gather, activations
        group = path.reducer.group.process_group
        self._files = StateFiles(
            dist.get_rank(group),
            dist.get_world_size(group),
            unit=path.unit,
            configuration=context.config.fingerprint(),
            sizes=path.sizes(),
            layout=path.reducer.group.layout,
            group=None if is_pipeline(context.engine) else group,  # stages save and load together
        )

    def install(self, patches: Patches) -> None:
        patches.intercept(self._engine, "save_checkpoint", self._save)
        patches.intercept(self._engine, "load_checkpoint", self._load)

    def load(self, tag_folder: str | os.PathLike[str], expected: str | None = None) -> bool:
        """Take over the residuals in the folder of a tag, all ranks together; return whether it has any.

        Args:
            tag_folder: The folder of a checkpoint's tag.
            expected: The identity of the save that they must belong to; None for any.

        Raises:
            DCTError: On every rank, if a rank's file is damaged or does not fit.
        """
        state = self._files.load(self._own_folder(tag_folder), expected=expected)
        if (
            state is None
            and self._engine.load_universal_checkpoint()
            and self._path.reducer.group.group_rank == 0
        ):
            logger.warning("dct: add the residuals to a universal checkpoint: dct universal SAVED UNIVERSAL")
        self.load_state_dict(state or FRESH)
        return state is not None

    def _save(self, original: Function, *args: Any, **keywords: Any) -> Any:
        # The signature of the class: a subclass may pass its arguments on unseen.
        signature = inspect.signature(DeepSpeedEngine.save_checkpoint)
        given = signature.bind(self._engine, *args, **keywords).arguments
        if not given["save_dir"]:
            return original(*args, **keywords)
        tag, client_state = given.get("tag"), given.get("client_state") or {}
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        folder = self._own_folder(Path(given["save_dir"], tag))
        for replicas in self._steps.replicas:
            replicas.check(self._steps.step, saves=True)
        if self._gather is not None:
            self._gather.gather()
        mark = folder / checkpoint.UNFINISHED
        if self._path.reducer.group.group_rank == 0 and folder.is_dir() and any(folder.iterdir()):
            mark.touch()
        # Before DeepSpeed's own files: once "latest" is written, the checkpoint is complete.
        identity = self._files.save(folder, self.state_dict)
        given.update(client_state={**client_state, CLIENT_KEY: identity})
        given.pop("self")
        names_latest = given.get("save_latest", True) and not self._engine.checkpoint_engine.is_decoupled()
        if names_latest:
            given["save_latest"] = False
        result = original(**given)  # it ends with a barrier
        mark.unlink(missing_ok=True)
        if names_latest:
            _write_latest(Path(given["save_dir"]), tag)
        return result

    def _load(self, original: Function, *args: Any, **keywords: Any) -> Any:
        loaded = original(*args, **keywords)
        if loaded[0] is None:
            return loaded
        given = inspect.signature(DeepSpeedEngine.load_checkpoint).bind(self._engine, *args, **keywords)
        given.apply_defaults()
        asked = given.arguments
        identity = loaded[1].pop(CLIENT_KEY, "")
        if asked["load_optimizer_states"] and not asked["load_module_only"]:
            self.load(Path(loaded[0]).parent, identity)
        else:
            self.load_state_dict(FRESH)
        return loaded

    def _own_folder(self, tag_folder: str | os.PathLike[str]) -> Path:
        if not is_pipeline(self._engine):
            return Path(tag_folder)
        return Path(tag_folder, f"dct_stage_{self._engine.stage_id:02d}_of_{self._engine.num_stages:02d}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the reducer's lies at its top level."""
        path = self._path
        state = path.reducer.state_dict()
        if self._gather is not None:
            state["parameters"] = self._gather.state_dict()
        if path.experts:
            state["expert_gradients"] = {
                name: {"unit": path.unit, "state": reducer.state_dict()}
                for name, reducer in path.experts.items()
            }
        return state | {name: each.streams.state_dict() for name, each in self._activations.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; what is not in it starts afresh."""
        path = self._path
        scale = float(path.optimizer.loss_scale) if path.scaled else 1.0  # the saved run may have had one
        path.reducer.load_state_dict(state, loss_scale=scale)
        step = self._steps.step = path.reducer.group.step
        if self._gather is not None:
            self._gather.load_state_dict(state.get("parameters"), step=step)
        for name, reducer in path.experts.items():
            saved = (state.get("expert_gradients") or {}).get(name)
            own = {**FRESH, "step": step}
            if saved is not None:
                own = checkpoint.in_unit(saved["state"], path.unit / saved["unit"])
            reducer.load_state_dict(own, loss_scale=scale)
        for name, activation in self._activations.items():
            activation.streams.load_state_dict(state.get(name) or {}, step=step)


def warn_of_dropped_residuals(engine: Any) -> None:
    """Let an engine whose section is switched off warn when it loads a checkpoint that holds residuals."""

    def load(original: Function, *args: Any, **keywords: Any) -> Any:
        loaded = original(*args, **keywords)
        file = None
        if loaded[0] is not None and dist.get_rank() == 0:
            file = next(Path(loaded[0]).parent.glob("**/dct_rank_*.pt"), None)
        if file is not None:
            what = "the section switches dct.data_parallel off, and the checkpoint holds residuals"
            try:
                streams = checkpoint.reshard([checkpoint.read(file)])["streams"].values()
            except DCTError as error:
                logger.warning(f"dct: {what}, which cannot be read and are not used: {error}")
                return loaded
            norm = sum(float(stream["residual"].norm()) ** 2 for stream in streams) ** 0.5
            logger.warning(
                f"dct: {what}: the unsent gradient of rank 0, of norm {norm:.3g}, is dropped. To send it "
                "first, load the checkpoint with 'sparsity': 0 and 'value_dtype': 'fp32', train one step "
                "and save"
            )
        return loaded

    Patches().intercept(engine, "load_checkpoint", load)


def _write_latest(folder: Path, tag: str) -> None:
    """Make ``tag`` the checkpoint to resume from; a collective, once the files of all ranks are there.

    DeepSpeed's rank 0 writes the name in place, once its own files are there: a kill leaves it empty, or the
    name of a checkpoint that lacks files of other ranks.
    """
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(tag)
        (folder / "latest.new").replace(folder / "latest")
    with lost_ranks.reported("barrier behind a checkpoint"):
        dist.barrier()
