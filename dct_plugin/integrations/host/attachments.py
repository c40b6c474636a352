"""The attachments of modules: a new one takes the hooks of an earlier one off.

Scripts wrap a module again to train other parts of it, in every ``fit``, and after a batch that was too
large.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from dct_plugin.config import DCTConfig
from dct_plugin.console import logger
from dct_plugin.errors import DCTError
from dct_plugin.metrics import Metrics


class Attached(Protocol):
    """An attachment of a host to a model."""

    def close(self) -> None:
        """Take off all that was put on the model, its optimizer and the host; may be called again."""


class Attachment(Attached, Protocol):
    """The result of ``dct_plugin.attach``, alike for every host.

    Attributes:
        config: The section as it is applied.
        ends: Takes off all that was put on the model, its optimizer and the process.
    """

    config: DCTConfig
    ends: contextlib.ExitStack

    @property
    def metrics(self) -> Metrics:
        """Bytes, densities and times so far."""

    def detach(self) -> None:
        """Let the host exchange gradients after the next step, which sends all residuals; a collective,
        between two steps. Then all hooks are removed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, thresholds and counters of this rank, between two steps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state of all ranks; a collective."""

    def load(self, folder: str | os.PathLike[str]) -> bool:
        """Restore :meth:`save`; a collective. Return False, with residuals of zero, if there is none."""


_ATTACHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attached]] = weakref.WeakKeyDictionary()


def take_off(model: nn.Module, but: Attached | None = None) -> None:
    """Close what is attached to a model, to a part of it, or to a model that it is a part of, ``but`` one."""
    for module in model.modules():
        reference = _ATTACHED.get(module)
        earlier = None if reference is None else reference()
        if earlier is None or earlier is but:
            continue
        forget(earlier)
        if dist.get_rank() == 0:
            logger.warning(
                "dct: the model is wrapped or attached to again: the earlier hooks are taken off, and what "
                "they had not sent is lost"
            )
        try:
            earlier.close()
        except DCTError as error:  # wrappers write weights before they are attached to
            logger.warning("dct: %s", error)


def note(model: nn.Module, attached: Attached) -> Callable[[], None]:
    """Note what is attached to a model, and close an earlier attachment.

    Returns:
        A function to call when this attachment is closed.
    """
    take_off(model, but=attached)
    for module in model.modules():
        _ATTACHED[module] = weakref.ref(attached)
    return functools.partial(forget, attached)


def forget(attached: Attached) -> None:
    """Note that an attachment was closed."""
    for module, reference in list(_ATTACHED.items()):
        if reference() in (attached, None):
            del _ATTACHED[module]
