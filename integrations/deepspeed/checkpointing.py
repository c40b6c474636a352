"""Residuals beside DeepSpeed's checkpoints: one ``dct_rank_XXXXX.pt`` per rank in the tag's folder.

DeepSpeed's own state names the save that the files are of, as an entry of the client state: files that were
left by another run, or by a save that was interrupted, are found.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from dct_plugin import checkpoint
from dct_plugin.data_parallel import GradientReducer
from dct_plugin.data_parallel.local import LocalUpdates
from dct_plugin.transport import lost_ranks

from ..host import reducer_files
from ..host.patches import Patches
from ..host.steps import StepHooks
from .moe import ExpertHooks
from .parameters import GatherHooks
from .pipeline import PipelineHooks
from .support import is_pipeline

#: Of the client state: the identity of the save.
CLIENT_KEY = "dct_plugin"


def install(
    engine: Any,
    reducer: GradientReducer,
    gathers: GatherHooks | None,
    steps: StepHooks,
    patches: Patches,
    *,
    unit: float,
    sizes: Mapping[str, int],
    configuration: str,
    local: LocalUpdates | None,
    activations: Mapping[str, PipelineHooks | ExpertHooks],
    experts: Mapping[str, GradientReducer],
) -> Callable[..., bool]:
    """Wrap ``save_checkpoint`` and ``load_checkpoint`` of an engine.

    Args:
        engine: DeepSpeed's engine; this instance is patched.
        reducer: Whose state is saved.
        gathers: Whose state is saved with it; the weights are gathered in full before they are saved.
        steps: Of the engine's optimizer.
        patches: Keeps what was replaced.
        unit: Factor on the gradients that reach the reducer, see :func:`dct_plugin.checkpoint.save`.
        sizes: Entries of the parameters by the names of their streams.
        configuration: Fingerprint of the ``dct`` section.
        local: Weights of this rank, which go into its own file; the others hold the anchor.
        activations: Whose states are saved with it, under their names.
        experts: Reducers of experts, whose states are saved with it.

    Returns:
        ``load(folder, expected=None)``: takes over the residuals in the folder of a tag, all ranks together;
        whether there were any. ``expected`` is the save they must be of.

    The stages of a pipeline hold other parameters: each has a folder for its data-parallel ranks.
    """
    group, parts = reducer.exchange.group, is_pipeline(engine)
    # Of the class: a subclass may pass its arguments on unseen.
    save_signature = inspect.signature(DeepSpeedEngine.save_checkpoint)
    load_signature = inspect.signature(DeepSpeedEngine.load_checkpoint)

    def state_dict() -> dict[str, Any]:
        state = reducer.state_dict()
        if gathers is not None:
            state["parameters"] = gathers.updates.state_dict()
        if experts:
            state["expert_gradients"] = {
                name: {"unit": unit, "state": each.state_dict()} for name, each in experts.items()
            }
        return state | {name: hooks.streams.state_dict() for name, hooks in activations.items()}

    def own_folder(of_tag: str | Path) -> Path:
        if not parts:
            return Path(of_tag)
        return Path(of_tag, f"dct_stage_{engine.stage_id:02d}_of_{engine.num_stages:02d}")

    def make_save(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **keywords: Any) -> Any:
            given = save_signature.bind(engine, *args, **keywords).arguments
            if not given["save_dir"]:
                return original(*args, **keywords)
            tag, client_state = given.get("tag"), given.get("client_state") or {}
            tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
            folder = own_folder(Path(given["save_dir"], tag))
            mark = folder / checkpoint.UNFINISHED
            if reducer.rank == 0 and folder.is_dir() and any(folder.iterdir()):
                mark.touch()
            # Before DeepSpeed's own files: once it has written "latest", the checkpoint is complete.
            if gathers is not None:
                gathers.gather()
            identity = reducer_files.save(
                folder, state_dict, group=group, parts=parts, unit=unit, configuration=configuration
            )
            given.update(client_state={**client_state, CLIENT_KEY: identity})
            given.pop("self")
            named = given.get("save_latest", True) and not engine.checkpoint_engine.is_decoupled()
            if named:
                given["save_latest"] = False
            with local.anchored() if local is not None else nullcontext():
                done = original(**given)
            mark.unlink(missing_ok=True)
            if named:
                _name_latest(Path(given["save_dir"]), tag)
            return done

        return save_checkpoint

    def make_load(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **keywords: Any) -> Any:
            found = original(*args, **keywords)
            if found[0] is None:
                return found
            given = load_signature.bind(engine, *args, **keywords)
            given.apply_defaults()
            asked = given.arguments
            identity = found[1].pop(CLIENT_KEY, "")
            if asked["load_optimizer_states"] and not asked["load_module_only"]:
                load(_folder(engine, asked["load_dir"], asked["tag"]), identity)
            else:
                adopt(reducer_files.FRESH)
            return found

        return load_checkpoint

    def load(folder: str | os.PathLike[str], expected: str | None = None) -> bool:
        place = own_folder(Path(folder))
        state = reducer_files.load(place, group=group, parts=parts, unit=unit, sizes=sizes, expected=expected)
        adopt(state or reducer_files.FRESH)
        return state is not None

    def adopt(state: dict[str, Any]) -> None:
        scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None
        reducer.load_state_dict(state, loss_scale=scale)
        steps.step = reducer.step
        if gathers is not None:
            gathers.updates.load_state_dict(state.get("parameters"), step=reducer.step)
        for name, each in experts.items():
            saved = (state.get("expert_gradients") or {}).get(name)
            own = {**reducer_files.FRESH, "step": reducer.step}
            if saved is not None:
                own = checkpoint.in_unit(saved["state"], unit / saved["unit"])
            each.load_state_dict(own, loss_scale=scale)
        for name, hooks in activations.items():
            hooks.streams.load_state_dict(state.get(name) or {}, step=reducer.step)

    patches.wrap(engine, "save_checkpoint", make_save)
    patches.wrap(engine, "load_checkpoint", make_load)
    return load


def _name_latest(folder: Path, tag: str) -> None:
    """Make ``tag`` the checkpoint to go on from; a collective.

    DeepSpeed's rank 0 writes it once its own files are there, perhaps not those of others, and in place;
    a kill in between leaves it empty.
    """
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(tag)
        (folder / "latest.new").replace(folder / "latest")
    with lost_ranks.reported("barrier behind a checkpoint"):
        dist.barrier()


def _folder(engine: Any, load_dir: Any, tag: Any) -> str:
    """Where DeepSpeed has just loaded from."""
    if tag is None:
        latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        with open(os.path.join(load_dir, latest), encoding="utf-8") as file:
            tag = file.read().strip()
    return os.path.join(load_dir, str(tag))
