"""What the installed DeepSpeed reads of a JSON: it is asked, since every version reads other keys.

:func:`ask` starts a process of its own: importing DeepSpeed takes seconds and prints. In a job DeepSpeed is
there, and :func:`keys_read` asks it.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import subprocess
import sys
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from dct_plugin.config.validation_errors import DEEPSPEED_KEYS

from ..host.deepspeed_keys import unread
from ..host.patches import Patches
from .section import READ_BY_PLUGIN

#: Seconds in which the process must answer.
_LIMIT = 120.0
#: What every version can read.
_LEAST = {"train_micro_batch_size_per_gpu": 1}


class Answer(NamedTuple):
    """What the installed DeepSpeed makes of a JSON.

    Attributes:
        keys: The keys that it reads at the top level of any JSON.
        fault: Why it does not take this one; empty if it does.
    """

    keys: frozenset[str]
    fault: str = ""


class _Recorder(dict[str, Any]):
    """A JSON that notes which keys it is asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def _noting(self, method: Any, key: Any, *default: Any) -> Any:
        self.asked.add(str(key))
        return method(self, key, *default)

    def __getitem__(self, key: str) -> Any:
        return self._noting(dict.__getitem__, key)

    def __contains__(self, key: object) -> bool:
        return bool(self._noting(dict.__contains__, key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._noting(dict.get, key, default)

    def pop(self, key: str, *default: Any) -> Any:
        return self._noting(dict.pop, key, *default)

    def keys(self) -> Any:  # of which DeepSpeed asks whether a key is among them
        return self

    def __copy__(self) -> _Recorder:
        return self


def parse(content: Mapping[str, Any], ranks: int = 1) -> Answer:
    """Have DeepSpeed parse a JSON for a job of so many ranks; imports DeepSpeed."""
    from deepspeed.runtime import config

    recorder, fault = _Recorder(copy.deepcopy(dict(content))), ""
    job = SimpleNamespace(get_rank=lambda *_: 0, get_world_size=lambda *_, **__: ranks)
    logger = logging.getLogger("DeepSpeed")
    before, logger.disabled = logger.disabled, True
    try:
        with Patches() as patches:
            patches.replace(config, "dist", job)
            config.DeepSpeedConfig(recorder)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    finally:
        logger.disabled = before
    return Answer(frozenset(recorder.asked), fault)


@functools.cache
def keys_read() -> frozenset[str]:
    """Return the keys that DeepSpeed reads at the top level of any JSON; imports DeepSpeed."""
    return parse(_LEAST).keys


def keys_for(content: Mapping[str, Any]) -> Collection[str]:
    """Return the keys that the installed DeepSpeed reads, asking it if ``content`` has unusual ones.

    Without DeepSpeed the keys of ``content`` are returned: nobody knows better.
    """
    usual = {*DEEPSPEED_KEYS, *READ_BY_PLUGIN}
    if not unread(content, usual):
        return usual
    answer = ask()
    return content.keys() if answer is None else answer.keys


def ask(content: Mapping[str, Any] = _LEAST, ranks: int = 1) -> Answer | None:
    """Return what DeepSpeed makes of a JSON, from a process of its own; None if none is installed."""
    return _ask(json.dumps([content, ranks]))


@functools.cache
def _ask(question: str) -> Answer | None:
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=_LIMIT)
        keys, fault = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None
    return Answer(frozenset(keys), fault)


def main() -> None:
    """Answer the question on the standard input; the last line of the output is the answer."""
    content, ranks = json.load(sys.stdin)
    answer = parse(content, ranks)
    print(json.dumps([sorted(keys_read()), answer.fault]))


if __name__ == "__main__":
    main()
