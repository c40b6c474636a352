"""Start-up agreement: every rank states what it is about to run; all go on, or all stop with the ranks named.

The statements travel through the process group's key-value store, not through a collective: a rank that never
comes (no plugin, no section, crashed) cannot hang the others beyond a time limit. Rank 0 compares and
publishes the verdict, so that the store sees O(ranks) requests.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..console import logger
from ..errors import DesyncError
from .lost_ranks import in_time

#: Seconds of a wait after which a warning names the ranks that did not come. Most ranks come here within
#: seconds; one that prepares data first may take longer.
PATIENCE = 120.0
#: Seconds in which a rank that is about to fail lets the others read why: rank 0 may be the one serving the
#: store.
_FAREWELL = 10.0
#: The likely reason why a rank reports nothing.
HINT = "dct-plugin is not installed or not active there (is TORCH_DEVICE_BACKEND_AUTOLOAD=0 set?)"

Facts = Mapping[str, Any]


@dataclass
class Agreement:
    """One rank's part in an agreement on one topic.

    Args:
        store: Store that all ranks share, for example that of the default process group.
        topic: Prefix of the keys, the same on all ranks and used once in the life of the store.
        rank, world_size: This process and the number of those that share the store.
        limit: Seconds to wait for the others.
        hint: The likely reason, besides a crash, why a rank reports nothing.
    """

    store: dist.Store
    topic: str
    rank: int
    world_size: int
    limit: float
    hint: str = HINT

    def confirm(self, facts: Facts) -> None:
        """State ``facts`` (JSON values by name) and wait until every rank has stated the same.

        Raises:
            DesyncError: On every rank that takes part: ranks state other facts, failed, do not take part, or
                did not answer within the limit. Names the ranks, the facts and their values.
        """
        own = {"facts": json.loads(json.dumps(dict(facts)))}
        # Rank 0 gives up after the limit, too, and says so: leave it the time to.
        patience = self.limit + _FAREWELL

        def agree() -> dict[str, Any]:
            self._say(own)
            return self._judge() if self.rank == 0 else self._await_verdict(patience)

        verdict = in_time(agree, patience + _FAREWELL)
        if verdict is None:
            raise DesyncError(
                f"rank {self.rank}: the ranks cannot agree at start-up, the key-value store does not answer: "
                "rank 0, which serves it unless the launcher does, has ended or is stopped; see its own "
                "output"
            )
        if verdict["fault"]:
            in_time(lambda: self._farewell(verdict["present"]), 2 * _FAREWELL)
            raise DesyncError(f"rank {self.rank}: {verdict['fault']}")

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell the others that this rank stops with ``error``; returns when they know, or after a short wait.
        It raises nothing of its own.
        """
        if error is None:
            return
        try:
            self._say({"error": f"{type(error).__name__}: {error}"})
            verdict = self._judge() if self.rank == 0 else self._await_verdict(_FAREWELL)
            if verdict["fault"]:
                self._farewell(verdict["present"])
        except Exception:  # the store is gone as well: the others will notice
            return

    def abstain(self) -> None:
        """State that this rank does not take part; returns at once."""
        self._say({"absent": True})

    # -- inside ----------------------------------------------------------------------------------------------

    def _say(self, statement: Mapping[str, Any]) -> None:
        self.store.set(self._key(self.rank), json.dumps(statement))

    def _key(self, name: object) -> str:
        return f"{self.topic}/{name}"

    def _read(self, name: object) -> Any:
        key = self._key(name)
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _judge(self) -> dict[str, Any]:
        """Rank 0: collect the statements, publish the verdict, return it."""
        heard: dict[int, Any] = {}
        until, warned = math.inf, time.monotonic() + PATIENCE
        for _ in attempts(self.limit):
            for rank in range(self.world_size):
                if rank not in heard and (statement := self._read(rank)) is not None:
                    heard[rank] = statement
            # One failure decides; the others, who are perhaps failing alike, get a moment to say so.
            if any("facts" not in statement for statement in heard.values()):
                until = min(until, time.monotonic() + 1.0)
            if len(heard) == self.world_size or time.monotonic() >= until:
                break
            if time.monotonic() >= warned:
                warned = math.inf
                self._warn([rank for rank in range(self.world_size) if rank not in heard])
        fault = describe(heard, self.world_size, self.limit, self.hint)
        verdict = {"fault": fault, "present": sum("absent" not in statement for statement in heard.values())}
        self.store.set(self._key("verdict"), json.dumps(verdict))
        return verdict

    def _warn(self, missing: Sequence[int]) -> None:
        logger.warning(
            f"dct: rank {self.rank} has waited for {PATIENCE:g} s at start-up: {ranks_in_words(missing)} did "
            f"not report yet. A rank may still prepare data; else it crashed, or {self.hint}. The ranks wait "
            f"for {self.limit:g} s in all"
        )

    def _await_verdict(self, limit: float) -> dict[str, Any]:
        first = None
        for _ in attempts(limit):
            if (verdict := self._read("verdict")) is not None:
                return dict(verdict)
            first = first or self._read(0)
            if first is not None and "absent" in first:
                return {"fault": describe({0: first}, 1, self.limit, self.hint), "present": 1}
        return {"fault": no_answer([0], self.limit, self.hint), "present": 1}

    def _farewell(self, present: int) -> None:
        """Wait until everybody has read the verdict: the first to exit may take the store with it."""
        key = self._key("farewell")
        self.store.add(key, 1)
        for _ in attempts(_FAREWELL):
            if self.store.add(key, 0) >= present:
                return


def attempts(seconds: float) -> Iterator[None]:
    """Yield for each request to the store until ``seconds`` are over, with pauses that become longer."""
    until, pause = time.monotonic() + seconds, 0.01
    yield
    while time.monotonic() < until:
        time.sleep(pause)
        yield
        pause = min(1.5 * pause, 0.25)


def describe(heard: Mapping[int, Any], world_size: int, limit: float, hint: str = HINT) -> str:
    """Return in words why the ranks do not agree; empty if they do.

    Args:
        heard: Statement by rank: ``{"facts": ...}``, ``{"error": ...}`` or ``{"absent": true}``.
        world_size: Ranks that should have stated something.
        limit: Seconds they had.
        hint: The likely reason why the others did not.
    """
    faults = [
        f"{ranks_in_words([rank])} failed at start-up: {statement['error']}"
        for rank, statement in sorted(heard.items())
        if "error" in statement
    ]
    if absent := [rank for rank, statement in heard.items() if "absent" in statement]:
        has = "has" if len(absent) == 1 else "have"
        faults.append(
            f"{ranks_in_words(absent)} {has} no dct section in the configuration (or one with "
            "enabled = false); every rank needs the same"
        )
    missing = [rank for rank in range(world_size) if rank not in heard]
    if missing and not faults:  # after a failure the wait is cut short: then silence says nothing
        faults.append(no_answer(missing, limit, hint))
    faults += differences({rank: s["facts"] for rank, s in heard.items() if "facts" in s})
    return "; ".join(faults)


def differences(facts: Mapping[int, Facts]) -> list[str]:
    """``['dct.data_parallel.sparsity differs: 0.99 on ranks 0, 2-3; 0.9 on rank 1', ...]``.

    A section that some ranks leave out is named by the options that the others give it.
    """
    names = dict.fromkeys(name for stated in facts.values() for name in stated)
    sections = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    lines = []
    for name in [name for name in names if name not in sections]:
        ranks: dict[str, list[int]] = {}
        for rank, stated in sorted(facts.items()):
            value = json.dumps(stated[name]) if name in stated else "not set"
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(f"{value} on {ranks_in_words(where)}" for value, where in ranks.items())
            lines.append(f"{name} differs: {values}")
    return lines


def no_answer(missing: Sequence[int], limit: float, hint: str) -> str:
    return f"{ranks_in_words(missing)} did not report within {limit:g} s: crashed, or {hint}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return ("rank " if len(spans) == 1 and spans[0][0] == spans[0][1] else "ranks ") + text
