"""Residuals, thresholds and counters in Megatron's checkpoints: one file per rank in the iteration's folder.

``megatron.training`` saves and loads them with its own checkpoints, in every ``--ckpt-format``: they are
complete before ``latest_checkpointed_iteration.txt`` names the checkpoint. Who trains with megatron.core
alone calls :func:`.hooks.save_checkpoint` and :func:`.hooks.load_checkpoint` beside
``dist_checkpointing.save`` and ``load``.

With another number of data-parallel ranks residuals are spread anew
(:func:`dct_plugin.checkpoint.reshard`). With other tensor, pipeline or expert parallelism the ranks hold
other parts of the parameters: the residuals are left, and a message says so.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from dct_plugin.checkpoint import Folder, StateFiles
from dct_plugin.console import logger
from dct_plugin.errors import VersionError
from dct_plugin.transport.nodes import layout_of

from ..host.patching import Function, when_imported
from .buckets import nodes_in
from .session import Hook, RankCoordinates, Session

_MODULE = "megatron.training.checkpointing"


def save(session: Session, folder: Folder) -> None:
    """Write every rank's state; a collective over all ranks.

    Raises:
        DCTError: On every rank, if one cannot write; names the ranks and the files.
    """
    _files(session).save(folder, session.state_dict)


def load(session: Session, folder: Folder) -> bool:
    """Restore every rank's state; a collective over all ranks.

    Returns:
        Whether there was one. Otherwise the log says why, and residuals are zero from here on.

    Raises:
        DCTError: On every rank, if a file is damaged or belongs elsewhere; names the ranks and the files.
    """
    state = replace(_files(session), layout=_node_layout(session)).load(folder)
    session.load_state_dict(state)
    if state is not None and dist.get_rank() == 0:
        print(f"dct: residuals and thresholds of step {session.step} loaded from {folder}", flush=True)
    return state is not None


def _files(session: Session) -> StateFiles:
    return replace(
        files_of(RankCoordinates.of_this_rank()),
        configuration=session.config.fingerprint(),
        sizes=session.reductions.models.sizes() if session.reductions else {},
    )


def files_of(rank: RankCoordinates) -> StateFiles:
    """Return the files of the data-parallel ranks that hold the same parameters as a rank."""
    name = f"dct_tp{rank.tensor:02d}_pp{rank.pipeline:03d}_dp{{rank:05d}}.pt"
    return StateFiles(rank.data, rank.replicas, name=name, cut=rank.layout, expert=rank.expert)


def _node_layout(session: Session) -> list[list[int]]:
    """Return the data-parallel ranks of each node, where gradients are summed in nodes first."""
    from megatron.core import parallel_state as ps

    group = instance = None
    if ps.model_parallel_is_initialized():
        group, instance = (
            ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=partial)
            for partial in (False, True)
        )
    return layout_of(nodes_in(session.config.data_parallel, group, instance))


class CheckpointHook(Hook):
    """Wraps ``save_checkpoint`` and ``load_checkpoint`` of ``megatron.training`` once it is imported."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._saving: int | None = None
        """The thread that is inside save_checkpoint, until the state is written: another thread deletes old
        checkpoints meanwhile.
        """
        self._folder: str | None = None
        self._loaded: tuple[str | None, bool] | None = None
        session.ends.callback(when_imported(_MODULE, self._patch))

    # -- wrappers -------------------------------------------------------------------------------------------

    def _patch(self, module: ModuleType) -> None:
        functions = {
            "save_checkpoint": self._save_checkpoint,
            "load_checkpoint": self._load_checkpoint,
            "get_checkpoint_name": self._get_checkpoint_name,
            "_load_base_checkpoint": self._load_base_checkpoint,
        }
        if missing := [name for name in functions if not hasattr(module, name)]:
            raise VersionError(
                f"{_MODULE} ({module.__file__}) has no {', '.join(missing)}: residuals could not be saved; "
                "nothing of it was patched"
            )
        from megatron.core import dist_checkpointing

        patches = self.session.patches
        patches.intercept(dist_checkpointing, "save", self._save_distributed)
        for name, function in functions.items():
            original = getattr(module, name)
            patches.intercept(module, name, function)
            patches.rebind("megatron.training", name, original, getattr(module, name))

    def _save_checkpoint(self, original: Function, *arguments: Any, **keywords: Any) -> Any:
        given = inspect.signature(original).bind(*arguments, **keywords).arguments
        args = self.session.megatron_args
        local = given.get("non_persistent_ckpt") and args.non_persistent_ckpt_type == "local"
        self.session.before_save()
        self._saving, self._folder = None if local else threading.get_ident(), None
        try:
            result = original(*arguments, **keywords)
            self._write()
        finally:
            self._saving = None
        return result

    def _get_checkpoint_name(self, original: Function, *arguments: Any, **keywords: Any) -> Any:
        name = original(*arguments, **keywords)
        if self._saving == threading.get_ident() and self._folder is None:
            call = inspect.signature(original).bind(*arguments, **keywords)
            call.arguments["return_base_dir"] = True
            self._folder = original(*call.args, **call.kwargs)
            if name != self._folder:  # --ckpt-format torch, where nobody minds other files in the folder
                self._write()
        return name

    def _save_distributed(self, original: Function, *arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)  # complains about folders that are not empty
        self._write()
        return result

    def _write(self) -> None:
        if self._saving == threading.get_ident() and self._folder is not None:
            self._saving = None
            save(self.session, self._folder)

    def _load_base_checkpoint(self, original: Function, *arguments: Any, **keywords: Any) -> Any:
        found = original(*arguments, **keywords)
        state, name, release, kind = found
        if state is not None:
            path = Path(str(name))
            folder = path if path.is_dir() else path.parent.parent
            local = getattr(kind, "name", "") == "LOCAL"
            self._loaded = (None if local else str(folder), bool(release))
        return found

    def _load_checkpoint(self, original: Function, *arguments: Any, **keywords: Any) -> Any:
        given = inspect.signature(original).bind(*arguments, **keywords).arguments
        self._loaded = None
        result = original(*arguments, **keywords)
        found, self._loaded = self._loaded, None
        # Without optimizer other weights are loaded beside the training, e.g. a reference model's.
        if found is None or given.get("optimizer") is None or given.get("load_arg", "load") != "load":
            return result
        folder, release = found
        args = self.session.megatron_args
        if folder is None or release or args.finetune or args.no_load_optim:
            self.session.load_state_dict(None)
            if dist.get_rank() == 0:
                reason = "it is a local one" if folder is None else "the optimizer starts afresh"
                logger.warning("dct: no residuals taken from the checkpoint: %s", reason)
        else:
            load(self.session, folder)
        return result
