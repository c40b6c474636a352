"""Set-up of the TCP connections between the ranks of a group.

Every rank listens at the addresses where gloo would (``GLOO_SOCKET_IFNAME``, or the route to ``MASTER_ADDR``,
or the host's name) and tells them the others through the group, with a secret token. Caller and listener both
prove with an HMAC that they know the token, which is never sent over these connections. A rank serves all
callers side by side, so that strangers at its port do not keep the other ranks waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from ..errors import ConfigError
from .lost_ranks import time_limit as time_limit

#: Environment variable that chooses how messages in host memory travel, on every rank alike.
VARIABLE = "DCT_TRANSPORT"
_CHOICES = ("sockets", "gloo")

#: Seconds for all connections of a rank, and for one caller to prove who it is.
_CONNECT, _HANDSHAKE = 15.0, 5.0
#: Callers that wait to be served.
_MOST_CALLERS = 256
#: Bytes of a rank's JSON: its choice, its addresses and its token.
_INVITATION_BYTES = 1024
_MOST_ADDRESSES = 8
_NONCE, _PROOF = 16, 32
_HELLO = struct.Struct(f"!I{_NONCE}s")  # the caller's position in the group, and its nonce


def connect(group: dist.ProcessGroup | None) -> tuple[dict[int, socket.socket] | None, str]:
    """Connect the ranks of a group whose CPU tensors gloo carries; a collective.

    Returns:
        A connection to every other rank by its position in the group, or None on every rank, with what this
        rank knows of the reason: a rank was told to use gloo (``DCT_TRANSPORT=gloo``; the reason is empty
        then), or could not be reached.

    Raises:
        ConfigError: ``DCT_TRANSPORT`` of a rank is neither of its values.
        RuntimeError: A rank did not answer within the time limit of the group.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)

    def all_good(good: bool, seconds: float) -> bool:
        everyone = torch.tensor([good], dtype=torch.int64, device="cpu")
        work = dist.all_reduce(everyone, dist.ReduceOp.MIN, group=group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=seconds))
        return bool(everyone.item())

    invite = partial(_exchange_invitations, group=group, world_size=len(ranks))
    return Meeting(dist.get_rank(group), ranks, time_limit(group), invite, all_good).connect(addresses_here())


class Meeting(NamedTuple):
    """The means by which ranks that are not connected yet tell each other how they can be reached.

    Attributes:
        position: This rank's position.
        ranks: Global rank of every position, for messages.
        limit: Seconds that a rank waits for the others.
        invite: Takes this rank's invitation, and returns those of all ranks; a collective.
        all_good: Takes whether this rank is connected and the seconds that are left, and returns whether all
            ranks are; a collective.
    """

    position: int
    ranks: Sequence[int]
    limit: float
    invite: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
    all_good: Callable[[bool, float], bool]

    def connect(self, addresses: Sequence[str]) -> tuple[dict[int, socket.socket] | None, str]:
        """Connect the ranks as :func:`connect` does; this one listens at those of ``addresses`` that are its
        machine's.
        """
        choice = os.environ.get(VARIABLE, _CHOICES[0])
        token = secrets.token_bytes(_PROOF)
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(each) for each in _listeners(addresses)]
            endpoints = [each.getsockname()[:2] for each in listeners]
            invitations = self.invite({"use": choice[:40], "endpoints": endpoints, "token": token.hex()})
            for rank, other in zip(self.ranks, invitations, strict=True):
                if other["use"] not in _CHOICES:
                    allowed = ", ".join(map(repr, _CHOICES))
                    raise ConfigError(f"rank {rank}: {VARIABLE} = {other['use']!r}: must be one of {allowed}")
            if any(other["use"] != _CHOICES[0] for other in invitations):
                return None, ""
            began = time.monotonic()
            rendezvous = _Rendezvous(self.position, self.ranks, invitations)
            # In a thread of its own: an event loop may be running in this one.
            with ThreadPoolExecutor(1) as pool:
                # Half of the limit is for the agreement below, in which a rank that has stopped is found.
                seconds = min(_CONNECT, self.limit / 2)
                pool.submit(asyncio.run, rendezvous.connect(listeners, seconds)).result()
        reason = rendezvous.reason()
        try:
            if self.all_good(not reason, max(1.0, began + self.limit - time.monotonic())):
                return rendezvous.connections, ""
        except BaseException:
            rendezvous.close()
            raise
        rendezvous.close()
        return None, reason or "another rank could not be connected"


class _Rendezvous:
    """One rank's part in connecting a group: it calls the ranks before it, and answers those behind it.

    Args:
        position: This rank's position in the group.
        ranks: Global rank of every position, for messages.
        invitations: ``endpoints`` and ``token`` of every position.
    """

    def __init__(self, position: int, ranks: Sequence[int], invitations: Sequence[Mapping[str, Any]]) -> None:
        self.connections: dict[int, socket.socket] = {}
        self._position = position
        self._ranks = ranks
        self._invitations = invitations
        self._token = bytes.fromhex(invitations[position]["token"])
        self._problems: dict[int, str] = {}
        self._behind = set(range(position + 1, len(ranks)))
        self._all_answered = asyncio.Event()

    async def connect(self, listeners: Sequence[socket.socket], seconds: float) -> None:
        """Connect for so many seconds at most. Never raises: :meth:`reason` says what is missing."""
        until = time.monotonic() + seconds
        for listener in listeners:
            # It listens anew, with a queue of its own length.
            await asyncio.start_server(self._answer, sock=listener, backlog=_MOST_CALLERS)
        calling = [asyncio.create_task(self._call(position, until)) for position in range(self._position)]
        if not self._behind:
            self._all_answered.set()
        calling.append(asyncio.create_task(self._all_answered.wait()))  # type: ignore[arg-type]
        await asyncio.wait(calling, timeout=seconds)
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*calling, *unfinished, return_exceptions=True)

    def reason(self) -> str:
        """Return why this rank is not connected to all others; empty if it is."""
        problems = [
            f"rank {self._ranks[lower]} cannot be reached at {self._problems.get(lower, 'its addresses')}"
            for lower in range(self._position)
            if lower not in self.connections
        ]
        if missing := [self._ranks[higher] for higher in sorted(self._behind - self.connections.keys())]:
            problems.append(f"rank(s) {missing} did not connect")
        return "; ".join(problems)

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections.values():
            connection.close()

    async def _call(self, position: int, until: float) -> None:
        """Connect to a rank at one of its addresses, each of which gets a share of the time that is left."""
        endpoints, failed = self._invitations[position]["endpoints"], []
        for tried, (address, port) in enumerate(endpoints):
            share = (until - time.monotonic()) / (len(endpoints) - tried)
            try:
                self.connections[position] = await asyncio.wait_for(
                    self._greet(position, address, port), min(_HANDSHAKE, share)
                )
                return
            except asyncio.TimeoutError:
                failed.append(f"{address} port {port}: no answer")
            except (OSError, EOFError) as error:
                failed.append(f"{address} port {port}: {error}")
            self._problems[position] = "; ".join(failed)

    async def _greet(self, position: int, address: str, port: int) -> socket.socket:
        token = bytes.fromhex(self._invitations[position]["token"])
        reader, writer = await asyncio.open_connection(address, port)
        with contextlib.closing(writer):
            hello = _HELLO.pack(self._position, secrets.token_bytes(_NONCE))
            writer.write(hello)
            nonce, proof = await reader.readexactly(_NONCE), await reader.readexactly(_PROOF)
            if not hmac.compare_digest(proof, _proof(token, b"listener", hello, nonce)):
                raise OSError("not the rank")
            writer.write(_proof(token, b"caller", hello, nonce))
            await writer.drain()
            return _socket_of(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep a caller that proves to be a rank that is awaited; close the connection of a stranger."""
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            position = await asyncio.wait_for(self._challenge(reader, writer), _HANDSHAKE)
            if (earlier := self.connections.get(position)) is not None:
                earlier.close()  # the rank has given it up, and called again
            self.connections[position] = _socket_of(writer)
            if self._behind <= self.connections.keys():
                self._all_answered.set()

    async def _challenge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Return the position of the caller, which proves to be that rank."""
        hello, nonce = await reader.readexactly(_HELLO.size), secrets.token_bytes(_NONCE)
        writer.write(nonce + _proof(self._token, b"listener", hello, nonce))
        position = int(_HELLO.unpack(hello)[0])
        proof = await reader.readexactly(_PROOF)
        expected = _proof(self._token, b"caller", hello, nonce)
        if not hmac.compare_digest(proof, expected) or position not in self._behind:
            raise OSError("a stranger")
        return position


def _socket_of(writer: asyncio.StreamWriter) -> socket.socket:
    """Return a socket for the connection that stays open when the writer is closed."""
    connected: socket.socket = writer.get_extra_info("socket")
    return connected.dup()


def _proof(token: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Return what only a rank that knows the token can say, in its role of caller or listener."""
    return hmac.digest(token, role + hello + nonce, "sha256")


def _exchange_invitations(
    invitation: Mapping[str, Any], group: dist.ProcessGroup | None, world_size: int
) -> list[dict[str, Any]]:
    own = json.dumps(invitation).encode().ljust(_INVITATION_BYTES)
    received = [torch.empty(_INVITATION_BYTES, dtype=torch.uint8, device="cpu") for _ in range(world_size)]
    dist.all_gather(received, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=group)
    return [json.loads(other.numpy().tobytes()) for other in received]


def _listeners(addresses: Sequence[str]) -> list[socket.socket]:
    """A listening socket at each of the addresses that is this machine's, and nowhere else."""
    found = []
    for address in addresses:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            found.append(socket.create_server((address, 0), family=family, backlog=_MOST_CALLERS))
    return found


def addresses_here(*, elsewhere: bool = False) -> list[str]:
    """Return the addresses where others may reach this rank, the most likely first; ``elsewhere`` if they may
    be on other machines than ``MASTER_ADDR``.
    """
    found = []
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        found += [_address_of(name.strip()) for name in names.split(",")]
    if master := os.environ.get("MASTER_ADDR"):
        found.append(_address_towards(master))
    if elsewhere or master not in ("localhost", "127.0.0.1"):  # with these all ranks are on this machine
        with contextlib.suppress(OSError):
            found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    found.append("127.0.0.1")
    return list(dict.fromkeys(address for address in found if address))[:_MOST_ADDRESSES]


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface; empty where it has none."""
    found = psutil.net_if_addrs().get(interface, [])
    return next((each.address for each in found if each.family == socket.AF_INET), "")


def _address_towards(host: str) -> str:
    """Return this machine's address on the route to ``host``; nothing is sent."""
    try:
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
