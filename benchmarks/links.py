"""A small network on one machine (Linux): a namespace per rank, links that count and limit bytes.

Every rank gets one interface per network, all ranks of a network hang on one switch. Needs root and iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

__all__ = ["HEADER_BYTES", "Links", "LinksError", "Network", "packets_sent"]

#: Ethernet 14, IPv4 20, TCP 20 with timestamps 12: what interface counters see of every packet's headers.
HEADER_BYTES = 66
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MTU = 1500


class LinksError(RuntimeError):
    """The namespaces cannot be made: no rights, no iproute2, or no kernel support."""


class Network(NamedTuple):
    """One interface of every rank.

    Attributes:
        name: Of the interface.
        rate: Limit of each direction in the notation of ``tc`` (``100mbit``); None: not limited.
        offload: Leave cutting packets to the other end: fast, but one header is counted for up to 64 kB;
            otherwise packets have at most 1500 bytes, as on a real wire.
    """

    name: str
    rate: str | None = None
    offload: bool = False


class Links:
    """Namespaces ``prefix-0`` ... and their switch, removed at the end of the ``with`` block.

    Rank ``r`` has address ``10.79.n.(r + 1)`` on network ``n``.

    Raises:
        LinksError: on entry, when a command fails.
    """

    def __init__(self, ranks: int, networks: Sequence[Network]) -> None:
        self.ranks = ranks
        self.networks = list(networks)
        self._prefix = f"dct-{os.getpid()}"

    def address(self, rank: int, network: int = 0) -> str:
        return f"10.79.{network}.{rank + 1}"

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        """``command``, to be run in a rank's namespace."""
        return ["ip", "netns", "exec", f"{self._prefix}-{rank}", *command]

    def __enter__(self) -> Links:
        if os.geteuid() != 0:
            raise LinksError("network namespaces need root")
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _build(self) -> None:
        switch = f"{self._prefix}-switch"
        _run(f"ip netns add {switch}")
        for rank in range(self.ranks):
            _run(f"ip netns add {self._prefix}-{rank}")
            _run(f"ip -n {self._prefix}-{rank} link set lo up")
        for number, network in enumerate(self.networks):
            segments = "" if network.offload else "gso_max_segs 1"
            _run(f"ip -n {switch} link add bridge{number} type bridge")
            _run(f"ip -n {switch} link set bridge{number} up")
            for rank in range(self.ranks):
                space, port = f"{self._prefix}-{rank}", f"port{number}-{rank}"
                _run(f"ip -n {switch} link add {port} type veth peer name {network.name} netns {space}")
                _run(f"ip -n {switch} link set {port} master bridge{number}")
                address = self.address(rank, number)
                _run(f"ip -n {space} addr add {address}/24 dev {network.name}")
                for place, device in ((switch, port), (space, network.name)):
                    _run(f"ip -n {place} link set {device} {segments} up")
                    if network.rate is not None:
                        bucket = _bucket(network.rate)
                        _run(f"ip netns exec {place} tc qdisc add dev {device} root {bucket}")
                # The usual congestion control, whatever this machine's default is.
                route = f"10.79.{number}.0/24 dev {network.name} src {address} congctl cubic"
                _run(f"ip -n {space} route replace {route}")

    def _remove(self) -> None:
        for name in ["switch", *map(str, range(self.ranks))]:
            subprocess.run(["ip", "netns", "del", f"{self._prefix}-{name}"], capture_output=True, check=False)


def _bucket(rate: str) -> str:
    """A token bucket whose burst is 0.1 ms (at least two packets), so that small messages are slowed down,
    too; its queue holds 20 ms.
    """
    unit = rate[-4:].lower()
    if unit not in _UNITS:
        raise LinksError(f"rate {rate!r}: expected a number with one of {', '.join(_UNITS)}")
    per_second = float(rate[:-4]) * _UNITS[unit] / 8
    burst = max(2 * (_MTU + 14), int(per_second * 1e-4))
    return f"tbf rate {rate} burst {burst} limit {max(1 << 18, int(per_second * 0.02))}"


def _run(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LinksError(f"{command}: {error}") from error
    if done.returncode:
        raise LinksError(f"{command}: {done.stderr.strip()}")


def packets_sent(device: str) -> int:
    """Packets that an interface of this namespace has sent since it came up."""
    with open(f"/sys/class/net/{device}/statistics/tx_packets", encoding="ascii") as file:
        return int(file.read())
