"""The attachments of modules: a new one takes the hooks of an earlier one off.

Scripts wrap a module again to train other parts of it, in every ``fit``, and after a batch that was too
large.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from dct_plugin.console import logger
from dct_plugin.errors import DCTError

from .attachment import HostAttachment

_ATTACHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[HostAttachment]] = weakref.WeakKeyDictionary()


def attached_to(model: nn.Module) -> HostAttachment | None:
    """Return what is attached to a model; None if nothing is."""
    reference = _ATTACHED.get(model)
    return None if reference is None else reference()


def take_off(model: nn.Module, but: HostAttachment | None = None) -> None:
    """Close what is attached to a model, to a part of it, or to a model that it is a part of, ``but`` one."""
    for module in model.modules():
        earlier = attached_to(module)
        if earlier is None or earlier is but:
            continue
        forget(earlier)
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "dct: the model is wrapped or attached to again: the earlier hooks are taken off, and what "
                "they had not sent is lost"
            )
        try:
            earlier.close()
        except DCTError as error:  # wrappers write weights before they are attached to
            logger.warning("dct: %s", error)


def note(model: nn.Module, attached: HostAttachment) -> Callable[[], None]:
    """Note what is attached to a model, and close an earlier attachment.

    Returns:
        A function to call when this attachment is closed.
    """
    take_off(model, but=attached)
    for module in model.modules():
        _ATTACHED[module] = weakref.ref(attached)
    return functools.partial(forget, attached)


def forget(attached: HostAttachment) -> None:
    """Note that an attachment was closed."""
    for module, reference in list(_ATTACHED.items()):
        if reference() in (attached, None):
            del _ATTACHED[module]
