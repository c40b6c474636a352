"""The replicas of one quorum: whether they run the same, and the connections between them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dct_plugin.errors import ConfigError, DCTError, DesyncError
from dct_plugin.transport.agreement import differences, ranks_in_words
from dct_plugin.transport.base import Transport
from dct_plugin.transport.tcp import Connections, TcpTransport
from dct_plugin.transport.tcp_connect import VARIABLE, Meeting, addresses_here
from dct_plugin.transport.transports import Peers

_HINT = "it has died since, or its process group is not one of dct_plugin.torchft"


class Statement(NamedTuple):
    """The statement of a replica about itself when a quorum begins.

    Attributes:
        process: Identity of its process group, another one after a restart.
        name: The replica's id, which the user chose.
        step: Steps that it has committed.
        reference: Step of the weights from which it sends differences; -1 if it has none.
        debt: Norm of what it has not sent.
        facts: What all replicas must share.
    """

    process: str
    name: str
    step: int
    reference: int
    debt: float
    facts: dict[str, Any]


class QuorumPeers(Peers):
    """The replicas of one quorum; the constructor is a collective of them.

    Args:
        store: Store of the quorum.
        rank, world_size: This replica's position, and the number of replicas.
        own: This replica's statement.
        dense: torchft's own process group, for dense sums.
        limit: Time to wait for another replica.

    Attributes:
        statements: Those of all replicas.

    Raises:
        ConfigError: This replica is not like the others, see :func:`check_alike`; names what differs.
        DesyncError: Another replica is refused, or did not answer.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        own: Statement,
        *,
        dense: dist.ProcessGroup,
        limit: timedelta,
    ) -> None:
        super().__init__(rank, range(world_size))
        self._store, self._dense, self._limit = store, dense, limit
        self.statements = [Statement(**each) for each in self._gather("statement", own._asdict())]
        check_alike(self.statements, rank)
        self._connections: Connections | None = None
        if world_size > 1:
            meeting = Meeting(
                rank,
                self.ranks,
                limit.total_seconds(),
                lambda invitation: self._gather("invitation", invitation),
                lambda good, seconds: all(self._gather("connected", good, seconds)),
            )
            sockets, reason = meeting.connect(addresses_here(elsewhere=True))
            if sockets is None:
                reason = reason or f"{VARIABLE} = gloo, which torchft's process groups do not know"
                raise DesyncError(f"{self._own()}: the replicas could not be connected: {reason}")
            self._connections = Connections(sockets, self.ranks, limit.total_seconds())

    def message_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def open_transport(self, device: torch.device) -> Transport:
        assert self._connections is not None
        return TcpTransport(self.rank, self.ranks, self._connections)

    def all_reduce(self, tensor: Tensor) -> None:
        self._dense.allreduce([tensor], dist.AllreduceOptions()).wait()

    def close(self) -> None:
        """Close the connections, so that the other replicas fail at once, too."""
        if self._connections is not None:
            self._connections.close()

    @contextmanager
    def guard(self, what: str, step: int | None, failed: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except DCTError:
            raise
        except RuntimeError as error:
            failed()
            first = str(error).splitlines()[0]
            names = ", ".join(f"{rank} = {each.name!r}" for rank, each in enumerate(self.statements))
            raise DesyncError(
                f"{self._own()}: the {what} in step {step} failed: {first} (ranks of this quorum: {names})"
            ) from error

    def _gather(self, topic: str, own: Any, seconds: float | None = None) -> list[Any]:
        """Return what every replica stores under a topic. A topic is used once in a quorum."""
        keys = [f"dct_plugin/{topic}/{rank}" for rank in self.ranks]
        self._store.set(keys[self.rank], json.dumps(own))
        try:
            self._store.wait(keys, self._limit if seconds is None else timedelta(seconds=seconds))
        except RuntimeError as error:
            silent = [rank for rank in self.ranks if not self._store.check([keys[rank]])]
            raise DesyncError(
                f"{self._own()}: {ranks_in_words(silent)} of the quorum did not report: {_HINT}"
            ) from error
        return [json.loads(self._store.get(key)) for key in keys]

    def _own(self) -> str:
        return f"rank {self.rank} of the quorum"


def check_alike(statements: Sequence[Statement], rank: int) -> None:
    """Check that all replicas state the same facts.

    If facts differ, those of the replicas with the most committed steps count; among these those of the most
    replicas; then those of the first replica.

    Raises:
        ConfigError: The replica at position ``rank`` states other facts than those.
        DesyncError: Another replica does.
    """
    facts: Mapping[int, Any] = {position: each.facts for position, each in enumerate(statements)}
    different = differences(facts)
    if not different:
        return
    texts = [json.dumps(each.facts, sort_keys=True) for each in statements]
    alike = Counter(texts)
    right = max(range(len(texts)), key=lambda i: (statements[i].step, alike[texts[i]], -i))
    refused = [position for position, text in enumerate(texts) if text != texts[right]]
    names = ", ".join(repr(statements[position].name) for position in refused)
    reason = (
        f"replica {names} ({ranks_in_words(refused)} of the quorum) is refused, as it does not run what the "
        f"others run: {'; '.join(different)}"
    )
    if rank in refused:
        raise ConfigError(f"{reason}; start it with the same")
    raise DesyncError(f"{reason}; the others go on without it")
