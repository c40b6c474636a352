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
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from dct_plugin import checkpoint
from dct_plugin.checkpoint import Loaded, NoState
from dct_plugin.console import logger
from dct_plugin.errors import DCTError, VersionError
from dct_plugin.transport.nodes import layout_of

from ..host.checkpoint import load_together, report_spread, save_together
from ..host.patching import Function, when_imported
from .buckets import nodes_in
from .session import Hook, RankCoordinates, Session

State = dict[str, Any]
_MODULE = "megatron.training.checkpointing"


def save(session: Session, folder: str | os.PathLike[str]) -> None:
    """Write every rank's state; a collective over all ranks.

    Raises:
        DCTError: On every rank, if one cannot write; names the ranks and the files.
    """
    own = RankCoordinates.of_this_rank()

    def content(identity: str) -> State:
        return {
            "save": identity,
            "configuration": session.config.fingerprint(),
            "layout": own.layout,
            "place": own.place,
            "expert": own.expert,
            "world_size": own.replicas,
            "state": session.state_dict(),
        }

    save_together(own.file(folder), content)


def load(session: Session, folder: str | os.PathLike[str]) -> bool:
    """Restore every rank's state; a collective over all ranks.

    Returns:
        Whether there was one. Otherwise the log says why, and residuals are zero from here on.

    Raises:
        DCTError: On every rank, if a file is damaged or belongs elsewhere; names the ranks and the files.
    """
    own = RankCoordinates.of_this_rank()
    sizes = session.reductions.models.sizes() if session.reductions else {}
    nodes = _node_layout(session)
    found = load_together(lambda: _read(own, Path(folder), sizes, nodes), folder)
    session.load_state_dict(None if found is None else found.state)
    if found is not None and dist.get_rank() == 0:
        print(f"dct: residuals and thresholds of step {session.step} loaded from {folder}", flush=True)
        report_spread(folder, found, own.replicas)
    return found is not None


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


def _read(
    rank: RankCoordinates, folder: Path, sizes: Mapping[str, int], nodes: Sequence[list[int]] = ()
) -> Loaded:
    """Return the state for a rank and its save.

    Args:
        rank: The rank.
        folder: Folder of the checkpoint.
        sizes: Entries of the model's parameters by name.
        nodes: Data-parallel ranks of each node, where gradients are summed in nodes first.

    Raises:
        NoState: There is none.
        DCTError: A file is damaged or belongs elsewhere.
    """
    own = rank.file(folder)
    # On node-local storage only the own file is here.
    known = own if own.exists() else rank._replace(data=0).file(folder)
    if not known.exists():
        other = next(folder.glob("dct_tp*_pp*_dp*.pt"), None) if folder.is_dir() else None
        if other is None:
            raise NoState("the checkpoint holds no dct_tp*_pp*_dp*.pt files")
        _check_layout(checkpoint.read(other), rank)
        raise NoState(f"{known.name} is missing")
    content = checkpoint.read(known)
    _check_layout(content, rank)
    saved = int(content["world_size"])
    dense = [each for name, each in content["state"]["reducers"].items() if name.startswith("dense")]
    same = saved == rank.replicas and all(each["state"].get("layout", []) == list(nodes) for each in dense)
    writers = [rank] if same else [rank._replace(data=number) for number in range(saved)]
    if missing := [each.file(folder).name for each in writers if not each.file(folder).exists()]:
        raise NoState(f"{missing[0]} is missing")

    def contents() -> Iterator[State]:
        for each in writers:
            file = each.file(folder)
            part = content if file == known else checkpoint.read(file, content)
            _check(file, part, each, sizes)
            yield part

    if same:
        return Loaded.of(next(contents())["state"], content)
    return Loaded.of(_resharded(contents, content["state"], rank), content)._replace(ranks=saved)


def _check_layout(content: State, rank: RankCoordinates) -> None:
    saved, layout = content["layout"], rank.layout
    if saved != layout:
        sizes = ", ".join(
            f"{name} {saved.get(name)} -> {layout[name]}"
            for name in layout
            if saved.get(name) != layout[name]
        )
        raise NoState(f"the parameters are cut in another way ({sizes}), which residuals cannot follow")


def _check(file: Path, content: State, rank: RankCoordinates, sizes: Mapping[str, int]) -> None:
    """Refuse a file that is not that of ``rank``, or does not fit the model."""
    if content["place"] != rank.place:
        raise DCTError(f"{file}: written by the rank at {content['place']}, its name says {rank.place}")
    for part in content["state"]["reducers"].values():
        checkpoint.check_sizes(file, part["state"], sizes)


def _resharded(contents: Callable[[], Iterator[State]], first: State, rank: RankCoordinates) -> State:
    """Return the state for another number of replicas: the mean of their residuals.

    Streams of activations are those of one replica.

    ``contents`` reads the files one by one; every kind of gradient takes its own pass over them.
    """
    reducers = {}
    for name, part in first["reducers"].items():
        is_dense, unit = not name.startswith("expert"), part["unit"]
        # Replicas of an expert layer are the ranks with the same experts.
        replicas = (each for each in contents() if is_dense or each["expert"] == rank.expert)
        states = (each["state"]["reducers"][name] for each in replicas)
        reducers[name] = {"unit": unit, "state": checkpoint.reshard(states, unit=unit)}
    return {"step": first["step"], "streams": first["streams"], "reducers": reducers}


class CheckpointHook(Hook):
    """Wraps ``save_checkpoint`` and ``load_checkpoint`` of ``megatron.training`` once it is imported."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._saving: int | None = None
        """The thread that is inside save_checkpoint: another one deletes old checkpoints meanwhile."""
        self._folder: str | None = None
        self._written = False
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
        self._saving, self._folder, self._written = threading.get_ident(), None, bool(local)
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
        if self._saving == threading.get_ident():
            self._write()
        return result

    def _write(self) -> None:
        if self._folder is not None and not self._written:
            self._written = True
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
