"""A small network on one machine (Linux): a namespace per node, links that count and limit bytes.

Every node gets one interface per network, all nodes of a network hang on one switch. The ranks of a node
reach each other over its loopback interface, which nothing limits. Needs iproute2 and
util-linux, and root or the right to make user namespaces; nothing outside the new namespaces is touched, and
they vanish with the processes in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from dct_plugin.errors import DCTError
from dct_plugin.rates import bits_per_second, check_rate

_MTU = 1500
#: Bytes of data in a full segment of TCP, without the headers (with timestamps, as is usual).
SEGMENT = _MTU - 52
#: Packets that are cut at the other end are at most this long, so that a short burst lets them pass whole.
_OFFLOADED = 16384


class LinksError(DCTError):
    """The namespaces cannot be made: no rights, no iproute2, or no kernel support."""


class Network(NamedTuple):
    """One interface of every node.

    Attributes:
        name: Of the interface.
        rate: Limit of each direction in the notation of ``tc`` (``100mbit``); None: not limited.
        offload: Leave cutting packets to the other end: fast, but one header is counted for up to 16 kB;
            otherwise packets have at most 1500 bytes, as on a real wire.
    """

    name: str
    rate: str | None = None
    offload: bool = False


class Links:
    """Namespaces of ``nodes`` nodes and of their switch, there within the ``with`` block.

    Node ``r`` has address ``10.79.n.(r + 1)`` on network ``n``.

    Raises:
        LinksError: on entry, when a command fails.
    """

    def __init__(self, nodes: int, networks: Sequence[Network]) -> None:
        self.nodes = nodes
        self.networks = list(networks)
        self._spaces: list[int] = []  # a process in each node's namespace, and last one in the switch's
        self._stack = ExitStack()

    def address(self, node: int, network: int = 0) -> str:
        return f"10.79.{network}.{node + 1}"

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """``command``, to be run in a node's namespace."""
        return [*self._enter(self._spaces[node]), *command]

    def limit(self, rate: str | None, network: int = 0) -> None:
        """Another rate for a network, for both directions of every node's link; None: no limit.

        Raises:
            LinksError: A command failed, or it is not a rate.
        """
        kind = self.networks[network]
        discipline = "pfifo limit 1000" if rate is None else _bucket(rate, kind.offload)
        for node in range(self.nodes):
            for space, device in ((-1, _port(network, node)), (node, kind.name)):
                self._run(space, f"tc qdisc replace dev {device} root {discipline}")

    def __enter__(self) -> Links:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self) -> None:
        # Without root, a user namespace in which this user may do what root may do in its own.
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        unshare = _tool("unshare")
        switch = self._hold([unshare, *user, "--net"])
        self._spaces = [self._hold([*self._enter(switch), unshare, "--net"]) for _ in range(self.nodes)]
        self._spaces.append(switch)
        for node in range(self.nodes):
            self._run(node, "ip link set lo up")
        for number, network in enumerate(self.networks):
            size = f"gso_max_size {_OFFLOADED}" if network.offload else "gso_max_segs 1"
            self._run(-1, f"ip link add bridge{number} type bridge")
            self._run(-1, f"ip link set bridge{number} up")
            for node in range(self.nodes):
                port, space = _port(number, node), self._spaces[node]
                self._run(-1, f"ip link add {port} type veth peer name {network.name} netns {space}")
                self._run(-1, f"ip link set {port} master bridge{number}")
                address = self.address(node, number)
                self._run(node, f"ip addr add {address}/24 dev {network.name}")
                for place, device in ((-1, port), (node, network.name)):
                    self._run(place, f"ip link set {device} {size} up")
                # The usual congestion control, whatever this machine's default is.
                route = f"10.79.{number}.0/24 dev {network.name} src {address} congctl cubic"
                self._run(node, f"ip route replace {route}")
            if network.rate is not None:
                self.limit(network.rate, number)

    def _hold(self, enter: Sequence[str]) -> int:
        """A process that keeps namespaces alive until the pipe to it is closed, by whatever ends this one."""
        command = [*enter, "sh", "-c", "echo; exec cat"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._stack.callback(process.communicate)
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            reason = process.stderr.read().decode().strip()
            raise LinksError(f"no network namespaces here: {reason or 'unshare failed'}")
        return process.pid

    @staticmethod
    def _enter(process: int) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return [_tool("nsenter"), "--target", str(process), *user, "--net"]

    def _run(self, space: int, command: str) -> None:
        name, *arguments = command.split()
        whole = [*self._enter(self._spaces[space]), _tool(name), *arguments]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinksError(f"{command}: {done.stderr.strip()}")


def _tool(name: str) -> str:
    # Where iproute2 is, but often not the path of a user who is not root.
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if path is None:
        raise LinksError(f"network namespaces need {name}, which is not installed")
    return path


def _port(network: int, node: int) -> str:
    return f"port{network}-{node}"


def _bucket(rate: str, offload: bool) -> str:
    """A token bucket whose burst is 0.1 ms (at least two packets, or one that is cut at the other end), so
    that small messages are slowed down, too; its queue holds 20 ms.
    """
    try:
        check_rate(rate)
    except ValueError as error:
        raise LinksError(f"rate {error}") from None
    per_second = bits_per_second(rate) / 8
    burst = max(_OFFLOADED + 1000 if offload else 2 * (_MTU + 14), int(per_second * 1e-4))
    return f"tbf rate {rate} burst {burst} limit {max(1 << 18, int(per_second * 0.02))}"
