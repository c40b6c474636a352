"""What the hooks for activations have in common: a stream per boundary or layer, with its threshold."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dct_plugin.config import ActivationConfig
from dct_plugin.model_parallel import ActivationStream

from .session import Hook, Session

__all__ = ["ActivationHook"]


class ActivationHook(Hook):
    """A hook whose state is streams by name; each is made at its first use, with the state loaded for it.

    Args:
        session: What the hooks share.
        config: Of this hook.
        prefix: Of its streams' names: the states of all hooks lie in one dictionary.
    """

    def __init__(self, session: Session, config: ActivationConfig, prefix: str) -> None:
        self.session = session
        self._settings = config
        self._prefix = prefix
        self._streams: dict[str, ActivationStream] = {}
        self._loaded: dict[str, Any] = {}

    def stream(self, name: str, config: ActivationConfig | None = None) -> ActivationStream:
        """The stream of a name (with the prefix); ``config`` is for its first use, None: the hook's."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = ActivationStream(
                self._settings if config is None else config,
                name=name,
                rank=dist.get_rank(),
                kernels=self.session.config.kernels,
            )
            if (state := self._loaded.pop(name, None)) is not None:
                stream.load_state_dict(state)
            stream.step, stream.training = self.session.step, self.session.training
        return stream

    def begin(self, training: bool) -> None:
        for stream in self._streams.values():
            stream.training = training

    def end_step(self) -> None:
        for stream in self._streams.values():
            stream.end_step()

    def state_dict(self) -> dict[str, Any]:
        own = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"streams": {**self._loaded, **own}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        streams = {} if state is None else state["streams"]
        self._streams.clear()
        self._loaded = {name: part for name, part in streams.items() if name.startswith(self._prefix)}
