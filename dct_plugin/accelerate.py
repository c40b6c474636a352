"""Hugging Face's Accelerate with torch's DDP or FSDP2: :func:`attach`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from .config import DCTConfig
from .integrations.attach import Attachment
from .integrations.attach import attach as attach_to_model
from .integrations.ddp import DCTState
from .integrations.host.patching import Function, Patches
from .metrics import Event

__all__ = ["attach"]

#: By accelerator the numbers of its attachments; the first has its files in the checkpoint's folder itself.
_TAKEN: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def attach(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    section: DCTConfig | Mapping[str, Any] | None = None,
    *,
    total_steps: int | None = None,
) -> Attachment:
    """Compress the gradients of a prepared model, as :func:`dct_plugin.attach` does.

    ``accelerator.save_state`` saves the residuals of every rank that calls it. ``load_state`` restores them
    if all ranks have theirs. The metrics go to the accelerator's trackers, if it has any.

    Args:
        accelerator: The ``Accelerator``. Residuals follow its gradient scaler.
        model, optimizer: As ``accelerator.prepare`` returned them.
        section, total_steps: See :func:`dct_plugin.attach`.

    Raises:
        ConfigError: See :func:`dct_plugin.attach`.
    """
    state = attach_to_model(model, optimizer, section, scaler=accelerator.scaler, total_steps=total_steps)
    taken = _TAKEN.setdefault(accelerator, set())
    number = next(number for number in itertools.count() if number not in taken)
    taken.add(number)
    state.ends.callback(taken.discard, number)
    place = f"dct_{number}" if number else ""
    if accelerator.is_main_process:
        state.metrics.add_sink(partial(_log, accelerator))
    # Scripts call save_state on the main process alone; for FSDP Accelerate's own part is a collective.
    save = state.save_alone if isinstance(state, DCTState) else state.save
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, folder: save(Path(folder, place)))
    state.ends.enter_context(hook)
    # After load_state, since the state follows the model and the optimizer. The hook knows the folder.
    folders: list[str] = []
    hook = accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
    state.ends.enter_context(hook)

    def load(original: Function, *arguments: Any, **keywords: Any) -> None:
        folders.clear()
        original(*arguments, **keywords)
        if folders:  # else the state was closed
            state.load(Path(folders[0], place))

    state.ends.enter_context(patches := Patches())
    patches.intercept(accelerator, "load_state", load)
    return state


def _log(accelerator: Any, events: list[Event]) -> None:
    figures, step = {name: value for name, value, _ in events}, events[0][2]
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            # W&B ignores what comes for an earlier step than the last one: the script's figures, if it counts
            # from 0. So these join the script's next ones.
            tracker.log({**figures, "dct/step": step}, commit=False)
        else:
            tracker.log(figures, step=step)
