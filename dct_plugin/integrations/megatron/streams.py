"""The base of the hooks for activations: a stream per boundary or layer, with its compressors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dct_plugin.config import ActivationConfig
from dct_plugin.model_parallel import ActivationStream

from ..host.activation_streams import ActivationStreams
from .session import Hook, Session


class ActivationHook(Hook):
    """A hook whose state is streams by name.

    Args:
        session: What the hooks share.
        config: Of this hook.
        prefix: Of its streams' names: the states of all hooks lie in one dictionary.
    """

    def __init__(self, session: Session, config: ActivationConfig, prefix: str) -> None:
        self.session = session
        self._settings = config
        self._streams = ActivationStreams(prefix, session.config.kernels, self.seed)

    def stream(self, name: str, config: ActivationConfig | None = None) -> ActivationStream:
        """Return the stream of a name with the prefix; ``config`` is for its first use (None: the hook's)."""
        return self._streams.stream(name, self._settings if config is None else config)

    def seed(self) -> int:
        """Return what seeds the streams beside their names."""
        return dist.get_rank()

    def begin(self, training: bool) -> None:
        self._streams.begin(training)

    def end_step(self) -> None:
        self._streams.end_step()

    def state_dict(self) -> dict[str, Any]:
        return {"streams": self._streams.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._streams.load_state_dict({} if state is None else state["streams"], step=self.session.step)
